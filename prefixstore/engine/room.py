"""Makes room in a location between two water marks, in idle time, so that new pages find space when they are written.

When a commit leaves more in the location than the high water mark, new pages are packed, and pages are evicted down to
the low water mark, those that have expired first. Each step is short, and so is its transaction. The
transaction that writes a page makes space itself only if it comes first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prefixstore.engine.budget import NO_LIMIT, Budget, Evictor
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.lease import Lease
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import Used
from prefixstore.engine.pages import Pages, fewer
from prefixstore.errors import FullError, StorageError
from prefixstore.format.autocodec import Encoder

__all__ = ["Room"]

log = logging.getLogger("prefixstore")

NOTHING_WANTED = Used(NO_LIMIT, NO_LIMIT)
# of one core
SHARE_OF_TIME = 0.25
# Pages deleted in one step: others wait for its transaction, and a batch of pages for the step.
PAGES_AT_ONCE = 64
# seconds until the location is asked again: while another process makes room there, and after failures
PAUSE = 1.0
LONGEST_PAUSE = 60.0


class Room:
    """Makes room in a location, one step at a time.

    Parameters
    ----------
    backend, catalog
        Of the engine.
    budget
        What the location may hold, and the marks.
    evictor
        Deletes pages.
    encode
        Its `is_short_of_space` is set.
    is_active
        Whether this engine makes room at all: one that reads only, or writes in the foreground only, does not.
    clock
        Seconds.

    Attributes
    ----------
    peak
        The most bytes that the location was seen to hold.
    last
        What it held when that was last known.
    """

    def __init__(
        self,
        backend: Pages,
        catalog: Catalog,
        budget: Budget,
        evictor: Evictor,
        encode: Encoder,
        *,
        is_active: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._catalog = catalog
        self._evictor = evictor
        self._encode = encode
        self._is_active = is_active
        self._clock = clock
        self._max_bytes = budget.max_bytes
        self._high, self._low = budget.share(budget.high_water), budget.share(budget.low_water)
        # Below this, pages are stored raw again: as far from the low mark as that is from the high mark, or each page
        # would be written raw first and packed soon after.
        self._relaxed = max(2 * self._low.bytes - self._high.bytes, self._low.bytes // 2)
        self._lease = Lease(b"room")
        # what the location should hold at most
        self._wanted = NOTHING_WANTED
        self._at_once = PAGES_AT_ONCE
        self._n_failures = 0
        self.peak = 0
        self.last = Used(0, 0)

    # -- what there is to do ------------------------------------------------------------------------------------------

    def note(self, used: Used, n_bytes: int) -> None:
        """Note how much a transaction has left in the location, and how many bytes it was to write."""
        self.saw(used)
        # or there is no space for as much again, where a few pages fill the budget
        if used.bytes > min(self._high.bytes, self._max_bytes - n_bytes):
            self._encode.is_short_of_space = True
        elif used.bytes <= self._relaxed:
            self._encode.is_short_of_space = False
        if self._is_active and (used.bytes > self._high.bytes or used.entries > self._high.entries):
            self._wanted = Used(
                self._low.bytes if used.bytes > self._high.bytes else self._wanted.bytes,
                self._low.entries if used.entries > self._high.entries else self._wanted.entries,
            )

    def saw(self, used: Used) -> None:
        """Note how much the location holds."""
        self.last = used
        self.peak = max(self.peak, used.bytes)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._wanted != NOTHING_WANTED

    def close(self) -> None:
        """Release the lease, so that another process may make room; if that fails, it expires."""
        if not self._lease.may_be_held:
            return
        try:
            with self._backend.update() as transaction:
                self._lease.release(transaction)
        except StorageError as error:
            log.info("the lease to make room was not given back: %s", error)

    # -- doing it -----------------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do one step; returns the seconds to wait before the next one."""
        started = self._clock()
        try:
            pause = self._make()
        except StorageError as error:
            self._n_failures += 1
            if self._n_failures == 1:
                log.warning("no space could be freed in idle time: %s", error)
            return min(PAUSE * 2.0**self._n_failures, LONGEST_PAUSE)
        except Exception:
            # a fault of the store: not the same again and again
            self._stop()
            raise
        self._n_failures = 0
        return pause if pause is not None else (self._clock() - started) * (1 / SHARE_OF_TIME - 1)

    def _make(self) -> float | None:
        """Evict some pages; how long to wait, None for as its share of time demands."""
        with self._backend.view() as view:
            used = view.used
            if not self._is_too_much(used):
                self._stop()
                return None
            if not self._lease.is_free(view):
                return PAUSE
        # not in the view: a location cannot reuse what an open one may see
        self._evict()
        return None

    def _is_too_much(self, used: Used) -> bool:
        return used.bytes > self._wanted.bytes or used.entries > self._wanted.entries

    def _stop(self) -> None:
        """There is enough room, or none can be made."""
        self._wanted = NOTHING_WANTED

    def _evict(self) -> None:
        """Delete some pages in the order of the policy, in one transaction."""
        is_done = False

        def delete(transaction: Transaction) -> None:
            nonlocal is_done
            is_any_left = self._evictor.evict(transaction, self._wanted, self._at_once)
            is_done = not is_any_left or not self._is_too_much(transaction.used)

        if self._delete(delete) and is_done:
            # or what is left is pinned; the next commit asks for room again
            self._stop()

    def _delete(self, delete: Callable[[Transaction], None]) -> bool:
        """Call `delete` with a transaction; whether it was committed."""
        try:
            with self._catalog.update(self._backend) as transaction:
                if not self._lease.take(transaction):
                    return False
                delete(transaction)
        except FullError as error:
            self._at_once = fewer(self._backend, self._at_once, error)
            return False
        self._at_once = PAGES_AT_ONCE
        return True
