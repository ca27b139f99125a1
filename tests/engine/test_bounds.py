"""What a put, an eviction or a lookup costs, counted in steps: it must not grow with pins, tenants or expired pages."""

import cProfile
import heapq
import pstats
from collections import Counter
from contextlib import closing
from functools import partial

import pytest

from prefixstore.engine import eviction as eviction_module
from prefixstore.engine.page import Page
from prefixstore.format.namespace import Namespace
from tests.support.engines import A, MemoryPages, P, Store, entry
from tests.support.faults import Seam


class Counted(Seam):
    """Pages of which every use is counted, and of their views and transactions."""

    def __init__(self, inner):
        self.calls = Counter()
        super().__init__(inner, lambda name: self.calls.update([name]))


@pytest.fixture
def steps(monkeypatch):
    """How often something was done that must not be done for each page or tenant."""
    counted = Counter()

    def count(name, function):
        def wrapper(*args):
            counted[name] += 1
            return function(*args)

        return wrapper

    monkeypatch.setattr(eviction_module.heapq, "heappop", count("pop", heapq.heappop))
    monkeypatch.setattr(eviction_module.heapq, "heappush", count("push", heapq.heappush))
    monkeypatch.setattr(Page, "has_expired", count("expired", Page.has_expired))
    monkeypatch.setattr(Namespace, "parse", count("parse", Namespace.parse))
    return counted


def during(steps, store, act):
    """What `act` did, the calls of the backend included, but for notes, which are written from time to time."""
    before = steps + store.backend.calls
    act()
    done = steps + store.backend.calls
    done.subtract(before)
    for of_notes in ("note", "put_note", "used"):
        del done[of_notes]
    return +done


def test_an_eviction_does_not_look_at_pinned_pages(steps):
    def costs(n_pinned):
        with closing(Store(Counted(MemoryPages()), max_entries=n_pinned + 5)) as store:
            for number in range(n_pinned):
                store.put([1000 + number] * P, 1)
                store.pin([1000 + number] * P)
            for number in range(6):
                store.put([number] * P, 1)
            found = during(steps, store, lambda: [store.put([10 + number] * P, 1) for number in range(5)])
            assert store.counters["evictions"] == 6
            return found

    # they have no leaf rows
    assert costs(200) <= costs(3)


@pytest.mark.parametrize("has_salt", [True, False])
def test_a_quota_costs_the_same_however_many_tenants_there_are(steps, has_salt):
    def costs(n_tenants):
        store = Store(Counted(MemoryPages()), quota=2 * entry())
        with closing(store):

            def put(tenant, number):
                namespace = Namespace({"salt" if has_salt else "model": f"tenant {tenant}"})
                store.settings = namespace.canonical
                assert store.put([number] * P, namespace=namespace.key) == 1

            for tenant in range(n_tenants):
                put(tenant, 1)
            for number in range(5):
                put(0, number + 2)
            found = during(steps, store, lambda: put(0, 10))
            assert store.counters["evictions"] > 0
            return found

    assert costs(120) == costs(2)


# -- expired pages -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lookup_does_not_walk_through_expired_pages(steps, clock):
    """Neither once nor with each page that it steps back; a chain of this length was too deep for a recursion."""
    n_pages = 3000
    tokens = list(range(n_pages * P))
    with closing(Store(Counted(MemoryPages()), options={"ttl": 60.0})) as store:
        store.put(tokens, 1)
        assert store.match(tokens) == len(tokens)
        clock[0] += 61 * 10**9
        steps.clear()
        assert store.match(tokens) == 0
        assert steps["expired"] == 1
        # they are deleted some at a time
        while store.engine.write_queue.has_deferred:
            before = len(store.stored_keys())
            store.engine.commit([])
            assert 0 < before - len(store.stored_keys()) <= 512
            store.match(tokens)
        assert store.stored_keys() == set()


def calls_in(act):
    """How many functions `act` calls, those of C included."""
    profile = cProfile.Profile()
    profile.runcall(act)
    return pstats.Stats(profile).total_calls


@pytest.mark.slow
@pytest.mark.parametrize("ttl", [None, 3600.0])
def test_an_eviction_costs_the_same_however_many_siblings_the_page_has(ttl):
    """As soon as there are more than are all read; also if the page before them would expire, but for them."""

    def costs(n_siblings):
        backend = MemoryPages()
        first = Store(backend, options={"ttl": ttl})
        first.put(A[:P], 1)
        with closing(Store(Counted(backend), max_entries=n_siblings + 1)) as store:
            batch = [new for number in range(n_siblings) for new in store.announce(A[:P] + [10 + number] * P, 1)]
            store.engine.commit(batch)
            assert store.counters["evictions"] == 0
            found = [calls_in(partial(store.put, A[:P] + [-5 - number] * P, 1)) for number in range(5)]
            assert store.counters["evictions"] == 5
            return min(found)

    # of fewer pages, more are in several samples of the same eviction
    assert costs(1200) < 1.25 * costs(400)


@pytest.mark.slow
def test_damaged_pages_are_deleted_and_repairs_are_made_some_at_a_time():
    n_pages = 1300
    tokens = list(range(n_pages * P))
    with closing(Store(Counted(MemoryPages()))) as store:
        store.put(tokens, 1)
        store.put([9] * P)
        store.engine.condemn(store.path(tokens).pages[1])
        scans, left = store.backend.calls["scan"], n_pages + 1
        while store.engine.write_queue.has_deferred:
            store.engine.commit([])
            with store.backend.inner.view() as view:
                entries = view.used.entries
            assert 0 < left - entries <= 512
            left = entries
            store.match(tokens)
        assert store.backend.calls["scan"] == scans
        assert store.counters["corrupt"] == n_pages - 1
        assert store.match(tokens) == store.match([9] * P) == P
        deleter = store.engine.deleter
        for repair in (deleter.repair, lambda _: deleter.delete_strays()):
            store.put(tokens, 1)
            first = store.path(tokens).pages[0]
            with store.backend.inner.update() as transaction:
                transaction.delete(first.key)
            found = store.engine.upkeep.check()
            assert [violation.rule for violation in found] == ["parent"]
            store.match(tokens)
            updates = store.backend.calls["update"]
            removed = repair(found)
            assert removed.pages == removed.bytes == n_pages - 1
            assert store.backend.calls["update"] - updates == 3
