"""New pages that are worth less than what would be evicted for them are not written; and what is learned is kept."""

import numpy as np

from prefixstore.engine.adaptive_policy import Mode
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.policy import Ordering
from prefixstore.errors import UnavailableError
from tests.support.engines import NS, MemoryPages, P, store_of


class Picky(Ordering):
    """By last use; admits the pages whose first token is allowed, and those before them."""

    def __init__(self, admitted=()):
        super().__init__("picky", lambda leaves: np.zeros(len(leaves)))
        self.admitted = admitted
        self.asked = []
        self.gone = []

    def admits(self, new, victim):
        self.asked.append(new.end // P)
        return new.end // P in self.admitted

    def evicted(self, key, uses, last_used):
        self.gone.append(key)


def prompt(first, pages):
    return [token for page in range(pages) for token in [first * 100 + page] * P]


def test_pages_are_refused_from_the_last_one_on_and_no_page_follows_a_refused_one():
    policy = Picky(admitted=[1, 2])
    with store_of(policy=policy, max_entries=4) as store:
        assert store.put(prompt(1, 1)) + store.put(prompt(2, 1)) + store.put(prompt(3, 1)) == 3
        assert store.put(prompt(4, 4)) == 2
        assert policy.asked[:2] == [4, 3]
        assert store.match(prompt(4, 4)) == 2 * P
        assert store.counters.group("dropped") == {"admission": 2}
        # one place was free, so one page had to go
        assert store.counters["evictions"] == 1


def test_if_nothing_is_admitted_nothing_is_evicted_and_the_policy_remembers_the_pages():
    policy = Picky()
    with store_of(policy=policy, max_entries=4) as store:
        for first in range(1, 5):
            store.put(prompt(first, 1))
        before = store.stored_keys()
        assert store.put(prompt(9, 3)) == 0
        assert store.stored_keys() == before
        assert store.counters["evictions"] == 0
        assert store.counters.group("dropped") == {"admission": 3}
        assert len(policy.gone) == 3
        # it is captured again the next time: it may be worth more then
        policy.admitted = [1]
        assert store.put(prompt(9, 1)) == 1


def test_the_pages_that_a_prompt_began_with_are_not_evicted_for_its_other_pages():
    with store_of(policy=Picky(admitted=range(9)), max_entries=4) as store:
        store.put(prompt(1, 2))
        store.put(prompt(2, 2))
        # the oldest leaf is the one that the new pages follow
        assert store.put(prompt(1, 4)) == 2
        assert store.match(prompt(1, 4)) == 4 * P
        assert store.match(prompt(2, 2)) == 0


def test_pinned_and_wanted_pages_are_admitted_always():
    policy = Picky()
    with store_of(policy=policy, max_entries=2) as store:
        store.put(prompt(1, 1))
        store.put(prompt(2, 1))
        with store.engine.write_queue.storing_all():
            assert store.put(prompt(3, 2)) == 2
        assert store.match(prompt(3, 2)) == 2 * P
        assert store.put(prompt(4, 1)) == 0
        assert store.counters.group("dropped") == {"admission": 1}


def test_a_quota_is_contested_among_the_pages_of_the_tenant():
    policy = Picky(admitted=[1])
    with store_of(policy=policy, max_entries=100, quota=2500) as store:
        store.put(prompt(1, 2))
        # admitted are first pages only: the leaf of the tenant goes for one, and nothing for the second
        assert store.put(prompt(2, 2)) == 1
        assert store.match(prompt(1, 2)) == P
        assert store.counters.group("dropped") == {"admission": 1}


# -- what was learned --------------------------------------------------------------------------------------------------


def used_often(engine, times=60):
    for i in range(times):
        engine.touch(NS, (), i)


def test_what_was_learned_is_kept_in_the_location():
    with store_of(policy=(first := POLICIES["adaptive"]())) as store:
        store.engine.commit([])
        first._duel.mode = Mode.LFU
        used_often(store.engine)
    with store_of(store.backend, policy=(second := POLICIES["adaptive"]())) as store:
        store.engine.commit([])
        assert second.mode is Mode.LFU


def test_damage_and_outages_cost_what_was_learned_and_nothing_else(monkeypatch, caplog):
    backend = MemoryPages()
    with backend.update() as transaction:
        transaction.put_note(b"policy/adaptive", b"garbage")
    policy = POLICIES["adaptive"]()
    with store_of(backend, policy=policy) as store:
        assert store.engine.commit([]) == 0
        assert "starts afresh" in caplog.text
        used_often(store.engine)

        def fails(*_):
            raise UnavailableError("the location is down")

        monkeypatch.setattr(policy, "save", fails)
    assert "was not saved" in caplog.text
