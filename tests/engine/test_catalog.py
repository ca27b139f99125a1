"""The catalog's lock: never held while the backend is asked, because a completion may wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest

from prefixstore.engine.budget import Quota
from prefixstore.engine.delete import subtree
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.namespace import Namespace
from tests.support.engines import MIB, NS, A, B, C, MemoryPages, P, Store, entry, put_snapshots, snapshot_of

SETTINGS = Namespace({"salt": "tenant"}).canonical


class Watched:
    """A backend, view or transaction that must not be used by a thread that owns the lock of a catalog.

    Every use is checked: attributes, calls, each step of an iterator, and both ends of a context. A violation is
    raised, and recorded in case the caller swallows it.
    """

    def __init__(self, inner, watch):
        self._inner = inner
        self._watch = watch

    def __getattr__(self, name):
        self._watch.check(name)
        value = getattr(self._inner, name)
        return self._watch.call(name, value) if callable(value) else value

    @contextmanager
    def view(self):
        self._watch.check("view")
        with self._inner.view() as view:
            yield Watched(view, self._watch)
            self._watch.check("end of view")

    @contextmanager
    def update(self):
        self._watch.check("update")
        with self._inner.update() as transaction:
            yield Watched(transaction, self._watch)
            self._watch.check("commit")


class Watch:
    """The catalogs whose locks must be free, what was asked, and what was asked under a lock."""

    def __init__(self):
        self.stores = []
        self.asked = set()
        self.violations = []

    def open(self, backend, **options):
        store = Store(Watched(backend, self), settings=SETTINGS, **options)
        self.stores.append(store)
        return store

    def check(self, name):
        self.asked.add(name)
        if any(store.engine._catalog.lock._is_owned() for store in self.stores):
            self.violations.append(name)
            raise AssertionError(f"{name} is asked of the backend under the catalog's lock")

    def call(self, name, function):
        def checked(*args, **options):
            self.check(name)
            result = function(*args, **options)
            return self.steps(name, result) if isinstance(result, Iterator) else result

        return checked

    def steps(self, name, found):
        for one in found:
            self.check(name)
            yield one
            self.check(name)


@pytest.fixture
def watch():
    made = Watch()
    yield made
    for store in made.stores:
        store.engine.close()
    assert made.violations == []


@pytest.fixture
def clock(monkeypatch):
    """The time, moved by hand."""
    now = [time.time_ns()]
    monkeypatch.setattr("time.time_ns", lambda: now[0])
    return now


def test_lookups_and_restores_ask_the_backend_without_the_lock(watch):
    store = watch.open(MemoryPages(), codec="zstd", options={"ram_bytes": MIB})
    engine = store.engine
    batch = store.announce(A)
    assert store.fetch(A) == 3  # from the buffers
    assert engine.commit(batch) == 3
    assert store.fetch(A) == 3  # from RAM
    engine._ram.clear()
    assert store.fetch(A) == store.fetch(A, streamed=True) == 3
    put_snapshots(store, B, [6, 9])
    assert store.match_snapshot(B) == 9
    assert engine.upkeep.used()[0].entries == 8
    assert [one.salt for one in engine.upkeep.namespaces()] == ["tenant"]
    assert engine.upkeep.check() == []
    with engine.view() as view:
        assert len(list(view.scan())) == len(engine.lookups.pages()) == 8
    assert len(engine.deleter.select([partial(subtree, key=page_keys(NS, as_tokens(A), P)[1])])) == 2
    engine.upkeep.change_note(b"name", lambda old: b"value")
    assert engine.upkeep.note(b"name") == b"value"
    assert {"view", "end of view", "namespaces", "note", "scan", "used"} <= watch.asked


@pytest.mark.parametrize("write_behind", [True, False])
def test_submitted_pages_are_written_without_the_lock(watch, write_behind):
    store = watch.open(MemoryPages(), options={"write_behind": write_behind})
    for new in store.pages(A):
        assert store.engine.captures.submit(new)
    store.engine.flush()
    assert len(store.stored_keys()) == 3
    assert store.counters.group("dropped") == {}
    assert {"update", "commit", "put", "put_namespace", "cost", "records", "sync"} <= watch.asked


def test_space_is_made_without_the_lock(watch, clock):
    store = watch.open(MemoryPages(), max_entries=5, quota=Quota(4 * entry(), 4 * entry()), options={"ttl": 60.0})
    engine = store.engine
    # eviction, for the budget and for quotas
    assert [store.put(tokens) for tokens in (A, B, C)] == [3, 3, 3]
    assert store.counters["evictions"] >= 4
    # uses and pins, which another engine would respect
    store.fetch(C)
    assert engine.upkeep.pin(NS, as_tokens(C), P, pinned=True) == 12
    assert store.put(A) < 3
    assert engine.upkeep.pin_page(engine.match(NS, as_tokens(C), P).pages[0], pinned=False) == 3
    # expiry
    clock[0] += 61 * 10**9
    assert store.match(C) == 0
    engine.commit([])
    assert store.counters["expired"] > 0
    assert store.stored_keys() == set()
    # thinning: of a pending snapshot, and of stored ones
    put_snapshots(store, A[:8], [5, 6])
    pending = snapshot_of(store, A[:7])
    assert engine.captures.announce(pending)
    assert engine.captures.thin(NS, as_tokens(A), P, 1, 8) == 2
    engine.commit([pending])
    assert store.match_snapshot(A) == 7
    assert {"usage", "touch", "delete", "cost"} <= watch.asked


def test_the_guard_detects_a_backend_call_under_the_lock():
    watch = Watch()
    store = watch.open(MemoryPages())
    with closing(store.engine):
        with pytest.raises(AssertionError, match="is asked of the backend"), store.engine._catalog.lock:
            store.match(A)
        assert watch.violations
