"""Chooses the order of eviction that serves best, by comparing three small caches of sampled keys without payloads."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from prefixstore.engine.hazards import AGES, age_bins

__all__ = ["Access", "Duel", "Mode", "admits_by_use"]

# pages of the sampled keys that each cache holds, as far as the sample may be so large, or so small
PAGES, MOST, LEAST = 1024, 1 / 4, 1 / 256
# an access this many accesses ago weighs a third of one now
MEMORY = 2000
# by how much another order has to be better, before it takes over
RATIO, AHEAD = 1.02, 1.0
# an order of use: the clock, and how far the end is from the largest possible one
END_BITS = 23
MOST_END = (1 << END_BITS) - 1
ORDER_BITS = 32 + END_BITS
# of the last access of a page in a cache
LAST = np.dtype([("page_class", "i4"), ("uses", "i8"), ("clock", "i8"), ("order", "i8"), ("gain", "f8")])
# the caches begin again when the store has this many times as many pages, or as few
RESIZE = 1.1
# accesses of a prompt that are compared at once
MOST_WAITING = 4096


class Mode(IntEnum):
    """An order of eviction."""

    LEARNED = 0
    LRU = 1
    LFU = 2


class Access(NamedTuple):
    """A use, or a capture, of a page: its class, its uses, and the clock, all with this access; its end; its gain."""

    number: int
    """Of its key."""
    page_class: int
    uses: int
    clock: int
    end: int
    """The position of its end: of pages that were used at the same time, the deeper one goes first."""
    gain: float

    @property
    def facts(self) -> tuple[int, int, int, int, float]:
        """As in `LAST`; the order is by the time of the use, and of one prompt, by depth."""
        order = self.clock << END_BITS | MOST_END - min(self.end, MOST_END)
        return self.page_class, self.uses, self.clock, order, self.gain


class _Cache:
    """What one order would hold of the sampled pages."""

    def __init__(self, mode: Mode, size: int) -> None:
        self._mode = mode
        self._size = size
        self._place: dict[int, int] = {}
        self._numbers: list[int] = []
        self._last = np.zeros(size, LAST)

    def access(self, prompt: Sequence[Access], worth: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[bool]:
        """Which pages of a prompt are cached. The others may be cached now, but not in place of these."""
        places = [self._place.get(one.number) for one in prompt]
        for one, at in zip(prompt, places, strict=True):
            if at is not None:
                self._last[at] = one.facts
        for one, place in zip(prompt, places, strict=True):
            if place is not None or one.number in self._place:
                continue
            at = len(self._numbers) if len(self._numbers) < self._size else self._victim(one, worth)
            if at is None:
                continue
            if at < len(self._numbers):
                # an interrupt may have left a number without its place
                self._place.pop(self._numbers[at], None)
                self._numbers[at] = one.number
            else:
                self._numbers.append(one.number)
            self._place[one.number] = at
            self._last[at] = one.facts
        return [at is not None for at in places]

    def _victim(self, new: Access, worth: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int | None:
        """Whose place the new page takes; None if it is not admitted."""
        last = self._last
        if self._mode is Mode.LEARNED:
            ranks = worth[last["page_class"] * AGES + age_bins(new.clock - last["clock"])] * last["gain"]
            at = int(ranks.argmin())
            return at if worth[new.page_class * AGES] * new.gain >= ranks[at] else None
        if self._mode is Mode.LFU:
            at = int((last["uses"] << ORDER_BITS | last["order"]).argmin())
            return at if admits_by_use(new.uses, int(last["uses"][at])) else None
        return int(last["order"].argmin())


def admits_by_use(uses: int, victim: int) -> bool:
    """Whether a page may replace one with so many uses. Of pages used once, the older one stays."""
    return uses >= victim and uses > 1


class Duel:
    """Counts the hits that each order would have, and says which order to use."""

    def __init__(self) -> None:
        # the order to use, until something is learned
        self.mode = Mode.LRU
        self.scores = [0.0] * len(Mode)
        self._pages = 0
        self._limit = 0
        self._caches: list[_Cache] = []
        # accesses of one prompt
        self._waiting: list[Access] = []

    def resize(self, pages: int) -> None:
        """Set how many pages the store has room for."""
        if pages < RESIZE * self._pages and pages * RESIZE > self._pages:
            return
        self._pages = max(pages, 1)
        share = min(max(PAGES / self._pages, LEAST), MOST)
        self._limit = int(share * (1 << 32))
        self._caches = [_Cache(mode, max(1, round(share * self._pages))) for mode in Mode]

    def samples(self, key: bytes) -> bool:
        """Whether the accesses of a page count."""
        return int.from_bytes(key[12:16], "little") < self._limit

    def access(self, one: Access, worth: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Note an access of a sampled page. Those of one prompt are compared together, when the next one begins."""
        if self._waiting and (one.clock != self._waiting[0].clock or len(self._waiting) == MOST_WAITING):
            self._compare(worth)
        self._waiting.append(one)

    def _compare(self, worth: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        prompt, self._waiting = self._waiting, []
        for mode, cache in zip(Mode, self._caches, strict=False):
            for is_hit in cache.access(prompt, worth):
                self.scores[mode] *= 1 - 1 / MEMORY
                self.scores[mode] += is_hit
        best = max(Mode, key=self.scores.__getitem__)
        if best is not self.mode and self.scores[best] > RATIO * self.scores[self.mode] + AHEAD:
            self.mode = best
