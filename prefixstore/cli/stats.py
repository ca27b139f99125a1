"""``stats``: what a location holds, and how it was used; ``top``: the same on a screen that refreshes itself."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live

from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.listing import SHORT
from prefixstore.cli.output import ago, iso, print_all, say, table_of
from prefixstore.counters import OTHERS, short
from prefixstore.engine.page_view import Used
from prefixstore.errors import StorageError
from prefixstore.format.figures import Figures, History
from prefixstore.format.keys import PAGE
from prefixstore.format.record import Facts
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import Holding, holdings_of, in_all, keys_in, namespaces_of, read_facts
from prefixstore.models.file import model_title
from prefixstore.report.labels import visible
from prefixstore.units import counted, format_bytes, format_number, format_seconds, format_share

# rows of a table on the screen; --json has all of them
MOST_SHOWN = 10
COLUMNS = ("stored>", "pages>", "hit rate>", "hits>", "saved>")
# days, today included
SPANS = {"today": 1, "last_7_days": 7, "last_31_days": None}
# whose namespace has been deleted, or has never had a page
GONE = "(gone)"


def stats(location: str, *, max_bytes: str | None = None) -> Result:
    """Show what a store holds, and how much it helps.

    Hit rate, tokens and time saved are for today (UTC), the last 7 and the last 31 days; by model and tenant for 31
    days. Processes write them every ten seconds, and when they end. Prompts of warming jobs do not count. The size
    limit is that of the process that was the last to write, or --max-bytes.

    Example: prefixstore stats lmdb:///var/cache/kv
    """
    given = options.max_bytes_of(max_bytes)
    with Archive(location, read_only=True) as archive, archive.view() as view:
        facts = read_facts(view)
        history, holdings, used = archive.history(), holdings_of(view, facts), view.used
        capacity = given if given is not None else history.max_bytes
        numbers = _numbers(archive, history, holdings, used, facts)
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
        spans = {name.replace("_", " "): history.total(days) for name, days in SPANS.items()}
        since = f"since {datetime.fromtimestamp(history.since, timezone.utc):%Y-%m-%d}" if history.since else ""
        shown: list[RenderableType] = [", ".join(_held(numbers)), "", *served(spans, since)]
        for name, some in groups.items():
            if any(one[name] not in ("", GONE) for one in some):
                shown += ["", table_of([name, *COLUMNS], map(partial(_row, name), some[:MOST_SHOWN]))]
                if len(some) > MOST_SHOWN:
                    shown.append(f"and {len(some) - MOST_SHOWN:,} more; --json has all")
        print_all(numbers["location"], *shown)
        if not is_local and not history.total().lookups:
            say("note: prompts of processes that use this as a far location are counted in their nearer location")

    since = iso(history.since * 10**9) if history.since is not None else None
    spans = {name: history.total(days).as_dict() for name, days in SPANS.items()}
    return Result(numbers | {"since": since} | spans | {f"by_{name}": some for name, some in groups.items()}, show)


def _numbers(
    archive: Archive, history: History, holdings: Sequence[Holding], used: Used, facts: Facts
) -> dict[str, Any]:
    total = in_all(holdings)
    n_damaged = int((~facts["is_readable"]).sum())
    facts = facts[facts["is_readable"]]
    is_expired = (facts["expires"] > 0) & (facts["expires"] <= time.time_ns()) & ~facts["pinned"]
    return {
        "location": archive.location,
        "encryption": archive.encryption,
        # an archive has one of its own where no store has written yet
        "policy": archive.policy if history.max_bytes is not None else None,
        "used_bytes": used.bytes,
        "pages": total.pages,
        "damaged_pages": n_damaged,
        "tokens": total.tokens,
        "stored_bytes": total.stored_bytes,
        "raw_bytes": total.raw_bytes,
        "namespaces": len(holdings),
        "tenants": len({one.namespace.salt for one in holdings if one.namespace and one.namespace.salt}),
        # pages that no other one follows
        "sequences": int((~np.isin(keys_in(facts["key"]), keys_in(facts["parent"]))).sum()),
        "pinned_pages": total.pinned,
        "expired_pages": int(is_expired.sum()),
        "page_uses": total.hits,
        "hits": history.total().hits,
        "last_used": iso(total.last_used),
    }


def _groups(
    history: History, holdings: Sequence[Holding], kind: str, title: Callable[[Holding], str]
) -> list[dict[str, Any]]:
    """What is stored and was counted of each model or tenant, with its title as `kind`; the largest first."""
    held: defaultdict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        held[title(holding)].append(holding)
    figures = by_title(history, {short(one.key): title(one) for one in holdings})
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys([*held, *figures]):
        total = in_all(held[name])
        sizes = {"pages": total.pages, "tokens": total.tokens, "stored_bytes": total.stored_bytes}
        found.append({kind: name} | sizes | figures.get(name, Figures()).as_dict())
    return sorted(found, key=lambda one: (-one["stored_bytes"], -one["prompt_tokens"], one[kind]))


def by_title(history: History, titles: Mapping[str, str], days: int | None = None) -> dict[str, Figures]:
    """What was counted on the last days (None: on all), by what `titles` say of a namespace, by its name there."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for _, name in history.days:
        names["(others)" if name == OTHERS else titles.get(name, GONE)].add(name)
    return {title: history.total(days, namespaces=some) for title, some in names.items()}


