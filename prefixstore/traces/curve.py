"""Hit rates of a trace against the size of the store, and what twice the budget would gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixstore.traces.read import Trace
from prefixstore.traces.replay import BELADY, Replayed, replay

__all__ = ["Curve", "pages_in", "simulate"]

# sizes, as shares of what all pages of the trace take, and as multiples of the budget
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Curve:
    """What each policy would have found in stores of several sizes.

    Attributes
    ----------
    sizes
        Pages that fit, rising.
    found
        For each policy, what was found at each size.
    budget
        The size that twice as much is compared with, in pages; one of `sizes`.
    total
        Pages in the trace: with as many, only what is new is not found.
    page_bytes
        Mean size of a page; None if it is not known.
    holds_all
        Whether the given budget holds all pages of the trace. Then `budget` is a smaller size.
    """

    sizes: tuple[int, ...]
    found: dict[str, tuple[Replayed, ...]]
    budget: int
    total: int
    page_bytes: float | None
    holds_all: bool = False

    def bytes_of(self, pages: int) -> float | None:
        """About how many bytes so many pages take."""
        return pages * self.page_bytes if self.page_bytes is not None else None

    def gain(self, policy: str) -> int:
        """How many more tokens twice the budget would find."""
        if self.holds_all:
            return 0
        at = self.sizes.index(self.budget)
        twice = self.sizes.index(2 * self.budget)
        return self.found[policy][twice].hit_tokens - self.found[policy][at].hit_tokens


def pages_in(trace: Trace, max_bytes: int | None) -> int | None:
    """The budget in pages: of so many bytes, or the recorded one; None if it is not known."""
    entries = trace.about.get("max_entries")
    recorded = trace.about.get("max_bytes")
    size = max_bytes if max_bytes is not None else recorded
    found = []
    if isinstance(entries, int) and max_bytes is None:
        found.append(entries)
    if isinstance(size, int) and trace.page_bytes:
        found.append(int(size / trace.page_bytes))
    return max(min(found), 1) if found else None


def simulate(
    trace: Trace,
    policies: Sequence[str],
    budget: int | None = None,
) -> Curve:
    """Replay a trace at several sizes, with Belady's algorithm beside the policies.

    Parameters
    ----------
    trace
        What was asked.
    policies
        Names of policies.
    budget
        In pages: sizes are multiples of it, as far as they are not above all pages of the trace; without one, or if it
        holds all of them, shares of all pages.
    """
    total = max(trace.pages, 1)
    holds_all = budget is not None and budget >= total
    if budget is None or holds_all:
        at = budget = max(round(0.1 * total), 1)
        sizes = {max(round(share * total), 1) for share in SHARES} | {at, 2 * at}
    else:
        sizes = {max(round(multiple * budget), 1) for multiple in MULTIPLES}
        # beyond twice the budget, only as far as there is something to gain
        sizes = {size for size in sizes if size <= max(total, 2 * budget)} | {budget, 2 * budget}
    ordered = tuple(sorted(sizes))
    found = {policy: tuple(replay(trace, policy, size) for size in ordered) for policy in [*policies, BELADY]}
    return Curve(ordered, found, budget, total, trace.page_bytes, holds_all)
