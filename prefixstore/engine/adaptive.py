"""The policy that learns which pages come back, how soon, and so which of them earn their room.

Pages are in classes: by the number of their uses, by the time between the last two (or how deep they are, as long as
there is one), and by how far they are from the end of the prompt. For each class the chance of coming back is learned
as a function of the time since the last use, counted in prompts. What a page is worth is the most that waiting can
bring: hits per time in the room, over the waiting time for which that is most (Gittins' index; LHD is a relative).
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixstore.engine.index import Page

__all__ = ["Adaptive", "Hazards", "Memory"]

Floats = npt.NDArray[np.float64]

# ages in half octaves of prompts: the last one begins at four million
AGES = 46
USES, KINDS = 7, 16
CLASSES = USES * KINDS
# so many pages of a kind outweigh what is known of its neighbours: pages of a prompt come back together, so 100 are few
DOUBT = 100.0
# what nobody has seen yet: the same chance in every half octave, which is the order of last use
BLANK, BLANK_WEIGHT = 0.045, 2.0
# evicted pages that are remembered for each page in the index, 8 bytes each
REMEMBERED = 8
# fewer sampled pages teach too little, and cost nothing
SAMPLES = 4096
# the samples reach so many times as far back as the index
REACH = 8
LEARN_EVERY = 50
# weight of what was learned before, each time
FADE = 0.998
# where the order of last use gets this part of the hits that can be had, what is learned is not worth its noise
ENOUGH = 0.97
# of a page of which this process has seen no use
PROMPT_NS = 10**10


def age_of(prompts: float) -> int:
    """The half octave of an age."""
    return min(AGES - 1, int(2 * math.log2(prompts + 1))) if prompts > 0 else 0


def _often(uses: int) -> int:
    return uses - 1 if uses < 4 else 3 if uses < 6 else 4 if uses < 9 else 5 if uses < 16 else 6


def _level(count: float, low: float, middle: float, high: float) -> int:
    return 0 if count < low else 1 if count < middle else 2 if count < high else 3


class Memory:
    """Uses and last use of evicted pages: a table without chains, in which a new page takes the place of an old one."""

    _BASE = 14

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 << self._BASE))

    def grow(self, pages: int) -> None:
        """Have places for those that were evicted from among so many pages."""
        while len(self._table) < REMEMBERED * pages:
            # a place is named by the low bits of the tag, of which each doubling uses one more
            bit = len(self._table) >> self._BASE
            keeps = array("Q", [0 if entry >> 40 & bit else entry for entry in self._table])
            moves = array("Q", [entry if entry >> 40 & bit else 0 for entry in self._table])
            self._table = keeps + moves

    def _place(self, key: bytes) -> tuple[int, int]:
        tag = int.from_bytes(key[:3], "little") | 1 << 23
        low = int.from_bytes(key[3:5], "little") & ((1 << self._BASE) - 1)
        return (low | tag << self._BASE) & (len(self._table) - 1), tag

    def keep(self, key: bytes, uses: int, clock: int) -> None:
        """Remember a page."""
        place, tag = self._place(key)
        self._table[place] = tag << 40 | min(uses, 255) << 32 | clock & 0xFFFFFFFF

    def recall(self, key: bytes) -> tuple[int, int] | None:
        """Uses, and the clock at the last one, of a page that was kept; now and then of another."""
        place, tag = self._place(key)
        entry = self._table[place]
        return (entry >> 32 & 255, entry & 0xFFFFFFFF) if entry >> 40 == tag else None


class Hazards:
    """How many pages of a class came back at an age, of those that were that old; and what waiting for it is worth."""

    def __init__(self) -> None:
        self._hits = np.zeros((CLASSES, AGES))
        self._lost = np.zeros((CLASSES, AGES))
        edges = np.exp2(np.arange(AGES + 1) / 2)
        self._width: Floats = edges[1:] - edges[:-1]
        self.learn((), 0)

    def end(self, kind: int, age: int, *, hit: bool) -> None:
        """A page of a class came back at this age, or was lost from sight."""
        (self._hits if hit else self._lost)[kind, age_of(age)] += 1

    def halve(self) -> None:
        """From now on half of the pages are told of: those that are waiting must weigh what they did."""
        self._hits /= 2
        self._lost /= 2

    def learn(self, waiting: Sequence[tuple[int, int]], clock: int) -> None:
        """Work out the worth of every class at every age; those that wait still are (class, clock of last use)."""
        self._hits *= FADE
        self._lost *= FADE
        ends = self._hits + self._lost
        if waiting:
            kinds, clocks = np.array(waiting, np.int64).T
            ages = np.minimum(AGES - 1, (2 * np.log2(np.maximum(clock - clocks, 0) + 1.0)).astype(np.int64))
            np.add.at(ends, (kinds, ages), 1)
        # who was lost at an age was there for half of it; who came back counts in full
        seen = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1] - (ends - self._hits) / 2
        # of all pages; of those with as many uses; of the class: where little is known, the wider circle speaks
        everywhere = (self._hits.sum(0) + BLANK * BLANK_WEIGHT) / (seen.sum(0) + BLANK_WEIGHT)
        guess = 1 - (1 - everywhere) ** (1 + np.arange(USES)[:, None] / 2)
        by_uses = (self._hits.reshape(USES, KINDS, AGES).sum(1) + DOUBT * guess) / (
            seen.reshape(USES, KINDS, AGES).sum(1) + DOUBT
        )
        around = np.repeat(by_uses, KINDS, axis=0)
        chance = np.minimum((self._hits + DOUBT * around) / (seen + DOUBT), 0.999)
        self.worth: list[list[float]] = self._worth(chance).tolist()

    def soon(self, age: float) -> float:
        """The part of those that came back which did so before they were that old."""
        came = np.concatenate([[0.0], np.cumsum(self._hits.sum(0))])
        return float(np.interp(2 * math.log2(age + 1), np.arange(AGES + 1), came) / max(came[-1], 1.0))

    def _worth(self, chance: Floats) -> Floats:
        """The most hits per time in the room, over all times to wait, for a page in the middle of each age."""
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
    """One lookup, and how many pages it found and brought."""

    __slots__ = ("added", "clock", "found", "ns")

    def __init__(self, clock: int, found: int) -> None:
        self.clock = clock
        self.found = found
        self.added = 0
        self.ns = time.time_ns()


class _Use:
    """The last use of a page that this process has seen; `seen` is its time."""

    __slots__ = ("depth", "gain", "gap", "kind", "prompt", "seen", "uses")

    def __init__(self, prompt: _Prompt, seen: int, depth: int, uses: int, gap: int) -> None:
        self.prompt = prompt
        self.seen = seen
        self.depth = depth
        self.uses = uses
        self.gap = gap
        # both are settled when the prompt is over
        self.kind = -1
        self.gain = 0.0


class Adaptive:
    """What is expected to bring the fewest hits for its room goes first, weighed by the time that a hit saves."""

    drifts = True

    def __init__(self) -> None:
        self._prompt = _Prompt(0, 0)
        self._recent: list[tuple[bytes, _Use]] = []
        self._memory = Memory()
        self._hazards = Hazards()
        self._samples: dict[bytes, tuple[int, int]] = {}
        self._share = 1 << 32
        self._pages = 0
        self._learned = 0
        # prompts that the index would reach back, if the order were that of last use
        self._reach = 1
        self._by_age = False
        self._us_per_token = 0.0
        self._ns_per_prompt = float(PROMPT_NS)

    # -- what happens -------------------------------------------------------------------------------------------------

    def looked_up(self, namespace: bytes, pages: Sequence[Page]) -> None:
        self._settle()
        before, self._prompt = self._prompt, _Prompt(self._prompt.clock + 1, len(pages))
        self._ns_per_prompt += (min(max(self._prompt.ns - before.ns, 0), 100 * PROMPT_NS) - self._ns_per_prompt) / 64
        for depth, page in enumerate(pages):
            last = page.note
            if isinstance(last, _Use):
                uses, gap = max(last.uses, page.hits + 1), self._prompt.clock - last.prompt.clock
            else:
                uses, gap = page.hits + 1, round(self._age(page))
            self._use(page, self._prompt.ns, depth, uses + 1, gap)

    def added(self, page: Page) -> None:
        self._pages += 1
        if page.compute_us and page.n_tokens:
            pace = page.compute_us / page.n_tokens
            self._us_per_token += (pace - self._us_per_token) / (64 if self._us_per_token else 1)
        prompt = self._prompt
        prompt.added += 1
        uses, clock = self._memory.recall(page.key) or (0, prompt.clock)
        gap = max(prompt.clock - clock, 0)
        self._use(page, page.last_used, prompt.found + prompt.added - 1, uses + 1, gap)

    def evicted(self, page: Page) -> None:
        self._pages -= 1
        if isinstance(page.note, _Use):
            self._memory.keep(page.key, page.note.uses, page.note.prompt.clock)

    def _use(self, page: Page, seen: int, depth: int, uses: int, gap: int) -> None:
        page.note = use = _Use(self._prompt, seen, depth, uses, gap)
        if int.from_bytes(page.key[8:12], "little") < self._share:
            self._recent.append((page.key, use))

    # -- what is learned from it --------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The pages of the last prompt are known: note the sampled ones."""
        for key, use in self._recent:
            last = self._samples.pop(key, None)
            if last is not None:
                self._hazards.end(last[0], use.prompt.clock - last[1], hit=True)
            use.kind = self._kind(use)
            self._samples[key] = use.kind, use.prompt.clock
        self._recent.clear()
        while len(self._samples) > max(self._pages, SAMPLES):
            kind, clock = self._samples.pop(next(iter(self._samples)))
            self._hazards.end(kind, self._prompt.clock - clock, hit=False)

    def renew(self, pages: int) -> None:
        self._pages = pages
        self._memory.grow(pages)
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
        self._by_age = self._hazards.soon(self._reach) > ENOUGH

    # -- what follows from that ---------------------------------------------------------------------------------------

    def _kind(self, use: _Use) -> int:
        """The class of a page, once its last prompt is over."""
        where = _level(use.depth, 2, 8, 32) if use.uses == 1 else _level(use.gap / self._reach, 0.5, 2, 8)
        behind = use.prompt.found + use.prompt.added - 1 - use.depth
        return _often(use.uses) * KINDS + where + 4 * _level(behind, 1, 5, 17)

    def _age(self, page: Page) -> float:
        """Prompts since another process has used a page."""
        return max(self._prompt.ns - page.last_used, 0) / max(self._ns_per_prompt, 1.0)

    def rank(self, page: Page) -> tuple[float, ...]:
        use = page.note
        if isinstance(use, _Use):
            kind, gain = use.kind, use.gain
            if not gain:
                kind, gain = self._kind(use), self._gain(page)
                if use.prompt is not self._prompt:
                    use.kind, use.gain = kind, gain
            age = float(self._prompt.clock - use.prompt.clock)
            if page.last_used > use.seen:
                age = min(age, self._age(page))
        else:
            # in the middle of a prompt, and neither often nor seldom, as far as anybody knows
            kind, gain, age = _often(page.hits + 1) * KINDS + 2 + 4 * 2, self._gain(page), self._age(page)
        worth = 1 / (1 + age) if self._by_age else self._hazards.worth[kind][age_of(age)]
        return worth * gain, page.last_used, -page.start

    def _gain(self, page: Page) -> float:
        """The time that a hit saves, for each byte; a measurement far from the average is not believed."""
        usual = page.n_tokens * (self._us_per_token or 1.0)
        saved = min(max(page.compute_us, usual / 2), usual * 2) if page.compute_us else usual
        return saved / (page.stored_bytes or page.raw_bytes or 1)
