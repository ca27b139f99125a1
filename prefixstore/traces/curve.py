"""Hit rates of a trace against the size of the store, and what twice the budget would gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixstore.traces.read import Trace
from prefixstore.traces.replay import BELADY, Replayed, replay

__all__ = ["Curve", "pages_in", "simulate"]

# sizes, as shares of what all pages of the trace take
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Curve:
    """What each policy would have found in stores of several sizes, all in pages.

    `sizes` are rising, and among them are the budget and twice as much. With `total` pages, only what is new is not
    found. `page_bytes` is the mean size of a page; None if it is not known.
    """

    sizes: tuple[int, ...]
    found: dict[str, tuple[Replayed, ...]]
    budget: int
    total: int
    page_bytes: float | None

    @property
    def holds_all(self) -> bool:
        """Whether the budget holds all pages of the trace."""
        return self.budget >= self.total

    def bytes_of(self, pages: int) -> float | None:
        """About how many bytes so many pages take."""
        return pages * self.page_bytes if self.page_bytes is not None else None

    def gain(self, policy: str) -> int:
        """How many more tokens twice the budget would find."""
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

    Sizes are shares of all pages of the trace, the budget (in pages; by default a tenth), and twice as much.
    """
    total = max(trace.pages, 1)
    budget = budget or max(round(0.1 * total), 1)
    sizes = tuple(sorted({max(round(share * total), 1) for share in SHARES} | {budget, 2 * budget}))
    found = {policy: tuple(replay(trace, policy, size) for size in sizes) for policy in [*policies, BELADY]}
    return Curve(sizes, found, budget, total, trace.page_bytes)
