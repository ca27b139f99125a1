"""Which page is evicted first."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixstore.engine.adaptive_policy import AGES, GHOSTS_PER_PAGE, SAMPLES, Adaptive, GhostTable, Hazards, age_of
from prefixstore.engine.eviction import POLICIES, Ordering, VictimQueue, lfu, longest_first, lru, priority
from prefixstore.engine.index import Index, Page

NS = b"n" * 32


def page(key, parent=NS, last_used=0, start=0, **fields):
    tokens = key if len(key) > 1 else key * 16
    return Page(key, parent, NS, start, tokens, 1, 1, 0, 0, last_used, may_be_victim=True, **fields)


def queue_of(*pages, policy=None):
    index = Index()
    for each in pages:
        assert index.add(each)
    queue = VictimQueue(index, policy or Ordering(lru))
    for each in pages:
        queue.push(each)
    return index, queue


def drain(index, queue):
    """Evict all that may be evicted, as the committer does."""
    order = []
    for victim in queue.victims():
        order.append(victim.key)
        index.remove(victim.key)
        parent = index.get(victim.parent)
        if parent is not None and parent.is_leaf:
            queue.push(parent)
    return order


def name(*what):
    return blake2b(repr(what).encode(), digest_size=16).digest()


class Cache:
    """A cache of `capacity` pages of one token under a policy; time is counted in prompts."""

    def __init__(self, policy, capacity):
        self.policy, self.capacity, self.now = policy, capacity, 0
        self.index = Index()
        self.queue = VictimQueue(self.index, policy)

    def prompt(self, *blocks):
        self.now += 1
        keys = [name(blocks[: i + 1]) for i in range(len(blocks))]
        here = [self.index.get(key) for key in keys if key in self.index]
        self.policy.looked_up(NS, here)
        for each in here:
            each.hits += 1
            each.last_used = self.now
        news = []
        for i in range(len(here), len(blocks)):
            parent = keys[i - 1] if i else NS
            new = Page(keys[i], parent, NS, i, keys[i][:4], 1, 1, 0, self.now, self.now, may_be_victim=True)
            assert self.index.add(new)
            self.policy.added(new)
            news.append(new)
        victims = self.queue.victims()
        while len(self.index) > self.capacity:
            victim = next(victims)
            self.policy.evicted(victim)
            self.index.remove(victim.key)
            parent = self.index.get(victim.parent)
            if parent is not None and parent.is_leaf:
                self.queue.push(parent)
        victims.close()
        for new in news:
            self.queue.push(new)
        return len(here)


# -- the simple policies -----------------------------------------------------------------------------------------------


def test_lru_evicts_the_oldest_use_first_and_among_equal_uses_the_deepest():
    assert lru(page(b"a", last_used=1)) < lru(page(b"b", last_used=2))
    assert lru(page(b"a", last_used=1, start=256)) < lru(page(b"b", last_used=1, start=0))


def test_lfu_evicts_the_least_often_used_first_and_among_those_the_oldest_use():
    assert lfu(page(b"a", last_used=9, hits=1)) < lfu(page(b"b", last_used=1, hits=2))
    assert lfu(page(b"a", last_used=1, hits=2)) < lfu(page(b"b", last_used=2, hits=2))


def test_longest_first_evicts_the_end_of_the_longest_prompt_first():
    assert longest_first(page(b"a", last_used=9, start=512)) < longest_first(page(b"b", last_used=1, start=256))
    assert longest_first(page(b"a", last_used=1, start=256)) < longest_first(page(b"b", last_used=2, start=256))


def test_priority_evicts_the_lowest_priority_first_and_among_equals_the_oldest_use():
    assert priority(page(b"a", last_used=9, priority=-1)) < priority(page(b"b", last_used=1))
    assert priority(page(b"a", last_used=1, priority=3)) < priority(page(b"b", last_used=2, priority=3))


def test_policies_have_names_and_each_engine_gets_its_own_instance():
    assert list(POLICIES) == ["adaptive", "lru", "lfu", "longest_first", "priority"]
    assert all(make() is not make() for make in POLICIES.values())


def test_lfu_counts_uses_before_an_eviction():
    policy = POLICIES["lfu"]()
    policy.evicted(page(name("often"), hits=4))
    back, other = page(name("often")), page(name("other"))
    policy.added(back)
    policy.added(other)
    assert [lfu(back)[0], lfu(other)[0]] == [5, 0]
    policy.evicted(back)
    policy.added(back)
    assert lfu(back)[0] == 6


# -- the queue ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_children_are_evicted_before_their_parents(policy):
    index, queue = queue_of(
        page(b"a", last_used=1),
        page(b"b", b"a", last_used=9, start=4),
        page(b"c", b"a", last_used=5, start=4),
        page(b"d", last_used=7),
        policy=POLICIES[policy](),
    )
    order = drain(index, queue)
    assert sorted(order) == [b"a", b"b", b"c", b"d"]
    assert order.index(b"a") > max(order.index(b"b"), order.index(b"c"))


def test_lru_gives_the_expected_order_of_a_small_tree():
    index, queue = queue_of(
        page(b"a", last_used=1),
        page(b"b", b"a", last_used=9, start=4),
        page(b"c", b"a", last_used=5, start=4),
        page(b"d", last_used=7),
    )
    assert drain(index, queue) == [b"c", b"d", b"b", b"a"]


def test_a_page_that_was_used_meanwhile_is_evicted_later():
    pages = [page(bytes([i]), last_used=i) for i in range(4)]
    index, queue = queue_of(*pages)
    pages[0].last_used = 10
    assert drain(index, queue) == [b"\1", b"\2", b"\3", b"\0"]


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_pages_are_skipped_until_they_are_unpinned(policy):
    pages = [page(bytes([i]), last_used=i, pinned=i < 2) for i in range(4)]
    index, queue = queue_of(*pages, policy=POLICIES[policy]())
    assert sorted(drain(index, queue)) == [b"\2", b"\3"]
    assert drain(index, queue) == []
    pages[1].pinned = False
    queue.push(pages[1])
    assert drain(index, queue) == [b"\1"]


def test_a_page_that_was_put_back_is_given_out_again():
    _index, queue = queue_of(page(b"a"), page(b"b", last_used=1))
    victims = queue.victims()
    first = next(victims)
    first.last_used = 5
    queue.push(first)
    assert [next(victims).key, next(victims).key] == [b"b", b"a"]


def test_pages_that_are_gone_or_have_children_are_skipped():
    a, b, c = page(b"a"), page(b"b", last_used=1), page(b"c", last_used=2)
    index, queue = queue_of(a, b, c)
    index.remove(b"b")
    index.add(page(b"d", b"a", last_used=3, start=4))
    assert [victim.key for victim in queue.victims()] == [b"c"]


def test_the_queue_does_not_grow_with_uses():
    pages = [page(bytes([i]), last_used=i) for i in range(10)]
    index, queue = queue_of(*pages)
    chance = random.Random(1)
    for now in range(10, 5000):
        used = chance.choice(pages)
        used.last_used = now
        queue.push(used)
    assert len(queue._heap) <= 64 + 4 * len(pages)
    assert drain(index, queue) == [each.key for each in sorted(pages, key=lru)]


class Reversing(Ordering):
    """A policy whose order is reversed without a use."""

    drifts = True
    sign = 1

    def __init__(self):
        super().__init__(lambda each: (self.sign * each.last_used,))


def test_if_the_policy_drifts_pages_are_ranked_again_after_one_in_sixteen():
    pages = [page(bytes([i]), last_used=i) for i in range(100)]
    policy = Reversing()
    _, queue = queue_of(*pages, policy=policy)
    victims = queue.victims()
    before = [next(victims).last_used for _ in range(10)]
    policy.sign = -1
    after = [next(victims).last_used for _ in range(40)]
    assert before == list(range(10))
    assert after[-10:] == sorted(after[-10:], reverse=True)
    assert after[-1] > 50


@st.composite
def forests(draw):
    """Pages in a trie, a few of them pinned."""
    pages = []
    for i in range(draw(st.integers(1, 25))):
        before = draw(st.sampled_from([None, *range(i)]))
        parent, start = (NS, 0) if before is None else (pages[before].key, pages[before].start + 1)
        fields = {name: draw(st.integers(0, 5)) for name in ("last_used", "hits", "priority")}
        pages.append(page(bytes([i]) * 4, parent, start=start, pinned=draw(st.integers(0, 9)) == 0, **fields))
    return pages


@settings(deadline=None)
@given(forests(), st.sampled_from(sorted(POLICIES)))
def test_each_victim_is_the_leaf_with_the_lowest_rank(pages, name_of):
    policy = POLICIES[name_of]()
    index, queue = queue_of(*pages, policy=policy)
    here = {each.key: each for each in pages}
    for key in drain(index, queue):
        leaves = [each for each in here.values() if not any(other.parent == each.key for other in here.values())]
        lowest = min((each for each in leaves if not each.pinned), key=lambda each: (policy.rank(each), each.key))
        assert key == lowest.key
        del here[key]
    leaves = [each for each in here.values() if not any(other.parent == each.key for other in here.values())]
    assert all(each.pinned for each in leaves)


# -- the policy that learns --------------------------------------------------------------------------------------------


def test_before_anything_is_learned_recency_and_uses_decide():
    policy = Adaptive()
    day = 86_400 * 10**9
    now = policy._prompt.ns
    old, new = page(b"a" * 16, last_used=now - 9 * day), page(b"b" * 16, last_used=now - day)
    used = page(b"c" * 16, last_used=now - 9 * day, hits=5)
    assert policy.rank(old) < policy.rank(new)
    assert policy.rank(old) < policy.rank(used)
    for each in (old, new, used):
        each.policy_data = None
    policy.looked_up(NS, [new])
    assert policy.rank(old) < policy.rank(new)


def test_a_use_by_another_process_counts():
    policy = Adaptive()
    seen = page(b"a" * 16, last_used=policy._prompt.ns)
    policy.added(seen)
    for _ in range(1000):
        policy.looked_up(NS, [])
    before = policy.rank(seen)
    seen.last_used = policy._prompt.ns + 10**9
    assert policy.rank(seen) > before


def test_among_similar_pages_the_largest_is_evicted_first_and_the_slowest_to_compute_last():
    policy = Adaptive()
    small, large, slow = (page(bytes([i]) * 16) for i in range(3))
    large.stored_bytes = 100
    for each in (small, large, slow):
        each.compute_us = 1000
    slow.compute_us = 1500
    for each in (small, large, slow):
        policy.added(each)
    assert policy.rank(large) < policy.rank(small) < policy.rank(slow)


def test_a_measured_time_far_from_the_average_is_clipped():
    policy = Adaptive()
    usual = page(b"u" * 16)
    policy._us_per_token = 10.0
    odd = page(b"o" * 16)
    odd.compute_us = 10**9
    assert policy._gain(odd) == 2 * policy._gain(usual)


def test_it_learns_that_the_pages_of_a_scan_are_not_used_again():
    adaptive, by_use = (Cache(POLICIES[name_of](), capacity=120) for name_of in ("adaptive", "lru"))
    hits = {adaptive: 0, by_use: 0}
    chance = random.Random(3)
    for i in range(3000):
        # documents of ten blocks are used again after about 100 prompts, those of the scan never
        document = chance.randrange(15) if i % 4 == 0 else ("scan", i)
        blocks = [(document, j) for j in range(10)]
        for cache in hits:
            hits[cache] += cache.prompt(*blocks)
    assert hits[adaptive] > 3 * hits[by_use]


def test_it_keeps_a_part_of_a_loop_that_does_not_fit():
    adaptive, by_use = (Cache(POLICIES[name_of](), capacity=50) for name_of in ("adaptive", "lru"))
    hits = {adaptive: 0, by_use: 0}
    for i in range(3000):
        for cache in hits:
            hits[cache] += cache.prompt(*((i % 20, j) for j in range(5)))
    assert hits[by_use] == 0
    assert hits[adaptive] > 3000 * 5 * 0.3


def test_a_page_that_is_stored_again_after_its_eviction_keeps_its_uses():
    cache = Cache(Adaptive(), capacity=4)
    for _ in range(3):
        cache.prompt("a")
    policy, key = cache.policy, name(("a",))
    gone = cache.index.get(key)
    policy.evicted(gone)
    cache.index.remove(key)
    cache.prompt("a")
    assert cache.index.get(key).policy_data.uses == 4


def test_its_memory_is_bounded():
    cache = Cache(Adaptive(), capacity=100)
    for i in range(6000):
        cache.prompt(*((i, j) for j in range(3)))
    policy = cache.policy
    assert len(policy._samples) <= SAMPLES
    assert len(policy._recent) <= 3
    assert policy._ghosts._table.itemsize * len(policy._ghosts._table) == 8 << GhostTable._BASE
    policy.prepare(100_000)
    assert len(policy._ghosts._table) < 2 * GHOSTS_PER_PAGE * 100_000


def test_ghosts_survive_the_growth_of_their_table():
    ghosts = GhostTable()
    keys = [name(i) for i in range(2000)]
    for i, key in enumerate(keys):
        ghosts.remember(key, i % 200 + 1, i)
    before = [ghosts.recall(key) for key in keys]
    ghosts.grow(60_000)
    assert [ghosts.recall(key) for key in keys] == before
    kept = sum(known == (i % 200 + 1, i) for i, known in enumerate(before))
    assert kept > 1800
    assert ghosts.recall(name("never")) is None


def test_fewer_samples_reach_as_far_when_the_index_grows():
    policy = Adaptive()
    policy.prepare(100)
    assert policy._share == 1 << 32
    policy.prepare(50_000)
    assert policy._share <= 1 << 30


def test_ages_are_half_octaves():
    assert [age_of(prompts) for prompts in (-1, 0, 1, 3, 7)] == [0, 0, 2, 4, 6]
    assert age_of(1e30) == AGES - 1


def test_the_worth_of_a_page_is_the_best_rate_of_hits_over_all_times_to_wait():
    hazards = Hazards()
    for _ in range(10_000):
        hazards.observe(0, 100, hit=True)
    hazards.learn((), 0)
    # all are used again at an age of 100 prompts: the nearer that is, the higher is the rate
    worth = hazards.worth[0]
    assert worth[0] < worth[age_of(50)] < worth[age_of(80)]
    assert worth[0] == pytest.approx(1 / 100, rel=0.3)
    assert worth[age_of(5000)] < worth[0]


def test_pages_that_were_not_used_again_yet_lower_the_worth_of_their_class():
    alone, among_others = Hazards(), Hazards()
    for each in (alone, among_others):
        for _ in range(500):
            each.observe(0, 10, hit=True)
    alone.learn([], 1000)
    among_others.learn([(0, 0)] * 5000, 1000)
    assert among_others.worth[0][0] < alone.worth[0][0] / 5


def test_where_nearly_all_pages_are_used_again_soon_the_order_is_that_of_last_use():
    policy = Adaptive()
    for i in range(200):
        policy.looked_up(NS, [])
        policy.added(page(name(i)))
    for _ in range(1000):
        policy._hazards.observe(0, 3, hit=True)
    policy.prepare(100)
    old, new = page(name("old"), hits=50), page(name("new"))
    policy.looked_up(NS, [old])
    policy.looked_up(NS, [])
    policy.added(new)
    assert policy.rank(old) < policy.rank(new)


def test_when_the_share_of_samples_is_halved_the_counts_are_halved():
    hazards = Hazards()
    for _ in range(1000):
        hazards.observe(0, 10, hit=True)
    hazards.learn([(0, 0)] * 1000, 1000)
    before = hazards.worth[0][0]
    hazards.halve()
    hazards.learn([(0, 0)] * 500, 1000)
    assert hazards.worth[0][0] == pytest.approx(before, rel=0.1)
