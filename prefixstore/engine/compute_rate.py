"""Measures how long computing, restoring and capturing take in one context, and decides what is worth doing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

from prefixstore.engine.page import Page

WEIGHT = 0.3
# batches of fewer tokens say nothing about the rate of a prefill
SMALLEST_BATCH = 32
# A restore or a capture is skipped if it is slower than computing by this factor. One in this many is done anyway.
MAX_SLOWDOWN = 1.2
RETRY_EVERY = 64
# capturing waits for the end of the completion if it would add more than this share to the time of the prompt
MAX_CAPTURE_SHARE = 0.1
# A restore that is given up has cost no more than this share of computing everything, its lookup included: a bit less
# than the 5 % that are promised, since giving up takes time as well.
MAX_SHARE = 0.04
# a page that is arriving is waited for if it will be in time even if the rest of it is slower by this factor
SLACK = 1.1
# a restore that was given up counts as slower than computing by this factor
LATE_SLOWDOWN = 2.0


class ComputeRate:
    """The seconds that computing a token, restoring a page, and capturing a copy take.

    A restore may take `max_delay` seconds longer than computing; None for no limit.
    """

    def __init__(self, max_delay: float | None = None) -> None:
        self._max_delay = max_delay
        self.token_seconds: float | None = None
        self.page_seconds: float | None = None
        self.copy_seconds: float | None = None
        self._last_copy: float | None = None
        # how many restores and captures were skipped
        self._skipped = Counter[str]()

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Note how long evaluating a batch took."""
        if n_tokens >= SMALLEST_BATCH:
            self.token_seconds = _mean(self.token_seconds, seconds / n_tokens)

    def restored(self, n_pages: float, seconds: float) -> None:
        """Note how long restoring pages took."""
        self.page_seconds = _mean(self.page_seconds, seconds / n_pages)

    def captured(self, n_copies: float, seconds: float) -> None:
        """Note how long copying pages out of the context took. A single slow time may be a pause and does not count."""
        last, self._last_copy = self._last_copy, seconds / n_copies
        if last is not None:
            self.copy_seconds = min(last, self._last_copy)

    def captures_along(self, page_tokens: int, n_copies: float = 1) -> bool:
        """Whether capturing pages of this many tokens while a prompt is computed delays it only a little."""
        if self.token_seconds is None or self.copy_seconds is None:
            return True
        return self.copy_seconds * n_copies <= self.token_seconds * page_tokens * MAX_CAPTURE_SHARE

    def late(self, pages: Sequence[Page], seconds: float, n_copies: float | None = None) -> None:
        """Note that the restore of these pages was given up after this many seconds."""
        if self.token_seconds is not None:
            seconds = self.token_seconds * sum(page.n_tokens for page in pages)
            seconds *= 1.0 if self.page_seconds is None else LATE_SLOWDOWN
        self.restored(n_copies or len(pages), seconds)

    def is_worth(self, n_tokens: int, n_pages: float) -> bool:
        """Whether restoring `n_pages` is expected to take little longer than computing the `n_tokens` they save."""
        return self._is_worth("restores", self.page_seconds, n_pages, n_tokens)

    def is_worth_capturing(self, n_tokens: int, n_copies: float) -> bool:
        """Whether capturing tokens in this many copies is expected to take little longer than computing them did."""
        return self._is_worth("captures", self.copy_seconds, n_copies, n_tokens)

    def _is_worth(self, what: str, seconds: float | None, n: float, n_tokens: int) -> bool:
        """Whether `n` times this many seconds is little more than computing takes; one in 64 is done anyway."""
        if self.token_seconds is None or seconds is None:
            return True
        if seconds * n <= self.token_seconds * n_tokens * MAX_SLOWDOWN:
            return True
        self._skipped[what] += 1
        return self._skipped[what] % RETRY_EVERY == 0

    def seconds_of(self, pages: Sequence[Page], live: int, end: int) -> list[float]:
        """How many seconds it takes to compute the tokens from `live` up to `end` that each page holds.

        As measured here, or before anything was, as recorded when the pages were captured; 0 if that is unknown.
        """
        if self.token_seconds is not None:
            return [self.token_seconds * max(min(page.end, end) - max(page.start, live), 0) for page in pages]
        return [page.compute_us / 1e6 for page in pages]

    def deadline(
        self, pages: Sequence[Page], live: int, end: int, *, whole: int | None = None, looked_up: float = 0.0
    ) -> RestoreDeadline | None:
        """How long restoring the tokens from `live` up to `end` from these pages may take; None for no limit.

        With `whole`, no state is of use before that many have arrived. The lookup has taken `looked_up` seconds.
        """
        if self._max_delay is None:
            return None
        seconds = self.seconds_of(pages, live, end)
        if not sum(seconds):
            return None
        return RestoreDeadline(seconds, self._max_delay, whole=whole, looked_up=looked_up)

    def compute_us(self, n_tokens: int) -> int:
        """How many microseconds computing this many tokens takes; 0 until something was computed."""
        return round(self.token_seconds * n_tokens * 1e6) if self.token_seconds is not None else 0


class RestoreDeadline:
    """When to give up a restore, so that it and computing the rest take little longer than computing everything.

    After `n` pages, a restore may have taken as long as computing these pages, and an allowance: `max_delay`, or
    `MAX_SHARE` of computing everything if that is more. So no more than the allowance is lost when it is given up. In
    the middle of a page it goes on if the page will be in time, judging by the share of it that has arrived.

    Parameters
    ----------
    seconds
        How long computing the tokens of each page takes.
    looked_up
        How long the lookup has taken: it is deducted from the share.
    whole
        How many states there are, if none is of use without the others: each may take its share of the time of
        computing. None if pages can be used as they arrive.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        max_delay: float,
        *,
        whole: int | None = None,
        looked_up: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._started = clock()
        total = math.fsum(seconds)
        allowed = max(max_delay, MAX_SHARE * total - looked_up)
        if whole is None:
            self._until = [allowed, *(allowed + computed for computed in accumulate(seconds))]
        else:
            self._until = [allowed + total * n / whole for n in range(1, whole + 1)]

    def left(self, n_given: int, arrived: float = 0.0) -> float:
        """Seconds left for the page after the first `n_given`, if this share of it has arrived."""
        now, last = self._clock() - self._started, len(self._until) - 1
        until = self._until[min(n_given, last)]
        if arrived > 0:
            expected = SLACK * now * (n_given + 1) / (n_given + arrived)
            if expected <= self._until[min(n_given + 1, last)]:
                until = max(until, expected)
        return until - now


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
