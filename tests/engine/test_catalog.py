"""The catalog's lock: never held while the backend is asked, because a completion may wait for it."""

import pytest

from prefixstore.backends.memory import MemoryBackend, SortedRows
from prefixstore.format.keys import as_tokens
from prefixstore.format.namespace import Namespace
from tests.support.engines import NS, A, B, C, MemoryPages, P, Store, entry, put_snapshots, snapshot_of

SETTINGS = Namespace({"salt": "tenant"}).canonical


class Watch:
    """Opens stores whose backend must not be asked by a thread that owns the lock of a catalog."""

    def __init__(self, patch):
        self.stores = []
        self.violations = []
        for owner, names in ((MemoryBackend, ("view", "update", "sync")), (SortedRows, ("get", "ranges", "apply"))):
            for name in names:
                patch.setattr(owner, name, self.checked(name, getattr(owner, name)))

    def checked(self, name, real):
        def asking(*args, **options):
            if any(store.engine._catalog.lock._is_owned() for store in self.stores):
                # the caller may swallow what is raised
                self.violations.append(name)
            return real(*args, **options)

        return asking

    def open(self, **options):
        store = Store(MemoryPages(), settings=SETTINGS, **options)
        self.stores.append(store)
        return store


@pytest.fixture
def watch(monkeypatch):
    made = Watch(monkeypatch)
    yield made
    for store in made.stores:
        store.engine.close()
    assert made.violations == []


def test_lookups_and_restores_ask_the_backend_without_the_lock(watch):
    store = watch.open(codec="zstd")
    engine = store.engine
    batch = store.announce(A)
    assert store.fetch(A) == 3  # from the buffers
    assert engine.commit(batch) == 3
    assert store.fetch(A) == store.fetch(A, streamed=True) == 3
    put_snapshots(store, B, [6, 9])
    assert store.match_snapshot(B) == 9
    assert engine.upkeep.used()[0].entries == len(engine.lookups.pages()) == 8
    assert engine.upkeep.check() == []
    engine.upkeep.change_note(b"name", lambda old: b"value")
    for write_behind in (True, False):
        store = watch.open(options={"write_behind": write_behind})
        assert store.submit(A) == 3
        store.engine.flush()
        assert len(store.stored_keys()) == 3
    # the watch sees what it looks for
    with store.engine._catalog.lock, store.backend.view():
        assert watch.violations.pop() == "view"


def test_space_is_made_without_the_lock(watch, clock):
    store = watch.open(max_entries=5, quota=4 * entry(), options={"ttl": 60.0})
    engine = store.engine
    # eviction, for the budget and for quotas
    assert [store.put(tokens) for tokens in (A, B, C)] == [3, 3, 3]
    assert store.counters["evictions"] >= 4
    # uses and pins, which another engine would respect
    store.fetch(C)
    assert store.pin(C) == 12
    assert store.put(A) < 3
    assert engine.upkeep.pin_page(store.path(C).pages[0], pinned=False) == 3
    # expiry
    clock[0] += 61 * 10**9
    assert store.match(C) == 0
    engine.commit([])
    assert store.stored_keys() == set()
    # thinning: of a pending snapshot, and of stored ones
    put_snapshots(store, A[:8], [5, 6])
    pending = snapshot_of(store, A[:7])
    assert engine.write_queue.announce(pending)
    assert engine.write_queue.thin(NS, as_tokens(A), P, 1, 8) == 2
    engine.commit([pending])
    assert store.match_snapshot(A) == 7
