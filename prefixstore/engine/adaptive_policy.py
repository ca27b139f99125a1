"""The eviction policy that learns which pages are used again, and when, and so which of them are worth their space.

Pages are in classes: by the number of their uses, by the time between the last two uses (or by depth, as long as there
has been only one), and by the distance from the end of the prompt. For each class the chance of another use is learned
as a function of the age: the number of prompts since the last use. The worth of a page is the largest ratio of expected
hits to expected waiting time, over all times to wait (Gittins' index; LHD is a relative).

A new page must be worth more than the leaf that would be evicted for it. And since what is learned does not fit every
work load, a duel on sampled keys (`prefixstore.engine.duel`) may choose the order of last use, or of the number of
uses, instead.
"""

from __future__ import annotations

import math
import struct
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixstore.engine.duel import Access, Duel, Mode, admits_by_use
from prefixstore.engine.ghosts import GhostTable
from prefixstore.engine.hazards import (
    AGES,
    CLASSES,
    CLASSES_PER_LEVEL,
    Hazards,
    age_bins,
    level,
    use_level,
)
from prefixstore.engine.index import Page
from prefixstore.engine.keyspace import LEAVES, Leaf
from prefixstore.engine.policy import Leaves, Policy, Ranks

__all__ = ["Adaptive"]

# at least this many pages are sampled: fewer teach too little, and would save nothing; more would take too much memory
SAMPLES, MOST_SAMPLES = 4096, 32768
# the samples reach this many times as far back as the pages that are stored
REACH = 8
LEARN_EVERY = 20
LEARN_SHIFT = 8
# where the order of last use gets this share of the possible hits, what is learned is not worth its noise
ENOUGH = 0.97
# assumed time between prompts, until prompts were seen
PROMPT_NS = 10**10
# the clock starts here: pages from before the start are older than it
EPOCH = 1 << 24
# pages of which it is known to which prompt they belong, and namespaces of which the latest prompt is known: pages may
# still be added to these
PAGES_KEPT, PROMPTS_KEPT = 4096, 64
# at least so many prompts are told apart by their times
TIMES_KEPT = 1 << 16
CLOCK_MASK = (1 << 32) - 1
# in the middle of a prompt, and with a gap of middle length: the class of a page whose last prompt is not known
MIDDLE = 2 + 4 * 2
MOST_USES = 255
LEVEL_OF_USES = np.array([use_level(max(n, 1)) for n in range(MOST_USES + 1)])

# clock, prompts seen, nanoseconds for a prompt, microseconds for a token, tokens of a page, mode, scores, share, reach
SAVED = struct.Struct("<QQdddB3dQd")
# more than any of these numbers can be
MANY = 1e18


class _Prompt(NamedTuple):
    """One lookup: its clock, and the position of its end, as far as it is known."""

    clock: int
    end: int | None


