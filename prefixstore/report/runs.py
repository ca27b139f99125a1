"""The prefix tree of a location as runs of pages, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixstore.format.keys import KEY_BYTES, PAGE
from prefixstore.format.record import Facts
from prefixstore.maintenance.holdings import keys_in

Column = npt.NDArray[Any]

# runs of a report; smaller ones are counted together
MOST_RUNS = 150_000
# Bands of uses: none, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 63, more. Pages of a run are in the same band.
USES = (1, 2, 4, 8, 16, 64)


# A run of pages without a branch, in an array with parents before their children:
RUN = np.dtype(
    [
        ("parent", "i8"),  # the run that it follows; -1 for the first of a namespace
        ("space", "i8"),  # the number of the namespace
        ("head", "i8"),  # row of the first page in the facts
        ("last", "i8"),  # row of the last one
        ("level", "i8"),  # how many runs are above
        ("siblings", "i8"),  # equal for runs that follow the same page; -1 for a run whose parent is lost
        ("start", "i8"),  # the position of the first token
        ("tokens", "i8"),
        ("pages", "i8"),
        ("snapshots", "i8"),  # they belong to the run that they follow
        ("bytes", "i8"),
        # how often its first page was restored, and its least used one
        ("hits", "i8"),
        ("least_hits", "i8"),
        # nanoseconds since the epoch: of the page used last, and of the oldest one; 0 if that is not believable
        ("last_used", "i8"),
        ("created", "i8"),
        ("pinned", "i8"),  # whether its pages are
        # how many it stands for: 1, or how many small ones were left out after `parent`, without `head`
        ("runs", "i8"),
    ]
)


def parents_of(facts: Facts) -> Column:
    """The row of the parent of each page; -1 if it has none, or another one than its place says."""
    keys, wanted, spaces = (keys_in(facts[name]) for name in ("key", "parent", "namespace"))
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    end = facts["start"].astype(np.int64) + facts["n_tokens"]
    # facts are not verified: that starts increase keeps a damaged record from making a circle
    fits = (keys[at] == wanted) & (facts["form"][at] == PAGE) & (spaces[at] == spaces)
    fits &= (end[at] == facts["start"]) & (facts["n_tokens"][at] > 0)
    return np.where(fits, at, -1)


def runs_of(facts: Facts, spaces: Sequence[bytes], now: int, *, by_use: bool = True) -> tuple[Column, Column]:
    """The runs of readable pages, and the number of the run of each. Facts and keys of namespaces are in order.

    `now` is nanoseconds since the epoch. Runs end where pages branch, and `by_use` also where they are used less, or
    are pinned no more.
    """
    n = len(facts)
    if not n:
        return np.empty(0, RUN), np.empty(0, np.int64)
    parent, is_page = parents_of(facts), facts["form"] == PAGE
    children = np.bincount(parent[is_page & (parent >= 0)], minlength=n)
    band = np.digitize(facts["hits"], USES)
    differs = by_use & ((band != band[parent]) | (facts["pinned"] != facts["pinned"][parent]))
    is_head = (parent < 0) | (is_page & ((children[parent] != 1) | differs))
    # each page points to its parent and each head to itself, until all point to their heads
    head = np.where(is_head, np.arange(n), parent)
    while not np.array_equal(further := head[head], head):
        head = further
    heads = np.flatnonzero(is_head)
    heads = heads[np.argsort(facts["start"][heads], kind="stable")]
    number = np.zeros(n, np.int64)
    number[heads] = np.arange(len(heads))
    run = number[head]

    def total(values: Column) -> Column:
        return np.bincount(run, values, len(heads)).astype(np.int64)

    def extreme(function: Any, values: Column, start: int) -> Column:
        found = np.full(len(heads), start, np.int64)
        function.at(found, run, values)
        return found

    above = parent[heads]
    wanted, of = keys_in(facts["parent"])[heads], keys_in(facts["namespace"])
    space = np.searchsorted(np.array(spaces, f"S{KEY_BYTES}"), of)[heads]
    is_lost = (above < 0) & (wanted != of[heads])
    found = np.empty(len(heads), RUN)
    found["parent"] = np.where(above >= 0, run[above], -1)
    found["space"] = space
    found["head"] = heads
    found["last"] = np.lexsort((facts["start"], is_page, run))[np.cumsum(np.bincount(run)) - 1]
    found["siblings"] = np.where(above >= 0, above, np.where(is_lost, -1, n + space))
    found["tokens"] = total(np.where(is_page | is_head, facts["n_tokens"], 0))
    found["pages"] = total(is_page)
    found["snapshots"] = total(~is_page)
    found["bytes"] = total(facts["stored_bytes"])
    hits = facts["hits"].astype(np.int64)
    found["least_hits"] = extreme(np.minimum, np.where(is_page | is_head, hits, 2**32), 2**32)
    found["last_used"] = extreme(np.maximum, facts["last_used"].astype(np.int64), 0)
    found["created"] = extreme(np.minimum, facts["created"].astype(np.int64), now)
    found["runs"] = 1
    for name in ("start", "hits", "pinned"):
        found[name] = facts[name][heads]
    levels = [0] * len(heads)
    for i, parent_run in enumerate(found["parent"].tolist()):
        levels[i] = levels[parent_run] + 1 if parent_run >= 0 else 0
    found["level"] = levels
    return found, run


def limited(runs: Column, most: int = MOST_RUNS) -> Column:
    """At most this many runs, those with the largest subtrees, each with one more run for what is left out below it."""
    if len(runs) <= most:
        return runs
    below = runs["bytes"].tolist()
    parents = runs["parent"].tolist()
    for i in range(len(runs) - 1, -1, -1):
        if parents[i] >= 0:
            below[parents[i]] += below[i]
    # parents are first, and at least as large as their children
    kept = np.sort(np.argsort(-np.array(below), kind="stable")[:most])
    is_kept = np.zeros(len(runs), bool)
    is_kept[kept] = True
    number = np.full(len(runs), -1, np.int64)
    number[kept] = np.arange(most)
    # what is left out is counted after the nearest run that is kept, or in its namespace
    place = [0] * len(runs)
    for i, parent in enumerate(parents):
        if not is_kept[i]:
            is_top = parent < 0 or is_kept[parent]
            place[i] = (int(number[parent]) if parent >= 0 else -1 - int(runs["space"][i])) if is_top else place[parent]
    left = runs[~is_kept]
    places, group = np.unique(np.array(place)[~is_kept], return_inverse=True)
    added = np.zeros(len(places), RUN)
    added["parent"] = np.maximum(places, -1)
    added["space"][group] = left["space"]
    for name in ("head", "last", "siblings"):
        added[name] = -1
    for name in ("tokens", "pages", "snapshots", "bytes", "runs"):
        added[name] = np.bincount(group, left[name], len(places))
    np.maximum.at(added["last_used"], group, left["last_used"])
    added["created"] = np.iinfo(np.int64).max
    np.minimum.at(added["created"], group, left["created"])
    shown = runs[kept]
    shown["parent"] = np.where(shown["parent"] >= 0, number[shown["parent"]], -1)
    return np.concatenate([shown, added])
