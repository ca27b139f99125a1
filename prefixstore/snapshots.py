"""Where snapshots are taken, and which of them are given up: the policy, as functions of positions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["positions", "thin"]


def positions(start: int, end: int, borders: Sequence[int], interval: int) -> list[int]:
    """Where to stop for a snapshot while the tokens from `start` up to `end` are evaluated.

    One token before the end: the same prompt again has to evaluate one, and the memory cannot step back. The border at
    which the first conversation starts to differ from others, behind the system prompt. The last two borders: behind
    what the user said, and before it. And one every `interval` tokens, at a border where there is one; none of these
    close to another position, since every stop costs a batch.

    Parameters
    ----------
    start, end
        The tokens are evaluated together: a prompt, or the token generated last.
    borders
        Positions at which messages begin, ascending; of the whole sequence.
    interval
        Tokens between snapshots that nothing else asks for.

    Returns
    -------
    list of int
        Ascending, above `start`; `end` is among them only as a multiple of `interval`.
    """
    inside = [border for border in borders if start < border < end]
    chosen = {end - 1} if end - 1 > start else set()
    chosen.update(inside[-2:], (border for border in borders[:1] if border in inside))
    for grid in range(start - start % interval + interval, end + 1, interval):
        point = max((border for border in inside if grid - interval < border <= grid), default=grid)
        if all(abs(point - other) > interval // 4 for other in chosen):
            chosen.add(point)
    return sorted(chosen)


def thin(taken: Sequence[int], keep: int, shared: Collection[int] = ()) -> set[int]:
    """Which of the snapshots along one sequence to give up.

    The newest stays. Of the others the one goes first whose loss makes the smallest gap, measured against how far back
    that gap is: so they stay spread out, dense behind the newest and ever wider before (logarithmically).

    Parameters
    ----------
    taken
        Positions, ascending.
    keep
        How many may stay, at least one.
    shared
        Positions from which other sequences go their own way: they go last.
    """
    left = list(taken)
    while len(left) > keep:
        newest = left[-1]

        def loss(i: int, left: list[int] = left, newest: int = newest) -> tuple[bool, float, int]:
            before = left[i - 1] if i else 0
            return left[i] in shared, (left[i + 1] - before) / (newest - before), i

        del left[min(range(len(left) - 1), key=loss)]
    return set(taken) - set(left)
