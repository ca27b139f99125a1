"""A circuit breaker: keeps completions from waiting for a location that fails or is slow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from prefixstore.backends.threads import start_thread
from prefixstore.counters import Counters
from prefixstore.engine.page import Page
from prefixstore.engine.pages import Pages
from prefixstore.errors import CorruptError, IncompatibleError, StorageError, UnavailableError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import checksum

log = logging.getLogger("prefixstore")

# How long a request may take, and how fast bytes must arrive: anything slower counts as a failure.
SLOW_SECONDS = 0.5
SLOW_BYTES_PER_SECOND = 8 << 20
# After so long, and the time that its bytes may take, a location hangs: callers stop waiting for it.
HANG_SECONDS = 10.0
# A location on this machine is slow if this many answers in a row are: one may be late because the machine has paused.
LOCAL_PATIENCE = 3
# The circuit stays open for this many times as long as the failure took, so that failures take less than a fiftieth of
# the time. A failure within FAST_SECONDS does not open it.
OPEN_FACTOR = 50
FAST_SECONDS = 0.002
# If that is longer than this, the circuit stays open until a thread has found the location healthy. It probes after
# FIRST_PROBE seconds, then after twice as many, and so on.
SHORT_OPEN = 1.0
FIRST_PROBE = 0.05
LAST_PROBE = 5.0


def time_limit(page: Page | None) -> float:
    """How many seconds the answer to a request for a page, or for records, may take."""
    return SLOW_SECONDS + (page.raw_bytes if page is not None else 0) / SLOW_BYTES_PER_SECOND


def probe(backend: Pages, page: Page | None) -> None:
    """Repeat a request for a page, or for records."""
    with backend.view() as view:
        view.record(page.key if page is not None else bytes(KEY_BYTES))
        for _, payload in view.fetch([page.key] if page is not None else []):
            checksum(payload)


class CircuitBreaker:
    """Lets requests to a location pass while the circuit is closed, and fails them at once while it is open.

    One error opens it, or `patience` slow answers in a row. Then a thread probes the location: it calls `probe` with
    the page whose request failed, or with None if it was for records.
    """

    def __init__(
        self,
        probe: Callable[[Page | None], object],
        counters: Counters,
        *,
        patience: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe = probe
        self._counters = counters
        self._patience = patience
        self._clock = clock
        # slow answers in a row, for records (False) and for pages: a location may be slow at one and not the other
        self._n_slow = {False: 0, True: 0}
        # reentrant, as that of `Counters`
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._open_until = 0.0
        self._is_probing = False

    def close(self) -> None:
        """End the probing thread; a running probe ends with the location's answer."""
        self._closing.set()

    @property
    def is_open(self) -> bool:
        """Whether requests fail immediately."""
        return self._clock() < self._open_until

    @contextmanager
    def asking(self, page: Page | None = None) -> Iterator[None]:
        """A block with a request for a page, or for records. Raises `UnavailableError` if the circuit is open."""
        if self.is_open:
            raise UnavailableError("circuit open after failures of the location; probing it in the background")
        started = self._clock()
        try:
            yield
        except (CorruptError, IncompatibleError) as error:
            if page is None:  # else the page is at fault, not the location
                self._open(self._clock() - started, page, f"it fails: {error}")
            raise
        except StorageError as error:
            self._open(self._clock() - started, page, f"it fails: {error}")
            raise
        seconds = self._clock() - started
        is_slow = seconds > time_limit(page)
        with self._lock:
            kind = page is not None
            self._n_slow[kind] = self._n_slow[kind] + 1 if is_slow else 0
            opens = self._n_slow[kind] >= self._patience
        if opens:
            self._open(seconds, page, f"it took {seconds:.1f} s to answer")
        elif is_slow:
            self._counters.time("lost", seconds)

    def patience(self, page: Page | None = None) -> float:
        """How many seconds a caller waits for the answer to a request for a page, or for records."""
        return HANG_SECONDS + time_limit(page)

    def hangs(self, page: Page | None = None) -> None:
        """Open the circuit: a caller has waited for that long in vain."""
        self._open(self.patience(page), page, "it does not answer")

    def _open(self, seconds: float, page: Page | None, why: str) -> None:
        """Open the circuit after a failure that took this many seconds."""
        self._counters.time("lost", seconds)
        open_seconds = seconds * OPEN_FACTOR if seconds > FAST_SECONDS else 0.0
        with self._lock:
            self._open_until = max(self._open_until, self._clock() + open_seconds)
            if open_seconds <= SHORT_OPEN or self._is_probing or self._closing.is_set():
                return
            with suppress(RuntimeError):  # no thread can be started now: the next failure tries again
                start_thread(self._probe_until_healthy, page, name="prefixstore-probe")
                self._is_probing = True
                log.warning("the location is not used until a probe succeeds: %s", why)
                self._counters.count("outages")

    def _probe_until_healthy(self, page: Page | None) -> None:
        """Close the circuit when the location answers in time."""
        pause = FIRST_PROBE
        while not self._closing.wait(pause):
            started = self._clock()
            try:
                self._probe(page)
                healthy = self._clock() - started <= time_limit(page)
            except StorageError:
                healthy = False
            except Exception:  # whatever it is, the location cannot be used
                log.exception("the location cannot be probed")
                healthy = False
            with self._lock:
                self._is_probing = not healthy
                # until a probe succeeds, no request passes
                self._open_until = 0.0 if healthy else float("inf")
            if healthy:
                log.warning("the location is used again")
                return
            pause = min(2 * pause, LAST_PROBE)