# -- text -------------------------------------------------------------------------------------------------------------


def in_use(used: Used, capacity: int | None) -> str:
    """How much of a location is used."""
    share = f" of {format_bytes(capacity)} ({format_share(used.bytes / capacity, 1)})" if capacity else ""
    return f"{format_bytes(used.bytes)}{share} used in {counted(used.entries, 'page')}"


def _held(numbers: Mapping[str, Any]) -> Iterator[str]:
    yield in_use(Used(numbers["used_bytes"], numbers["pages"]), numbers.get("capacity_bytes"))
    if "capacity_pages" in numbers:
        yield f"at most {format_number(numbers['capacity_pages'])} pages"
    yield f"{format_number(numbers['tokens'])} tokens"
    if numbers["stored_bytes"] < numbers["raw_bytes"]:
        yield f"{format_bytes(numbers['stored_bytes'])} for {format_bytes(numbers['raw_bytes'])} of state"
    for what in ("damaged", "pinned", "expired"):
        if n := numbers[f"{what}_pages"]:
            yield f"{format_number(n)} {what}"
    if numbers["policy"] is not None:
        yield f"policy {numbers['policy']}"
    if numbers["encryption"] != "none":
        yield str(numbers["encryption"])
    if numbers["last_used"] is not None:
        yield f"used {ago(round(datetime.fromisoformat(numbers['last_used']).timestamp() * 1e9))}"


