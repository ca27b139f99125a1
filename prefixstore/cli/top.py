"""``prefixstore top``: how a store is used now, on a screen that refreshes itself."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from prefixstore.cli.output import width
from prefixstore.cli.screen import MOST_SHOWN, Screen, lines
from prefixstore.errors import StorageError
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.hottest import Hot, hottest

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["top"]

# All pages are looked at for the hottest prefixes: so often at most, and no more than this share of the time.
HOTTEST_SECONDS = 5.0
HOTTEST_SHARE = 0.05
QUIT = "qQ"


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
            for line in lines(screen, width(), None):
                typer.echo(line)
        else:
            _watch(archive, seconds)


def _watch(archive: Archive, seconds: float) -> None:
    from rich.console import Console  # noqa: PLC0415 - costs a quarter of the start
    from rich.live import Live  # noqa: PLC0415 - as above

    console = Console(file=sys.stdout, highlight=False)
    screen = Screen(archive.location)
    is_over = False
    with ThreadPoolExecutor(1) as thread, _keys() as key:
        search: Future[tuple[list[Hot], float]] | None = None
        next_search = 0.0

        def search_once() -> tuple[list[Hot], float]:
            started = time.monotonic()
            return _hottest(archive, lambda: is_over), time.monotonic() - started

        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    _refresh(screen, archive)
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
    from rich.text import Text  # noqa: PLC0415 - costs a quarter of the start

    text = Text(no_wrap=True, overflow="crop")
    for before, line in zip(["", *shown], shown, strict=False):
        text.append(f"{line}\n", "bold" if not before else "")
    return text


def _refresh(screen: Screen, archive: Archive) -> None:
    try:
        screen.read(archive)
        screen.fault = None
    except StorageError as error:
        screen.fault = str(error)


def _hottest(archive: Archive, stop: Callable[[], bool]) -> list[Hot]:
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
