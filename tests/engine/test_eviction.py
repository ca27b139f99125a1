"""Which page is evicted first, which new pages are worth a place, and what the policy learns."""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import pytest

from prefixstore.engine.adaptive_policy import MOST_SAMPLES, SAMPLES, TIMES_KEPT, Adaptive
from prefixstore.engine.duel import Access, Duel, Mode, admits_by_use
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.ghosts import GHOSTS_PER_PAGE, GhostTable
from prefixstore.engine.hazards import AGES, CLASSES, Hazards, age_bin, age_bins
from prefixstore.engine.keyspace import LEAVES, Leaf

NS = b"n" * 32
SECOND = 10**9


def name(*what):
    return blake2b(repr(what).encode(), digest_size=32).digest()


@dataclass
class Page:
    """A page of one token."""

    key: bytes
    parent: bytes = NS
    end: int = 1
    last_used: int = 0
    compute_us: int = 0
    raw_bytes: int = 1
    stored_bytes: int = 1
    n_tokens: int = 1
    uses: int = 1
    page_class: int = 0
    priority: int = 0

    @property
    def leaf(self):
        """What eviction ranks it by."""
        return Leaf(
            self.parent,
            self.last_used,
            0,
            self.stored_bytes,
            self.end,
            self.n_tokens,
            self.compute_us,
            self.uses,
            self.priority,
            self.page_class,
        )


def ranks(policy, pages):
    """The ranks of pages, of equal ones the least recently used first, and the deepest of those."""
    leaves = np.frombuffer(b"".join(page.leaf.pack() for page in pages), LEAVES)
    found = policy.ranks(leaves).tolist()
    return [(rank, page.last_used, -page.end) for rank, page in zip(found, pages, strict=True)]


class Cache:
    """A cache of `capacity` pages of one token under a policy; a prompt takes a second."""

    def __init__(self, policy, capacity):
        self.policy, self.capacity, self.now = policy, capacity, time.time_ns() + SECOND
        self.pages = {}
        self.n_children = {}
        self.written = 0

    def prompt(self, *blocks):
        """How many pages of a prompt hit; the others are added as far as they are admitted, from the first one on."""
        self.now += SECOND
        keys = [name(blocks[: i + 1]) for i in range(len(blocks))]
        n = next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))
        self.policy.looked_up(NS, [self.pages[key] for key in keys[:n]], len(blocks), self.now)
        for key in keys[:n]:
            self.pages[key].last_used = self.now
        new = []
        above = self.pages[keys[n - 1]] if n else None
        for i in range(n, len(keys)):
            page = Page(keys[i], keys[i - 1] if i else NS, i + 1, last_used=self.now)
            self.policy.added(NS, page, above.last_used if above is not None else None)
            new.append(page)
            above = page
        self._admit(new)
        return n

    def _admit(self, new):
        self.policy.prepare(len(self.pages))
        victims = self.victims() if len(self.pages) + len(new) > self.capacity else []
        # what a prompt begins with is not evicted for its other pages
        following = {page.parent for page in new}
        while len(self.pages) + len(new) > self.capacity:
            while victims and victims[0][1] in following:
                heapq.heappop(victims)
            victim = self.pages[victims[0][1]] if victims else None
            if victim is not None and self.policy.admits(new[-1].leaf, victim.leaf):
                heapq.heappop(victims)
                self.drop(victim.key, victims)
            else:
                page = new.pop()
                self.policy.evicted(page.key, page.uses, page.last_used)
        for page in new:
            self.pages[page.key] = page
            self.n_children[page.parent] = self.n_children.get(page.parent, 0) + 1
        self.written += len(new)

    def victims(self):
        """The leaves and their ranks, the lowest first."""
        pages = [page for page in self.pages.values() if not self.n_children.get(page.key)]
        found = list(zip(ranks(self.policy, pages), (page.key for page in pages), strict=True)) if pages else []
        heapq.heapify(found)
        return found

    def drop(self, key, victims=None):
        """Evict a page; the one before it may be among the victims then."""
        page = self.pages.pop(key)
        self.policy.evicted(key, page.uses, page.last_used)
        self.n_children[page.parent] -= 1
        above = self.pages.get(page.parent)
        if victims is not None and above is not None and not self.n_children[above.key]:
            heapq.heappush(victims, (ranks(self.policy, [above])[0], above.key))

    def uses(self, *blocks):
        return self.pages[name(blocks)].uses


