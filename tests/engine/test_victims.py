"""Which leaves are chosen for eviction: by samples of their rows, whatever others do, and whatever the counts say."""

import random

import pytest

from prefixstore.engine import keyspace
from prefixstore.engine.eviction import POLICIES, POOL, Victims
from prefixstore.engine.keyspace import Leaf, leaf_row
from prefixstore.format.record import Usage
from tests.support.engines import NS, OTHER, MemoryPages, P, store_of
from tests.support.pages import make_page
from tests.support.places import write_rows

NOW = 1_700_000_000_000_000_000


@pytest.fixture(autouse=True)
def seeded():
    random.seed(1)


@pytest.fixture
def backend():
    return MemoryPages()


def put(transaction, number, usage, *, parent=None, space=NS):
    """Put a page without a payload; its key."""
    start = 0 if parent is None else 4
    key, record = make_page(b"", [number] * 4, parent=parent or space, start=start, namespace=space)
    transaction.put(key, record, usage, b"")
    return key


def fill(backend, n, *, space=NS, first=0, step=1):
    """Put pages of which each next one was used later; their keys."""
    with backend.update() as transaction:
        return [put(transaction, first + i, Usage(NOW + i * step), space=space) for i in range(n)]


def ranked(policy="lru"):
    """How a policy ranks leaves."""
    chosen = POLICIES[policy]()
    return lambda keys, leaves: chosen.ranks(leaves)


def taken(victims, transaction, at_most=10**6):
    """Delete the next victims; their keys, in order."""
    found = []
    while len(found) < at_most and (victim := victims.lowest()) is not None:
        found.append(victim.key)
        assert transaction.delete(victim.key)
        victims.added(victim.namespace, victim.leaf.parent)
    return found


# -- the order --------------------------------------------------------------------------------------------------------

ORDERS = {
    "lru": lambda usage, end: (usage.last_used, -end),
    "lfu": lambda usage, end: (usage.uses, usage.last_used, -end),
    "longest_first": lambda usage, end: (-end, usage.last_used),
    "priority": lambda usage, end: (usage.priority, usage.last_used, -end),
}


@pytest.mark.parametrize("policy", ORDERS)
def test_of_up_to_256_leaves_the_order_is_exact_and_a_page_comes_when_none_follows_it(backend, policy):
    chance, order = random.Random(1), ORDERS[policy]
    # the pages that are followed have few uses: they are the next ones once their children are gone
    pages, parents = {}, {}
    with backend.update() as transaction:
        for number in range(POOL):
            space = chance.choice([NS, OTHER])
            above = chance.choice([None, None, *(key for key, (_, end, s) in pages.items() if (end, s) == (4, space))])
            usage = Usage(
                NOW + chance.randrange(100) * 1000 + number,
                uses=chance.randint(1, 9),
                priority=chance.randint(-9, 9),
                pinned=chance.random() < 0.05,
            )
            key = put(transaction, number, usage, parent=above, space=space)
            pages[key], parents[key] = (usage, 8 if above else 4, space), above
    rank = ranked(policy)
    # in several transactions
    while True:
        with backend.update() as transaction:
            found = taken(Victims(transaction, rank), transaction, 50)
        for key in found:
            leaves = [k for k, (usage, *_) in pages.items() if not usage.pinned and k not in parents.values()]
            assert key == min(leaves, key=lambda k: order(*pages[k][:2]))
            del pages[key], parents[key]
        if not found:
            break
    assert all(usage.pinned or key in parents.values() for key, (usage, *_) in pages.items())


@pytest.mark.slow
def test_of_many_leaves_those_that_are_evicted_are_among_the_oldest():
    backend = MemoryPages()
    keys = fill(backend, 5000)
    age = {key: i for i, key in enumerate(keys)}
    with backend.update() as transaction:
        found = [age[key] for key in taken(Victims(transaction, ranked()), transaction, 500)]
    assert len(set(found)) == 500
    # The fourth of 256 leaves is that new once in 10^18 times, and of 64, if all four samples were the same ones, once
    # in 10^6; that they are is as rare.
    assert max(found) < 1500
    # exactly, it would be 250
    assert sum(found) / 500 < 400


