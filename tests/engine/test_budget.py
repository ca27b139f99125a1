"""Budgets: quotas of tenants, pins, priorities."""

from contextlib import closing

import pytest

from prefixstore.format.namespace import Namespace
from tests.support.engines import MIB, MemoryPages, P, Store
from tests.support.newer import make_newer

SIZE = 10_000  # bytes of a page
PAGE = SIZE + 4 * P  # as a quota counts it


def tenant(backend, salt, *, max_bytes=64 * MIB, quota=None, **options):
    """One process of a tenant: an engine of its own on a shared backend."""
    space = Namespace({"salt": salt, "model": "m"})
    return Store(backend, max_bytes, quota=quota, namespace=space.key, settings=space.canonical, options=options)


def held(store):
    """How many of the sequences [0]*4 to [999]*4 are stored."""
    return sum(store.match([i] * P) == P for i in range(1000))


@pytest.fixture
def backend():
    with closing(MemoryPages()) as opened:
        yield opened


# -- quotas ------------------------------------------------------------------------------------------------------------


def test_a_tenant_with_a_quota_evicts_its_own_pages_only(backend):
    quiet = tenant(backend, "quiet", quota=10 * PAGE)
    loud = tenant(backend, "loud", quota=10 * PAGE)
    for i in range(5):
        quiet.put([i] * P, SIZE)
    for i in range(100):
        loud.put([i] * P, SIZE)
    assert (held(quiet), held(loud)) == (5, 10)
    assert loud.counters["evictions"] == 90
    assert loud.engine.upkeep.check() == []


def test_in_a_full_location_a_tenant_evicts_its_own_pages_first(backend):
    # otherwise the oldest pages would be evicted: those of the quiet tenant
    max_bytes = 12 * (PAGE + 1000)
    quiet = tenant(backend, "quiet", max_bytes=max_bytes, quota=10 * PAGE)
    loud = tenant(backend, "loud", max_bytes=max_bytes, quota=10 * PAGE)
    for i in range(6):
        quiet.put([i] * P, SIZE)
    for i in range(100):
        loud.put([i] * P, SIZE)
    assert held(quiet) == 6
    assert held(loud) >= 5


def test_a_page_that_cannot_fit_because_of_pins_evicts_nothing(backend):
    store = tenant(backend, "one", max_bytes=20 * (PAGE + 1300))
    for i in range(18):
        store.put([i] * P, SIZE)
    for i in range(9):
        store.pin([i] * P)
    assert store.put([100] * P, 13 * SIZE) == 0
    assert store.counters.group("dropped") == {"budget": 1}
    assert held(store) == 18
    assert store.counters["evictions"] == 0
    # one that fits if all that can be is evicted
    assert store.put([101] * P, 12 * SIZE) == 1
    assert held(store) == 10


# -- what is stored with a page ----------------------------------------------------------------------------------------


def test_priority_and_expiry_are_stored_with_the_page(backend, clock):
    tenant(backend, "a", ttl=60, priority=-3).put([1] * P, SIZE)
    with backend.view() as view:
        ((key, _, usage),) = view.scan()
    assert (usage.priority, usage.expires) == (-3, clock[0] + 60 * 10**9)
    reader = tenant(backend, "a")
    reader.fetch([1] * P)
    reader.engine.commit([])
    reader.pin([1] * P)
    with backend.view() as view:
        assert view.usage(key).priority == -3
        assert view.usage(key).expires == usage.expires
        assert view.usage(key).hits == 1


@pytest.mark.parametrize("pinned", [False, True])
def test_pages_after_one_of_a_newer_version_make_way_for_others(monkeypatch, pinned):
    backend = MemoryPages()
    with closing(Store(backend, max_entries=10)) as store:
        for number in range(8):
            store.put([1] * P + [10 + number] * P)
        store.put([1] * P + [10] * P + [11] * P)
        if pinned:
            store.pin([1] * P + [10] * P + [11] * P)
        root = store.path([1] * P).pages[0]
        make_newer(backend, root.key)
        store.match([1] * P)
        # what lookups find goes first, as long as there is any
        kept = 7 if pinned else 9
        assert [store.put([number] * P) for number in range(50, 50 + kept)] == [1] * kept
        assert store.put([99] * P) == 1
        assert len(store.stored_keys()) == 10
        assert len(store.engine.evictor.evict(0).pages) == kept
        assert len(store.stored_keys()) == (3 if pinned else 1)
        # the page of the newer version stays
        assert root.key in store.stored_keys()
