"""The eviction policies: how they rank, what the adaptive one learns and keeps; in the end its parts."""

from __future__ import annotations

import random
import time
from hashlib import blake2b

import numpy as np
import pytest

from prefixstore.engine.adaptive_policy import Adaptive
from prefixstore.engine.duel import Access, Duel, Mode
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.ghosts import GHOSTS_PER_PAGE, GhostTable
from prefixstore.engine.hazards import AGES, CLASSES, Hazards, age_bin
from prefixstore.engine.index import Page
from prefixstore.engine.keyspace import LEAVES, Leaf
from prefixstore.format.saved_state import pack_state
from prefixstore.traces.replay import InEngine

NS = b"n" * 32
SECOND = 10**9


def name(*what):
    return blake2b(repr(what).encode(), digest_size=32).digest()


def page(number, *, last_used=0, compute_us=0, stored_bytes=1, **facts):
    """A page of one token."""
    return Page(name(number), NS, NS, 0, bytes(4), 1, stored_bytes, compute_us, 0, last_used, **facts)


def ranks(policy, pages):
    leaves = [
        Leaf(NS, one.last_used, 0, one.stored_bytes, one.end, 1, one.compute_us, one.uses, one.priority, one.page_class)
        for one in pages
    ]
    return policy.ranks(np.frombuffer(b"".join(leaf.pack() for leaf in leaves), LEAVES)).tolist()


def by_what_was_learned():
    """The policy in the mode in which worth decides."""
    policy = Adaptive()
    policy._duel.mode = Mode.LEARNED
    return policy


def policy_of(cache):
    return cache._engine._catalog.policy


def test_policies_have_names_and_each_engine_gets_its_own_instance():
    assert list(POLICIES) == ["adaptive", "lru", "lfu", "longest_first", "priority"]
    assert all(POLICIES[policy]().name == policy for policy in POLICIES)
    assert all(make() is not make() for make in POLICIES.values())


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", lambda page: (page.last_used, -page.end)),
        ("lfu", lambda page: (page.uses, page.last_used, -page.end)),
        ("longest_first", lambda page: (-page.end, page.last_used)),
        ("priority", lambda page: (page.priority, page.last_used, -page.end)),
    ],
)
def test_a_simple_policy_ranks_by_what_its_name_says(policy, order):
    chance, pages = random.Random(1), []
    for i in range(300):
        pages.append(page(i, last_used=i % 100, uses=chance.randint(1, 9), priority=chance.randint(-9, 9)))
        pages[-1].start = i % 50
    found = [(rank, one.last_used, -one.end) for rank, one in zip(ranks(POLICIES[policy](), pages), pages, strict=True)]
    by_rank = [one for _, one in sorted(zip(found, pages, strict=True), key=lambda each: each[0])]
    assert list(map(order, by_rank)) == sorted(map(order, pages))


@pytest.mark.parametrize("policy", ["lfu", "adaptive"])
def test_uses_before_an_eviction_count(policy):
    with InEngine(policy, 10) as cache:
        for _ in range(4):
            cache.request([1])
        cache._engine.commit([])
        cache._engine.evict(0)
        for block in (1, 2):
            cache.request([block])
        assert [cache.ask([block]).pages[0].uses for block in (1, 2)] == [6, 2]


# -- the policy that learns --------------------------------------------------------------------------------------------


def scan(chance):
    """Documents of ten blocks are used again after about 100 prompts, those of the scan never."""
    for i in range(700):
        document = chance.randrange(15) if i % 4 == 0 else 100 + i
        yield [document * 10 + j for j in range(10)]


def loop(_):
    for i in range(500):
        yield [i % 20 * 5 + j for j in range(5)]


def window(chance):
    """It moves on: what was used last is used next."""
    now = 100
    for _ in range(600):
        now += chance.random() < 0.5
        yield [(now - min(int(chance.expovariate(1 / 8)), 100)) * 5 + j for j in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "pages", "at_least"), [(scan, 120, 2.0), (loop, 50, 500.0), (window, 100, 0.97)])
def test_it_learns_what_is_used_again_and_goes_by_last_use_where_that_is_better(trace, pages, at_least):
    hits = {}
    for policy in ("adaptive", "lru"):
        with InEngine(policy, pages) as cache:
            hits[policy] = sum(map(cache.request, trace(random.Random(3))))
    # of a loop that does not fit, LRU has nothing
    assert hits["adaptive"] > at_least * max(hits["lru"], 1)


def test_the_age_of_a_page_is_the_number_of_prompts_since_its_last_use_also_where_few_are_remembered(monkeypatch):
    monkeypatch.setattr("prefixstore.engine.adaptive_policy.TIMES_KEPT", 100)
    policy = Adaptive()
    start, first = policy._ns, policy._clock
    chance, times, now = random.Random(8), [], start
    for _ in range(950):
        now += chance.randint(1, SECOND)
        times.append(now)
        policy.looked_up(NS, [], 1, now)
    assert len(policy._times) < 200
    for i in range(800, 950):
        # of any time between two prompts it is the clock of the first one
        for when in (times[i], (times[i + 1] if i < 949 else times[i] + SECOND) - 1):
            assert policy._clock_at(when) == first + i + 1
    asked = np.array([start - SECOND * 10**6, *times, times[-1] + SECOND], np.int64)
    assert policy._clocks(asked).tolist() == [policy._clock_at(int(when)) for when in asked]
    assert sorted(policy._clocks(asked)) == policy._clocks(asked).tolist()
    # those that are not remembered are estimated
    assert policy._clock_at(times[400]) == pytest.approx(first + 401, abs=60)