@pytest.mark.slow
def test_a_sample_is_of_all_namespaces_by_how_many_leaves_they_have():
    backend = MemoryPages()
    fill(backend, 500, step=3)
    fill(backend, 1500, space=OTHER)
    with backend.view() as view:
        # the first victim of each of 300 choosers, the oldest leaf that it has read
        first = [Victims(view, ranked()).lowest().namespace for _ in range(300)]
    # 75 +- 7.5; were each namespace as likely as the other, it would be 150
    assert 22 < first.count(NS) < 128


def test_all_are_taken_in_the_end_however_many_there_are_and_each_once(backend):
    keys = fill(backend, 200) + fill(backend, 100, space=OTHER)
    rank = ranked()
    found = []
    while True:
        with backend.update() as transaction:
            some = taken(Victims(transaction, rank), transaction, 80)
        found += some
        if not some:
            break
    assert len(found) == 300
    assert set(found) == set(keys)
    # the last ones in the exact order
    assert found[-1] == keys[199]


# -- what others do ---------------------------------------------------------------------------------------------------


CHANGES = {
    "used": lambda t, key, number: t.touch(key, Usage(NOW + 10**15 + number)),
    "pinned": lambda t, key, number: t.touch(key, Usage(NOW, pinned=True)),
    "followed": lambda t, key, number: put(t, 10**6 + number, Usage(NOW + 10**15), parent=key),
    "deleted": lambda t, key, number: t.delete(key),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("n", [100, 300])
def test_what_others_have_changed_since_it_was_ranked_is_not_evicted(backend, what, n):
    fill(backend, n)
    rank = ranked()
    # ranked, and nothing is done with it
    with backend.view() as view:
        victims = Victims(view, rank)
        changed = []
        for _ in range(20):
            changed.append((victim := victims.lowest()).key)
            victims.spare(victim)
    with backend.update() as transaction:
        for number, key in enumerate(changed):
            CHANGES[what](transaction, key, number)
    with backend.update() as transaction:
        found = taken(Victims(transaction, rank), transaction, n // 2)
    assert len(found) == n // 2
    assert not set(found) & set(changed)


def test_expired_pages_go_first(backend):
    with backend.update() as transaction:
        keys = [put(transaction, i, Usage(NOW + i, expires=1 + i if i % 10 == 5 else 0)) for i in range(200)]
    with backend.update() as transaction:
        found = taken(Victims(transaction, ranked()), transaction)
    assert found[:20] == keys[5::10]


# -- rows that are wrong ----------------------------------------------------------------------------------------------


SPOILED = {
    "damaged": lambda _: b"garbage",
    "deleted": lambda _: None,
    "too low": lambda count: count._replace(leaves=0).pack(),
    "too high": lambda count: count._replace(leaves=10**9).pack(),
}


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("which", ["all", "namespaces"])
def test_victims_are_found_whatever_the_counts_say(spoiled, which):
    backend = MemoryPages()
    keys = fill(backend, 200) + fill(backend, 100, space=OTHER)
    with backend.view() as view:
        rows = view.counts()
    chosen = [row for row in rows if (row == keyspace.COUNT) == (which == "all")]
    write_rows(backend, *((row, SPOILED[spoiled](rows[row])) for row in chosen))
    rank = ranked()
    with backend.update() as transaction:
        found = taken(Victims(transaction, rank), transaction, 250)
    with backend.update() as transaction:
        found += taken(Victims(transaction, rank), transaction)
    assert sorted(found) == sorted(keys)


def test_leaf_rows_of_pages_that_are_gone_are_dropped_and_an_eviction_comes_to_an_end():
    with store_of() as store:
        for i in range(100):
            store.put([i] * P, 0)
        gone = [random.randbytes(32) for _ in range(150)]
        leaf = Leaf(NS, 1, 0, 0, P, P, 1, 0, 0).pack()
        write_rows(store.backend, *((leaf_row(space, key), leaf) for key in gone for space in (NS, OTHER)))
        assert len(store.engine.evictor.evict(0).pages) == 100
        assert store.stored_keys() == set()
        with store.backend.view() as view:
            assert view.rows.ranges([keyspace.everything(keyspace.LEAF)])[0] == []
        store.backend.reindex()
