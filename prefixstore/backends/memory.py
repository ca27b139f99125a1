"""Pages in the memory of this process: for tests, and for stores of one process."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.backends.base import CHANGES_KEPT, Backend, Entry, Transaction, Used, View, facts_after
from prefixstore.backends.forks import ForkLevel, ForkLock, register_at_fork
from prefixstore.backends.handle_lock import HandleLock
from prefixstore.backends.location import without_password
from prefixstore.errors import InvalidParameterError, StorageError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT
from prefixstore.format.record import RECORD, USAGE, Buffer, Record, Usage

__all__ = ["MemoryBackend", "agreed_bytes", "name_of", "open_memory"]

NAMED = re.compile(r"memory://(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)", re.IGNORECASE)

# What Python holds for a page besides its tokens and payload: record, usage, dictionary slots (measured on 3.11).
ENTRY_BYTES = RECORD.size + USAGE.size + 720

# The children of a page that have one form: tokens and key of each, in order. A list is never changed, but replaced.
_Siblings: TypeAlias = "list[tuple[bytes, bytes]]"


_ABOVE_KEYS = b"\xff" * (KEY_BYTES + 1)


@dataclass(frozen=True, slots=True)
class _Entry:
    record: Record
    usage: Usage
    payload: bytes

    @property
    def bytes(self) -> int:
        return _cost(self.record, len(self.payload))


def _cost(record: Record, n_bytes: int) -> int:
    return len(record.tokens) + n_bytes + ENTRY_BYTES


class _Pages:
    """The committed state."""

    def __init__(self) -> None:
        self.entries: dict[bytes, _Entry] = {}
        self.namespaces: dict[bytes, bytes] = {}
        self.notes: dict[bytes, bytes] = {}
        # by parent and form
        self.children: dict[tuple[bytes, int], _Siblings] = {}
        # all keys in order, for a generation; made when they are asked for
        self.ordered: tuple[int, list[bytes]] = 0, []
        self.changes: deque[tuple[int, list[bytes]]] = deque(maxlen=CHANGES_KEPT)
        self.generation = 0
        self.bytes = 0
        # of payloads as stored, and of the states that they stand for
        self.sizes = 0, 0


class _View(View):
    """Reads the dictionaries as they are; each read is one dictionary operation, or made under the lock."""

    def __init__(self, pages: _Pages, lock: threading.Lock) -> None:
        self._pages = pages
        self._lock = lock

    def _entry(self, key: bytes) -> _Entry | None:
        return self._pages.entries.get(key)

    def _items(self) -> list[tuple[bytes, _Entry]]:
        with self._lock:
            return list(self._pages.entries.items())

    @property
    def generation(self) -> int:
        return self._pages.generation

    def changes(self, since: int) -> list[bytes] | None:
        with self._lock:
            kept = list(self._pages.changes)
            now = self._pages.generation
        if since == now:
            return []
        if since > now or not kept or kept[0][0] > since + 1:
            return None
        return [key for generation, keys in kept if generation > since for key in keys]

    def _siblings(self, parent: bytes, form: int) -> _Siblings:
        return self._pages.children.get((parent, form), [])

    def _keys(self) -> list[bytes]:
        """All keys in order."""
        with self._lock:
            if self._pages.ordered[0] != self._pages.generation:
                self._pages.ordered = self._pages.generation, sorted(self._pages.entries)
            return self._pages.ordered[1]

    def _entries(self, keys: Sequence[bytes]) -> list[Entry]:
        """Those of these pages that are still there."""
        found = ((key, self._entry(key)) for key in keys)
        return [Entry(key, entry.record, entry.usage) for key, entry in found if entry is not None]

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        for key, entry in self._items():
            yield key, entry.record, entry.usage

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        siblings = self._siblings(parent, PAGE)
        n_below = bisect_right(siblings, (tokens, _ABOVE_KEYS))
        return self._entries([key for _, key in siblings[max(n_below - 1, 0) : n_below + 1]])

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        lists = (self._siblings(parent, form)[:at_most] for parent in dict.fromkeys(parents))
        return self._entries([key for siblings in lists for _, key in siblings])

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        return {key for key in keys if any(self._siblings(key, form) for form in (PAGE, SNAPSHOT))}

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        return facts_after(self._keys(), self._entries, after, at_most)

    def record(self, key: bytes) -> Record | None:
        entry = self._entry(key)
        return entry.record if entry is not None else None

    def usage(self, key: bytes) -> Usage | None:
        entry = self._entry(key)
        return entry.usage if entry is not None else None

    def payload(self, key: bytes) -> Buffer | None:
        entry = self._entry(key)
        return entry.payload if entry is not None else None

    def fetch(self, keys: Sequence[bytes]) -> Iterator[tuple[Record, Buffer]]:
        for key in keys:
            entry = self._entry(key)
            if entry is None:
                return
            yield entry.record, entry.payload

    def payload_keys(self) -> Iterator[bytes]:
        return (key for key, _ in self._items())

    def namespaces(self) -> Mapping[bytes, bytes]:
        with self._lock:
            return dict(self._pages.namespaces)

    def namespace(self, key: bytes) -> bytes | None:
        return self._pages.namespaces.get(key)

    def note(self, name: bytes) -> bytes | None:
        return self._pages.notes.get(name)

    @property
    def sizes(self) -> tuple[int, int]:
        return self._pages.sizes

    @property
    def used(self) -> Used:
        with self._lock:
            return Used(self._pages.bytes, len(self._pages.entries))


class _Change(_View, Transaction):
    """What a transaction has staged, over the committed state; `apply` commits it."""

    def __init__(self, pages: _Pages, lock: threading.Lock) -> None:
        super().__init__(pages, lock)
        self._staged: dict[bytes, _Entry | None] = {}
        self._staged_children: dict[tuple[bytes, int], _Siblings] = {}
        self._structural: list[bytes] = []
        self._staged_namespaces: dict[bytes, bytes | None] = {}
        self._staged_notes: dict[bytes, bytes | None] = {}
        self._bytes = pages.bytes
        self._sizes = pages.sizes
        self._n_entries = len(pages.entries)

    def _entry(self, key: bytes) -> _Entry | None:
        return self._staged[key] if key in self._staged else super()._entry(key)

    def _items(self) -> list[tuple[bytes, _Entry]]:
        items = dict(super()._items()) | self._staged
        return [(key, entry) for key, entry in items.items() if entry is not None]

    def _siblings(self, parent: bytes, form: int) -> _Siblings:
        staged = self._staged_children.get((parent, form))
        return super()._siblings(parent, form) if staged is None else staged

    def _own_siblings(self, record: Record) -> _Siblings:
        """The siblings of a page, in a list that may be changed until the transaction ends."""
        of = record.parent, record.form
        if of not in self._staged_children:
            self._staged_children[of] = super()._siblings(*of).copy()
        return self._staged_children[of]

    def _keys(self) -> list[bytes]:
        return sorted(key for key, _ in self._items())

    def namespaces(self) -> Mapping[bytes, bytes]:
        return _overlaid(super().namespaces(), self._staged_namespaces)

    def namespace(self, key: bytes) -> bytes | None:
        return self._staged_namespaces[key] if key in self._staged_namespaces else super().namespace(key)

    def note(self, name: bytes) -> bytes | None:
        return self._staged_notes[name] if name in self._staged_notes else super().note(name)

    @property
    def sizes(self) -> tuple[int, int]:
        return self._sizes

    @property
    def used(self) -> Used:
        return Used(self._bytes, self._n_entries)

    def cost(self, record: Record, n_bytes: int) -> int:
        return _cost(record, n_bytes)

    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        self.delete(key)
        entry = _Entry(record, usage, bytes(payload))
        self._staged[key] = entry
        insort(self._own_siblings(record), (record.tokens, key))
        self._bytes += entry.bytes
        self._sizes = self._sizes[0] + record.stored_bytes, self._sizes[1] + record.raw_bytes
        self._n_entries += 1
        self._structural.append(key)

    def delete(self, key: bytes) -> bool:
        entry = self._entry(key)
        if entry is None:
            return False
        self._staged[key] = None
        siblings = self._own_siblings(entry.record)
        del siblings[bisect_left(siblings, (entry.record.tokens, key))]
        self._bytes -= entry.bytes
        self._sizes = self._sizes[0] - entry.record.stored_bytes, self._sizes[1] - entry.record.raw_bytes
        self._n_entries -= 1
        self._structural.append(key)
        return True

    def touch(self, key: bytes, usage: Usage, *, announce: bool = False) -> None:
        entry = self._entry(key)
        if entry is not None:
            self._staged[key] = _Entry(entry.record, usage, entry.payload)
            self._structural += [key] * announce

    def put_namespace(self, key: bytes, settings: bytes) -> None:
        if self.namespace(key) != settings:
            self._staged_namespaces[key] = settings

    def drop_namespace(self, key: bytes) -> None:
        self._staged_namespaces[key] = None

    def put_note(self, name: bytes, value: bytes | None) -> None:
        self._staged_notes[name] = value

    def apply(self) -> None:
        """Commit. May be called again after an interrupt, and then does the rest."""
        pages = self._pages
        with self._lock:
            for key, entry in self._staged.items():
                if entry is None:
                    pages.entries.pop(key, None)
                else:
                    pages.entries[key] = entry
            for of, siblings in self._staged_children.items():
                if siblings:
                    pages.children[of] = siblings
                else:
                    pages.children.pop(of, None)
            if self._staged_namespaces:
                pages.namespaces = _overlaid(pages.namespaces, self._staged_namespaces)
            pages.notes = _overlaid(pages.notes, self._staged_notes)
            pages.bytes = self._bytes
            pages.sizes = self._sizes
            if self._structural:
                if not pages.changes or pages.changes[-1][1] is not self._structural:
                    pages.changes.append((pages.generation + 1, self._structural))
                pages.generation = pages.changes[-1][0]


def _overlaid(values: Mapping[bytes, bytes], staged: Mapping[bytes, bytes | None]) -> dict[bytes, bytes]:
    """Values updated by the staged ones; None deletes."""
    return {key: value for key, value in {**values, **staged}.items() if value is not None}


class _Memory:
    """Pages in dictionaries, and the locks around them; shared by the backends that name it.

    Attributes
    ----------
    pages
        The committed state.
    writing
        Held by the one transaction at a time.
    reading
        Held for a moment, where several dictionaries are read or changed together.
    handle_lock
        Held shared by transactions, so that a child does not inherit half a commit.
    max_bytes
        The budget of the stores that write to it; None until one does.
    users
        How many backends are open.
    """

    def __init__(self) -> None:
        self.pages = _Pages()
        self.handle_lock = HandleLock()
        self.max_bytes: int | None = None
        self.users = 0
        self._start()
        register_at_fork(self, ForkLevel.HANDLE)

    def _start(self) -> None:
        """The locks of this process."""
        self.writing = threading.Lock()
        self.reading = threading.Lock()

    def before_fork(self) -> None:
        self.handle_lock.acquire_exclusive(self)

    def after_fork_in_parent(self) -> None:
        self.handle_lock.release_exclusive(self)

    def after_fork_in_child(self) -> None:
        if not self.handle_lock.is_exclusive(self):
            # interrupts kept the fork from waiting: there may be half a commit
            self.pages = _Pages()
        self._start()
        self.handle_lock.renew()


class _Names:
    """The memories of this process that have a name. A forked child has copies of them."""

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}
        self._lock = ForkLock()

    def open(self, name: str, max_bytes: int, *, read_only: bool) -> _Memory:
        """The memory of this name. Raises `InvalidParameterError` if the options do not fit those that are open."""
        with self._lock.held:
            memory = self._memories.get(name)
            if memory is None:
                if read_only:
                    raise InvalidParameterError(
                        f"read_only=True: no store memory://{name} is open in this process; open one for writing first"
                    )
                memory = self._memories[name] = _Memory()
            if not read_only:
                if memory.max_bytes not in (None, max_bytes):
                    raise InvalidParameterError(
                        f"max_bytes={max_bytes}: memory://{name} is open with max_bytes={memory.max_bytes}, and what "
                        "opens it shares one memory; pass the same, or another name"
                    )
                memory.max_bytes = max_bytes
            memory.users += 1
            return memory

    def close(self, name: str, memory: _Memory) -> None:
        """Close a backend; the last one releases the memory."""
        with self._lock.held:
            memory.users -= 1
            if not memory.users and self._memories.get(name) is memory:
                del self._memories[name]

    def max_bytes_of(self, name: str) -> int | None:
        """The budget of the stores that are open under a name; None if there are none."""
        with self._lock.held:
            memory = self._memories.get(name)
            return memory.max_bytes if memory is not None else None


_NAMES = _Names()


class MemoryBackend(Backend):
    """Pages in dictionaries. They are lost with the process; a forked child has its own copy.

    Parameters
    ----------
    name
        Backends of one name share their pages, until the last one is closed; None for pages of its own.
    max_bytes
        The budget of the store; for backends of one name it has to be the same.
    read_only
        Whether the store only reads; it has to be open already then.

    Raises
    ------
    InvalidParameterError
        If the options do not fit those with which the name is open.
    """

    def __init__(self, name: str | None = None, *, max_bytes: int = 0, read_only: bool = False) -> None:
        self._name = name
        self._is_open = True
        self._memory = _Memory() if name is None else _NAMES.open(name, max_bytes, read_only=read_only)

    @property
    def _pages(self) -> _Pages:
        return self._memory.pages

    @property
    def location(self) -> str:
        return "memory:" if self._name is None else f"memory://{self._name}"

    @property
    def is_local(self) -> bool:
        return True

    @contextmanager
    def view(self) -> Iterator[View]:
        memory = self._memory
        yield _View(memory.pages, memory.reading)

    @contextmanager
    def update(self) -> Iterator[Transaction]:
        memory = self._memory
        with memory.handle_lock.shared(), memory.writing:
            change = _Change(memory.pages, memory.reading)
            yield change
            try:
                change.apply()
            except BaseException:
                # an interrupt: all or nothing, and something is there
                change.apply()
                raise

    def sync(self) -> None:
        """Nothing to do: memory does not outlive the process."""

    def after_fork(self) -> None:
        """Nothing to drop: the child has a copy of the pages, whose locks are new."""

    def close(self) -> None:
        was_open, self._is_open = self._is_open, False
        if was_open:
            if self._name is not None:
                _NAMES.close(self._name, self._memory)
            self._memory = _Memory()


def name_of(location: str) -> str | None:
    """The name in ``"memory://name"``; None for ``"memory:"``.

    Raises
    ------
    InvalidParameterError
        If it is neither.
    """
    if location.lower() in ("memory:", "memory://"):
        return None
    found = NAMED.fullmatch(location)
    if found is None:
        raise InvalidParameterError(
            f"location={without_password(location)!r}: memory has no path; "
            'pass "memory:", or "memory://name" with a name '
            "of letters, digits, and . _ - for one store that several open in this process"
        )
    return found["name"]


def agreed_bytes(location: str) -> int | None:
    """The `max_bytes` with which a named store in memory is open; None if none is."""
    name = name_of(location)
    return _NAMES.max_bytes_of(name) if name is not None else None


def open_memory(location: str, *, max_bytes: int, read_only: bool) -> MemoryBackend:
    """A new store in memory, or the one that is open under a name; the engine keeps its budget."""
    name = name_of(location)
    if name is not None:
        return MemoryBackend(name, max_bytes=max_bytes, read_only=read_only)
    if read_only:
        raise InvalidParameterError(
            'read_only=True: a new store in memory is empty; open it for writing, or use "lmdb:"'
        )
    return MemoryBackend()