def test_among_similar_pages_the_largest_is_evicted_first_and_the_slowest_to_compute_last():
    policy = by_what_was_learned()
    pages = []
    for i, (size, us) in enumerate([(100, 1000), (1, 1000), (1, 1500), (1, 10**9)]):
        pages.append(page(i, compute_us=us, stored_bytes=size, last_used=policy._ns))
        policy.added(NS, pages[-1])
    policy._us_per_token = 1000.0
    found = ranks(policy, pages)
    assert found[0] < found[1] < found[2] <= found[3]
    # a measured time far from the average is clipped
    assert found[3] == pytest.approx(2 * found[1])


def test_a_page_belongs_to_the_prompt_of_the_page_before_it():
    policy = Adaptive()
    now = time.time_ns()
    policy.looked_up(NS, [page(1)], 100, now + SECOND)
    policy.looked_up(NS, [], 2, now + 2 * SECOND)
    of_first, of_latest = page(2), page(3)
    of_first.parent = name(1)
    for one in (of_first, of_latest):
        policy.added(NS, one)
    # so far from the end of its prompt, and so near
    assert (of_first.page_class, of_latest.page_class) == (1 + 4 * 3, 1 + 4 * 1)


@pytest.mark.slow
def test_what_was_learned_is_taken_over():
    with InEngine("adaptive", 120) as cache:
        for blocks in scan(random.Random(5)):
            cache.request(blocks)
        old, new = policy_of(cache), Adaptive()
    old._duel.mode = Mode.LFU
    packed = pack_state(old.parts())
    assert len(packed) < 2 << 20
    # the other process has seen prompts of its own before it reads the note
    for i in range(30):
        new.looked_up(NS, [], i, new._ns + SECOND)
    assert new.load(packed)
    old._learn(old._pages)
    assert new._hazards.worth == pytest.approx(old._hazards.worth, rel=0.1)
    assert new.mode is Mode.LFU
    assert [new._clock - (last & 0xFFFFFFFF) for last in new._samples.values()] == [
        old._clock - (last & 0xFFFFFFFF) for last in old._samples.values()
    ]


@pytest.mark.parametrize("policy", ["adaptive", "lfu"])
def test_damaged_notes_are_ignored(policy):
    with InEngine(policy, 20) as cache:
        for i in range(200):
            cache.request([i % 7, 100 + i % 30])
        packed = pack_state(policy_of(cache).parts())
    chance, fresh = random.Random(6), POLICIES[policy]()
    for _ in range(60):
        bad = bytearray(packed)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        assert not fresh.load(bytes(bad))
    for bad in (b"", b"garbage", packed[:-1], packed + b"x", packed[: len(packed) // 2]):
        assert not fresh.load(bad)
    if policy == "lfu":
        assert not Adaptive().load(packed)
    assert fresh.load(packed)
    assert not POLICIES["lru"]().load(packed)


# -- the parts of it ---------------------------------------------------------------------------------------------------


def test_ghosts_survive_the_growth_of_their_table_and_a_dump():
    ghosts, now = GhostTable(), 1 << 24
    keys = [name(i) for i in range(2000)]
    for i, key in enumerate(keys):
        ghosts.remember(key, i % 30 + 1, now + i)

    def kept(table, later=0):
        found = [table.recall(key, now + later + 2000) for key in keys]
        return sum(
            one is not None and one.uses == i % 30 + 1 and abs(one.clock - now - later - i) <= 64
            for i, one in enumerate(found)
        )

    assert kept(ghosts) > 1950
    ghosts.grow(100_000)
    assert len(ghosts) >= GHOSTS_PER_PAGE * 100_000
    assert kept(ghosts) > 1950
    other = GhostTable()
    other.load(ghosts.dump(now + 2000), 5000)
    assert kept(other, 5000) > 1950
    assert sum(ghosts.recall(name("never", i), now) is not None for i in range(1000)) < 20


def test_the_worth_of_a_page_is_the_best_rate_of_hits_over_all_times_to_wait():
    hazards = Hazards()

    def learned(n_waiting, age):
        hazards.learn(np.zeros(n_waiting, np.int64), np.full(n_waiting, age))
        return hazards.worth.reshape(CLASSES, AGES)[0]

    for _ in range(10_000):
        hazards.observe(0, 100, hit=True)
    # all are used again at an age of 100 prompts: the nearer that is, the higher is the rate
    alone = learned(0, 0)
    assert alone[0] < alone[age_bin(50)] < alone[age_bin(80)]
    assert alone[0] == pytest.approx(1 / 100, rel=0.3)
    assert alone[age_bin(5000)] < alone[0]
    # those that were not used again yet lower it
    among_others = learned(100_000, 1000)
    assert among_others[0] < alone[0] / 5
    # half as many are sampled from here on
    hazards.halve()
    assert learned(50_000, 1000)[0] == pytest.approx(among_others[0], rel=0.1)


@pytest.mark.parametrize("best", [Mode.LRU, Mode.LFU])
def test_the_order_that_has_the_most_hits_wins_the_duel(best):
    duel, chance = Duel(), random.Random(7)
    duel.resize(400)
    # what was learned says the opposite of what would help
    worth = np.tile(np.arange(AGES, dtype=np.float64) + 1, CLASSES)
    for clock in range(8_000):
        if best is Mode.LRU:
            number, uses = clock // 40 + chance.randrange(80), 1
        else:
            number = chance.randrange(80) if chance.random() < 0.3 else 1000 + clock
            uses = 20 if number < 1000 else 1
        duel.access(Access(number, 0, uses, clock, 1, 1.0), worth)
    assert duel.mode is best
