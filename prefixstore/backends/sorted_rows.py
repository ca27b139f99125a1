"""Rows in the memory of this process, sorted, in versions that never change."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

from prefixstore.backends.contract import Change, Range, Row, View
from prefixstore.format.record import Buffer

__all__ = ["ROWS_OF_BLOCK", "SortedRows"]

# a block of more rows becomes two
ROWS_OF_BLOCK = 512


class SortedRows(View):
    """Rows in order, in blocks. A row is kept as the change that would write it, and takes `cost` bytes.

    What is committed never changes: an update has its own copy of the blocks that differ.
    """

    def __init__(self, cost: Callable[[Change], int]) -> None:
        self._cost = cost
        # one for each bound, and always a first one
        self._blocks: list[list[Change]] = [[]]
        # no key of a block is below its bound; the first bound is empty
        self._bounds = [b""]
        self._used = 0
        # the ids of the blocks that no other view has
        self._own: set[int] = set()

    def copy(self) -> SortedRows:
        """The same rows, for an update to change."""
        found = SortedRows(self._cost)
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
            self._used += sum(map(self._cost, after)) - sum(map(self._cost, before))
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
