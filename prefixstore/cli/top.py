"""``prefixstore top``: how a store is used now, on a screen that refreshes itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live

from prefixstore.cli.listing import SHORT
from prefixstore.cli.output import ago, print_all, table_of
from prefixstore.cli.stats import by_title, in_use, served
from prefixstore.engine.page_view import Facts
from prefixstore.errors import StorageError
from prefixstore.format.figures import Figures, History
from prefixstore.format.keys import PAGE
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import namespaces_of, read_facts
from prefixstore.models.file import model_title
from prefixstore.report.labels import visible
from prefixstore.stats import short
from prefixstore.units import format_number, format_share

__all__ = ["Screen", "hottest", "top"]

# All pages are looked at for the hottest prefixes: so often at most, and no more than this share of the time.
HOTTEST_SECONDS = 5.0
HOTTEST_SHARE = 0.05
# pages among which they are looked for: those of a long prefix are used together
CONSIDERED = 4096
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
        # what was counted in all until a time, in seconds: each time that it was read in the last minute
        self._totals: list[tuple[float, Figures]] = []
        self._hottest: Sequence[Any] = ()
        self._next_search = 0.0

    def read(self, archive: Archive) -> Iterator[RenderableType]:
        """Read what changes, and return the lines and tables that show it. Raises `StorageError`."""
        history = archive.history()
        with archive.view() as view:
            used, spaces = view.used, namespaces_of(view)
            if (started := time.monotonic()) >= self._next_search:
                self._hottest = hottest(read_facts(view), MOST_SHOWN)
                took = time.monotonic() - started
                self._next_search = started + max(HOTTEST_SECONDS, took / HOTTEST_SHARE)
        # whose the namespaces are, by their names in the history: their tenants and models
        titles = {short(key): _title(one.settings, history) for key, one in spaces.items()}
        yield f"{time.strftime('%H:%M:%S', time.localtime(history.at))}  {archive.location}"
        yield in_use(used, history.max_bytes)
        yield ""
        yield from served(self.spans(history))
        busiest = sorted(by_title(history, titles, days=1).items(), key=lambda one: -one[1].prompt_tokens)
        if rows := [_row(title, figures) for title, figures in busiest[:MOST_SHOWN] if figures.lookups]:
            yield ""
            yield table_of(["busiest today", "lookups>", "hit rate>", "tokens>", "restored>"], rows)
        if self._hottest:
            yield ""
            columns = ["hottest prefixes", "uses>", "tokens>", "last used>", "page>"]
            yield table_of(columns, (_hot_row(one, titles) for one in self._hottest))

    def spans(self, history: History) -> dict[str, Figures]:
        """What was counted since the first look of the last minute, today, and in all days."""
        now = history.total()
        self._totals = [one for one in self._totals if one[0] >= history.at - LATEST_SECONDS] + [(history.at, now)]
        days = {"today": history.total(1), "31 days": now}
        began, before = self._totals[0]
        if began == history.at:
            return days
        # days that are no longer kept may be missing
        latest = Figures(*(max(n - m, 0) for n, m in zip(now, before, strict=True)))
        return {f"last {history.at - began:.0f} s": latest, **days}


def _hot_row(one: Any, titles: Mapping[str, str]) -> list[str]:
    return [
        titles.get(short(one["namespace"].tobytes()), "unknown"),
        format_number(int(one["hits"])),
        format_number(int(one["start"]) + int(one["n_tokens"])),
        ago(int(one["last_used"])),
        one["key"].tobytes().hex()[:SHORT],
    ]


def _row(title: str, figures: Figures) -> list[str]:
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
