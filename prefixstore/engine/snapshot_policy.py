"""Where snapshots are taken, and which of them are deleted again, as functions of positions."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence

__all__ = ["positions", "thin"]

# No stop is made this close after the start: to evaluate these tokens again costs next to nothing in a batch.
MIN_DISTANCE = 8
# tokens of "<|start_header_id|>assistant<|end_header_id|>" and a line break
HEADER_TOKENS = 4


def positions(start: int, end: int, borders: Sequence[int], interval: int) -> list[int]:
    """Where to stop for a snapshot while the tokens from `start` up to `end` are evaluated.

    - One token before the end: if the same prompt comes again, one token has to be evaluated, and the memory cannot
      step back.
    - The first border, after the system prompt, where conversations start to differ.
    - The last two borders: before and after the user's message.
    - Every `interval` tokens, at a border where there is one.

    Every stop costs a batch, which takes as long as a generated token. So none is made where it would gain next to
    nothing: just after the start, where the previous turn ended; at the bare header of the coming answer; or, for the
    stops that only the interval requires, close to another one.

    Parameters
    ----------
    start, end
        The tokens are evaluated together: a prompt, or the token generated last.
    borders
        Positions at which messages begin, ascending; of the whole sequence.
    interval
        Tokens between snapshots where there is no other reason for one.

    Returns
    -------
    list of int
        Ascending, above `start`; `end` is among them only as a multiple of `interval`.
    """
    inside = borders[
        bisect_left(borders, start + MIN_DISTANCE if start else 1) : bisect_left(borders, end - HEADER_TOKENS)
    ]
    last = inside[-2:] if len(inside) > 1 and borders[-1] == inside[-1] else inside[-1:]
    asked = {*last, *inside[: borders[:1] == inside[:1]]} | ({end - 1} if end - 1 > start else set())
    grid: list[int] = []
    for multiple in range(start - start % interval + interval, end + 1, interval):
        border = inside[bisect_right(inside, multiple) - 1] if inside else -1
        points = (border, multiple) if multiple - interval < border <= multiple else (multiple,)
        free = (point for point in points if all(abs(point - other) > interval // 2 for other in (*asked, *grid[-1:])))
        grid.extend(itertools.islice(free, 1))
    return sorted({*asked, *grid})


def thin(taken: Sequence[int], keep: int, interval: int, shared: Collection[int] = ()) -> set[int]:
    """Which of the snapshots along one sequence to delete.

    The newest stays. Of the others, the one whose loss leaves the smallest gap is deleted first, by the logarithm of
    the distance from the newest: so they stay dense near the newest, and older ones are spaced further apart.

    Parameters
    ----------
    taken
        Positions, ascending.
    keep
        How many may stay, at least one.
    interval
        Distances much smaller than this do not matter.
    shared
        Positions from which other sequences branch off: they are deleted last.
    """
    left = list(taken)
    while len(left) > keep:
        newest = left[-1] + interval

        def loss(i: int, newest: int = newest) -> tuple[bool, float, int]:
            before = left[i - 1] if i else 0
            return left[i] in shared, (newest - before) / (newest - left[i + 1]), i

        del left[min(range(len(left) - 1), key=loss)]
    return set(taken) - set(left)
