"""Which page is evicted first, which new pages are worth a place, and what the policy learns."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import pytest
from prefixstore.engine.page_table import PageTable

from prefixstore.backends.base import FACTS
from prefixstore.engine.adaptive_policy import MOST_SAMPLES, SAMPLES, Adaptive
from prefixstore.engine.duel import Access, Duel, Mode, admits_by_use
from prefixstore.engine.eviction import BUSY, POLICIES, Candidates
from prefixstore.engine.ghosts import GHOSTS_PER_PAGE, GhostTable
from prefixstore.engine.hazards import AGES, CLASSES, Hazards, age_bin, age_bins

NS = b"n" * 32


def name(*what):
    return blake2b(repr(what).encode(), digest_size=32).digest()


@dataclass
class Page:
    """A page of one token."""

    key: bytes
    parent: bytes = NS
    end: int = 1
    hits: int = 0
    last_used: int = 0
    compute_us: int = 0
    raw_bytes: int = 1
    stored_bytes: int = 1
    n_tokens: int = 1


class Cache:
    """A cache of `capacity` pages of one token under a policy; time is counted in prompts."""

    def __init__(self, policy, capacity):
        self.policy, self.capacity, self.now = policy, capacity, 0
        self.table = PageTable()
        self.candidates = Candidates(self.table, policy)
        self.pages = {}
        self.written = 0

    def prompt(self, *blocks):
        """How many pages of a prompt hit; the others are added as far as they are admitted, from the first one on."""
        self.now += 1
        keys = [name(blocks[: i + 1]) for i in range(len(blocks))]
        n = next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))
        self.policy.looked_up(self.table, NS, [self.pages[key] for key in keys[:n]], len(blocks))
        for key in keys[:n]:
            self.table.use(key, self.now)
        for i in range(n, len(keys)):
            page = Page(keys[i], keys[i - 1] if i else NS, i + 1, last_used=self.now)
            self.table.add(
                page.key,
                page.parent,
                NS,
                end=page.end,
                n_bytes=1,
                last_used=self.now,
                is_stored=False,
                may_be_victim=False,
            )
            self.policy.added(self.table, NS, page)
            self.pages[page.key] = page
        self._admit(keys[n:])
        return n

    def _admit(self, new):
        victims = self.candidates.victims()
        victim = None
        while len(self.pages) > self.capacity:
            while victim is None:
                victim = victims.next()
                victim = None if victim is BUSY else victim
            if self.policy.admits(self.table, self.table.find(new[-1]), victim):
                self.drop(self.table.key(victim))
                victim = None
            else:
                victims.spared()
                self.drop(new.pop())
        if victim is not None:
            self.candidates.offer(victim)
        for key in new:
            self.table.change(key, is_stored=True, may_be_victim=True)
        self.written += len(new)

    def drop(self, key):
        noted = self.table.noted(self.table.find(key))
        self.table.remove(key)
        self.policy.evicted(key, *noted)
        del self.pages[key]


# -- the simple policies -----------------------------------------------------------------------------------------------


def test_policies_have_names_and_each_engine_gets_its_own_instance():
    assert list(POLICIES) == ["adaptive", "lru", "lfu", "longest_first", "priority"]
    assert all(make() is not make() for make in POLICIES.values())


@pytest.mark.parametrize("policy", [*POLICIES, *Mode])
def test_one_page_ranks_as_among_many(policy):
    mode = policy if isinstance(policy, Mode) else None
    chance, table, policy = random.Random(1), PageTable(), POLICIES["adaptive" if mode is not None else policy]()
    for i in range(300):
        policy.looked_up(table, NS, [Page(name(j), end=j + 1) for j in range(i)][:3], chance.randint(1, 40))
        page = Page(name(i), end=i % 50 + 1, last_used=i, compute_us=chance.randint(0, 99))
        table.add(page.key, NS, NS, end=page.end, n_bytes=1, last_used=i, priority=i % 7)
        policy.added(table, NS, page)
    policy.prepare(table)
    if mode is not None:
        policy._duel.mode = mode
    ranks = policy.ranks(table.blocks[0].columns, np.arange(300))
    assert ranks.tolist() == pytest.approx([policy.rank(table.blocks[0], at) for at in range(300)])


def test_lfu_counts_uses_before_an_eviction():
    cache = Cache(POLICIES["lfu"](), 10)
    for _ in range(4):
        cache.prompt("often")
    key = name(("often",))
    cache.drop(key)
    cache.prompt("often")
    cache.prompt("other")
    assert cache.table.entry(cache.table.find(key)).uses == 5
    assert cache.table.entry(cache.table.find(name(("other",)))).uses == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_children_are_evicted_before_their_parents_and_pinned_pages_never(policy):
    chance, cache = random.Random(2), Cache(POLICIES[policy](), 1000)
    for _ in range(100):
        cache.prompt(*(chance.randrange(3) for _ in range(chance.randint(1, 6))))
    pinned = chance.choice([page for page in cache.pages.values() if page.end == 4])
    cache.table.change(pinned.key, pinned=True)
    for slot in cache.candidates.victims().victims():
        key = cache.table.key(slot)
        assert not any(page.parent == key for page in cache.pages.values())
        cache.drop(key)
    assert [page.end for page in cache.pages.values()] == [1, 2, 3, 4]


def by_what_was_learned():
    """The policy in the mode in which worth decides."""
    policy = Adaptive()
    policy._duel.mode = Mode.LEARNED
    return policy


# -- the policy that learns --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_that_the_pages_of_a_scan_are_not_used_again():
    adaptive, by_use = (Cache(POLICIES[name_of](), capacity=120) for name_of in ("adaptive", "lru"))
    hits = {adaptive: 0, by_use: 0}
    chance = random.Random(3)
    for i in range(3000):
        # documents of ten blocks are used again after about 100 prompts, those of the scan never
        document = chance.randrange(15) if i % 4 == 0 else ("scan", i)
        for cache in hits:
            hits[cache] += cache.prompt(*((document, j) for j in range(10)))
    assert hits[adaptive] > 3 * hits[by_use]
    # and does not write them
    assert adaptive.written < by_use.written / 4


@pytest.mark.slow
def test_it_keeps_a_part_of_a_loop_that_does_not_fit():
    adaptive, by_use = (Cache(POLICIES[name_of](), capacity=50) for name_of in ("adaptive", "lru"))
    hits = {adaptive: 0, by_use: 0}
    for i in range(3000):
        for cache in hits:
            hits[cache] += cache.prompt(*((i % 20, j) for j in range(5)))
    assert hits[by_use] == 0
    assert hits[adaptive] > 3000 * 5 * 0.3


@pytest.mark.slow
def test_where_learning_does_not_help_it_goes_by_last_use():
    adaptive, by_use = (Cache(POLICIES[name_of](), capacity=100) for name_of in ("adaptive", "lru"))
    hits = {adaptive: 0, by_use: 0}
    chance, now = random.Random(4), 0
    for _ in range(4000):
        # a window that moves on: what was used last is used next
        now += chance.random() < 0.5
        document = now - int(chance.expovariate(1 / 8))
        for cache in hits:
            hits[cache] += cache.prompt(*((document, j) for j in range(5)))
    assert hits[adaptive] > 0.98 * hits[by_use]


def test_a_page_that_is_stored_again_after_its_eviction_keeps_its_uses_also_if_it_was_not_admitted():
    cache = Cache(Adaptive(), capacity=4)
    for _ in range(3):
        cache.prompt("a")
    cache.drop(name(("a",)))
    cache.prompt("a")
    assert cache.table.entry(cache.table.find(name(("a",)))).uses == 4


def test_a_use_by_another_process_counts():
    policy, table = by_what_was_learned(), PageTable()
    page = Page(name(1), last_used=policy._ns)
    slot = table.add(page.key, NS, NS, end=1, n_bytes=1, last_used=policy._ns)
    policy.added(table, NS, page)
    for _ in range(1000):
        policy.looked_up(table, NS, [], 1)
    before = policy.rank(table.blocks[0], slot)
    table.use(page.key, policy._ns)
    policy.used_elsewhere(table, slot)
    assert policy.rank(table.blocks[0], slot) > before


def test_among_similar_pages_the_largest_is_evicted_first_and_the_slowest_to_compute_last():
    policy, table = by_what_was_learned(), PageTable()
    ranks = []
    for i, (size, time) in enumerate([(100, 1000), (1, 1000), (1, 1500), (1, 10**9)]):
        page = Page(name(i), compute_us=time, stored_bytes=size)
        slot = table.add(page.key, NS, NS, end=1, n_bytes=size, last_used=0)
        policy._us_per_token = 1000.0
        policy.added(table, NS, page)
        policy._us_per_token = 1000.0
        policy.stored(table, slot, page)
        ranks.append(policy.rank(table.blocks[0], slot))
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[1] < ranks[2]
    # a measured time far from the average is clipped
    assert ranks[3] == pytest.approx(2 * ranks[1])


def test_pages_of_before_the_start_rank_by_their_uses_and_their_time():
    policy = by_what_was_learned()
    day, now = 86_400 * 10**9, policy._ns
    facts = np.zeros(3, FACTS)
    facts["last_used"], facts["hits"] = [now - 9 * day, now - day, now - 9 * day], [0, 0, 5]
    facts["stored_bytes"] = facts["n_tokens"] = 1
    table = PageTable()
    table.reserve(3)
    for column, values in policy.describe(facts, now).items():
        table.blocks[0].columns[column][:3] = values
    old, new, used = policy.ranks(table.blocks[0].columns, np.arange(3))
    assert old < min(new, used)


@pytest.mark.slow
def test_its_memory_is_bounded():
    cache = Cache(Adaptive(), capacity=100)
    for i in range(2000):
        cache.prompt(*((i, j) for j in range(3)))
    policy = cache.policy
    assert len(policy._samples) <= SAMPLES
    assert len(policy._prompts) <= 64
    assert len(policy._latest) == 1
    ghosts = GhostTable()
    ghosts.grow(10**7)
    assert ghosts.n_bytes == 16 << 20
    for pages in (10**4, 10**5, 10**6):
        cache.table.totals.of(None).stored = pages
        policy.prepare(cache.table)
        assert len(policy._samples) <= MOST_SAMPLES
        assert sum(len(each._classes) for each in policy._duel._caches) <= 3 * max(1024, pages // 256)


@pytest.mark.slow
def test_what_was_learned_is_taken_over():
    chance, cache = random.Random(5), Cache(Adaptive(), capacity=120)
    for i in range(1000):
        document = chance.randrange(15) if i % 4 == 0 else ("scan", i)
        cache.prompt(*((document, j) for j in range(10)))
    old, new = cache.policy, Adaptive()
    old._duel.mode = Mode.LFU
    dumped = old.dump()
    assert len(dumped) < 2 << 20
    # the other process has seen prompts of its own before it reads the note
    for i in range(30):
        new.looked_up(PageTable(), NS, [], i)
    assert new.load(dumped)
    old._learn(old._pages)
    assert new._hazards.worth == pytest.approx(old._hazards.worth, rel=0.1)
    assert new.mode is Mode.LFU
    assert [new._clock - (last & 0xFFFFFFFF) for last in new._samples.values()] == [
        old._clock - (last & 0xFFFFFFFF) for last in old._samples.values()
    ]
    gone = [name(tuple((("scan", i), j) for j in range(k + 1))) for i in range(900, 990) for k in range(10)]
    was, now = ([policy._ghosts.recall(key, policy._clock) for key in gone] for policy in (old, new))
    assert sum(one is not None for one in was) > 100
    for one, other in zip(was, now, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.uses == other.uses
            assert abs((old._clock - one.clock) - (new._clock - other.clock)) <= 16


@pytest.mark.parametrize("policy", ["adaptive", "lfu"])
def test_damaged_notes_are_ignored(policy):
    cache = Cache(POLICIES[policy](), capacity=20)
    for i in range(200):
        cache.prompt(i % 7, i % 30)
    dumped = cache.policy.dump()
    chance, fresh = random.Random(6), POLICIES[policy]()
    for _ in range(60):
        bad = bytearray(dumped)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        assert not fresh.load(bytes(bad))
    for bad in (b"", b"garbage", dumped[:-1], dumped + b"x", dumped[: len(dumped) // 2]):
        assert not fresh.load(bad)
    other = POLICIES["lfu" if policy == "adaptive" else "adaptive"]()
    if policy == "lfu":
        assert not other.load(dumped)
    assert fresh.load(dumped)
    assert not POLICIES["lru"]().load(dumped)


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


@pytest.mark.slow
def test_a_full_table_of_ghosts_dumps_its_newest_entries():
    ghosts, now = GhostTable(), 1 << 24
    ghosts.grow(100_000)
    keys = [name(i) for i in range(200_000)]
    for i, key in enumerate(keys):
        # the older half before the clock starts, as after a restart
        ghosts.remember(key, 1, now + (i - 100_000) // 2)
    dumped = ghosts.dump(now + 50_000)
    assert len(dumped) <= (1 << 20) + 1
    other = GhostTable()
    other.load(dumped, 0)
    assert sum(other.recall(key, now + 50_000) is not None for key in keys[100_000:]) > 90_000
    assert sum(other.recall(key, now + 50_000) is not None for key in keys[:50_000]) < 5_000


def test_ages_are_half_octaves_by_either_way_to_work_them_out():
    assert [age_bin(prompts) for prompts in (-1, 0, 1, 2, 3, 5, 7)] == [0, 0, 2, 3, 4, 5, 6]
    assert age_bin(1 << 40) == AGES - 1
    prompts = np.array([*range(5000), *(1 << k for k in range(12, 30))])
    assert age_bins(prompts).tolist() == [age_bin(each) for each in prompts.tolist()]


def learned(observed, waiting=()):
    hazards = Hazards()
    for page_class, age, n, hit in observed:
        for _ in range(n):
            hazards.observe(page_class, age, hit=hit)
    hazards.learn(np.zeros(len(waiting), np.int64), np.array(waiting, np.int64))
    return hazards.worth.reshape(CLASSES, AGES)


def test_the_worth_of_a_page_is_the_best_rate_of_hits_over_all_times_to_wait():
    worth = learned([(0, 100, 10_000, True)])
    # all are used again at an age of 100 prompts: the nearer that is, the higher is the rate
    assert worth[0][0] < worth[0][age_bin(50)] < worth[0][age_bin(80)]
    assert worth[0][0] == pytest.approx(1 / 100, rel=0.3)
    assert worth[0][age_bin(5000)] < worth[0][0]


def test_pages_that_were_not_used_again_yet_lower_the_worth_of_their_class():
    alone, among_others = learned([(0, 10, 500, True)]), learned([(0, 10, 500, True)], [1000] * 5000)
    assert among_others[0][0] < alone[0][0] / 5


def test_when_the_share_of_samples_is_halved_the_counts_are_halved():
    hazards = Hazards()
    for _ in range(1000):
        hazards.observe(0, 10, hit=True)
    hazards.learn(np.zeros(1000, np.int64), np.full(1000, 1000))
    before = hazards.worth[0]
    hazards.halve()
    hazards.learn(np.zeros(500, np.int64), np.full(500, 1000))
    assert hazards.worth[0] == pytest.approx(before, rel=0.1)


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


def test_of_pages_that_were_used_once_the_older_one_stays():
    assert [admits_by_use(*uses) for uses in ((1, 1), (2, 1), (2, 2), (2, 3), (1, 3))] == [
        False,
        True,
        True,
        False,
        False,
    ]
