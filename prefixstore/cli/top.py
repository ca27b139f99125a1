"""``prefixstore top``: how a store is used now, on a screen that refreshes itself."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from prefixstore.cli.output import ago, columns_shown, grid
from prefixstore.engine.facts import FACTS
from prefixstore.engine.page_view import Used, View
from prefixstore.errors import StorageError
from prefixstore.format.figures import MINUTE, Figures, History
from prefixstore.format.keys import PAGE
from prefixstore.maintenance.archive import Archive
from prefixstore.report.labels import visible
from prefixstore.stats import MINUTES_KEPT, Purpose
from prefixstore.units import counted, format_bytes, format_number, format_seconds, format_share

__all__ = ["Screen", "hottest", "lines", "top"]

# All pages are looked at for the hottest prefixes: so often at most, and no more than this share of the time.
HOTTEST_SECONDS = 5.0
HOTTEST_SHARE = 0.05
# pages among which they are looked for: those of a long prefix are used together
CONSIDERED = 4096
SLICE = 10_000
QUIT = "qQ"
# of the lists on the screen
MOST_SHOWN = 8
WINDOWS = (1, 10, 60)
# what a process has left in its queue is told for so long
RECENT_SECONDS = 30
BARS = " ▁▂▃▄▅▆▇█"


def top(location: str, *, once: bool = False, seconds: float = 2.0) -> None:
    """Watch how a store is used.

    It shows requests, hit rate, the latest prompts and the hottest prefixes. Processes write the figures with their
    commits, so they are some seconds old. Press q to quit. The last 1, 10 and 60 minutes are whole minutes; the current
    minute is added to the first two. With --once, or without a terminal, it is printed once; `prefixstore stats --json`
    has the same figures as JSON.

    Example: prefixstore top lmdb:///var/cache/kv
    """
    with Archive(location, read_only=True) as archive:
        if once or not sys.stdout.isatty():
            screen = Screen(archive.location)
            screen.read(archive)
            screen.hottest = _hottest(archive, lambda: False)
            for line in lines(screen, columns_shown(), None):
                typer.echo(line)
        else:
            _watch(archive, seconds)


def _watch(archive: Archive, seconds: float) -> None:
    console = Console(file=sys.stdout, highlight=False)
    screen = Screen(archive.location)
    is_over = False
    with ThreadPoolExecutor(1) as thread, _keys() as key:
        search: Future[tuple[list[Any], float]] | None = None
        next_search = 0.0

        def search_once() -> tuple[list[Any], float]:
            started = time.monotonic()
            return _hottest(archive, lambda: is_over), time.monotonic() - started

        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    try:
                        screen.read(archive)
                        screen.fault = None
                    except StorageError as error:
                        screen.fault = str(error)
                    if search is not None and search.done():
                        found, took = search.result()
                        screen.hottest, search = found, None
                        next_search = time.monotonic() + max(HOTTEST_SECONDS, took / HOTTEST_SHARE)
                    if search is None and time.monotonic() >= next_search:
                        search = thread.submit(search_once)
                    shown = lines(screen, console.width, console.height - 1)
                    live.update(_styled(shown), refresh=True)
                    # the first time, until the hottest prefixes are found
                    if key(0.2 if search is not None and not screen.hottest else seconds) in QUIT:
                        return
        finally:
            is_over = True


def _styled(shown: Sequence[str]) -> Text:
    """The lines, with the first one of each part in bold."""
    text = Text(no_wrap=True, overflow="crop")
    for before, line in zip(["", *shown], shown, strict=False):
        text.append(f"{line}\n", "bold" if not before else "")
    return text


def _hottest(archive: Archive, stop: Callable[[], bool]) -> list[Any]:
    try:
        with archive.backend.view() as view:
            return hottest(view, MOST_SHOWN, stop)
    except StorageError:
        return []


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key, and returns it; ``"-"`` if none is pressed.

    Where standard input is no terminal, it waits.
    """

    def wait(seconds: float) -> str:
        time.sleep(seconds)
        return "-"

    try:
        import termios  # noqa: PLC0415 - not on every system
        import tty  # noqa: PLC0415 - as above

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError, termios.error):
        yield wait
        return

    def pressed(seconds: float) -> str:
        if select.select([number], [], [], seconds)[0]:
            # not through a buffer, of which select knows nothing; at the end of the input there is nothing to wait for
            keys = os.read(number, 64).decode("ascii", "replace") or QUIT
            return next((key for key in keys if key in QUIT), keys[0])
        return "-"

    try:
        # Ctrl-C is a signal still
        tty.setcbreak(number)
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def hottest(view: View, n: int, stop: Callable[[], bool] = lambda: False) -> list[Any]:
    """The `n` prefixes that are used most, each as long as it is used as often: the facts of their last pages.

    A page counts its uses since it was stored, those by warming jobs too.
    It looks at all pages, in slices; `stop` is called after each, and ends that if it returns True.
    """
    best = np.empty(0, FACTS)
    after = b""
    while not stop() and len(facts := view.facts(after, SLICE)):
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
    hottest
        The prefixes that are used most; see `hottest`.
    fault
        Why the location cannot be read; None if it can.
    """

    location: str
    history: History = field(default_factory=lambda: History(time.time()))
    used: Used = field(default_factory=lambda: Used(0, 0))
    hottest: Sequence[Any] = ()
    fault: str | None = None

    def read(self, archive: Archive) -> None:
        """Read what changes. Raises `StorageError`."""
        self.history, self.used = archive.history(), archive.used()


def lines(screen: Screen, columns: int, rows: int | None) -> list[str]:
    """What is shown, in so many columns and rows; None for as many rows as it takes."""
    history = screen.history
    title = f"{time.strftime('%H:%M:%S', time.localtime(history.at))}  {screen.location}"
    fault = [] if screen.fault is None else [f"the location cannot be read: {screen.fault}"]
    tables = [_rates(history, columns), _requests(history, columns), _hot(screen, columns)]
    parts = [[title, *_used(screen, columns)], fault, *tables]
    shown = [visible(line) for part in parts if part for line in ["", *part]][1:]
    if rows is not None:
        # the last line says how to leave
        shown = [*shown[: rows - 1], "q quits"]
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


def _rates(history: History, columns: int) -> list[str]:
    known = [(figures, span) for figures, span in (_last(history, n) for n in WINDOWS)]
    if not known[-1][0].lookups:
        return ["no prompt was looked up in the last hour"]
    rows = [
        ["requests a minute", *(format_number(one.lookups * MINUTE / span) for one, span in known)],
        ["hit rate", *(format_share(one.hit_rate) for one, _ in known)],
        ["of prompt restored", *(format_share(one.restored_share) for one, _ in known)],
        ["tokens restored/s", *(format_number(one.tokens_restored / span) for one, span in known)],
        ["tokens computed/s", *(format_number(one.tokens_computed / span) for one, span in known)],
        ["time saved", *(format_seconds(one.seconds_saved) for one, _ in known)],
        ["pages evicted", *(format_number(one.evictions) for one, _ in known)],
    ]
    header = ["last", *(f"{n} min" for n in WINDOWS)]
    # all columns, so that nothing moves
    found = grid(rows, columns, header, keeps_all=True)
    found += _bars(history, min(MINUTES_KEPT, columns))
    waiting = [one for one in history.writers if history.at - one.at < RECENT_SECONDS]
    if waiting:
        pages = sum(one.pending_pages for one in waiting)
        size = format_bytes(sum(one.queued_bytes for one in waiting))
        latest = ago(round(max(one.at for one in waiting) * 1e9))
        queue = f"{counted(pages, 'page')} ({size})" if pages else "nothing waits to be written"
        found.append(f"queue: {queue}, {counted(len(waiting), 'process', 'processes')}, as of {latest}")
    return found


def _last(history: History, minutes: int) -> tuple[Figures, float]:
    """What was counted in the running minute and so many before it, and how many seconds that is."""
    first = int(history.at // MINUTE - min(minutes, MINUTES_KEPT - 1)) * MINUTE
    return Figures.sum(one.figures for one in history.minutes if one.start >= first), history.at - first


def _bars(history: History, n: int) -> list[str]:
    """Lookups of each of the last minutes as bars, the running one at the end, under their scale."""
    counts = {one.start // MINUTE: one.figures.lookups for one in history.minutes}
    now = int(history.at // MINUTE)
    shown = [max(counts.get(minute, 0), 0) for minute in range(now - n + 1, now + 1)]
    most = max(*shown, 1)
    bars = "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in shown)
    return [f"requests in each of the last {n} min, {BARS[-1]} is {format_number(most)}:", bars]


def _requests(history: History, columns: int) -> list[str]:
    rows = [
        [
            _whose(history, one.namespace)
            if one.purpose == Purpose.SERVING
            else f"{one.purpose}: {_whose(history, one.namespace)}",
            ago(round(one.at * 1e9)),
            one.source.replace("_", " "),
            format_number(one.prompt_tokens),
            format_number(one.restored_tokens),
        ]
        for one in history.requests[::-1][:MOST_SHOWN]
    ]
    return grid(rows, columns, ["latest prompts", "when", "from", "tokens", "restored"]) if rows else []


def _hot(screen: Screen, columns: int) -> list[str]:
    rows = []
    for one in screen.hottest:
        whose = _whose(screen.history, one["namespace"].tobytes().hex()[:16])
        uses, tokens = format_number(int(one["hits"])), format_number(int(one["start"]) + int(one["n_tokens"]))
        rows.append([whose, uses, tokens, ago(int(one["last_used"])), one["key"].tobytes().hex()[:12]])
    return grid(rows, columns, ["hottest prefixes", "uses", "tokens", "last used", "page"]) if rows else []


def _whose(history: History, namespace: str) -> str:
    """The tenant and the model of a prompt; the model only if there are several, or no tenant."""
    known = history.describe(namespace)
    has_models = len({one.title for one in history.described.values()}) > 1
    if not known.tenant:
        return known.title
    return f"{known.tenant}, {known.title}" if has_models else known.tenant
