"""The contract of a backend: it keeps sorted rows, and a large payload beside some of them.

It knows nothing of pages, tokens or models; what the rows mean is written once, in `prefixstore.engine.keyspace`. Keys
and values are bytes: a key of 1 to `LONGEST_KEY`, a value of at most some hundred KiB, a payload of any size. Keys are
ordered by their bytes, which are unsigned. There are two kinds of access:

- a **view** reads. It sees everything that was committed before it opened; later commits may or may not be visible, but
  each call of `View.get` or `View.ranges` sees one state, and a later call none that is older. It never waits for a
  writer. A payload that it returned stays readable and unchanged until it closes.
- an **update** reads and writes, in a `Draft`. What it wrote becomes visible to others as a whole when it closes, and
  not at all if it closes with an exception or its process dies. Updates that contradict each other are not both
  committed: the second one waits for its turn, or ends with `ConflictError` and is done again. A loss of power may
  lose what was committed since the last `Backend.sync`, the newest first, and nothing else.

A caller holds one view or update of a backend at a time, and does not fork while it holds one. A missing key is None,
never an exception. The errors are those of `prefixstore.errors.StorageError`: `FullError` (delete something and try
again), `UnavailableError` (worth a retry later; also that the backend was closed), `CorruptError` and
`IncompatibleError` (not worth one).

A new backend is one module, an entry point in the group ``prefixstore.backends``, and one subclass of
`prefixstore.testing.BackendContract`. ``docs/backends.md`` has a complete example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from prefixstore.errors import UnavailableError
from prefixstore.format.record import Buffer

__all__ = [
    "LONGEST_KEY",
    "Backend",
    "Change",
    "ConflictError",
    "Costs",
    "Draft",
    "Range",
    "Row",
    "Update",
    "View",
    "after_all",
]

# bytes: one less than LMDB takes
LONGEST_KEY = 510
# this many more rows than a range may have are asked for at first, as a draft may have changed some of them
MORE_ROWS = 16


class ConflictError(UnavailableError):
    """Another process has meanwhile changed what an update depends on; the same work may be done again at once.

    Nothing of the update is committed then.
    """


def after_all(start: bytes) -> bytes:
    """The first key that is above all that begin with these bytes."""
    return (int.from_bytes(start, "big") + 1).to_bytes(len(start), "big")


class Row(NamedTuple):
    """A key and its value."""

    key: bytes
    value: bytes


class Range(NamedTuple):
    """Rows from the key `start` on and before the key `stop`, in the order of their keys: at most `limit`.

    With `reverse` in the opposite order: the last ones first. Each bound has 0 to `LONGEST_KEY` bytes; a range whose
    `stop` is not above its `start` is empty.
    """

    start: bytes
    stop: bytes
    limit: int | None = None
    reverse: bool = False


class Change(NamedTuple):
    """A row to be written, or, without a value, to be deleted together with its payload.

    A row that is written without a payload keeps the one that it has.
    """

    key: bytes
    value: bytes | None
    payload: Buffer | None = None


@dataclass(frozen=True)
class Costs:
    """What the size of a location grows by with each row, in bytes, at most.

    Attributes
    ----------
    row
        For a row, beside its key and its value.
    payload
        For a payload, beside its bytes.
    unit
        A payload takes a multiple of this many bytes.
    """

    row: int = 0
    payload: int = 0
    unit: int = 1

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        """Of a row with a payload of this many bytes, or with none."""
        size = self.row + len(key) + len(value)
        if payload is not None:
            size += -(-(payload + self.payload) // self.unit) * self.unit
        return size


class View(ABC):
    """The committed rows. May be handed from one thread to another, but not used by two at once.

    Attributes
    ----------
    arrived
        How many bytes of the payload that `payloads` receives have arrived, if the backend knows. Any thread may read
        it.
    at_once
        How many rows it reads in the time of one request; None for any number. Who can do with fewer asks for no more.
    is_encrypted
        Whether payloads are decrypted as they arrive: then the next one is asked for while one is used.
    """

    arrived: int = 0
    at_once: int | None = None
    is_encrypted: bool = False

    @abstractmethod
    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of these rows, in one state of the location. A server answers in one round trip."""

    @abstractmethod
    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        """The rows of each range, in one state of the location. A server answers in one round trip."""

    @abstractmethod
    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        """Value and payload of these rows, in order, as they arrive; None for a row that there is not.

        The two belong together even if the row is written again meanwhile: an update may write and delete rows while it
        iterates, and gets what was there when it called this, unless it has asked for `used` since. Who asks may stop
        at any time. The memory is valid until the view closes; the caller copies nothing. They are not verified.
        """

    @property
    @abstractmethod
    def used(self) -> int:
        """The size of the location in bytes, everything included."""


