"""Pages that are evicted after all others: in each order, in a store of any size, within the budget."""

from __future__ import annotations

import random

import pytest

from prefixstore.engine.eviction import POLICIES
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.record import Usage
from tests.support.engines import NS, A, B, C, MemoryPages, P, store_of
from tests.support.pages import make_page


def put(backend, usages):
    """Put a page with each of these usages; their keys."""
    keys = []
    with backend.update() as transaction:
        transaction.put_namespace(NS, b'{"n":1}')
        for number, usage in enumerate(usages):
            key, record = make_page(b"", [number] * P, parent=NS, namespace=NS)
            transaction.put(key, record, usage, b"")
            keys.append(key)
    return keys


def order(engine, **options):
    """The keys of all pages, in the order of their eviction."""
    return [bytes.fromhex(key) for key in engine.evictor.evict(0, **options).pages]


@pytest.mark.parametrize(("policy", "n"), [("lru", 200), ("adaptive", 350), ("lfu", 350)])
def test_they_come_last_in_every_order_the_least_recently_used_first(policy, n):
    chance, backend = random.Random(n), MemoryPages()
    used = [10**18 + i for i in chance.sample(range(10**6), n)]
    keys = put(backend, [Usage(when, uses=chance.randrange(1, 9), priority=chance.randrange(-9, 9)) for when in used])
    last = dict(zip(keys, used, strict=True))
    early, late = keys[:20], keys[20:40]
    chance.shuffle(keys)
    with store_of(backend) as store:
        engine = store.engine
        engine._policy = engine._catalog.policy = POLICIES[policy]()
        engine.evictor.keep("a", early)
        # ranked, before the others are kept
        found = order(engine, dry_run=True)
        assert set(found[-20:]) == set(early)
        engine.evictor.keep("b", late)
        for options in ({"dry_run": True}, {}):
            found = order(engine, **options)
            assert len(found) == n
            assert found[-40:] == sorted([*early, *late], key=last.__getitem__)


def test_a_page_can_be_kept_before_it_is_stored_and_is_kept_when_it_comes_back():
    with store_of() as store:
        key = page_keys(NS, as_tokens(A[:P]), P)[0]
        store.engine.evictor.keep("a", [key])
        for _ in range(2):
            for tokens in (A, B, C):
                store.put(tokens[:P])
            found = order(store.engine)
            assert len(found) == 3
            assert found[-1] == key
