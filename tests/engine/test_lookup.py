"""Lookups, compared with brute force: over what is stored, what waits, and both."""

from __future__ import annotations

import random

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.pages import Pages
from prefixstore.format.keys import as_tokens
from tests.support import seeds
from tests.support.engines import MIB, NS, OTHER, MemoryPages, Store, snapshot_of

# 256 and -1 are next to 1 and 0 in another byte order
ALPHABETS = ([0, 1], [0, 1, 256, 65536, -1, 2**31 - 1])


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Random:
    """Sequences that begin like earlier ones, up to a random place."""

    def __init__(self, seed, alphabet):
        self.chance, self.alphabet = random.Random(seed), alphabet
        self.seen = [[]]

    def tokens(self, longest=22):
        known = self.chance.choice(self.seen)
        new = known[: self.chance.randrange(len(known) + 1)]
        new = new + self.chance.choices(self.alphabet, k=self.chance.randrange(max(longest - len(new), 0) + 1))
        self.seen.append(new)
        return new


@pytest.fixture
def store():
    opened = Store(MemoryPages())
    yield opened
    opened.engine.close()


@pytest.mark.parametrize("alphabet", ALPHABETS, ids=["narrow", "wide"])
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_the_longest_prefix_is_found_to_the_token_stored_or_waiting(store, alphabet, seed):
    some = Random(seed, alphabet)
    known, waiting = [], []
    for step in range(60):
        tokens = some.tokens()
        # what waits follows what waits, and what is stored follows what is stored
        store.engine.match(NS, as_tokens(tokens), 4)
        waiting += store.announce(tokens)
        known.append(tokens)
        if step % 3 == 2:
            store.engine.commit(waiting)
            waiting = []
        for _ in range(5):
            wanted = some.tokens(26)
            path = store.engine.match(NS, as_tokens(wanted), 4)
            assert path.n_tokens == max(shared(wanted, one) for one in known)
            covered = b"".join(page.tokens for page in path.pages)[: 4 * path.n_tokens]
            assert covered == as_tokens(wanted[: path.n_tokens]).tobytes()
            assert store.match(wanted, namespace=OTHER) == 0
    store.engine.commit(waiting)


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_the_deepest_snapshot_is_found_within_a_limit_and_at_a_multiple(store, seed):
    some = Random(seed, [0, 1])
    known, waiting = [], []
    for step in range(40):
        tokens = some.tokens()
        if not tokens:
            continue
        waiting += store.announce(tokens[: len(tokens) // 4 * 4], 0)
        new = snapshot_of(store, tokens)
        if store.engine.announce(new):
            waiting.append(new)
        known.append(tokens)
        if step % 3 == 2:
            store.engine.commit(waiting)
            waiting = []
        for multiple_of in (1, 2, 3):
            wanted = some.tokens(26)
            limit = some.chance.randrange(len(wanted) + 1)
            here = [len(one) for one in known if wanted[: len(one)] == one and len(one) <= limit]
            expected = max((n for n in here if n % multiple_of == 0), default=0)
            assert store.match_snapshot(wanted, limit, multiple_of) == expected
    store.engine.commit(waiting)


def test_what_another_process_does_is_seen_by_the_next_lookup(tmp_path):
    one, two = (Store(Pages(LMDBBackend(tmp_path, MIB))) for _ in range(2))
    tokens = list(range(12))
    for _ in range(3):
        one.put(tokens)
        assert two.match(tokens) == 12
        assert two.engine.clear(NS) == 3
        assert one.match(tokens) == 0
    for store in (one, two):
        store.engine.close()