class Update(View):
    """A view that writes, too. What it wrote becomes visible to others when it closes: see the contract above."""

    @property
    @abstractmethod
    def costs(self) -> Costs:
        """By which `used` is estimated."""

    @abstractmethod
    def put(
        self,
        key: bytes,
        value: bytes,
        payload: Buffer | None = None,
        *,
        replaced: int | None = None,
        owner: bytes | None = None,
    ) -> None:
        """Write a row. The memory of the payload must stay valid and unchanged until the update has closed.

        `replaced` is the size of the payload that the row has, if the caller knows it: then `used` is estimated better.
        `owner` stands for the tenant that owns it: an encrypted location has a key for each. None for the owner that
        the row had when it was read.
        """

    @abstractmethod
    def delete(self, key: bytes, *, replaced: int | None = None) -> None:
        """Delete a row and its payload, if it is there. For `replaced`, see `put`."""


class Draft(Update):
    """A view with changes over it, which are written when the update that it belongs to closes.

    Parameters
    ----------
    view
        What is committed; nobody else changes it while the update lasts, or the update ends with `ConflictError`.
    costs
        By which `used` is estimated.
    apply
        Writes changes into an open transaction, in which `view` reads them from then on. Then `used` is exact.
    """

    def __init__(self, view: View, costs: Costs, apply: Callable[[Sequence[Change]], None] | None = None) -> None:
        self._view = view
        self.at_once = view.at_once
        self._costs = costs
        self._apply = apply
        self._changes: dict[bytes, Change] = {}
        # the keys of the changes, in order
        self._keys: list[bytes] = []
        # of these, those that were deleted, and perhaps written again: their payloads are gone
        self._deleted: set[bytes] = set()
        # and those of rows that are written, in order
        self._written: list[bytes] = []
        # by how many bytes the changes make the location larger
        self._growth = 0
        # values that were read: as nobody else changes them, once is enough
        self._read: dict[bytes, bytes | None] = {}
        # Where reading a range may begin instead, by its first bound and direction: what is before was changed here, so
        # that a row that was deleted is passed over once, and not in each range.
        self._begins: dict[tuple[bytes, bool], bytes] = {}

    def put(
        self,
        key: bytes,
        value: bytes,
        payload: Buffer | None = None,
        *,
        replaced: int | None = None,
        owner: bytes | None = None,
    ) -> None:
        self._change(Change(key, value, payload), replaced)

    def delete(self, key: bytes, *, replaced: int | None = None) -> None:
        self._change(Change(key, None), replaced)

    def _change(self, change: Change, replaced: int | None) -> None:
        before = self._changes.get(change.key)
        was_written = before is not None and before.value is not None
        if change.value is not None and not was_written:
            insort(self._written, change.key)
        elif change.value is None and was_written:
            del self._written[bisect_left(self._written, change.key)]
        if before is None:
            insort(self._keys, change.key)
            before = Change(change.key, self._read.get(change.key))
        else:
            replaced = None if before.payload is None else len(before.payload)
            if change.value is not None and change.payload is None:
                change = change._replace(payload=before.payload)
        if change.value is None:
            self._deleted.add(change.key)
        elif change.payload is None:
            # it keeps the one that it has
            replaced = None
        self._growth += self._size(change, None if change.payload is None else len(change.payload))
        self._growth -= self._size(before, replaced)
        self._changes[change.key] = change

    def _size(self, row: Change, payload: int | None) -> int:
        return 0 if row.value is None else self._costs.of(row.key, row.value, payload)

    @property
    def costs(self) -> Costs:
        return self._costs

    @property
    def changes(self) -> list[Change]:
        """What is to be written, one after the other, in the order of the keys.

        A row that was deleted and written again without a payload is two of them: its old payload goes.
        """
        found = []
        for key in self._keys:
            change = self._changes[key]
            if key in self._deleted and change.value is not None and change.payload is None:
                found.append(Change(key, None))
            found.append(change)
        return found

    def flush(self) -> None:
        """Have the changes written into the open transaction, if there is one."""
        if self._apply is not None and self._changes:
            self._apply(self.changes)
            self._read.update((key, change.value) for key, change in self._changes.items())
            self._changes, self._keys, self._written, self._deleted = {}, [], [], set()
            self._growth, self._begins = 0, {}

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        unread = [key for key in keys if key not in self._changes and key not in self._read]
        if unread:
            self._read.update(zip(unread, self._view.get(unread), strict=True))
        return [change.value if (change := self._changes.get(key)) else self._read[key] for key in keys]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        found: dict[int, list[Row]] = {}
        n_more = MORE_ROWS
        while waiting := {i: self._asked(one, n_more) for i, one in enumerate(wanted) if i not in found}:
            for (i, asked), rows in zip(waiting.items(), self._view.ranges(list(waiting.values())), strict=True):
                kept = self._unchanged(wanted[i], rows)
                # with fewer, as many as were asked for may have been changed
                if asked.limit is None or len(rows) < asked.limit or len(kept) >= (wanted[i].limit or 0):
                    found[i] = self._merged(wanted[i], kept)
            n_more *= 4
        return [found[i] for i in range(len(wanted))]

    def _asked(self, wanted: Range, n_more: int) -> Range:
        """What to read for a range: some more rows than it may have if some were changed, from where others begin."""
        if wanted.reverse:
            wanted = wanted._replace(stop=self._begins.get((wanted.stop, True), wanted.stop))
        else:
            wanted = wanted._replace(start=self._begins.get((wanted.start, False), wanted.start))
        n_changed = bisect_left(self._keys, wanted.stop) - bisect_left(self._keys, wanted.start)
        limit = wanted.limit
        return wanted if limit is None else wanted._replace(limit=limit + max(min(n_changed, n_more), 0))

    def _unchanged(self, wanted: Range, rows: list[Row]) -> list[Row]:
        """Those of the first stored rows of a range that were not changed; remembers where they begin."""
        kept = [row for row in rows if row.key not in self._changes]
        n_changed = len(rows) if not kept else rows.index(kept[0])
        if n_changed:
            self._begins[wanted.stop if wanted.reverse else wanted.start, wanted.reverse] = rows[n_changed - 1].key
        return kept

    def _merged(self, wanted: Range, kept: list[Row]) -> list[Row]:
        """These stored rows and those that were written here."""
        low, high = bisect_left(self._written, wanted.start), bisect_left(self._written, wanted.stop)
        if wanted.limit is not None and wanted.reverse:
            low = max(low, high - wanted.limit)
        elif wanted.limit is not None:
            high = min(high, low + wanted.limit)
        mine = [Row(key, self._changes[key].value or b"") for key in self._written[low:high]]
        return sorted(mine + kept, reverse=wanted.reverse)[: wanted.limit]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        # as they are now: the caller may change rows before it takes the first one, and between them
        changes = [self._changes.get(key) for key in keys]
        is_here = [
            change is not None and (change.payload is not None or change.key in self._deleted) for change in changes
        ]
        stored = self._view.payloads([key for key, mine in zip(keys, is_here, strict=True) if not mine])
        return self._payloads(changes, is_here, stored)

    def _payloads(
        self,
        changes: Sequence[Change | None],
        is_here: Sequence[bool],
        stored: Iterator[tuple[bytes, Buffer | None] | None],
    ) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for change, mine in zip(changes, is_here, strict=True):
            found = None if mine else next(stored)
            if change is None:
                yield found
            elif change.value is None:
                yield None
            else:
                yield change.value, change.payload if found is None else found[1]

    @property
    def used(self) -> int:
        self.flush()
        return self._view.used + self._growth


