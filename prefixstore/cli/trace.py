"""``prefixstore trace``: what a store was asked, with other budgets and policies."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.output import fields, table, tell
from prefixstore.engine.eviction import policy_named
from prefixstore.traces.read import Trace, read_trace
from prefixstore.traces.replay import Curve, pages_in, simulate
from prefixstore.units import counted, format_bytes, format_share

# a trace has no priorities
DEFAULTS = ("adaptive", "lru")


def simulate_(
    file: Path,
    *,
    policy: list[str] | None = None,
    max_bytes: str | None = None,
    pages: int | None = None,
    requests: int | None = None,
) -> Result:
    """Show the hit rate against the size of the store, and what twice the budget would gain.

    Policies run in the real engine. Sizes are shares of all that was asked, and once and twice the budget, that is
    --max-bytes, --pages, or the recorded one. The rate of the store that was recorded is shown too.

    Example: prefixstore trace simulate trace.jsonl --max-bytes 20GiB
    """
    read = read_trace(file, requests)
    budget = pages or pages_in(read, options.max_bytes_of(max_bytes))
    names = list(dict.fromkeys(policy or DEFAULTS))
    for name in names:
        policy_named(name)  # raises if it is unknown
    # it is shown on a terminal only, and removed at the end
    with Console(stderr=True).status(f"replaying {counted(len(read.requests), 'request')} at several sizes"):
        found = simulate(read, names, budget)
    data = {
        "trace": str(file),
        "skipped_lines": read.skipped,
        "recorded_rate": _recorded(read),
        "pages": list(found.sizes),
        "bytes": [found.bytes_of(size) for size in found.sizes],
        "budget_pages": found.budget,
        "all_pages": found.total,
        "rates": {name: [round(one.rate, 4) for one in ones] for name, ones in found.found.items()},
        "twice_the_budget_wins": {name: found.gain(name) for name in found.found},
    }

    def show() -> None:
        _about(read, file, found.budget, is_known=budget is not None)
        headers = ["pages>", *(["bytes>"] * (found.page_bytes is not None)), *(f"{name}>" for name in found.found)]
        table(headers, [_row(found, i) for i in range(len(found.sizes))])
        if found.holds_all:
            tell("the budget holds all pages of the trace: a larger one finds no more")
            return
        for name in names:
            _say_gain(read, found, name, is_known=budget is not None)

    return Result(data, show)


def _row(found: Curve, i: int) -> list[str]:
    size = found.sizes[i]
    n_bytes = found.bytes_of(size)
    shown = [f"{size:,}", *([format_bytes(n_bytes)] if n_bytes is not None else [])]
    return shown + [format_share(ones[i].rate, 1) for ones in found.found.values()]


def _say_gain(read: Trace, found: Curve, name: str, *, is_known: bool) -> None:
    before, after = (found.found[name][found.sizes.index(n * found.budget)].rate for n in (1, 2))
    what = f"twice {'the budget' if is_known else 'this size'} ({counted(2 * found.budget, 'page')}) finds"
    unit = "tokens" if read.is_ours else "blocks"
    more = f"{found.gain(name):,} {unit} more: {format_share(after, 1)} instead of {format_share(before, 1)}"
    tell(f"{name}: {what} {more if found.gain(name) > 0 else 'no more'}")


def _about(read: Trace, file: Path, size: int, *, is_known: bool) -> None:
    more = f" of {format_bytes(read.page_bytes)}" if read.page_bytes else ""
    more += "" if is_known else ", a tenth of all (no budget in pages is known)"
    about = {
        "trace": str(file),
        "requests": f"{len(read.requests):,}",
        "different pages": f"{read.pages:,}",
        "budget": f"{counted(size, 'page')}{more}",
    }
    if read.is_ours:
        about["recorded"] = f"{format_share(_recorded(read), 1)} of the tokens found"
    fields(about | ({"lines skipped": f"{read.skipped:,}"} if read.skipped else {}))


def _recorded(read: Trace) -> float | None:
    """How much of the tokens the recorded store itself found; None if that is not known."""
    n_tokens = sum(event.n_tokens for event in read.requests)
    return sum(event.hit_tokens or 0 for event in read.requests) / max(n_tokens, 1) if read.is_ours else None
