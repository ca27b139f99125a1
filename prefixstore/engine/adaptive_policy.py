"""The eviction policy that learns which pages are used again, and when, and so which of them are worth their space.

Pages are classified by the number of their uses, by the time between the last two uses (or by depth, after a single
use), and by the distance from the end of the prompt. For each class the probability of another use is learned as a
function of the age: the number of prompts since the last use. The worth of a page is the largest ratio of expected hits
to expected waiting time, over all waiting times (the Gittins index; LHD is similar).

A new page must be worth more than the leaf that would be evicted for it. What is learned does not fit every workload:
a duel, which compares three small caches of sampled keys without payloads, may choose LRU or LFU instead.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixstore.engine.hazards import (
    AGES,
    CLASSES,
    CLASSES_PER_LEVEL,
    Hazards,
    age_bins,
    level,
    use_level,
)
from prefixstore.engine.keyspace import LEAVES, Leaf
from prefixstore.engine.page import Page
from prefixstore.engine.policy import MOST_COUNTED, Ghosts, Leaves, Policy, Ranks
from prefixstore.errors import CorruptError
from prefixstore.format.saved_state import pack_state, unpack_state

# how many sampled pages each cache holds, and the largest and the smallest share of all pages that it may be
PAGES, MOST, LEAST = 1024, 1 / 4, 1 / 256
# an access this many accesses ago weighs a third of one now
MEMORY = 2000
# how much better another order must be to take over: by this factor, and this many hits
RATIO, AHEAD = 1.02, 1.0
# an order of use has the clock, and the distance of the page's end from the largest possible one
END_BITS = 23
MOST_END = (1 << END_BITS) - 1
ORDER_BITS = 32 + END_BITS
# what a cache remembers of the last access of a page
LAST = np.dtype([("page_class", "i4"), ("uses", "i8"), ("clock", "i8"), ("order", "i8"), ("gain", "f8")])
# the caches start empty again when the number of stored pages has changed by this factor
RESIZE = 1.1
# accesses of a prompt that are compared at once
MOST_WAITING = 4096


class Mode(IntEnum):
    """An order of eviction."""

    LEARNED = 0
    LRU = 1
    LFU = 2


class Access(NamedTuple):
    """A use or a capture of a page, with its class, its uses and the clock including this access, and its gain."""

    number: int
    """The first bits of its key."""
    page_class: int
    uses: int
    clock: int
    end: int
    """The position of its end: of pages that were used at the same time, the deepest is evicted first."""
    gain: float

    @property
    def facts(self) -> tuple[int, int, int, int, float]:
        """The fields of `LAST`; the order is by time of use, and within a prompt by depth."""
        order = self.clock << END_BITS | MOST_END - min(self.end, MOST_END)
        return self.page_class, self.uses, self.clock, order, self.gain


class _Cache:
    """The sampled pages that a store with one of the orders would hold."""

    def __init__(self, mode: Mode, size: int) -> None:
        self._mode = mode
        self._size = size
        self._place: dict[int, int] = {}
        self._numbers: list[int] = []
        self._last = np.zeros(size, LAST)

    def access(self, prompt: Sequence[Access], worth: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[bool]:
        """Which pages of a prompt are cached. The others are admitted after that, but not in place of these."""
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
                # after an interrupt, a number may have no place
                self._place.pop(self._numbers[at], None)
                self._numbers[at] = one.number
            else:
                self._numbers.append(one.number)
            self._place[one.number] = at
            self._last[at] = one.facts
        return [at is not None for at in places]

    def _victim(self, new: Access, worth: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int | None:
        """The place of the page that a new one replaces; None if it is not admitted."""
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
    """Whether a page may replace a victim, by their uses. Of pages that were used once, the older one stays."""
    return uses >= victim and uses > 1


class Duel:
    """Counts the hits that each order would have, and chooses the order to use."""

    def __init__(self) -> None:
        # the order to use
        self.mode = Mode.LRU
        self.scores = [0.0] * len(Mode)
        self._pages = 0
        self._limit = 0
        self._caches: list[_Cache] = []
        # accesses of one prompt
        self._waiting: list[Access] = []

    def resize(self, pages: int) -> None:
        """Set how many pages the store holds."""
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
        """Note an access of a sampled page. Accesses of one prompt are compared together, when the next one begins."""
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


# how many pages are sampled: fewer would teach too little, and more would take too much memory
SAMPLES, MOST_SAMPLES = 4096, 32768
# the samples reach this many times as far back as the stored pages
REACH = 8
LEARN_EVERY = 20
LEARN_SHIFT = 8
# where LRU gets this share of the possible hits, what is learned is not worth its noise
ENOUGH = 0.97
# the time between prompts that is assumed until some were seen
PROMPT_NS = 10**10
# the clock starts here, so that pages from before the start can be older
EPOCH = 1 << 24
# of how many prompts, at least, the times are kept
TIMES_KEPT = 1 << 16
CLOCK_MASK = (1 << 32) - 1
# pages are sampled by 32 bits of their keys; this is the limit for all of them
WHOLE = 1 << 32
# the class, within its level, of a page whose last prompt is unknown: a middle gap, in the middle of a prompt
MIDDLE = 2 + 4 * 2
LEVEL_OF_USES = np.array([use_level(max(n, 1)) for n in range(MOST_COUNTED + 1)])

# the saved mode and reach; no reach is as large as MANY
SAVED = struct.Struct("<Bd")
MANY = 1e18


class Adaptive(Policy):
    """Pages with the fewest expected hits for their space are evicted first."""

    name = "adaptive"
    note = b"policy/adaptive"

    def __init__(self) -> None:
        self._clock = EPOCH
        # when each of the last prompts began, from the one with the clock `_first` on; the start counts as one
        self._times = array("q", [time.time_ns()])
        self._first = EPOCH
        self._ghosts = Ghosts()
        self._hazards = Hazards()
        self._duel = Duel()
        self._worth = self._hazards.worth
        # class << 32 | clock of the last use of sampled pages, the least recently used first
        self._samples: OrderedDict[int, int] = OrderedDict()
        self._share = WHOLE
        self._pages = 0
        self._learned = EPOCH
        # how many prompts the store would reach back under LRU
        self._reach = 1.0
        self._page_tokens = 1.0
        # the position of the end of the last prompt, to which captured pages are taken to belong; None if not known
        self._end: int | None = None

    @property
    def mode(self) -> Mode:
        """The order in use."""
        return self._duel.mode

    # -- observing ----------------------------------------------------------------------------------------------------

    def looked_up(self, pages: Sequence[Page], n_tokens: int | None, now: int) -> None:
        clocks = self._clocks(np.array([page.last_used for page in pages], np.int64)).tolist()
        self._clock += 1
        try:
            self._times.append(now)
        except BufferError:
            # at a fork a thread of the parent was looking at them, and in the child it never ends
            self._times = array("q", [*self._times, now])
        if len(self._times) == 2 * TIMES_KEPT:
            del self._times[:TIMES_KEPT]
            self._first += TIMES_KEPT
        self._end = n_tokens
        for page, clock in zip(pages, clocks, strict=True):
            self._use(page, page.uses + 1, self._clock - clock)

    def added(self, page: Page) -> None:
        self._page_tokens = max(self._page_tokens * 0.999, page.n_tokens)
        ghost = self._ghosts.recall(page.key)
        uses, clock = ghost if ghost is not None else (0, self._clock)
        self._use(page, max(uses + 1, page.uses), self._clock - clock)

    def _clocks(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The clock at each time: of the prompt that began last; before those that are known, by their mean rate."""
        known = np.frombuffer(self._times, np.int64)
        n = np.searchsorted(known, times, side="right")
        rate = max(int(known[-1] - known[0]), 1) / (len(known) - 1) if len(known) > 1 else PROMPT_NS
        before = self._first - 1 - np.rint(np.maximum(known[0] - times, 0) / rate).astype(np.int64)
        return np.where(n > 0, self._first + n - 1, np.maximum(before, 0))

    def _use(self, page: Page, uses: int, gap: int) -> None:
        if uses == 1:
            where = level((page.end - 1) // self._page_tokens, 2, 8, 32)
        else:
            where = level(gap / self._reach, 0.5, 2, 8)
        after = 2 if self._end is None else level((self._end - page.end) / self._page_tokens, 0.01, 4.01, 16.01)
        page_class = use_level(uses) * CLASSES_PER_LEVEL + where + 4 * after
        page.uses = uses = min(uses, MOST_COUNTED)
        page.page_class = page_class + 1
        number = int.from_bytes(page.key[:8], "little")
        if number >> 32 < self._share:
            last = self._samples.pop(number, None)
            if last is not None:
                self._hazards.observe(last >> 32, self._clock - (last & CLOCK_MASK), hit=True)
            self._samples[number] = page_class << 32 | self._clock
            if len(self._samples) > min(max(self._pages, SAMPLES), MOST_SAMPLES):
                _, last = self._samples.popitem(last=False)
                self._hazards.observe(last >> 32, self._clock - (last & CLOCK_MASK), hit=False)
        if self._duel.samples(page.key):
            gain = page.n_tokens / (page.stored_bytes or page.raw_bytes or 1)
            self._duel.access(Access(number, page_class, uses, self._clock, page.end, gain), self._worth)

    def evicted(self, key: bytes, uses: int, last_used: int) -> None:
        self._ghosts.remember(key, uses, int(self._clocks(np.array([last_used]))[0]))

    # -- learning -----------------------------------------------------------------------------------------------------

    def prepare(self, pages: int) -> None:
        self._pages = pages
        self._duel.resize(pages)
        enough = min(max(pages, SAMPLES), MOST_SAMPLES)
        while self._share > 1 and enough * WHOLE < self._share * REACH * pages:
            self._share >>= 1
            self._hazards.halve()
            limit = self._share
            self._samples = OrderedDict(one for one in self._samples.items() if one[0] >> 32 < limit)
        if self._clock >= self._learned + max(LEARN_EVERY, len(self._samples) >> LEARN_SHIFT):
            self._learn()

    def _followed(self) -> npt.NDArray[np.int64]:
        """The sampled pages, the least recently used first: their classes, and their ages."""
        last = np.fromiter(self._samples.values(), np.int64, count=len(self._samples))
        return np.stack([last >> 32, self._clock - (last & CLOCK_MASK)])

    def _learn(self) -> None:
        self._learned = self._clock
        classes, ages = self._followed()
        self._hazards.learn(classes, ages)
        self._worth = self._hazards.worth
        if len(ages):
            within = max(self._pages * self._share // WHOLE, 1)
            self._reach = max(float(ages[-within]), 1.0) if within <= len(ages) else max(float(ages[0]), self._reach)
        if self._hazards.share_of_hits_before(self._reach) > ENOUGH:
            self._worth = np.tile(np.arange(AGES, 0, -1, dtype=np.float64), CLASSES)

    # -- ranking ------------------------------------------------------------------------------------------------------

    def ranks(self, leaves: Leaves) -> Ranks:
        if self._duel.mode is Mode.LRU:
            return np.zeros(len(leaves))
        if self._duel.mode is Mode.LFU:
            uses: Ranks = leaves["uses"].astype(np.float64)
            return uses
        return self._worths(leaves)

    def _worths(self, leaves: Leaves) -> Ranks:
        ages = self._clock - self._clocks(leaves["last_used"].astype(np.int64))
        # of pages that another policy, or another process, has put: of the middle class with as many uses
        unknown = LEVEL_OF_USES[np.minimum(leaves["uses"], MOST_COUNTED)] * CLASSES_PER_LEVEL + MIDDLE
        known = leaves["page_class"].astype(np.int64) - 1
        classes = np.where((known >= 0) & (known < CLASSES), known, unknown)
        worth: Ranks = self._worth[classes * AGES + age_bins(np.maximum(ages, 0))]
        worth *= leaves["n_tokens"] / np.maximum(leaves["stored_bytes"], 1)
        return worth

    def admits(self, new: Leaf, victim: Leaf) -> bool:
        if self._duel.mode is Mode.LRU:
            return True
        if self._duel.mode is Mode.LFU:
            return admits_by_use(new.uses, victim.uses)
        worths = self._worths(np.array([tuple(new), tuple(victim)], LEAVES))
        return bool(worths[0] >= worths[1])

    # -- keeping what was learned -------------------------------------------------------------------------------------

    def save(self) -> bytes:
        classes, ages = self._followed()
        hazards = self._hazards.dump(classes, ages, WHOLE / self._share)
        return pack_state({"hazards": hazards, "numbers": SAVED.pack(self._duel.mode, self._reach)})

    def load(self, note: bytes) -> bool:
        hazards = Hazards()
        try:
            parts = unpack_state(note)
            hazards.load(parts["hazards"])
            number, reach = SAVED.unpack(parts["numbers"])
            mode = Mode(number)
        except (CorruptError, KeyError, ValueError, struct.error):
            return False
        if not 1 <= reach < MANY:
            return False
        self._duel.mode, self._hazards, self._reach = mode, hazards, reach
        self._learn()
        return True
