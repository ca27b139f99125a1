"""Which leaves are chosen for eviction: by samples of their rows, whatever others do, and whatever the counts say."""

from __future__ import annotations

import random
import time
from contextlib import closing

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine import keyspace
from prefixstore.engine.budget import Quota
from prefixstore.engine.eviction import KEPT, POLICIES, POOL, Group, Sampler
from prefixstore.engine.keyspace import Count, Leaf, leaf_row
from prefixstore.engine.pages import Pages
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Usage
from tests.support.engines import MIB, NS, OTHER, A, B, C, MemoryPages, P, Store, store_of, two_stores
from tests.support.newer import make_corrupt
from tests.support.pages import make_page

NOW = 1_700_000_000_000_000_000
SECOND = 10**9


@pytest.fixture(autouse=True)
def seeded():
    random.seed(1)


@pytest.fixture(params=["memory", pytest.param("lmdb", marks=pytest.mark.slow)])
def backend(request, tmp_path):
    with closing(
        MemoryPages() if request.param == "memory" else Pages(LMDBBackend(tmp_path / "kv", 64 * MIB))
    ) as found:
        yield found


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


def sampler(policy="lru"):
    policy = POLICIES[policy]()
    return Sampler(lambda keys, leaves: policy.ranks(leaves))


def taken(victims, transaction, at_most=10**6):
    """Delete the next victims; their keys, in order."""
    found = []
    while len(found) < at_most and (victim := victims.next()) is not None:
        found.append(victim.key)
        assert transaction.delete(victim.key)
        victims.taken(victim)
    return found


# -- the order --------------------------------------------------------------------------------------------------------

ORDERS = {
    "lru": lambda usage, end: (usage.last_used, -end),
    "lfu": lambda usage, end: (usage.uses, usage.last_used, -end),
    "longest_first": lambda usage, end: (-end, usage.last_used),
    "priority": lambda usage, end: (usage.priority, usage.last_used, -end),
}


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("seed", range(2))
def test_of_up_to_256_leaves_the_order_is_exact_and_a_page_comes_when_none_follows_it(backend, policy, seed):
    chance, order = random.Random(seed), ORDERS[policy]
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
    choose = sampler(policy)
    # in several transactions
    while True:
        with backend.update() as transaction:
            found = taken(choose.victims(transaction), transaction, 50)
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
        found = [age[key] for key in taken(sampler().victims(transaction), transaction, 500)]
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
        first = [sampler().victims(view).next().namespace for _ in range(300)]
    # 75 +- 7.5; were each namespace as likely as the other, it would be 150
    assert 22 < first.count(NS) < 128


def test_all_are_taken_in_the_end_however_many_there_are_and_each_once(backend):
    keys = fill(backend, 200) + fill(backend, 100, space=OTHER)
    choose = sampler()
    found = []
    while True:
        with backend.update() as transaction:
            some = taken(choose.victims(transaction), transaction, 80)
        found += some
        if not some:
            break
    assert len(found) == 300
    assert set(found) == set(keys)
    # the last ones in the exact order
    assert found[-1] == keys[199]


