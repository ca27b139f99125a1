"""Locations filled with many tiny pages: conversations of ten pages, and a few long ones.

The conversations are numbered, and a number is enough to compute the tokens of one again. A note in the location holds
the next number, so a fill that was interrupted goes on, and a location from which pages were evicted gets new ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.page_view import PageView
from prefixstore.engine.pages import Pages
from prefixstore.format.keys import page_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, Usage, checksum
from prefixstore.parameters import Parameters

PAGE_TOKENS = Parameters.PAGE_TOKENS
CHAIN_PAGES = 10
PROMPT_TOKENS = CHAIN_PAGES * PAGE_TOKENS
LONG_TOKENS = 32_000
# conversations of 32,000 tokens, numbered from here on
LONG, N_LONG = 1 << 40, 4
PAYLOAD = bytes(range(64))
CHECKSUM = checksum(PAYLOAD)
COMPUTE_US = 50_000
VOCABULARY = 32_000
# A transaction of LMDB keeps every page of the file that it has changed in memory, and each of ours changes some four.
CHAINS_AT_ONCE = 2_000
NOTE = b"benchmarks.scale"


def namespace() -> Namespace:
    """A namespace of no model."""
    return Namespace({"label": "scale", "salt": None, "page_tokens": PAGE_TOKENS})


def tokens_of(chain: int) -> npt.NDArray[np.int32]:
    """The tokens of a conversation."""
    n_tokens = LONG_TOKENS if chain >= LONG else PROMPT_TOKENS
    return np.random.default_rng([13, chain]).integers(0, VOCABULARY, n_tokens, np.int32)


def records_of(chain: int, space: bytes, now: int) -> Iterator[tuple[bytes, Record]]:
    """The keys and records of the pages of a conversation."""
    raw = tokens_of(chain).astype("<i4").tobytes()
    parent, step = space, PAGE_TOKENS * 4
    for start in range(0, len(raw), step):
        tokens = raw[start : start + step]
        key = page_key(parent, tokens)
        size = len(PAYLOAD)
        yield key, Record(space, parent, start // 4, tokens, 0, size, size, CHECKSUM, COMPUTE_US, now)
        parent = key


def last_keys(chains: list[int], space: bytes) -> list[bytes]:
    """The key of the last page of each conversation."""
    return [list(records_of(chain, space, 0))[-1][0] for chain in chains]


def next_chain(view: PageView) -> int:
    """The number of the first conversation that was never stored."""
    return int(view.note(NOTE) or b"0")


def stored_chains(view: PageView, space: bytes, count: int, seed: int) -> tuple[list[int], float]:
    """Numbers of conversations that are stored as a whole, drawn at random, and which share of those drawn are."""
    end = next_chain(view)
    drawn = np.random.default_rng(seed).permutation(end)[: 2 * count].tolist()
    keys = last_keys(drawn, space)
    stored = view.records(keys)
    found = [chain for chain, key in zip(drawn, keys, strict=True) if key in stored]
    return found[:count], len(found) / max(len(drawn), 1)


def fill(backend: Pages, space: Namespace, n_pages: int) -> int:
    """Put conversations until the location holds so many pages; returns how many were put."""
    n_put = 0
    with backend.update() as transaction:
        transaction.put_namespace(space.key, space.canonical)
        for chain in range(LONG, LONG + N_LONG):
            pages = list(records_of(chain, space.key, time.time_ns()))
            stored = transaction.records([key for key, _ in pages])
            # pinned: each run looks them up
            n_put += put(transaction, [page for page in pages if page[0] not in stored], pinned=True)
        entries = transaction.used.entries
    while entries < n_pages:
        n_chains = min(CHAINS_AT_ONCE, -(-(n_pages - entries) // CHAIN_PAGES))
        with backend.update() as transaction:
            first, now = next_chain(transaction), time.time_ns()
            pages = [page for i in range(n_chains) for page in records_of(first + i, space.key, now)]
            # in the order of their keys, neighbours are written into the same page of the file
            n_put += put(transaction, sorted(pages, key=lambda page: page[0]))
            transaction.put_note(NOTE, b"%d" % (first + n_chains))
            entries = transaction.used.entries
        print(f"\r{entries:,} of {n_pages:,} pages", end="", file=sys.stderr, flush=True)
    if n_put:
        print(file=sys.stderr)
        backend.sync()
    return n_put


def put(transaction: PageUpdate, pages: list[tuple[bytes, Record]], *, pinned: bool = False) -> int:
    """Put these pages; how many there are."""
    for key, record in pages:
        transaction.put(key, record, Usage(record.created, pinned=pinned), PAYLOAD)
    return len(pages)
