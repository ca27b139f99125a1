"""What is learned about classes of pages: the chance of another use by age, and the worth that follows from it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

# ages in half octaves of prompts: 1, 1.5, 2, 3, 4, 6, ...; the last one begins at twelve million
AGES = 46
USE_LEVELS = 7
CLASSES_PER_LEVEL = 16
CLASSES = USE_LEVELS * CLASSES_PER_LEVEL
# This many pages of a class outweigh what is known of similar classes. Pages of one prompt are used again together, so
# 100 are few.
PRIOR_PAGES = 100.0
# before anything was observed: the same chance in every half octave, which gives the order of last use
DEFAULT_CHANCE, DEFAULT_WEIGHT = 0.045, 2.0
# weight of what was learned before, each time
FADE = 0.998


def age_bins(prompts: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """The half octaves of numbers of prompts: exponent and first binary place of one more, as a float has them."""
    bits = (prompts + 1).astype(np.float32).view(np.int32)
    bins: npt.NDArray[np.int32] = np.minimum((bits >> 22) - 254, AGES - 1)
    return bins


def use_level(uses: int) -> int:
    """The level of a number of uses, one part of the class of a page."""
    return uses - 1 if uses < 4 else 3 if uses < 6 else 4 if uses < 9 else 5 if uses < 16 else 6


def level(count: float, low: float, middle: float, high: float) -> int:
    """0 to 3: how many of the three a number has reached."""
    return 0 if count < low else 1 if count < middle else 2 if count < high else 3


class Hazards:
    """For each class, the share of the pages of an age that are used again at that age, and the worth that follows.

    Attributes
    ----------
    worth
        By class and age, one class after the other: expected hits for the time in the store.
    """

    def __init__(self) -> None:
        self._hits = np.zeros((CLASSES, AGES))
        self._lost = np.zeros((CLASSES, AGES))
        octaves = np.exp2(np.arange(AGES // 2 + 1))
        edges = np.stack([octaves, 1.5 * octaves], axis=1).reshape(-1)[: AGES + 1]
        self._width: Floats = edges[1:] - edges[:-1]
        self.worth: npt.NDArray[np.float64] = np.zeros(CLASSES * AGES)
        self.learn(np.empty(0, np.int64), np.empty(0, np.int64))

    def observe(self, page_class: int, age: int, *, hit: bool) -> None:
        """Count a page of this class as used again at this age, or as no longer followed."""
        (self._hits if hit else self._lost)[page_class, age_bins(np.array([max(age, 0)]))[0]] += 1

    def halve(self) -> None:
        """Halve the old counts, since from here on half as many pages are sampled."""
        self._hits /= 2
        self._lost /= 2

    def learn(self, classes: npt.NDArray[np.int64], ages: npt.NDArray[np.int64]) -> None:
        """Compute the worth of every class at every age, given the sampled pages that have not been used again."""
        self._hits *= FADE
        self._lost *= FADE
        ends = self._hits + self._lost
        np.add.at(ends, (classes, age_bins(np.maximum(ages, 0))), 1)
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
        self.worth = self._worth(chance).reshape(-1)

    def share_of_hits_before(self, age: float) -> float:
        """The share of all repeated uses that happened before this age."""
        hits = np.concatenate([[0.0], np.cumsum(self._hits.sum(0))])
        return float(np.interp(2 * np.log2(age + 1), np.arange(AGES + 1), hits) / max(hits[-1], 1.0))

    def _worth(self, chance: Floats) -> Floats:
        """The most hits for the time in the store, over all times to wait, for a page in the middle of each age."""
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

    def dump(self, classes: npt.NDArray[np.int64], ages: npt.NDArray[np.int64], weight: float) -> bytes:
        """What was observed, with a weight; pages as given to `learn` count as no longer followed."""
        lost = self._lost.copy()
        np.add.at(lost, (classes, age_bins(np.maximum(ages, 0))), 1)
        return (np.stack([self._hits, lost]) * weight).astype("<f4").tobytes()

    def load(self, dumped: bytes) -> None:
        """Take over earlier observations. Raises `ValueError` if these are not valid counts."""
        counts = np.frombuffer(dumped, "<f4").astype(np.float64).reshape(2, CLASSES, AGES)
        if not (np.isfinite(counts).all() and (counts >= 0).all() and counts.max() < 1e12):
            raise ValueError("not counts")
        self._hits, self._lost = counts[0].copy(), counts[1].copy()
