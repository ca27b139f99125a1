# mypy: ignore-errors
"""The eviction policy that learns which pages are used again, and when, and so which of them are worth their space.

Pages are in classes: by the number of their uses, by the time between the last two uses (or by depth, as long as there
has been only one), and by the distance from the end of the prompt. For each class the chance of another use is learned
as a function of the age: the number of prompts since the last use. The worth of a page is the largest ratio of expected
hits to expected waiting time, over all times to wait (Gittins' index; LHD is a relative).
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixstore.engine.index import Page

__all__ = ["Adaptive", "GhostTable", "Hazards"]

Floats = npt.NDArray[np.float64]

# ages in half octaves of prompts: the last one begins at four million
AGES = 46
USE_LEVELS, CLASSES_PER_LEVEL = 7, 16
CLASSES = USE_LEVELS * CLASSES_PER_LEVEL
# This many pages of a class outweigh what is known of similar classes. Pages of one prompt are used again together, so
# 100 are few.
PRIOR_PAGES = 100.0
# before anything was observed: the same chance in every half octave, which gives the order of last use
DEFAULT_CHANCE, DEFAULT_WEIGHT = 0.045, 2.0
# evicted pages that are remembered for each page in the index, 8 bytes each
GHOSTS_PER_PAGE = 8
# at least this many pages are sampled: fewer teach too little, and would save nothing
SAMPLES = 4096
# the samples reach this many times as far back as the index
REACH = 8
LEARN_EVERY = 50
# weight of what was learned before, each time
FADE = 0.998
# where the order of last use gets this share of the possible hits, what is learned is not worth its noise
ENOUGH = 0.97
# assumed time between prompts, until prompts were seen
PROMPT_NS = 10**10


def age_of(prompts: float) -> int:
    """The half octave of a number of prompts."""
    return min(AGES - 1, int(2 * math.log2(prompts + 1))) if prompts > 0 else 0


def _use_level(uses: int) -> int:
    return uses - 1 if uses < 4 else 3 if uses < 6 else 4 if uses < 9 else 5 if uses < 16 else 6


def _level(count: float, low: float, middle: float, high: float) -> int:
    return 0 if count < low else 1 if count < middle else 2 if count < high else 3


class GhostTable:
    """Uses and last use of evicted pages, in a hash table without chains: an entry overwrites the one in its slot."""

    _BASE = 14

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 << self._BASE))

    def grow(self, pages: int) -> None:
        """Make the table large enough for an index with this many pages."""
        while len(self._table) < GHOSTS_PER_PAGE * pages:
            # the slot is chosen by the low bits of the tag, and each doubling uses one more of them
            bit = len(self._table) >> self._BASE
            keeps = array("Q", [0 if entry >> 40 & bit else entry for entry in self._table])
            moves = array("Q", [entry if entry >> 40 & bit else 0 for entry in self._table])
            self._table = keeps + moves

    def _slot(self, key: bytes) -> tuple[int, int]:
        tag = int.from_bytes(key[:3], "little") | 1 << 23
        low = int.from_bytes(key[3:5], "little") & ((1 << self._BASE) - 1)
        return (low | tag << self._BASE) & (len(self._table) - 1), tag

    def remember(self, key: bytes, uses: int, clock: int) -> None:
        """Keep the number of uses of an evicted page, and the clock at the last one."""
        slot, tag = self._slot(key)
        self._table[slot] = tag << 40 | min(uses, 255) << 32 | clock & 0xFFFFFFFF

    def recall(self, key: bytes) -> tuple[int, int] | None:
        """Uses of an evicted page, and the clock at the last one; rarely those of another page with the same tag."""
        slot, tag = self._slot(key)
        entry = self._table[slot]
        return (entry >> 32 & 255, entry & 0xFFFFFFFF) if entry >> 40 == tag else None


class Hazards:
    """For each class, the share of the pages of an age that are used again at that age, and the worth that follows."""

    def __init__(self) -> None:
        self._hits = np.zeros((CLASSES, AGES))
        self._lost = np.zeros((CLASSES, AGES))
        edges = np.exp2(np.arange(AGES + 1) / 2)
        self._width: Floats = edges[1:] - edges[:-1]
        self.learn((), 0)

    def observe(self, page_class: int, age: int, *, hit: bool) -> None:
        """A page of this class was used again at this age, or is not followed any longer."""
        (self._hits if hit else self._lost)[page_class, age_of(age)] += 1

    def halve(self) -> None:
        """From here on half as many pages are sampled: halve the old counts, so that both weigh the same."""
        self._hits /= 2
        self._lost /= 2

    def learn(self, waiting: Sequence[tuple[int, int]], clock: int) -> None:
        """Compute the worth of every class at every age.

        Parameters
        ----------
        waiting
            The sampled pages that have not been used again: class, and clock at the last use.
        clock
            The current one.
        """
        self._hits *= FADE
        self._lost *= FADE
        ends = self._hits + self._lost
        if waiting:
            classes, clocks = np.array(waiting, np.int64).T
            ages = np.minimum(AGES - 1, (2 * np.log2(np.maximum(clock - clocks, 0) + 1.0)).astype(np.int64))
            np.add.at(ends, (classes, ages), 1)
        # a page that was lost at an age counts for half of it, one that was used again in full
        seen = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1] - (ends - self._hits) / 2
        # Where a class has few pages, the estimate leans on all pages with as many uses, and that one on all pages.
        everywhere = (self._hits.sum(0) + DEFAULT_CHANCE * DEFAULT_WEIGHT) / (seen.sum(0) + DEFAULT_WEIGHT)
        guess = 1 - (1 - everywhere) ** (1 + np.arange(USE_LEVELS)[:, None] / 2)
        by_uses = (self._hits.reshape(USE_LEVELS, CLASSES_PER_LEVEL, AGES).sum(1) + PRIOR_PAGES * guess) / (
            seen.reshape(USE_LEVELS, CLASSES_PER_LEVEL, AGES).sum(1) + PRIOR_PAGES
        )
        around = np.repeat(by_uses, CLASSES_PER_LEVEL, axis=0)
        chance = np.minimum((self._hits + PRIOR_PAGES * around) / (seen + PRIOR_PAGES), 0.999)
        self.worth: list[list[float]] = self._worth(chance).tolist()

    def share_of_hits_before(self, age: float) -> float:
        """The share of all repeated uses that happened before this age."""
        hits = np.concatenate([[0.0], np.cumsum(self._hits.sum(0))])
        return float(np.interp(2 * math.log2(age + 1), np.arange(AGES + 1), hits) / max(hits[-1], 1.0))

    def _worth(self, chance: Floats) -> Floats:
        """The most hits for the time in the index, over all times to wait, for a page in the middle of each age."""
        worth = np.empty_like(chance)
        for age in range(AGES):
            hit, width = chance[:, age:].copy(), self._width[age:].copy()
            hit[:, 0] = 1 - np.sqrt(1 - hit[:, 0])
            width[0] /= 2
            left = np.cumprod(1 - hit, axis=1)
            before = np.concatenate([np.ones((len(left), 1)), left[:, :-1]], axis=1)
            waited = np.cumsum(before * (1 - hit / 2) * width, axis=1)
            worth[:, age] = ((1 - left) / waited).max(axis=1)
        return worth


class _Prompt:
    """One lookup: when it happened, and how many pages it found and added."""

    __slots__ = ("added", "clock", "found", "ns")

    def __init__(self, clock: int, found: int) -> None:
        self.clock = clock
        self.found = found
        self.added = 0
        self.ns = time.time_ns()


class _Use:
    """The last use of a page that this process has seen: the policy's data of that page. `seen` is its time."""

    __slots__ = ("depth", "gain", "gap", "page_class", "prompt", "seen", "uses")

    def __init__(self, prompt: _Prompt, seen: int, depth: int, uses: int, gap: int) -> None:
        self.prompt = prompt
        self.seen = seen
        self.depth = depth
        self.uses = uses
        self.gap = gap
        # both are known when the prompt is over
        self.page_class = -1
        self.gain = 0.0


