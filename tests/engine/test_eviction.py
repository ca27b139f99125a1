"""The eviction policies: how they rank, what the adaptive one learns and keeps; in the end its parts."""

import random
from hashlib import blake2b

import numpy as np
import pytest

from prefixstore.engine.adaptive_policy import Adaptive, Mode
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.keyspace import LEAVES, Leaf
from prefixstore.engine.page import Page
from prefixstore.traces.replay import InEngine

NS = b"n" * 32
SECOND = 10**9


def name(*what):
    return blake2b(repr(what).encode(), digest_size=32).digest()


def page(number, *, last_used=0, stored_bytes=1, **facts):
    """A page of one token."""
    return Page(name(number), NS, NS, 0, bytes(4), 1, stored_bytes, 0, 0, last_used, **facts)


def ranks(policy, pages):
    leaves = [
        Leaf(NS, one.last_used, 0, one.stored_bytes, one.end, 1, one.uses, one.priority, one.page_class)
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


def now_of(policy):
    """When it has begun, or the last prompt has."""
    return policy._times[-1]


def test_policies_have_names_and_each_engine_gets_its_own_instance():
    assert list(POLICIES) == ["adaptive", "lru", "lfu", "longest_first", "priority"]
    assert all(POLICIES[policy]().name == policy for policy in POLICIES)
    assert all(make() is not make() for make in POLICIES.values())


@pytest.mark.parametrize("policy", ["lfu", "adaptive"])
def test_uses_before_an_eviction_count(policy):
    with InEngine(policy, 10) as cache:
        for _ in range(4):
            cache.request([1])
        cache._engine.commit([])
        cache._engine.evictor.evict(0)
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


def test_among_similar_pages_the_largest_is_evicted_first():
    policy = by_what_was_learned()
    pages = [page(i, stored_bytes=size, last_used=now_of(policy)) for i, size in enumerate((100, 1))]
    for one in pages:
        policy.added(one)
    large, small = ranks(policy, pages)
    assert large == pytest.approx(small / 100)


def test_prompts_go_on_in_a_child_that_was_forked_while_a_thread_looked_at_the_times():
    policy = Adaptive()
    left_behind = np.frombuffer(policy._times, np.int64)
    for _ in range(3):
        policy.looked_up([], 1, now_of(policy))
    assert (len(left_behind), len(policy._times)) == (1, 4)


@pytest.mark.slow
def test_what_was_learned_is_taken_over():
    with InEngine("adaptive", 120) as cache:
        for blocks in scan(random.Random(5)):
            cache.request(blocks)
        old, new = policy_of(cache), Adaptive()
    old._duel.mode = Mode.LFU
    packed = old.save()
    assert len(packed) < 2 << 20
    # the other process has seen prompts of its own before it reads the note
    for _ in range(30):
        new.looked_up([], 1, now_of(new) + SECOND)
    assert new.load(packed)
    old._learn()
    assert new._hazards.worth == pytest.approx(old._hazards.worth, rel=0.1)
    assert new.mode is Mode.LFU


def test_damaged_notes_are_ignored():
    with InEngine("adaptive", 20) as cache:
        for i in range(200):
            cache.request([i % 7, 100 + i % 30])
        packed = policy_of(cache).save()
    chance, fresh = random.Random(6), Adaptive()
    for _ in range(60):
        bad = bytearray(packed)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        assert not fresh.load(bytes(bad))
    for bad in (b"", b"garbage", packed[:-1], packed + b"x", packed[: len(packed) // 2]):
        assert not fresh.load(bad)
    assert fresh.load(packed)
    assert not POLICIES["lru"]().load(packed)
