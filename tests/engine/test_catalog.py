"""The catalog's lock: never held while the backend is asked, because a completion may wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.budget import Quota
from prefixstore.engine.delete import of_namespaces, subtree
from prefixstore.engine.pages import Pages
from prefixstore.errors import FullError
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import StoredPage
from tests.support.engines import MIB, NS, A, B, C, MemoryPages, P, Store, entry, put_snapshots, snapshot_of
from tests.support.faults import FaultyBackend

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
        if any(store.engine._catalog._lock._is_owned() for store in self.stores):
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


def spoil(store, key):
    """Replace the payload of a page by other bytes, past the engine."""
    with store.backend._inner.update() as transaction:
        record, usage = transaction.record(key), transaction.usage(key)
        transaction.delete(key)
        transaction.put(key, record, usage, bytes(record.stored_bytes))


def delete(store, key):
    """Delete a page, past the engine."""
    with store.backend._inner.update() as transaction:
        transaction.delete(key)


def stored_pages(store):
    """What another location would export."""
    with store.backend.view() as view:
        pages = sorted(view.scan(), key=lambda one: one[1].start)
        return [StoredPage(key, record, usage, bytes(view.payload(key))) for key, record, usage in pages]


@pytest.fixture(params=["memory", "lmdb"])
def new_backend(request, tmp_path):
    return MemoryPages if request.param == "memory" else lambda: Pages(LMDBBackend(tmp_path / "kv", MIB))


def test_lookups_and_restores_ask_the_backend_without_the_lock(watch, new_backend):
    store = watch.open(new_backend(), codec="zstd", options={"ram_bytes": MIB})
    engine = store.engine
    batch = store.announce(A)
    assert store.fetch(A) == 3  # from the buffers
    assert engine.commit(batch) == 3
    assert store.fetch(A) == 3  # from RAM
    engine._ram.clear()
    assert store.fetch(A) == store.fetch(A, streamed=True) == 3
    put_snapshots(store, B, [6, 9])
    assert store.match_snapshot(B) == 9
    assert engine.used()[0].entries == 8
    assert [one.salt for one in engine.namespaces()] == ["tenant"]
    assert engine.check() == []
    with engine.view() as view:
        assert len(list(view.scan())) == len(engine.pages()) == 8
    assert len(engine.deleter.select([partial(subtree, key=page_keys(NS, as_tokens(A), P)[1])])) == 2
    engine.change_note(b"name", lambda old: b"value")
    assert engine.note(b"name") == b"value"
    assert {"view", "end of view", "namespaces", "note", "scan", "used"} <= watch.asked


@pytest.mark.parametrize("write_behind", [True, False])
def test_submitted_pages_are_written_without_the_lock(watch, new_backend, write_behind):
    store = watch.open(new_backend(), options={"write_behind": write_behind})
    for new in store.pages(A):
        assert store.engine.submit(new)
    store.engine.flush()
    assert len(store.stored_keys()) == 3
    assert store.counters.group("dropped") == {}
    assert {"update", "commit", "put", "put_namespace", "cost", "records", "sync"} <= watch.asked


def test_space_is_made_without_the_lock(watch, new_backend, clock):
    store = watch.open(new_backend(), max_entries=5, quota=Quota(4 * entry(), 4 * entry()), options={"ttl": 60.0})
    engine = store.engine
    # eviction, for the budget and for quotas
    assert [store.put(tokens) for tokens in (A, B, C)] == [3, 3, 3]
    assert store.counters["evictions"] >= 4
    # uses and pins, which another engine would respect
    store.fetch(C)
    assert engine.pin(NS, as_tokens(C), P, pinned=True) == 12
    assert store.put(A) < 3
    assert engine.pin_page(engine.match(NS, as_tokens(C), P).pages[0], pinned=False) == 3
    # expiry
    clock[0] += 61 * 10**9
    assert store.match(C) == 0
    engine.commit([])
    assert store.counters["expired"] > 0
    assert store.stored_keys() == set()
    # thinning: of a pending snapshot, and of stored ones
    put_snapshots(store, A[:8], [5, 6])
    pending = snapshot_of(store, A[:7])
    assert engine.announce(pending)
    assert engine.thin(NS, as_tokens(A), P, 1, 8) == 2
    engine.commit([pending])
    assert store.match_snapshot(A) == 7
    assert {"usage", "touch", "delete", "cost"} <= watch.asked


def test_more_space_is_made_without_the_lock_when_the_location_is_full(watch):
    store = watch.open(FaultyBackend(MemoryPages(), "put", FullError("full"), at=4, times=2))
    assert [store.put(tokens) for tokens in (A, B)] == [3, 3]
    assert "reclaim" in watch.asked


def test_damage_is_dealt_with_without_the_lock(watch, new_backend):
    store = watch.open(new_backend())
    engine = store.engine
    keys = page_keys(NS, as_tokens(A), P)
    # a damaged payload
    store.put(A)
    spoil(store, keys[1])
    assert store.fetch(A) == 1
    engine.commit([])
    assert store.counters["corrupt"] == 2
    # a state that does not fit its page
    store.put(A)
    engine.condemn(engine.match(NS, as_tokens(A), P).pages[2], lambda state, start, n: False)
    engine.commit([])
    assert store.stored_keys() == set(keys[:2])
    # a page that vanished, and an orphan
    store.put(A)
    delete(store, keys[1])
    assert store.fetch(A) == 1
    found = engine.check()
    assert [violation.rule for violation in found] == ["parent"]
    assert engine.deleter.repair(found).pages == 1
    assert store.match(A) == 4
    assert store.counters.group("unreadable") == {"corrupt": 1}


def test_pages_are_deleted_and_imported_without_the_lock(watch, new_backend):
    store = watch.open(new_backend())
    engine = store.engine
    for tokens in (A, B, C):
        store.put(tokens)
    pages = stored_pages(store)
    assert engine.delete([partial(subtree, key=page_keys(NS, as_tokens(A), P)[1])]).pages == 2
    assert len(engine.evict(1).pages) == 7
    assert engine.importer.import_pages(pages, {NS: SETTINGS}).pages == 9
    assert engine.importer.import_pages(pages, {NS: SETTINGS}).present == 9
    delete(store, page_keys(NS, as_tokens(B), P)[0])
    assert engine.delete([partial(of_namespaces, namespaces={NS})]).pages == 6
    assert engine.deleter.delete_strays().pages == 2
    assert engine.deleter.delete_strays().pages == 0
    engine.deleter.drop_empty_namespaces()
    store.put(A)
    assert engine.clear(NS) == 3
    engine.scrub()
    engine.compact()
    assert {"scan", "drop_empty_namespaces", "reclaim", "scrub", "compact"} <= watch.asked


def test_two_engines_on_one_location_see_what_the_other_does_without_the_lock(watch, tmp_path):
    one, two = (watch.open(Pages(LMDBBackend(tmp_path, MIB)), max_entries=8) for _ in range(2))
    one.put(A)
    assert two.fetch(A) == 3
    ours, theirs = one.announce(B), two.announce([*B, 9])
    assert (one.engine.commit(ours), two.engine.commit(theirs)) == (3, 4)
    assert two.engine.pin(NS, as_tokens(A), P, pinned=True) == 12
    for number in range(10, 30):
        two.put([number] * 4)
    assert one.match([29] * 4) == 4
    assert one.put(C) == 3
    assert two.engine.clear(NS) == 8
    assert one.match(A) == 0
    assert {"records", "scan"} <= watch.asked


def test_the_guard_detects_a_backend_call_under_the_lock():
    watch = Watch()
    store = watch.open(MemoryPages())
    with closing(store.engine):
        with pytest.raises(AssertionError, match="is asked of the backend"), store.engine._catalog._lock:
            store.match(A)
        assert watch.violations
