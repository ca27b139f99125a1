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
    age_bin,
    age_bins,
    level,
    use_level,
)
from prefixstore.engine.key_table import Slots
from prefixstore.engine.page_columns import SHIFT, Block, Column
from prefixstore.engine.page_table import MASK, PageTable
from prefixstore.engine.policy import Columns, PageFacts, Policy, Ranks

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
# prompts that pages may still be added to
PROMPTS_KEPT = 64
CLOCK_MASK = (1 << 32) - 1
# in the middle of a prompt, and with a gap of middle length: the class of a page whose last prompt is not known
MIDDLE = 2 + 4 * 2
MOST_USES = 255

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

    drifts = True
    name = "adaptive"
    note = b"policy/adaptive"

    def __init__(self) -> None:
        self._clock = self._began = EPOCH
        self._ns = time.time_ns()
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
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

    def looked_up(self, table: PageTable, namespace: bytes, pages: Sequence[PageFacts], n_tokens: int | None) -> None:
        now = time.time_ns()
        self._ns_per_prompt += (min(max(now - self._ns, 0), 100 * PROMPT_NS) - self._ns_per_prompt) / 64
        self._ns = now
        self._clock += 1
        prompt = _Prompt(self._clock, n_tokens)
        self._prompts[self._clock] = prompt
        self._latest[namespace] = prompt
        self._latest.move_to_end(namespace)
        for prompts in (self._prompts, self._latest):
            if len(prompts) > PROMPTS_KEPT:
                prompts.popitem(last=False)
        for page in pages:
            gain: float
            slot = table.find(page.key)
            if slot >= 0:
                block, at = table.blocks[slot >> SHIFT], slot & MASK
                uses, gap, gain = block.uses[at], self._clock - block.clock[at], block.gain[at]
            else:
                uses, gap, gain = page.hits + 1, round(self._age_by_time(page.last_used)), self._gain(page)
            self._use(table, page, slot, prompt, uses + 1, gap, gain)

    def added(self, table: PageTable, namespace: bytes, page: PageFacts) -> None:
        if page.compute_us and page.n_tokens:
            us_per_token = page.compute_us / page.n_tokens
            self._us_per_token += (us_per_token - self._us_per_token) / (64 if self._us_per_token else 1)
        self._page_tokens = max(self._page_tokens * 0.999, page.n_tokens)
        ghost = self._ghosts.recall(page.key, self._clock)
        uses, clock = ghost if ghost is not None else (0, self._clock)
        prompt = self._prompt_of(table, namespace, page)
        gap = max(prompt.clock - clock, 0)
        self._use(table, page, table.find(page.key), prompt, uses + 1, gap, self._gain(page))

    def _prompt_of(self, table: PageTable, namespace: bytes, page: PageFacts) -> _Prompt:
        """The prompt that a new page belongs to: that of its parent, as several may be computed at the same time."""
        above = table.find(page.parent) if page.parent != namespace else -1
        if above >= 0:
            found = self._prompts.get(table.blocks[above >> SHIFT].clock[above & MASK])
            if found is not None:
                return found
        return self._latest.get(namespace, _Prompt(self._clock, None))

    def _use(
        self, table: PageTable, page: PageFacts, slot: int, prompt: _Prompt, uses: int, gap: int, gain: float
    ) -> None:
        page_class = self._class_of(page, prompt, uses, gap)
        uses = min(uses, MOST_USES)
        if slot >= 0:
            block, at = table.blocks[slot >> SHIFT], slot & MASK
            block.uses[at], block.page_class[at] = uses, page_class
            block.clock[at], block.gain[at] = prompt.clock, gain
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
            self._duel.access(Access(number, page_class, uses, prompt.clock, page.end, gain), self._worth)

    def _class_of(self, page: PageFacts, prompt: _Prompt, uses: int, gap: int) -> int:
        if uses == 1:
            where = level((page.end - 1) // self._page_tokens, 2, 8, 32)
        else:
            where = level(gap / self._reach, 0.5, 2, 8)
        after = level((prompt.end - page.end) / self._page_tokens, 0.01, 4.01, 16.01) if prompt.end is not None else 2
        return use_level(uses) * CLASSES_PER_LEVEL + where + 4 * after

    def used_elsewhere(self, table: PageTable, slot: int) -> None:
        block, at = table.blocks[slot >> SHIFT], slot & MASK
        age = min(round(self._age_by_time(block.last_used[at])), EPOCH)
        block.clock[at] = max(block.clock[at], self._clock - age)

    def found(self, table: PageTable, slot: int, page: PageFacts) -> None:
        block, at = table.blocks[slot >> SHIFT], slot & MASK
        uses = min(page.hits + 1, MOST_USES)
        block.uses[at], block.gain[at] = uses, self._gain(page)
        block.clock[at] = max(self._clock - round(self._age_by_time(page.last_used)), 0)
        block.page_class[at] = use_level(uses) * CLASSES_PER_LEVEL + MIDDLE

    def stored(self, table: PageTable, slot: int, page: PageFacts) -> None:
        table.blocks[slot >> SHIFT].gain[slot & MASK] = self._gain(page)

    def evicted(self, key: bytes, uses: int, clock: int) -> None:
        self._ghosts.remember(key, uses, clock)

    # -- learning -----------------------------------------------------------------------------------------------------

    def prepare(self, table: PageTable) -> None:
        pages = table.totals.of(None).stored
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

    def ranks(self, columns: Columns, at: Slots) -> Ranks:
        if self._duel.mode is Mode.LRU:
            return np.zeros(len(at))
        if self._duel.mode is Mode.LFU:
            return columns["uses"][at].astype(np.float64)
        ages = self._clock - columns["clock"][at].astype(np.int64)
        worth: Ranks = self._worth[columns["page_class"][at].astype(np.int64) * AGES + age_bins(np.maximum(ages, 0))]
        return worth * columns["gain"][at]

    def rank(self, block: Block, at: int) -> float:
        if self._duel.mode is Mode.LRU:
            return 0.0
        if self._duel.mode is Mode.LFU:
            return float(block.uses[at])
        age = age_bin(self._clock - block.clock[at])
        return float(self._worth[block.page_class[at] * AGES + age]) * float(block.gain[at])

    def admits(self, table: PageTable, new: int, victim: int) -> bool:
        mine, other = table.blocks[new >> SHIFT], table.blocks[victim >> SHIFT]
        if self._duel.mode is Mode.LRU:
            return True
        if self._duel.mode is Mode.LFU:
            return admits_by_use(mine.uses[new & MASK], other.uses[victim & MASK])
        return self.rank(mine, new & MASK) >= self.rank(other, victim & MASK)

    def _age_by_time(self, last_used: int) -> float:
        """Prompts since another process used a page, estimated from the time."""
        return max(self._ns - last_used, 0) / max(self._ns_per_prompt, 1.0)

    def _gain(self, page: PageFacts) -> float:
        """The time that a hit saves, for each byte; a measured time far from the average is clipped."""
        usual = page.n_tokens * (self._us_per_token or 1.0)
        saved = min(max(page.compute_us, usual / 2), usual * 2) if page.compute_us else usual
        return saved / (page.stored_bytes or page.raw_bytes or 1)

    def describe(self, facts: npt.NDArray[Any], now: int) -> dict[str, Column]:
        # no use was seen by this process
        usual = facts["n_tokens"] * (self._us_per_token or 1.0)
        saved = np.where(facts["compute_us"] > 0, np.clip(facts["compute_us"], usual / 2, usual * 2), usual)
        ages = np.maximum(now - facts["last_used"].astype(np.int64), 0) / max(self._ns_per_prompt, 1.0)
        uses = np.minimum(facts["hits"].astype(np.int64) + 1, MOST_USES)
        levels = np.array([use_level(max(n, 1)) for n in range(MOST_USES + 1)])
        return {
            "uses": uses,
            "gain": saved / np.maximum(facts["stored_bytes"], 1),
            "clock": np.maximum(self._clock - ages, 0),
            "page_class": levels[uses] * CLASSES_PER_LEVEL + MIDDLE,
        }

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


def _share_of(number: int) -> int:
    """By what a page is sampled, or not: a part of the number of its key."""
    return number >> 32
