"""``prefixstore stats``: what a location holds, and how it was used."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

import typer

from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.output import ago, columns_shown, grid, iso, listed, say
from prefixstore.engine.index import Page
from prefixstore.engine.page_view import Used
from prefixstore.format.figures import Figures, History
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import Holding
from prefixstore.metrics import location_text
from prefixstore.models.file import model_title
from prefixstore.report.labels import visible
from prefixstore.stats import OTHERS, short
from prefixstore.units import format_bytes, format_number, format_seconds, format_share

__all__ = ["stats"]

# rows of a table on the screen; --json has all of them
MOST_SHOWN = 10
# days, today included
SPANS = {"today": 1, "last_7_days": 7, "last_31_days": None}
# whose namespace has been deleted, or has never had a page
GONE = "(gone)"


def stats(location: str, *, prometheus: bool = False, max_bytes: str | None = None) -> Result:
    """Show what a store holds, and how much it helps.

    Hit rate, tokens and time saved are for today (UTC), the last 7 and the last 31 days; by model and tenant for 31
    days. Processes write them every ten seconds, and when they end. Prompts of warming jobs do not count. The size
    limit is that of the process that was the last to write, or --max-bytes.

    Example: prefixstore stats lmdb:///var/cache/kv
    """
    given = options.max_bytes_of(max_bytes)
    with Archive(location, read_only=True) as archive:
        history, holdings, used = archive.history(), archive.holdings(), archive.used()
        capacity = given if given is not None else history.max_bytes
        if prometheus:
            return Result(None, partial(typer.echo, location_text(used, holdings, capacity, history), nl=False))
        pages = archive.pages()
        numbers = _numbers(archive, history, holdings, pages, used)
        is_local = archive.backend.is_local
    if capacity is not None:
        numbers["capacity_bytes"] = capacity
        numbers["free_bytes"] = max(capacity - used.bytes, 0)
        numbers["utilization"] = round(used.bytes / capacity, 4) if capacity else 0.0
    if history.max_entries is not None:
        numbers["capacity_pages"] = history.max_entries
    groups = {
        "model": _groups(history, holdings, "model", lambda one: model_title(one.settings, history.models)),
        # pages without one are those of the tenant ""
        "tenant": _groups(history, holdings, "tenant", lambda one: str(one.settings.get("salt") or "")),
    }

    def show() -> None:
        for line in _lines(numbers, history, groups, columns_shown()):
            typer.echo(visible(line))
        if not is_local and not history.total().lookups:
            say("note: prompts of processes that use this as a far location are counted in their nearer location")

    return Result(numbers | _usage(history) | {f"by_{name}": some for name, some in groups.items()}, show)


def _numbers(
    archive: Archive, history: History, holdings: Sequence[Holding], pages: Sequence[Page], used: Used
) -> dict[str, Any]:
    now = time.time_ns()
    return {
        "location": archive.location,
        "encryption": archive.encryption,
        # an archive has one of its own where no store has written yet
        "policy": archive.policy if history.max_bytes is not None else None,
        "used_bytes": used.bytes,
        "pages": used.entries,
        **{name: sum(getattr(one, name) for one in holdings) for name in ("tokens", "stored_bytes", "raw_bytes")},
        "namespaces": len(holdings),
        "tenants": len({one.namespace.salt for one in holdings if one.namespace and one.namespace.salt}),
        "sequences": sum(page.is_leaf for page in pages),
        "pinned_pages": sum(one.pinned for one in holdings),
        "expired_pages": sum(0 < page.expires <= now and not page.pinned for page in pages),
        "page_uses": sum(one.hits for one in holdings),
        "hits": history.total().hits,
        "last_used": iso(max((one.last_used for one in holdings), default=0)),
    }


def _usage(history: History) -> dict[str, object]:
    """How the location was used, for JSON."""
    since = history.since
    spans = {name: history.total(days).as_dict() for name, days in SPANS.items()}
    return {"since": iso(since * 10**9) if since is not None else None, **spans}


def _groups(
    history: History, holdings: Iterable[Holding], kind: str, title: Callable[[Holding], str]
) -> list[dict[str, Any]]:
    """What is stored and was counted of each model or tenant, with its title as `kind`; the largest first."""
    figures: defaultdict[str, list[Figures]] = defaultdict(list)
    held: defaultdict[str, list[Holding]] = defaultdict(list)
    titles = {OTHERS: "(others)"}
    for holding in holdings:
        titles[short(holding.key)] = title(holding)
        held[title(holding)].append(holding)
    for (_, namespace), counted in history.days.items():
        figures[titles.get(namespace, GONE)].append(counted)
    found: list[dict[str, Any]] = [
        {
            kind: name,
            **{size: sum(getattr(one, size) for one in held[name]) for size in ("pages", "tokens", "stored_bytes")},
            **Figures.sum(figures[name]).as_dict(),
        }
        for name in dict.fromkeys([*held, *figures])
    ]
    return sorted(found, key=lambda one: (-one["stored_bytes"], -one["prompt_tokens"], one[kind]))


# -- text -------------------------------------------------------------------------------------------------------------


def _lines(
    numbers: dict[str, Any], history: History, groups: dict[str, list[dict[str, Any]]], columns: int
) -> Iterator[str]:
    yield numbers["location"] + ("" if numbers["encryption"] == "none" else f", {numbers['encryption']}")
    yield from listed(_held(numbers), columns)
    yield ""
    yield from _served(history, columns)
    for name, some in groups.items():
        if any(one[name] not in ("", GONE) for one in some):
            yield from _table(name, some, columns)


def _held(numbers: dict[str, Any]) -> Iterator[str]:
    used = format_bytes(numbers["used_bytes"])
    if "capacity_bytes" in numbers:
        used += f" of {format_bytes(numbers['capacity_bytes'])}"
    yield f"{used} used" + (f" ({format_share(numbers['utilization'], 1)})" if "utilization" in numbers else "")
    most = f" of {format_number(numbers['capacity_pages'])}" if "capacity_pages" in numbers else ""
    yield f"{format_number(numbers['pages'])} page{'s' * (numbers['pages'] != 1)}{most}"
    yield f"{format_number(numbers['tokens'])} tokens"
    if numbers["stored_bytes"] < numbers["raw_bytes"]:
        yield f"{format_bytes(numbers['stored_bytes'])} for {format_bytes(numbers['raw_bytes'])} of state"
    for what in ("pinned", "expired"):
        n = numbers[f"{what}_pages"]
        yield f"{format_number(n)} {what}" if n else ""
    yield f"policy {numbers['policy']}" if numbers["policy"] is not None else ""
    if numbers["last_used"] is not None:
        yield f"used {ago(round(datetime.fromisoformat(numbers['last_used']).timestamp() * 1e9))}"


def _served(history: History, columns: int) -> Iterator[str]:
    figures = [history.total(days) for days in SPANS.values()]
    if not figures[-1].prompt_tokens:
        yield "no prompt has been looked up yet"
        return
    texts: dict[str, Callable[[Figures], str]] = {
        "hit rate": lambda one: format_share(one.hit_rate),
        "hits": lambda one: format_number(one.hits),
        "misses": lambda one: format_number(one.misses),
        "tokens of prompts": lambda one: format_number(one.prompt_tokens),
        "tokens restored": lambda one: format_number(one.tokens_restored),
        "tokens computed": lambda one: format_number(one.tokens_computed),
        "time saved": lambda one: format_seconds(one.seconds_saved),
        "pages written": lambda one: format_number(one.allocations),
        "bytes written": lambda one: format_bytes(one.bytes_written),
        "pages evicted": lambda one: format_number(one.evictions),
    }
    rows = [[name, *map(text, figures)] for name, text in texts.items()]
    yield from grid(rows, columns, [_since(history), *(name.replace("_", " ") for name in SPANS)])


def _since(history: History) -> str:
    return f"since {datetime.fromtimestamp(history.since, timezone.utc):%Y-%m-%d}" if history.since else ""


def _table(name: str, groups: Sequence[dict[str, Any]], columns: int) -> Iterator[str]:
    rows = [
        [
            one[name] or "(none)",
            format_bytes(one["stored_bytes"]),
            format_number(one["pages"]),
            format_share(one["hit_rate"]),
            format_number(one["hits"]),
            format_seconds(one["seconds_saved"]) if one["hits"] else "-",
        ]
        for one in groups[:MOST_SHOWN]
    ]
    yield ""
    yield from grid(rows, columns, [name, "stored", "pages", "hit rate", "hits", "saved"])
    if len(groups) > MOST_SHOWN:
        yield f"and {len(groups) - MOST_SHOWN:,} more; --json has all"