def test_what_is_spared_is_not_chosen_again_in_this_transaction(backend):
    for n in (50, 400):
        keys = set(fill(backend, n, first=1000 * n))
        choose = sampler()
        with backend.update() as transaction:
            victims = choose.victims(transaction)
            spared = set()
            for _ in range(40):
                victim = victims.next()
                assert victim.key not in spared
                spared.add(victim.key)
                victims.spare(victim)
            assert set(taken(victims, transaction)) == keys - spared
        with backend.update() as transaction:
            assert set(taken(choose.victims(transaction), transaction)) == spared


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
    choose = sampler()
    # ranked, and nothing is done with it
    with backend.view() as view:
        victims = choose.victims(view)
        changed = [victims.next().key for _ in range(20)]
    with backend.update() as transaction:
        for number, key in enumerate(changed):
            CHANGES[what](transaction, key, number)
    with backend.update() as transaction:
        found = taken(choose.victims(transaction), transaction, n // 2)
    assert len(found) == n // 2
    assert not set(found) & set(changed)


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_in_the_same_transaction_is_not_evicted(backend, what):
    fill(backend, 100)
    with backend.update() as transaction:
        victims = sampler().victims(transaction)
        first = victims.next()
        victims.offer(first.row, first.leaf.pack())
        CHANGES[what](transaction, first.key, 1)
        assert first.key not in taken(victims, transaction, 50)


@pytest.mark.slow
def test_an_engine_does_not_evict_what_another_one_uses_or_pins_or_continues(tmp_path):
    with two_stores(tmp_path / "kv") as (one, two):
        sequences = [[i] * P for i in range(300)]
        one.engine.commit([page for tokens in sequences for page in one.announce(tokens, 10)])
        # what comes first in the order, as far as one knows
        tried = one.engine.evict(0, dry_run=True).pages
        assert len(tried) == 300
        of = {page_keys(NS, as_tokens(tokens), P)[0].hex(): tokens for tokens in sequences}
        first = [of[key] for key in tried[:9]]
        for tokens in first[:3]:
            assert two.fetch(tokens) == 1
        two.engine.commit([])
        for tokens in first[3:6]:
            assert two.engine.pin(NS, as_tokens(tokens), P, pinned=True) == P
        for tokens in first[6:]:
            assert two.put([*tokens, *A[:P]], 10) == 1
        used = one.engine.used()[0]
        one.engine.evict(used.bytes // 2)
        assert 0 < one.engine.used()[0].entries < used.entries
        for store in (one, two):
            assert all(store.match(tokens) == P for tokens in first)
            assert store.match([*first[8], *A[:P]]) == 2 * P


def test_uses_that_are_not_written_yet_count():
    with store_of(options={"write_behind": False}) as store:
        for tokens in (A, B, C):
            store.put(tokens[:P])
        store.fetch(A[:P])
        with store.backend.view() as view:
            before = {key: usage.last_used for key, _, usage in view.scan()}
        evicted = store.engine.evict(0, dry_run=True).pages
        first, *_, last = (bytes.fromhex(key) for key in evicted)
        path = store.engine.match(NS, as_tokens(A[:P]), P)
        assert last == path.pages[0].key
        assert first == min(before, key=lambda key: (key == last, before[key]))


def test_a_time_in_the_future_is_not_believed():
    backend = MemoryPages()
    with backend.update() as transaction:
        far = put(transaction, 1, Usage(time.time_ns() + 10**18))
        old = put(transaction, 2, Usage(NOW))
    with store_of(backend) as store:
        store.put(A[:P])
        assert [bytes.fromhex(key) for key in store.engine.evict(0).pages][:2] == [old, far]


def test_kept_pages_go_last_and_expired_ones_first(backend):
    with backend.update() as transaction:
        keys = [put(transaction, i, Usage(NOW + i, expires=1 + i if i % 10 == 5 else 0)) for i in range(200)]
    kept = set(keys[:200:10])

    def rank(found, leaves):
        return [KEPT if key in kept else leaves["last_used"][i] / 1e9 for i, key in enumerate(found)]

    with backend.update() as transaction:
        found = taken(Sampler(rank).victims(transaction), transaction)
    assert found[:20] == keys[5::10]
    assert found[-20:] == keys[::10]
    assert len(found) == 200


def test_victims_are_found_after_any_number_of_pages_that_are_in_use(backend):
    """The leaves with the first keys are spared, so many that a pool would have nothing else."""
    with backend.update() as transaction:
        keys = sorted(put(transaction, i, Usage(NOW + i)) for i in range(700))
    with backend.update() as transaction:
        victims = sampler().victims(transaction)
        n_spared, found = 0, []
        while (victim := victims.next()) is not None:
            if victim.key in keys[:600]:
                victims.spare(victim)
                n_spared += 1
            else:
                assert transaction.delete(victim.key)
                victims.taken(victim)
                found.append(victim.key)
    assert (n_spared, sorted(found)) == (600, keys[600:])


# -- rows that are wrong ----------------------------------------------------------------------------------------------


def write(backend, *rows):
    """Write rows as no engine would; None deletes one."""
    with backend.rows.update() as draft:
        for row, value in rows:
            if value is None:
                draft.delete(row)
            else:
                draft.put(row, value)


def count_rows(backend):
    with backend.view() as view:
        return view.counts()


def damaged(_):
    return b"garbage"


def deleted(_):
    return None


def too_low(count):
    return count._replace(leaves=0).pack()


def too_high(count):
    return count._replace(leaves=10**9).pack()


@pytest.mark.parametrize("spoiled", [damaged, deleted, too_low, too_high])
@pytest.mark.parametrize("which", ["all", "namespaces", "both"])
def test_victims_are_found_whatever_the_counts_say(backend, spoiled, which):
    keys = fill(backend, 200) + fill(backend, 100, space=OTHER)
    rows = count_rows(backend)
    chosen = [row for row in rows if which == "both" or (row == keyspace.COUNT) == (which == "all")]
    write(backend, *((row, spoiled(rows[row])) for row in chosen))
    choose = sampler()
    with backend.update() as transaction:
        found = taken(choose.victims(transaction), transaction, 250)
    with backend.update() as transaction:
        found += taken(choose.victims(transaction), transaction)
    assert sorted(found) == sorted(keys)


def test_counts_of_namespaces_that_have_nothing_hide_no_leaves(backend):
    keys = fill(backend, 300)
    forged = [(keyspace.count_row(bytes([i]) * 16, bytes([i]) * 32), Count(5, leaves=10**6).pack()) for i in range(90)]
    write(backend, *forged)
    with backend.update() as transaction:
        assert sorted(taken(sampler().victims(transaction), transaction)) == sorted(keys)


def test_leaf_rows_of_pages_that_are_gone_are_dropped_and_an_eviction_comes_to_an_end():
    for n_there in (10, 100):
        with store_of() as store:
            for i in range(n_there):
                store.put([i] * P, 0)
            gone = [random.randbytes(32) for _ in range(150)]
            leaf = Leaf(NS, 1, 0, 0, P, P, 0, 1, 0, 0).pack()
            write(store.backend, *((leaf_row(space, key), leaf) for key in gone for space in (NS, OTHER)))
            assert len(store.engine.evict(0).pages) == n_there
            assert store.stored_keys() == set()
            with store.backend.view() as view:
                assert view.rows.ranges([keyspace.everything(keyspace.LEAF)])[0] == []
            store.backend.reindex()


def test_a_leaf_row_that_cannot_be_read_is_passed_over_until_it_is_mended():
    with store_of() as store:
        for tokens in (A, B, C):
            store.put(tokens[:P])
        with store.backend.view() as view:
            rows = view.rows.ranges([keyspace.everything(keyspace.LEAF)])[0]
        write(store.backend, (rows[0].key, rows[0].value[:-1]))
        assert len(store.engine.evict(0).pages) == 2
        assert store.engine.deleter.repair(store.engine.check()) is not None
        assert len(store.engine.evict(0).pages) == 1


@pytest.mark.parametrize("n", [40, 400])
def test_a_page_whose_record_is_damaged_is_evicted_like_others(n):
    backend = MemoryPages()
    keys = fill(backend, n)
    make_corrupt(backend, keys[3])
    with store_of(backend) as store:
        store.engine.evict(0)
        assert store.stored_keys() == set()
        with backend.view() as view:
            assert view.rows.ranges([keyspace.everything(keyspace.LEAF)])[0] == []
            assert view.count() == Count()


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [None, 0, 10**6])
@pytest.mark.parametrize("n", [100, 300])
def test_a_group_takes_only_its_own(backend, said, n):
    mine, third = fill(backend, n), b"t" * 32
    others = fill(backend, n, space=OTHER)
    more = fill(backend, 20, space=third)
    choose = sampler()
    with backend.update() as transaction:
        group = Group(b"mine", {NS: n if said is None else said, third: 20 if said is None else said})
        found = taken(choose.victims(transaction, group), transaction)
        assert sorted(found) == sorted(mine + more)
    with backend.update() as transaction:
        assert taken(choose.victims(transaction, Group(b"none", {})), transaction) == []
        assert sorted(taken(choose.victims(transaction), transaction)) == sorted(others)


@pytest.mark.parametrize("quota", [Quota(namespace=50_000), Quota(salt=50_000)])
def test_a_quota_evicts_of_the_namespaces_that_it_is_for_and_of_no_others(quota):
    mine, same, other = (Namespace({"salt": salt, "model": m}) for salt, m in (("a", "x"), ("a", "y"), ("b", "x")))
    backend = MemoryPages()
    with closing(Store(backend, quota=quota)) as store:
        n = 0

        def put_into(space, times):
            nonlocal n
            for _ in range(times):
                n += 1
                store.settings = space.canonical
                assert store.put([n] * P, namespace=space.key) == 1

        put_into(other, 40)
        put_into(same, 30)
        put_into(mine, 60)
        with backend.view() as view:
            mine, same, other = (view.count(space.key) for space in (mine, same, other))
        assert other.pages == 40
        assert mine.quota_bytes <= 50_000
        assert mine.pages >= 48
        # the other namespace of the salt was used before
        assert same.pages == (30 if quota.salt is None else 0)


def test_the_pools_of_few_groups_are_kept(backend):
    fill(backend, 300)
    choose = sampler()
    with backend.view() as view:
        for i in range(200):
            assert choose.victims(view, Group(b"%d" % i, {NS: 300})).next() is not None
    assert len(choose._pools) <= 64
    assert all(len(pool) <= POOL for pool in choose._pools.values())
