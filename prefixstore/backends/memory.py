"""Rows in the memory of this process, in versions that never change: for tests, and for stores of one process."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefixstore.backends import refusals
from prefixstore.backends.contract import Backend, Change, Costs, Draft, Range, Row, View
from prefixstore.backends.location import without_password
from prefixstore.errors import InvalidParameterError
from prefixstore.format.record import Buffer

# a block of more rows becomes two
ROWS_OF_BLOCK = 512


class _Costs(Costs):
    """What Python holds for a row with a payload, and for the small rows that come with it (measured on 3.11)."""

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        return 0 if payload is None else super().of(key, value, payload)


COSTS = _Costs(payload=1000)


def _cost(row: Change) -> int:
    return COSTS.of(row.key, row.value or b"", None if row.payload is None else len(row.payload))


class SortedRows(View):
    """Rows in order, in blocks. A row is kept as the change that would write it.

    What is committed never changes: an update has its own copy of the blocks that differ.
    """

    def __init__(self) -> None:
        # one for each bound, and always a first one
        self._blocks: list[list[Change]] = [[]]
        # no key of a block is below its bound; the first bound is empty
        self._bounds = [b""]
        self._used = 0
        # the ids of the blocks that no other view has
        self._own: set[int] = set()

    def copy(self) -> SortedRows:
        """The same rows, for an update to change."""
        found = SortedRows()
        found._bounds, found._blocks, found._used = self._bounds.copy(), self._blocks.copy(), self._used
        return found

    @property
    def used(self) -> int:
        return self._used

    def _row(self, key: bytes) -> Change | None:
        block = self._blocks[bisect_right(self._bounds, key) - 1]
        at = bisect_left(block, (key,))
        return block[at] if at < len(block) and block[at].key == key else None

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [row.value if (row := self._row(key)) else None for key in keys]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        return [self._range(*one) for one in wanted]

    def _range(self, start: bytes, stop: bytes, limit: int | None, reverse: bool) -> list[Row]:
        found: list[Change] = []
        numbers = range(bisect_right(self._bounds, start) - 1, bisect_left(self._bounds, stop))
        for number in reversed(numbers) if reverse else numbers:
            block = self._blocks[number]
            rows = block[bisect_left(block, (start,)) : bisect_left(block, (stop,))]
            found += reversed(rows) if reverse else rows
            if limit is not None and len(found) >= limit:
                break
        return [Row(row.key, row.value or b"") for row in found[:limit]]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for key in keys:
            row = self._row(key)
            yield None if row is None or row.value is None else (row.value, row.payload)

    def apply(self, changes: Sequence[Change]) -> None:
        """Write changes into these rows, which are those of an update."""
        for change in changes:
            number = bisect_right(self._bounds, change.key) - 1
            block = self._blocks[number]
            if id(block) not in self._own:
                block = self._blocks[number] = block.copy()
                self._own.add(id(block))
            at = bisect_left(block, (change.key,))
            before = [row for row in block[at : at + 1] if row.key == change.key]
            after = [] if change.value is None else [_kept(change, before)]
            block[at : at + len(before)] = after
            self._used += sum(map(_cost, after)) - sum(map(_cost, before))
            if len(block) > ROWS_OF_BLOCK:
                upper = block[ROWS_OF_BLOCK // 2 :]
                del block[ROWS_OF_BLOCK // 2 :]
                self._own.add(id(upper))
                self._blocks.insert(number + 1, upper)
                self._bounds.insert(number + 1, upper[0].key)
            elif number and not block:
                del self._blocks[number], self._bounds[number]


def _kept(change: Change, before: Sequence[Change]) -> Change:
    """A row as it is kept, with the payload that it had if the change brings none."""
    payload = before[0].payload if change.payload is None and before else change.payload
    return change if payload is None else change._replace(payload=bytes(payload))


class Memory:
    """The committed rows, and the lock of the one update at a time."""

    def __init__(self) -> None:
        # a commit is one assignment, which neither an interrupt nor a fork can divide
        self.rows = SortedRows()
        self.writing = threading.Lock()


class MemoryBackend(Backend):
    """Rows in lists. They are lost with the process; a forked child has its own copy."""

    is_local = True

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory or Memory()
        self._closed = False

    @property
    def location(self) -> str:
        return "memory:"

    def _opened(self) -> Memory:
        if self._closed:
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
        self._memory.writing = threading.Lock()

    def close(self) -> None:
        self._closed = True
        # others may still show it
        self._memory = Memory()


def open_memory(location: str, *, max_bytes: int, read_only: bool) -> MemoryBackend:
    """A new store in memory; the engine keeps its budget."""
    if location.lower() not in ("memory:", "memory://"):
        raise InvalidParameterError(
            f'location={without_password(location)!r}: memory has no path; pass "memory:". One store serves any number '
            "of Llamas"
        )
    if read_only:
        raise InvalidParameterError(
            'read_only=True: a new store in memory is empty; open it for writing, or use "lmdb:"'
        )
    return MemoryBackend()
