"""Rows in the memory of this process: for tests, and for stores of one process."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from prefixstore.backends import refusals
from prefixstore.backends.contract import Backend, Change, Costs, Draft, View
from prefixstore.backends.forks import ForkLock
from prefixstore.backends.location import without_password
from prefixstore.backends.sorted_rows import SortedRows
from prefixstore.errors import InvalidParameterError

__all__ = ["MemoryBackend", "open_memory"]

NAMED = re.compile(r"memory://(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)", re.IGNORECASE)


class _Costs(Costs):
    """What Python holds for a row with a payload, and for the small rows that come with it (measured on 3.11)."""

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        return 0 if payload is None else super().of(key, value, payload)


COSTS = _Costs(payload=1000)


def _cost(row: Change) -> int:
    return COSTS.of(row.key, row.value or b"", None if row.payload is None else len(row.payload))


class _Memory:
    """The committed rows; shared by the backends that name it."""

    def __init__(self) -> None:
        # a commit is one assignment, which neither an interrupt nor a fork can divide
        self.rows = SortedRows(_cost)
        # held by the one update at a time
        self.writing = threading.Lock()


# the memories that have a name, for as long as a backend has them open; a forked child has copies of them
_named: WeakValueDictionary[str, _Memory] = WeakValueDictionary()
_naming = ForkLock()


def _shared(name: str, *, read_only: bool) -> _Memory:
    """The memory of this name. Raises `InvalidParameterError` if none is open that can be read."""
    with _naming.held:
        memory = _named.get(name)
        if memory is None:
            if read_only:
                raise InvalidParameterError(
                    f"read_only=True: no store memory://{name} is open in this process; open one for writing first"
                )
            memory = _named[name] = _Memory()
        return memory


class MemoryBackend(Backend):
    """Rows in lists. They are lost with the process; a forked child has its own copy.

    Backends of one name share their rows, until the last one is closed. One that only reads needs one that is open:
    otherwise this raises `InvalidParameterError`.
    """

    is_local = True

    def __init__(self, name: str | None = None, *, read_only: bool = False) -> None:
        self._name = name
        self._memory: _Memory | None = _Memory() if name is None else _shared(name, read_only=read_only)

    @property
    def location(self) -> str:
        return "memory:" if self._name is None else f"memory://{self._name}"

    def _opened(self) -> _Memory:
        if self._memory is None:
            raise refusals.closed(self.location)
        return self._memory

    @contextmanager
    def view(self) -> Iterator[View]:
        yield self._opened().rows

    @contextmanager
    def update(self) -> Iterator[Draft]:
        with self._opened().writing:
            rows = self._opened().rows.copy()
            draft = Draft(rows, COSTS, rows.apply)
            yield draft
            draft.flush()
            self._opened().rows = rows

    def sync(self) -> None:
        """Nothing to do: memory does not outlive the process."""

    def after_fork(self) -> None:
        if self._memory is not None:
            self._memory.writing = threading.Lock()

    def close(self) -> None:
        self._memory = None


def _name_of(location: str) -> str | None:
    """The name in ``"memory://name"``; None for ``"memory:"``. Raises `InvalidParameterError` if it is neither."""
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


def open_memory(location: str, *, max_bytes: int, read_only: bool) -> MemoryBackend:
    """A new store in memory, or the one that is open under a name; the engine keeps its budget."""
    name = _name_of(location)
    if name is not None:
        return MemoryBackend(name, read_only=read_only)
    if read_only:
        raise InvalidParameterError(
            'read_only=True: a new store in memory is empty; open it for writing, or use "lmdb:"'
        )
    return MemoryBackend()
