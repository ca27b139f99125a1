"""``prefixstore top``: how a store is used now, on a screen that refreshes itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from prefixstore.cli.listing import SHORT
from prefixstore.cli.output import ago, columns_shown, grid
from prefixstore.cli.stats import GONE
from prefixstore.engine.facts import FACTS
from prefixstore.engine.page_view import Used, View
from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.figures import Figures, History
from prefixstore.format.keys import PAGE
from prefixstore.format.namespace import Namespace
from prefixstore.maintenance.archive import Archive
from prefixstore.models.file import model_title
from prefixstore.report.labels import visible
from prefixstore.stats import DAY, OTHERS, short
from prefixstore.units import format_bytes, format_number, format_seconds, format_share

__all__ = ["Screen", "hottest", "lines", "top"]

# All pages are looked at for the hottest prefixes: so often at most, and no more than this share of the time.
HOTTEST_SECONDS = 5.0
HOTTEST_SHARE = 0.05
# pages among which they are looked for: those of a long prefix are used together
CONSIDERED = 4096
SLICE = 10_000
# of the lists on the screen
MOST_SHOWN = 8
# what is the latest while it is watched: processes write their figures every ten seconds
LATEST_SECONDS = 60.0


def top(location: str, *, once: bool = False, seconds: float = 2.0) -> None:
    """Watch how a store is used.

    It shows lookups, hit rate, the busiest tenants and the hottest prefixes: of the last minute, if it is watched for
    as long, of today (UTC) and of 31 days. Processes write the figures every ten seconds. Ctrl-C ends it. With
    --once, or without a terminal, it is printed once; `prefixstore stats --json` has the same figures as JSON.

    Example: prefixstore top lmdb:///var/cache/kv
    """
    with Archive(location, read_only=True) as archive:
        screen = Screen(archive.location)
        if once or not sys.stdout.isatty():
            screen.read(archive)
            for line in lines(screen, columns_shown(), None):
                typer.echo(line)
        else:
            _watch(screen, archive, seconds)


def _watch(screen: Screen, archive: Archive, seconds: float) -> None:
    console = Console(file=sys.stdout, highlight=False)
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                screen.read(archive)
                screen.fault = None
            except StorageError as error:
                screen.fault = str(error)
            live.update(_styled(lines(screen, console.width, console.height - 1)), refresh=True)
            time.sleep(seconds)


def _styled(shown: Sequence[str]) -> Text:
    """The lines, with the first one of each part in bold."""
    text = Text(no_wrap=True, overflow="crop")
    for before, line in zip(["", *shown], shown, strict=False):
        text.append(f"{line}\n", "bold" if not before else "")
    return text


def hottest(view: View, n: int) -> list[Any]:
    """The `n` prefixes that are used most, each as long as it is used as often: the facts of their last pages.

    A page counts its uses since it was stored, those by warming jobs too. It looks at all pages, in slices.
    """
    best = np.empty(0, FACTS)
    after = b""
    while len(facts := view.facts(after, SLICE)):
        after = facts["key"][-1].tobytes()
        used = facts[facts["is_readable"] & (facts["hits"] > 0) & (facts["form"] == PAGE)]
        best = np.concatenate([best, used])
        order = np.lexsort((best["start"], -best["hits"].astype(np.int64)))
        best = best[order[:CONSIDERED]]
    # a page that is used as often as one that continues it is a part of that prefix
    continued = {(one["parent"].tobytes(), int(one["hits"])) for one in best}
    ends = [one for one in best if (one["key"].tobytes(), int(one["hits"])) not in continued]
    ends.sort(key=lambda one: (-int(one["hits"]), -int(one["start"])))
    return ends[:n]


# -- what is shown ----------------------------------------------------------------------------------------------------


@dataclass
class Screen:
    """What is shown.

    Attributes
    ----------
    location
        The location.
    history, used
        How it was used, and what it holds.
    titles
        Whose the namespaces are, by their names in the history: their tenants and models.
    totals
        What was counted in all until a time, in seconds: each time that it was read in the last minute.
    hottest
        The prefixes that are used most; see `hottest`.
    next_search
        When they are looked for again.
    fault
        Why the location cannot be read; None if it can.
    """

    location: str
    history: History = field(default_factory=History)
    used: Used = field(default_factory=lambda: Used(0, 0))
    titles: dict[str, str] = field(default_factory=dict)
    totals: list[tuple[float, Figures]] = field(default_factory=list)
    hottest: Sequence[Any] = ()
    next_search: float = 0.0
    fault: str | None = None

    def read(self, archive: Archive) -> None:
        """Read what changes. Raises `StorageError`."""
        self.history = archive.history()
        with archive.backend.view() as view:
            self.used, spaces = view.used, view.namespaces()
            if (started := time.monotonic()) >= self.next_search:
                self.hottest = hottest(view, MOST_SHOWN)
                took = time.monotonic() - started
                self.next_search = started + max(HOTTEST_SECONDS, took / HOTTEST_SHARE)
        for key, settings in spaces.items():
            if short(key) not in self.titles:
                self.titles[short(key)] = _title(settings, self.history)
        at = self.history.at
        self.totals = [one for one in self.totals if one[0] >= at - LATEST_SECONDS] + [(at, self.history.total())]

    def latest(self) -> Figures:
        """What was counted since the first of the `totals`. Days that are no longer kept may be missing from it."""
        (_, before), (_, now) = self.totals[0], self.totals[-1]
        return Figures(*(max(n - m, 0) for n, m in zip(now, before, strict=True)))

    def busiest(self) -> list[tuple[str, Figures]]:
        """What was counted today of each namespace, the one with most tokens first."""
        today = int(self.history.at // DAY)
        found = [(name, figures) for (day, name), figures in self.history.days.items() if day == today]
        return sorted(found, key=lambda one: -one[1].prompt_tokens)


def _title(settings: bytes, history: History) -> str:
    """The tenant and the model of a namespace."""
    try:
        found = Namespace.parse(settings).settings
    except CorruptError:
        return "unknown"
    return ", ".join(filter(None, [str(found.get("salt") or ""), model_title(found, history.models)]))


def lines(screen: Screen, columns: int, rows: int | None) -> list[str]:
    """What is shown, in so many columns and rows; None for as many rows as it takes."""
    title = f"{time.strftime('%H:%M:%S', time.localtime(screen.history.at))}  {screen.location}"
    fault = [] if screen.fault is None else [f"the location cannot be read: {screen.fault}"]
    tables = [_rates(screen, columns), _busiest(screen, columns), _hot(screen, columns)]
    parts = [[title, *_used(screen, columns)], fault, *tables]
    shown = [visible(line) for part in parts if part for line in ["", *part]][1:]
    if rows is not None:
        # the last line says how to leave
        shown = [*shown[: rows - 1], "Ctrl-C ends this"]
    return [line if len(line) <= columns else f"{line[: columns - 1]}…" for line in shown]


def _used(screen: Screen, columns: int) -> list[str]:
    pages, used = f"{format_number(screen.used.entries)} pages", format_bytes(screen.used.bytes)
    budget = screen.history.max_bytes
    if not budget:
        return [f"{used} used, {pages}"]
    share = screen.used.bytes / budget
    n = min(30, max(columns - 50, 10))
    full = min(round(share * n), n)
    return [f"[{'#' * full}{'.' * (n - full)}] {used} of {format_bytes(budget)} ({format_share(share)}), {pages}"]


def _rates(screen: Screen, columns: int) -> list[str]:
    known = {"today": screen.history.total(1), "31 days": screen.history.total()}
    if len(screen.totals) > 1:
        seconds = round(screen.totals[-1][0] - screen.totals[0][0])
        known = {f"last {seconds} s": screen.latest(), **known}
    if not known["31 days"].prompt_tokens:
        return ["no prompt has been looked up yet"]
    figures = known.values()
    rows = [
        ["lookups", *(format_number(one.lookups) for one in figures)],
        ["hit rate", *(format_share(one.hit_rate) for one in figures)],
        ["of prompt restored", *(format_share(one.restored_share) for one in figures)],
        ["tokens restored", *(format_number(one.tokens_restored) for one in figures)],
        ["tokens computed", *(format_number(one.tokens_computed) for one in figures)],
        ["time saved", *(format_seconds(one.seconds_saved) for one in figures)],
        ["pages written", *(format_number(one.allocations) for one in figures)],
        ["pages evicted", *(format_number(one.evictions) for one in figures)],
    ]
    return grid(rows, columns, ["", *known])


def _busiest(screen: Screen, columns: int) -> list[str]:
    rows = [
        [
            "(others)" if name == OTHERS else screen.titles.get(name, GONE),
            format_number(one.lookups),
            format_share(one.hit_rate),
            format_number(one.prompt_tokens),
            format_number(one.tokens_restored),
        ]
        for name, one in screen.busiest()[:MOST_SHOWN]
    ]
    return grid(rows, columns, ["busiest today", "lookups", "hit rate", "tokens", "restored"]) if rows else []


def _hot(screen: Screen, columns: int) -> list[str]:
    rows = []
    for one in screen.hottest:
        whose = screen.titles.get(short(one["namespace"].tobytes()), "unknown")
        uses, tokens = format_number(int(one["hits"])), format_number(int(one["start"]) + int(one["n_tokens"]))
        rows.append([whose, uses, tokens, ago(int(one["last_used"])), one["key"].tobytes().hex()[:SHORT]])
    return grid(rows, columns, ["hottest prefixes", "uses", "tokens", "last used", "page"]) if rows else []
