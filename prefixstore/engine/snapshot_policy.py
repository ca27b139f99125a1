"""Which snapshots of a sequence are deleted again, as a function of positions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["thin"]


def thin(taken: Sequence[int], keep: int, interval: int, valued: Collection[int] = ()) -> set[int]:
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
    valued
        Positions from which other sequences branch off, or are likely to: they are deleted last.
    """
    left = list(taken)
    while len(left) > keep:
        newest = left[-1] + interval

        def loss(i: int, newest: int = newest) -> tuple[bool, float, int]:
            before = left[i - 1] if i else 0
            return left[i] in valued, (newest - before) / (newest - left[i + 1]), i

        del left[min(range(len(left) - 1), key=loss)]
    return set(taken) - set(left)
