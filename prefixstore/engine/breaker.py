"""Leaves a location alone that fails or is slow, so that completions do not wait for it again and again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError, IncompatibleError, StorageError, UnavailableError
from prefixstore.stats import Counters

__all__ = ["Breaker"]

log = logging.getLogger("prefixstore")

# What a question may take, and how fast bytes and records have to come: what is slower counts as failing.
SLOW_SECONDS = 0.5
SLOW_BYTES_PER_SECOND = 8 << 20
SLOW_RECORDS_PER_SECOND = 2000
# For so many times as long as a failure took nothing is asked: failures take less than a fiftieth of the time. What
# fails as fast as this may be asked at once.
REST = 50
FAST_SECONDS = 0.002
# A longer rest than this ends when a thread has found the location well, which it asks after so many seconds, then
# after twice as many, and so on.
SHORT_REST = 1.0
FIRST_PROBE = 0.05
LAST_PROBE = 5.0


@dataclass
class Question:
    """What the location is asked for: a page, or records, of which there may be many when all are read anew."""

    page: Page | None
    n_records: int = 0

    @property
    def patience(self) -> float:
        """Seconds that the answer may take."""
        n_bytes = self.page.raw_bytes if self.page is not None else 0
        return SLOW_SECONDS + n_bytes / SLOW_BYTES_PER_SECOND + self.n_records / SLOW_RECORDS_PER_SECOND


class Breaker:
    """Lets questions through to a location, and none while it is left alone.

    Parameters
    ----------
    probe
        Asks the location what it last failed to answer: of this page, or, for None, what is stored. By a thread.
        Returns how many records were read.
    counters
        Counts how often the location was left alone (``"outages"``), and the time that was lost on it.
    """

    def __init__(self, probe: Callable[[Page | None], int], counters: Counters) -> None:
        self._probe = probe
        self._counters = counters
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._rests_until = 0.0
        self._probing = False

    def close(self) -> None:
        """End the thread, as soon as the location lets it."""
        self._closing.set()

    @property
    def is_resting(self) -> bool:
        """Whether the location is left alone at the moment."""
        return time.monotonic() < self._rests_until

    @contextmanager
    def asking(self, page: Page | None = None) -> Iterator[Question]:
        """A question to the location; whoever asks for many records notes how many they were.

        Parameters
        ----------
        page
            What is read, if it is one page.

        Raises
        ------
        UnavailableError
            If the location is left alone.
        """
        if self.is_resting:
            raise UnavailableError("the location has failed, or was slow, and is left alone until it is well again")
        started = time.monotonic()
        question = Question(page)
        try:
            yield question
        except (CorruptError, IncompatibleError) as error:
            if page is None:  # otherwise it is the page's fault
                self._rest(time.monotonic() - started, page, f"it fails: {error}")
            raise
        except StorageError as error:
            self._rest(time.monotonic() - started, page, f"it fails: {error}")
            raise
        seconds = time.monotonic() - started
        if seconds > question.patience:
            self._rest(seconds, page, f"it took {seconds:.1f} s to answer")

    def _rest(self, seconds: float, page: Page | None, why: str) -> None:
        self._counters.time("lost", seconds)
        rest = seconds * REST if seconds > FAST_SECONDS else 0.0
        with self._lock:
            self._rests_until = max(self._rests_until, time.monotonic() + rest)
            starts = rest > SHORT_REST and not self._probing and not self._closing.is_set()
            self._probing = self._probing or starts
        if starts:
            log.warning("the location is left alone until it is well again: %s", why)
            self._counters.count("outages")
            try:
                threading.Thread(target=self._watch, args=(page,), name="prefixstore-probe", daemon=True).start()
            except RuntimeError:
                # the interpreter is ending; nobody will ask again
                self._probing = False

    def _watch(self, page: Page | None) -> None:
        """Ask from time to time, and end the rest when there is an answer in time."""
        pause = FIRST_PROBE
        while not self._closing.wait(pause):
            started = time.monotonic()
            try:
                question = Question(page, self._probe(page))
                well = time.monotonic() - started <= question.patience
            except StorageError:
                well = False
            except Exception:  # whatever it is, it is not well, and must be asked again
                log.exception("the location cannot be asked")
                well = False
            with self._lock:
                self._probing = not well
                # as long as this thread goes on, nobody else asks
                self._rests_until = 0.0 if well else float("inf")
            if well:
                log.warning("the location is well again")
                return
            pause = min(2 * pause, LAST_PROBE)