class Backend(ABC):
    """A location that keeps rows. Safe to use from many threads.

    Attributes
    ----------
    is_local
        Whether it is on this machine: then a read is cheap, and one slow answer says more about the machine than about
        the location.
    """

    is_local: bool = False

    @property
    @abstractmethod
    def location(self) -> str:
        """The location as a URL."""

    @abstractmethod
    def view(self) -> AbstractContextManager[View]:
        """Read what is committed. Raises `UnavailableError` or `CorruptError`."""

    @abstractmethod
    def update(self) -> AbstractContextManager[Update]:
        """Read and write. Leaving the block writes the changes of the draft, all of them or, with an error, none."""

    @abstractmethod
    def sync(self) -> None:
        """Return when everything committed so far survives a loss of power, as far as the location can promise it."""

    @abstractmethod
    def close(self) -> None:
        """Release the location. A second call does nothing."""

    def compact(self, *, erase: bool = False) -> int:
        """Return space freed by deletions to the disk; returns the number of bytes.

        With `erase`, what deletions have freed is overwritten, so that nothing of it can be read from the files.
        Raises `UnavailableError` if that is not possible now, because a reader still sees it. What the location cannot
        promise is described in ``docs/operations.md``.
        """
        return 0

    def check(self) -> None:  # noqa: B027 - most backends have nothing to do
        """Check what the backend keeps the rows in. Raises `CorruptError` if it is damaged."""

    def reclaim(self) -> None:  # noqa: B027 - most backends have nothing to do
        """Make the space freed by deletions usable for the next update."""

    def after_fork(self) -> None:  # noqa: B027 - most backends have nothing to do
        """Called in a forked child before anything else: drop what belongs to the parent. No other thread runs."""