class Adaptive(Policy):
    """Pages with the fewest expected hits for their space are evicted first, weighted by the time that a hit saves."""

    name = "adaptive"
    note = b"policy/adaptive"

    def __init__(self) -> None:
        self._clock = self._began = EPOCH
        self._ns = time.time_ns()
        # when each of the last prompts began, from the one with the clock `_first` on; the start counts as one
        self._times = array("q", [self._ns])
        self._first = EPOCH
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._latest: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._ghosts = GhostTable()
        self._hazards = Hazards()
        self._duel = Duel()
        self._worth = self._hazards.worth
        # class << 32 | clock of the last use of sampled pages, the least recently used first
        self._samples: OrderedDict[int, int] = OrderedDict()
        self._share = 1 << 32
        self._pages = 0
        self._learned = EPOCH
        # how many prompts the store would reach back if it were in the order of last use
        self._reach = 1.0
        self._us_per_token = 0.0
        self._ns_per_prompt = float(PROMPT_NS)
        self._page_tokens = 1.0

    @property
    def mode(self) -> Mode:
        """The order in use."""
        return self._duel.mode

    # -- observing ----------------------------------------------------------------------------------------------------

    def looked_up(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None, now: int) -> None:
        self._ns_per_prompt += (min(max(now - self._ns, 0), 100 * PROMPT_NS) - self._ns_per_prompt) / 64
        self._ns = now
        clocks = [self._clock_at(page.last_used) for page in pages]
        self._clock += 1
        self._times.append(now)
        if len(self._times) == 2 * TIMES_KEPT:
            del self._times[:TIMES_KEPT]
            self._first += TIMES_KEPT
        prompt = _Prompt(self._clock, n_tokens)
        _note(self._latest, namespace, prompt, PROMPTS_KEPT)
        for page, clock in zip(pages, clocks, strict=True):
            self._use(page, prompt, page.uses + 1, self._clock - clock)

    def added(self, namespace: bytes, page: Page) -> None:
        if page.compute_us and page.n_tokens:
            us_per_token = page.compute_us / page.n_tokens
            self._us_per_token += (us_per_token - self._us_per_token) / (64 if self._us_per_token else 1)
        self._page_tokens = max(self._page_tokens * 0.999, page.n_tokens)
        ghost = self._ghosts.recall(page.key, self._clock)
        uses, clock = ghost if ghost is not None else (0, self._clock)
        # the prompt of its parent: several may be computed at the same time
        prompt = self._prompts.get(page.parent) or self._latest.get(namespace, _Prompt(self._clock, None))
        self._use(page, prompt, max(uses + 1, page.uses), max(prompt.clock - clock, 0))

    def _clock_at(self, time: int) -> int:
        """The clock at a time: of the prompt that began last; before those that are known, by their average."""
        n = bisect_right(self._times, time)
        return self._first + n - 1 if n else max(self._first - 1 - round(self._prompts_before(time)), 0)

    def _clocks(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As `_clock_at`, of many times."""
        n = np.searchsorted(np.frombuffer(self._times, np.int64), times, side="right")
        before = self._first - 1 - np.rint(self._prompts_before(times)).astype(np.int64)
        return np.where(n > 0, self._first + n - 1, np.maximum(before, 0))

    def _prompts_before(self, times: Any) -> Any:
        """How many prompts there were between these times and the first one that is known."""
        return np.maximum(self._times[0] - times, 0) / max(self._ns_per_prompt, 1.0)

    def _use(self, page: Page, prompt: _Prompt, uses: int, gap: int) -> None:
        page_class = self._class_of(page, prompt, uses, gap)
        page.uses = uses = min(uses, MOST_USES)
        page.page_class = page_class + 1
        _note(self._prompts, page.key, prompt, PAGES_KEPT)
        number = int.from_bytes(page.key[:8], "little")
        if _share_of(number) < self._share:
            last = self._samples.pop(number, None)
            if last is not None:
                self._hazards.observe(last >> 32, prompt.clock - (last & CLOCK_MASK), hit=True)
            self._samples[number] = page_class << 32 | prompt.clock
            if len(self._samples) > min(max(self._pages, SAMPLES), MOST_SAMPLES):
                _, last = self._samples.popitem(last=False)
                self._hazards.observe(last >> 32, self._clock - (last & CLOCK_MASK), hit=False)
        if self._duel.samples(page.key):
            gain = self._gain(page)
            self._duel.access(Access(number, page_class, uses, prompt.clock, page.end, gain), self._worth)

    def _class_of(self, page: Page, prompt: _Prompt, uses: int, gap: int) -> int:
        if uses == 1:
            where = level((page.end - 1) // self._page_tokens, 2, 8, 32)
        else:
            where = level(gap / self._reach, 0.5, 2, 8)
        after = level((prompt.end - page.end) / self._page_tokens, 0.01, 4.01, 16.01) if prompt.end is not None else 2
        return use_level(uses) * CLASSES_PER_LEVEL + where + 4 * after

    def evicted(self, key: bytes, uses: int, last_used: int) -> None:
        self._ghosts.remember(key, uses, self._clock_at(last_used))

    # -- learning -----------------------------------------------------------------------------------------------------

    def prepare(self, pages: int) -> None:
        self._pages = pages
        self._ghosts.grow(pages)
        self._duel.resize(pages)
        enough = min(max(pages, SAMPLES), MOST_SAMPLES)
        while self._share > 1 and enough << 32 < self._share * REACH * pages:
            self._share >>= 1
            self._hazards.halve()
            limit = self._share
            self._samples = OrderedDict(one for one in self._samples.items() if _share_of(one[0]) < limit)
        if self._clock >= self._learned + max(LEARN_EVERY, len(self._samples) >> LEARN_SHIFT):
            self._learn(pages)

    def _learn(self, pages: int) -> None:
        self._learned = self._clock
        last = np.fromiter(self._samples.values(), np.int64, count=len(self._samples))
        self._hazards.learn(last >> 32, self._clock - (last & CLOCK_MASK))
        # the samples are in the order of last use
        within = max(pages * self._share >> 32, 1)
        oldest = int(last[-within]) & CLOCK_MASK if within <= len(last) else self._began
        self._reach = float(max(self._clock - oldest, 1))
        self._worth = self._hazards.worth
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
        unknown = LEVEL_OF_USES[np.minimum(leaves["uses"], MOST_USES)] * CLASSES_PER_LEVEL + MIDDLE
        known = leaves["page_class"].astype(np.int64) - 1
        classes = np.where((known >= 0) & (known < CLASSES), known, unknown)
        usual = leaves["n_tokens"] * (self._us_per_token or 1.0)
        saved = np.where(leaves["compute_us"] > 0, np.clip(leaves["compute_us"], usual / 2, usual * 2), usual)
        worth: Ranks = self._worth[classes * AGES + age_bins(np.maximum(ages, 0))]
        worth *= saved / np.maximum(leaves["stored_bytes"], 1)
        return worth

    def admits(self, new: Leaf, victim: Leaf) -> bool:
        if self._duel.mode is Mode.LRU:
            return True
        if self._duel.mode is Mode.LFU:
            return admits_by_use(new.uses, victim.uses)
        worths = self._worths(np.array([tuple(new), tuple(victim)], LEAVES))
        return bool(worths[0] >= worths[1])

    def _gain(self, page: Page) -> float:
        """The time that a hit saves, for each byte; a measured time far from the average is clipped."""
        usual = page.n_tokens * (self._us_per_token or 1.0)
        saved = min(max(page.compute_us, usual / 2), usual * 2) if page.compute_us else usual
        return saved / (page.stored_bytes or page.raw_bytes or 1)

    # -- keeping what was learned -------------------------------------------------------------------------------------

    def parts(self) -> dict[str, bytes]:
        # numbers of keys, and class and clock
        samples = np.array(list(self._samples.items()), np.uint64).astype("<u8")
        numbers = SAVED.pack(
            self._clock,
            self._clock - self._began,
            self._ns_per_prompt,
            self._us_per_token,
            self._page_tokens,
            self._duel.mode,
            *self._duel.scores,
            self._share,
            self._reach,
        )
        return {
            "numbers": numbers,
            "hazards": self._hazards.dump(),
            "ghosts": self._ghosts.dump(self._clock),
            "samples": samples.tobytes(),
        }

    def take_over(self, parts: Mapping[str, bytes]) -> None:
        hazards, ghosts = Hazards(), GhostTable()
        clock, seen, ns_per_prompt, us_per_token, page_tokens, mode, *scores, share, reach = SAVED.unpack(
            parts["numbers"]
        )
        # the clock of this process keeps running: shift saved times by the difference
        later = self._clock - clock
        hazards.load(parts["hazards"])
        ghosts.load(parts["ghosts"], later)
        samples = np.frombuffer(parts["samples"], "<u8").reshape(-1, 2)
        classes = (samples[:, 1] >> np.uint64(32)).astype(np.int64)
        clocks = (samples[:, 1] & np.uint64(CLOCK_MASK)).astype(np.int64) + later
        floats = [ns_per_prompt, us_per_token, page_tokens, *scores, reach]
        if not (
            all(math.isfinite(number) and 0 <= number < MANY for number in floats)
            and min(page_tokens, reach, share) >= 1
            and max(share, seen) <= 1 << 32
            and len(samples) <= MOST_SAMPLES
            and ((classes < CLASSES) & (clocks >= 0) & (clocks <= self._clock)).all()
        ):
            raise ValueError("not the state of this policy")
        self._duel.mode = Mode(mode)
        self._ns_per_prompt, self._us_per_token, self._page_tokens = ns_per_prompt, us_per_token, page_tokens
        self._began = max(self._clock - min(seen, EPOCH), 0)
        self._duel.scores = list(scores)
        self._share, self._reach = share, reach
        self._hazards, self._ghosts = hazards, ghosts
        numbers = samples[:, 0].tolist()
        self._samples = OrderedDict(zip(numbers, (classes << 32 | clocks).tolist(), strict=True))
        self._learn(len(numbers) * (1 << 32) // (share * REACH))


def _note(prompts: OrderedDict[bytes, _Prompt], key: bytes, prompt: _Prompt, at_most: int) -> None:
    """Keep the latest prompt of a page, or namespace, and forget the oldest one beyond so many."""
    prompts[key] = prompt
    prompts.move_to_end(key)
    if len(prompts) > at_most:
        prompts.popitem(last=False)


def _share_of(number: int) -> int:
    """By what a page is sampled, or not: a part of the number of its key."""
    return number >> 32
