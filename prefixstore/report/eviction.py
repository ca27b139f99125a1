"""What was evicted, as far as the policy remembers it, and estimates for other sizes of the store."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from prefixstore.engine.adaptive_policy import SAVED, Adaptive
from prefixstore.engine.facts import Facts
from prefixstore.engine.ghosts import GhostTable
from prefixstore.engine.page_view import View
from prefixstore.errors import CorruptError
from prefixstore.format.saved_state import unpack_state
from prefixstore.report.runs import Column

__all__ = ["Estimate", "Evicted", "estimates", "evicted_of"]

# fewer restores of stored pages say nothing
ENOUGH_RESTORES = 20
# sizes that are estimated, as shares of what is held now
SIZES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
# the shortest time in which a page counts as known: otherwise a new page would seem to be used all the time
SHORTEST = 60.0
# pages of similar rates are counted together, so many groups for each power of two
FINE = 8


@dataclass(frozen=True)
class Evicted:
    """Pages that the policy remembers to have evicted.

    Attributes
    ----------
    uses
        How often each was used, the first time included.
    seconds
        How far back the memory of the policy reaches, estimated.
    """

    uses: Column
    seconds: float


def evicted_of(view: View) -> Evicted | None:
    """What the policy remembers; None if it keeps no such memory, or it cannot be read."""
    note = view.note(Adaptive.note)
    if note is None:
        return None
    try:
        parts = unpack_state(note)
        _, seen, ns_per_prompt, *_ = SAVED.unpack(parts["numbers"])
        table = GhostTable()
        table.load(parts["ghosts"], 0)
        uses = table.uses()
    except (CorruptError, KeyError, ValueError, IndexError, struct.error):
        return None
    return Evicted(uses, seen * ns_per_prompt / 1e9)


@dataclass(frozen=True)
class Estimate:
    """What a store of another size would restore.

    Attributes
    ----------
    share
        Its size, as a share of what is held now.
    n_bytes
        The same in bytes.
    reuse
        The share of the known reuse that it would serve.
    """

    share: float
    n_bytes: int
    reuse: float


def estimates(facts: Facts, evicted: Evicted | None, now: int) -> list[Estimate]:
    """What stores of other sizes would restore of the tokens that are known to be used again; empty if too few are.

    Each page is taken to be used again at random, as often as it was so far, and the least recently used to be evicted
    first. Then a page is there if it was used within a time that is the same for all, and is as long as the size allows
    (Che's approximation). Sizes above the present one are known only from what the policy remembers of evicted pages.
    """
    held = int(facts["stored_bytes"].sum())
    if not held or int(facts["hits"][facts["n_tokens"] > 0].sum()) < ENOUGH_RESTORES:
        return []
    ages = np.maximum((now - np.minimum(facts["created"].astype(np.int64), now)) / 1e9, SHORTEST)
    sizes: Column = facts["stored_bytes"].astype(np.float64)
    rates: Column = (facts["hits"] + 1.0) / ages
    worth: Column = facts["hits"] * facts["n_tokens"].astype(np.float64) / ages
    has_ghosts = evicted is not None and len(evicted.uses) > 0
    if evicted is not None and has_ghosts:
        seconds = max(evicted.seconds, SHORTEST)
        sizes = np.concatenate([sizes, np.full(len(evicted.uses), held / len(facts))])
        rates = np.concatenate([rates, evicted.uses / seconds])
        worth = np.concatenate([worth, (evicted.uses - 1) * facts["n_tokens"].mean() / seconds])
    groups = np.round(np.log2(rates) * FINE).astype(np.int64)
    _, group = np.unique(groups, return_inverse=True)
    sizes, worth = np.bincount(group, sizes), np.bincount(group, worth)
    rates = np.exp(np.bincount(group, np.log(rates)) / np.bincount(group))
    known = float(sizes.sum())
    found = []
    for share in SIZES:
        if share > 1 and not has_ghosts:
            break
        reuse = _served(sizes, rates, worth, share * held) if share * held < known * (1 - 1e-9) else 1.0
        found.append(Estimate(share, round(share * held), reuse))
    return found


def _served(sizes: Column, rates: Column, worth: Column, space: float) -> float:
    """The share of the uses of pages that find them in a store of this size."""
    low, high = -60.0, 120.0
    for _ in range(80):
        middle = (low + high) / 2
        # the logarithm of the time for which pages stay
        is_small = float((sizes * -np.expm1(-rates * 2.0**middle)).sum()) < space
        low, high = (middle, high) if is_small else (low, middle)
    return float((worth * -np.expm1(-rates * 2.0**low)).sum() / worth.sum())