def served(spans: Mapping[str, Figures], since: str = "") -> list[RenderableType]:
    """A table of what was counted in each span of time, the longest last; a line if that is nothing."""
    figures = list(spans.values())
    if not figures[-1].prompt_tokens:
        return ["no prompt has been looked up yet"]
    rows: dict[str, Callable[[Figures], str]] = {
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
    columns = [since, *(f"{name}>" for name in spans)]
    return [table_of(columns, ([name, *map(text, figures)] for name, text in rows.items()))]


def _row(name: str, group: Mapping[str, Any]) -> list[str]:
    return [
        group[name] or "(shared)",
        format_bytes(group["stored_bytes"]),
        format_number(group["pages"]),
        format_share(group["hit_rate"]),
        format_number(group["hits"]),
        format_seconds(group["seconds_saved"]) if group["hits"] else "-",
    ]


# -- top --------------------------------------------------------------------------------------------------------------

# All pages are looked at for the hottest prefixes: so often at most, and no more than this share of the time.
HOTTEST_SECONDS = 5.0
HOTTEST_SHARE = 0.05
# pages among which they are looked for: those of a long prefix are used together
CONSIDERED = 4096
# of its lists
MOST_LISTED = 8


def top(location: str, *, once: bool = False, seconds: float = 2.0) -> None:
    """Watch how a store is used.

    It shows lookups, hit rate, the busiest tenants and the hottest prefixes: of today (UTC) and of 31 days. Processes
    write the figures every ten seconds. Ctrl-C ends it. With --once, or without a terminal, it is printed once;
    `prefixstore stats --json` has the figures as JSON, and `prefixstore tree --json` the uses of each page.

    Example: prefixstore top lmdb:///var/cache/kv
    """
    with Archive(location, read_only=True) as archive:
        screen = Screen()
        if once or not sys.stdout.isatty():
            print_all(*screen.read(archive))
            return
        console = Console(file=sys.stdout, markup=False, highlight=False)
        # what does not fit the terminal is cut
        with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            shown: Sequence[RenderableType] = ()
            while True:
                try:
                    shown = [*screen.read(archive)]
                    live.update(Group("Ctrl-C ends this", *shown), refresh=True)
                except StorageError as error:
                    fault = f"the location cannot be read: {visible(str(error))}"
                    live.update(Group("Ctrl-C ends this", fault, *shown), refresh=True)
                time.sleep(seconds)


def hottest(facts: Facts, n: int) -> list[Any]:
    """The `n` prefixes that are used most, each as long as it is used as often: the facts of their last pages.

    A page counts its uses since it was stored, those by warming jobs too.
    """
    used = facts[facts["is_readable"] & (facts["hits"] > 0) & (facts["form"] == PAGE)]
    best = used[np.lexsort((used["start"], -used["hits"].astype(np.int64)))][:CONSIDERED]
    # a page that is used as often as one that continues it is a part of that prefix
    continued = {(one["parent"].tobytes(), int(one["hits"])) for one in best}
    ends = [one for one in best if (one["key"].tobytes(), int(one["hits"])) not in continued]
    ends.sort(key=lambda one: (-int(one["hits"]), -int(one["start"])))
    return ends[:n]


# -- what is shown ----------------------------------------------------------------------------------------------------


class Screen:
    """What is shown, and what has to be remembered for it between two looks at a location."""

    def __init__(self) -> None:
        self._hottest: Sequence[Any] = ()
        self._next_search = 0.0

    def read(self, archive: Archive) -> Iterator[RenderableType]:
        """Read what changes, and return the lines and tables that show it. Raises `StorageError`."""
        history = archive.history()
        with archive.view() as view:
            used, spaces = view.used, namespaces_of(view)
            if (started := time.monotonic()) >= self._next_search:
                self._hottest = hottest(read_facts(view), MOST_LISTED)
                took = time.monotonic() - started
                self._next_search = started + max(HOTTEST_SECONDS, took / HOTTEST_SHARE)
        # whose the namespaces are, by their names in the history: their tenants and models
        titles = {short(key): _title(one.settings, history) for key, one in spaces.items()}
        yield f"{time.strftime('%H:%M:%S', time.localtime(history.at))}  {archive.location}"
        yield in_use(used, history.max_bytes)
        yield ""
        yield from served({"today": history.total(1), "31 days": history.total()})
        busiest = sorted(by_title(history, titles, days=1).items(), key=lambda one: -one[1].prompt_tokens)
        if rows := [_busy_row(title, figures) for title, figures in busiest[:MOST_LISTED] if figures.lookups]:
            yield ""
            yield table_of(["busiest today", "lookups>", "hit rate>", "tokens>", "restored>"], rows)
        if self._hottest:
            yield ""
            columns = ["hottest prefixes", "uses>", "tokens>", "last used>", "page>"]
            yield table_of(columns, (_hot_row(one, titles) for one in self._hottest))


def _hot_row(one: Any, titles: Mapping[str, str]) -> list[str]:
    return [
        titles.get(short(one["namespace"].tobytes()), "unknown"),
        format_number(int(one["hits"])),
        format_number(int(one["start"]) + int(one["n_tokens"])),
        ago(int(one["last_used"])),
        one["key"].tobytes().hex()[:SHORT],
    ]


def _busy_row(title: str, figures: Figures) -> list[str]:
    return [
        title,
        format_number(figures.lookups),
        format_share(figures.hit_rate),
        format_number(figures.prompt_tokens),
        format_number(figures.tokens_restored),
    ]


def _title(settings: Mapping[str, object], history: History) -> str:
    """The tenant and the model of a namespace."""
    return ", ".join(filter(None, [str(settings.get("salt") or ""), model_title(settings, history.models)]))
