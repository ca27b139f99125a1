"""Hit rates of a trace against the size of the store, what twice the budget would gain, and a plot of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from prefixstore.traces.read import Trace
from prefixstore.traces.replay import BELADY, Replayed, replay
from prefixstore.units import format_bytes

__all__ = ["Curve", "pages_in", "simulate", "svg"]

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


# -- the plot ---------------------------------------------------------------------------------------------------------

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 120, 40, 52
COLOURS = ("#1f5fa8", "#b36b1d", "#2e7d4f", "#8a3ea0", "#a03e3e")
# the least distance of two labels at the right, in pixels
APART = 14


def svg(curve: Curve, title: str) -> str:
    """Hit rate against size, a line for each policy; Belady is dashed."""
    low, high = math.log(curve.sizes[0]), math.log(max(curve.sizes[-1], curve.sizes[0] + 1))
    top = max(max(one.rate for one in found) for found in curve.found.values())
    step = 0.2 if top > 0.5 else 0.1 if top > 0.2 else 0.05
    n_steps = max(math.ceil(top / step), 1)
    top = n_steps * step

    def x(size: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(size) - low) / (high - low)

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * rate / top

    mark, bottom, right = x(curve.budget), HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 20, title, "start", ' font-size="13"'),
        _text((LEFT + right) / 2, HEIGHT - 12, "size of the store (log scale)"),
        f'<path d="M{mark:.1f} {TOP}V{bottom}" stroke="#999999" stroke-dasharray="2 3"/>',
    ]
    for rate in (step * i for i in range(n_steps + 1)):
        parts += [
            f'<path d="M{LEFT} {y(rate):.1f}H{right}" stroke="#dddddd"/>',
            _text(LEFT - 6, y(rate) + 4, f"{rate:.0%}", "end"),
        ]
    parts += [_text(x(size), bottom + 16, _size(curve, size)) for size in curve.sizes]
    ends = []
    for i, (policy, found) in enumerate(curve.found.items()):
        colour = "#555555" if policy == BELADY else COLOURS[i % len(COLOURS)]
        dashes = ' stroke-dasharray="6 4"' if policy == BELADY else ""
        points = " ".join(f"{x(size):.1f},{y(one.rate):.1f}" for size, one in zip(curve.sizes, found, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        ends.append((y(found[-1].rate), policy, colour))
    at = -math.inf
    for wanted, policy, colour in sorted(ends):
        at = max(wanted, at + APART)
        parts.append(_text(right + 8, at + 4, policy, "start", f' fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _size(curve: Curve, pages: int) -> str:
    n_bytes = curve.bytes_of(pages)
    return format_bytes(n_bytes) if n_bytes is not None else f"{pages:,}"