class Adaptive:
    """Pages with the fewest expected hits for their space are evicted first, weighted by the time that a hit saves."""

    drifts = True

    def __init__(self) -> None:
        self._prompt = _Prompt(0, 0)
        self._recent: list[tuple[bytes, _Use]] = []
        self._ghosts = GhostTable()
        self._hazards = Hazards()
        self._samples: dict[bytes, tuple[int, int]] = {}
        self._share = 1 << 32
        self._pages = 0
        self._learned = 0
        # how many prompts the index would reach back if it were in the order of last use
        self._reach = 1
        self._by_age = False
        self._us_per_token = 0.0
        self._ns_per_prompt = float(PROMPT_NS)

    # -- observing ----------------------------------------------------------------------------------------------------

    def looked_up(self, namespace: bytes, pages: Sequence[Page]) -> None:
        self._sample_last_prompt()
        before, self._prompt = self._prompt, _Prompt(self._prompt.clock + 1, len(pages))
        self._ns_per_prompt += (min(max(self._prompt.ns - before.ns, 0), 100 * PROMPT_NS) - self._ns_per_prompt) / 64
        for depth, page in enumerate(pages):
            last = page.policy_data
            if isinstance(last, _Use):
                uses, gap = max(last.uses, page.hits + 1), self._prompt.clock - last.prompt.clock
            else:
                uses, gap = page.hits + 1, round(self._age_by_time(page))
            self._use(page, self._prompt.ns, depth, uses + 1, gap)

    def added(self, page: Page) -> None:
        self._pages += 1
        if page.compute_us and page.n_tokens:
            us_per_token = page.compute_us / page.n_tokens
            self._us_per_token += (us_per_token - self._us_per_token) / (64 if self._us_per_token else 1)
        prompt = self._prompt
        prompt.added += 1
        uses, clock = self._ghosts.recall(page.key) or (0, prompt.clock)
        gap = max(prompt.clock - clock, 0)
        self._use(page, page.last_used, prompt.found + prompt.added - 1, uses + 1, gap)

    def evicted(self, page: Page) -> None:
        self._pages -= 1
        if isinstance(page.policy_data, _Use):
            self._ghosts.remember(page.key, page.policy_data.uses, page.policy_data.prompt.clock)

    def _use(self, page: Page, seen: int, depth: int, uses: int, gap: int) -> None:
        page.policy_data = use = _Use(self._prompt, seen, depth, uses, gap)
        if int.from_bytes(page.key[8:12], "little") < self._share:
            self._recent.append((page.key, use))

    # -- learning -----------------------------------------------------------------------------------------------------

    def _sample_last_prompt(self) -> None:
        """All pages of the last prompt are known now: sample some of them."""
        for key, use in self._recent:
            last = self._samples.pop(key, None)
            if last is not None:
                self._hazards.observe(last[0], use.prompt.clock - last[1], hit=True)
            use.page_class = self._class_of(use)
            self._samples[key] = use.page_class, use.prompt.clock
        self._recent.clear()
        while len(self._samples) > max(self._pages, SAMPLES):
            page_class, clock = self._samples.pop(next(iter(self._samples)))
            self._hazards.observe(page_class, self._prompt.clock - clock, hit=False)

    def prepare(self, pages: int) -> None:
        self._pages = pages
        self._ghosts.grow(pages)
        while self._share > 1 and max(pages, SAMPLES) << 32 < self._share * REACH * pages:
            self._share >>= 1
            self._hazards.halve()
            self._samples = {
                key: last for key, last in self._samples.items() if int.from_bytes(key[8:12], "little") < self._share
            }
        if self._prompt.clock >= self._learned + max(LEARN_EVERY, len(self._samples) >> 8):
            self._learn(pages)

    def _learn(self, pages: int) -> None:
        clock, last = self._prompt.clock, list(self._samples.values())
        self._learned = clock
        self._hazards.learn(last, clock)
        # the samples are in the order of last use
        within = max(pages * self._share >> 32, 1)
        self._reach = max(clock - last[-within][1], 1) if within <= len(last) else max(clock, 1)
        self._by_age = self._hazards.share_of_hits_before(self._reach) > ENOUGH

    # -- ranking ------------------------------------------------------------------------------------------------------

    def _class_of(self, use: _Use) -> int:
        """The class of a page, once its last prompt is over."""
        where = _level(use.depth, 2, 8, 32) if use.uses == 1 else _level(use.gap / self._reach, 0.5, 2, 8)
        after = use.prompt.found + use.prompt.added - 1 - use.depth
        return _use_level(use.uses) * CLASSES_PER_LEVEL + where + 4 * _level(after, 1, 5, 17)

    def _age_by_time(self, page: Page) -> float:
        """Prompts since another process used a page, estimated from the time."""
        return max(self._prompt.ns - page.last_used, 0) / max(self._ns_per_prompt, 1.0)

    def rank(self, page: Page) -> tuple[float, ...]:
        use = page.policy_data
        if isinstance(use, _Use):
            page_class, gain = use.page_class, use.gain
            if not gain:
                page_class, gain = self._class_of(use), self._gain(page)
                if use.prompt is not self._prompt:
                    use.page_class, use.gain = page_class, gain
            age = float(self._prompt.clock - use.prompt.clock)
            if page.last_used > use.seen:
                age = min(age, self._age_by_time(page))
        else:
            # no use was seen by this process: assume the middle of a prompt, and a gap of middle length
            page_class = _use_level(page.hits + 1) * CLASSES_PER_LEVEL + 2 + 4 * 2
            gain, age = self._gain(page), self._age_by_time(page)
        worth = 1 / (1 + age) if self._by_age else self._hazards.worth[page_class][age_of(age)]
        return worth * gain, page.last_used, -page.start

    def _gain(self, page: Page) -> float:
        """The time that a hit saves, for each byte; a measured time far from the average is clipped."""
        usual = page.n_tokens * (self._us_per_token or 1.0)
        saved = min(max(page.compute_us, usual / 2), usual * 2) if page.compute_us else usual
        return saved / (page.stored_bytes or page.raw_bytes or 1)