# -- the simple policies -----------------------------------------------------------------------------------------------


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
    chance = random.Random(1)
    pages = [
        Page(name(i), end=i % 50 + 1, last_used=i % 100, uses=chance.randint(1, 9), priority=chance.randint(-9, 9))
        for i in range(300)
    ]
    found = ranks(POLICIES[policy](), pages)
    by_rank = [page for _, page in sorted(zip(found, pages, strict=True), key=lambda each: each[0])]
    assert list(map(order, by_rank)) == sorted(map(order, pages))


@pytest.mark.parametrize("policy", [*POLICIES, *Mode])
def test_one_page_ranks_as_among_many(policy):
    mode = policy if isinstance(policy, Mode) else None
    chance, policy = random.Random(1), POLICIES["adaptive" if mode is not None else policy]()
    now, pages = time.time_ns(), []
    for i in range(300):
        now += SECOND
        policy.looked_up(NS, [Page(name(j), end=j + 1) for j in range(i)][:3], chance.randint(1, 40), now)
        page = Page(name(i), end=i % 50 + 1, last_used=now, compute_us=chance.randint(0, 99), priority=i % 7)
        policy.added(NS, page, None)
        pages.append(page)
    policy.prepare(300)
    if mode is not None:
        policy._duel.mode = mode
    assert [ranks(policy, [page])[0] for page in pages] == ranks(policy, pages)


def test_lfu_counts_uses_before_an_eviction():
    cache = Cache(POLICIES["lfu"](), 10)
    for _ in range(4):
        cache.prompt("often")
    cache.drop(name(("often",)))
    cache.prompt("often")
    cache.prompt("other")
    assert cache.uses("often") == 5
    assert cache.uses("other") == 1


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
    assert cache.uses("a") == 4


def test_a_use_by_another_process_counts():
    policy = by_what_was_learned()
    now = policy._ns
    page = Page(name(1), last_used=now)
    policy.added(NS, page, None)
    for i in range(1000):
        policy.looked_up(NS, [], 1, now + (i + 1) * SECOND)
    before = ranks(policy, [page])
    page.last_used = now + 1000 * SECOND
    assert ranks(policy, [page]) > before


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
        page = Page(name(i), compute_us=us, stored_bytes=size, last_used=policy._ns)
        policy.added(NS, page, None)
        pages.append(page)
    policy._us_per_token = 1000.0
    found = [rank for rank, *_ in ranks(policy, pages)]
    assert found == sorted(found)
    assert found[0] < found[1] < found[2]
    # a measured time far from the average is clipped
    assert found[3] == pytest.approx(2 * found[1])


def test_pages_of_before_the_start_rank_by_their_uses_and_their_time():
    policy = by_what_was_learned()
    day, now = 86_400 * SECOND, policy._ns
    used = [(now - 9 * day, 1), (now - day, 1), (now - 9 * day, 6)]
    old, new, often = ranks(policy, [Page(name(i), last_used=when, uses=n) for i, (when, n) in enumerate(used)])
    assert old[0] < min(new[0], often[0])


def test_a_class_that_nobody_knows_and_a_use_in_the_future_have_a_rank():
    policy = by_what_was_learned()
    pages = [Page(name(i), uses=65535, page_class=i % 256, last_used=i << 56) for i in range(0, 128, 5)]
    assert np.isfinite([rank for rank, *_ in ranks(policy, pages)]).all()


@pytest.mark.slow
def test_its_memory_is_bounded():
    cache = Cache(Adaptive(), capacity=100)
    for i in range(2000):
        cache.prompt(*((i, j) for j in range(3)))
    policy = cache.policy
    assert len(policy._samples) <= SAMPLES
    assert len(policy._prompts) <= 64
    assert len(policy._latest) == 1
    assert len(policy._times) < 2 * TIMES_KEPT
    ghosts = GhostTable()
    ghosts.grow(10**7)
    assert ghosts.n_bytes == 16 << 20
    for pages in (10**4, 10**5, 10**6):
        policy.prepare(pages)
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
        new.looked_up(NS, [], i, new._ns + SECOND)
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
