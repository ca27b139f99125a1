"""A transaction that fails: what it has changed in the catalog is taken back, at the cost of what it has changed."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prefixstore.engine.journal import Journal

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine import follow
from prefixstore.engine.budget import Quota
from prefixstore.engine.delete import of_namespaces
from prefixstore.engine.invariants import violations
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import Suspicion
from prefixstore.errors import FullError, StorageError, UnavailableError
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, StoredPage, Usage, checksum
from tests.support import in_thread
from tests.support.ctrl_c import interrupted, places_in
from tests.support.engines import (
    MIB,
    NS,
    OTHER,
    A,
    B,
    C,
    MemoryPages,
    P,
    Store,
    entry,
    put_snapshots,
    snapshot_of,
    state_of,
    two_stores,
)
from tests.support.fragile import Fragile, assert_true
from tests.support.models import TORTURE

SETTINGS = Namespace({"salt": "tenant"}).canonical


def store_on(inner, **options):
    return Store(Fragile(inner), settings=SETTINGS, **options)


def imported(number):
    """A page of another location."""
    tokens = as_tokens([number] * P).tobytes()
    state = state_of(tokens)
    record = Record(OTHER, OTHER, 0, tokens, 0, len(state), len(state), checksum(state), 0, 1)
    return StoredPage(record.key, record, Usage(number), state)


# Each scenario prepares a store and returns what is to be done in transactions that fail.


def a_commit_of_everything(store):
    """Evicts, continues a tail, deletes damaged, thinned and expired pages, records uses, empties a namespace."""
    store.put([1, 1, 1, 1, 2, 2])  # a tail, pinned
    store.engine.pin(NS, as_tokens([1, 1, 1, 1, 2, 2]), P, pinned=True)
    put_snapshots(store, B[:8], [5, 6])
    store.engine.thin(NS, as_tokens(B), P, 1, 8)
    store.put([9] * 4, namespace=OTHER)
    expiring = store.announce([7] * 8)
    for new in expiring:
        new.page.expires = 1
    store.engine.commit(expiring)
    store.put(C)
    store.engine._catalog.mark_damaged(page_keys(NS, as_tokens(C), P)[1], Suspicion(lambda *_: False))
    store.fetch(C[:4])
    batch = store.announce([1, 1, 1, 1, 2, 2, 2, 2]) + store.announce(A) + [snapshot_of(store, B[:7])]
    store.engine.announce(batch[-1])
    return partial(store.engine.commit, batch)


def an_import_that_evicts(store):
    for tokens in (A, B):
        store.put(tokens)
    pages = [imported(number) for number in range(1, 12)]
    return partial(store.engine.import_pages, pages, {OTHER: SETTINGS})


def a_pin(store):
    store.put(A)
    store.put(B)
    store.engine.pin(NS, as_tokens(B), P, pinned=True)
    return partial(store.engine.pin, NS, as_tokens(A), P, pinned=True)


def an_unpin(store):
    store.put(A)
    store.engine.pin(NS, as_tokens(A), P, pinned=True)
    return lambda: store.engine.pin_page(store.engine.match(NS, as_tokens(A), P).pages[0], pinned=False)


def a_clear(store):
    store.put(A)
    store.put(B)
    store.put(C, namespace=OTHER)
    return partial(store.engine.delete, [partial(of_namespaces, namespaces={NS})])


def a_repair(store):
    store.put(A)
    store.put(B)
    with store.backend.inner.update() as transaction:
        transaction.delete(page_keys(NS, as_tokens(A), P)[0])
    store.match(A)
    found = store.engine.check()
    return partial(store.engine.repair, found)


def an_eviction(store):
    store.put(A)
    store.put(B)
    return partial(store.engine.evict_to, 1)


SCENARIOS = [a_commit_of_everything, an_import_that_evicts, a_pin, an_unpin, a_clear, a_repair, an_eviction]


@pytest.mark.attack
@pytest.mark.parametrize("error", [UnavailableError, FullError])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whichever_call_fails_the_catalog_says_what_is_stored(scenario, error):
    for number in itertools.count(1):
        backend = MemoryPages()
        store = store_on(backend, max_entries=9, quota=Quota(9 * entry(), 9 * entry()))
        act = scenario(store)
        store.match(A)
        store.backend.fails_at, store.backend.error = number, error("fails on purpose")
        failed = False
        try:
            act()
        except StorageError:
            failed = True
        store.match(A)
        is_over = store.backend.fails_at is not None
        store.backend.fails_at = None
        store.engine.commit([])
        store.match(A)
        assert_true(store.engine)
        # what failed can be done again
        if failed:
            act()
            store.match(A)
            assert_true(store.engine)
        store.close()
        if is_over:
            break
    assert number > 3


@pytest.mark.slow
@pytest.mark.parametrize("new_backend", ["memory", "lmdb"])
def test_a_failure_costs_no_more_steps_in_a_large_store_than_in_a_small_one(new_backend, tmp_path):
    def steps(n_pages, where):
        backend = MemoryPages() if new_backend == "memory" else Pages(LMDBBackend(where, 8 * MIB))
        store = store_on(backend, max_entries=n_pages)
        for number in range(100, 100 + n_pages):
            store.put([number] * P, 1)
        before = dict(store.backend.calls)
        store.backend.fails_at = 12
        assert store.put(A, 1) == 0
        assert store.match(A) == 0
        assert_true(store.engine)
        after = dict(store.backend.calls)
        store.engine.close()
        return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}

    assert steps(300, tmp_path / "large") == steps(10, tmp_path / "small")


def test_evictions_of_a_transaction_that_failed_are_not_counted():
    store = store_on(MemoryPages(), max_entries=3)
    store.put(A)
    store.backend.fails_at = 25
    assert store.put(B) == 0
    assert store.counters["evictions"] == 0
    assert store.match(A) == 12
    assert store.put(B) == 3
    assert store.counters["evictions"] == 3
    store.close()


def test_the_next_transaction_of_the_process_sees_what_was_taken_back():
    """Between the end of a failed transaction and the moment when the catalog knows, no other one may begin."""
    store = store_on(MemoryPages())
    store.put(A)
    catalog = store.engine._catalog
    seen = []
    end = catalog._end_journal

    def late(error, *began):
        # another thread could be in its transaction by now
        seen.append(catalog._turn.locked())
        end(error, *began)

    catalog._end_journal = late
    store.backend.fails_at = 6
    with pytest.raises(UnavailableError):
        store.engine.clear(NS)
    assert seen == [True]
    assert store.match(A) == 12
    store.close()


def test_after_an_interruption_the_catalog_is_rebuilt():
    store = store_on(MemoryPages())
    store.put(A)
    store.backend.fails_at, store.backend.error = 6, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        store.engine.clear(NS)
    assert_true(store.engine)
    assert store.match(A) == 12
    store.close()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("moment", ["put", "commit"])
@pytest.mark.parametrize("how", ["abandon", "mark_damaged", "continue"])
def test_a_page_that_is_given_up_while_it_is_written_leaves_nothing_behind(how, moment, fails):
    """By another thread: before it was put, or after that."""
    store = store_on(MemoryPages())
    store.put(A[:4])
    batch = store.announce(A[:7])
    more = []
    catalog = store.engine._catalog

    def interfere(name):
        if name == moment:
            store.backend.on_call = lambda name: None
            if how == "abandon":
                catalog.abandon(batch)
            elif how == "mark_damaged":
                catalog.mark_damaged(batch[0].page.key)
            else:
                more.extend(store.announce(A[:8]))
            if fails:
                raise UnavailableError("fails on purpose")

    store.backend.on_call = interfere
    store.engine.commit(batch)
    assert_true_beside(store, more)
    store.engine.commit(more)
    store.match(A)
    assert_true(store.engine)
    # given up too late, it is stored all the same
    given_up = 7 if moment == "commit" and not fails else 4
    assert store.match(A) == (8 if how == "continue" else given_up)
    store.close()


def assert_true_beside(store, more):
    store.match(A)
    if not more and not store.engine._catalog._contents.deferred.damaged:
        assert_true(store.engine)


@pytest.mark.parametrize("fails", [True, False])
def test_a_page_that_another_process_has_stored_stays_when_it_is_given_up_here(fails):
    backend = MemoryPages()
    ours, theirs = store_on(backend, max_entries=3), store_on(backend, max_entries=3)
    ours.put(A[:4])
    batch = ours.announce(A[:8])
    theirs.put(A[:8])
    assert ours.match(A) == 8
    if fails:
        ours.backend.fails_at = 4
        assert ours.engine.commit(batch) == 0
        assert ours.backend.fails_at is None
    else:
        ours.engine._catalog.abandon(batch)
    assert_true(ours.engine)
    assert ours.match(A) == 8
    for number in range(5, 9):
        assert ours.put([number] * P) == 1
        assert ours.engine.check() == []
    ours.close()


def test_a_page_that_is_given_up_while_a_transaction_finds_it_stored_and_fails_can_be_evicted():
    backend = MemoryPages()
    ours, theirs = store_on(backend, max_entries=3), store_on(backend, max_entries=3)
    batch = ours.announce(A[:8])
    theirs.put(A[:8])

    def give_up_and_fail(name):
        if name == "commit":
            ours.engine._catalog.abandon(batch)
            raise UnavailableError("fails on purpose")

    ours.backend.on_call = give_up_and_fail
    ours.engine.commit(batch)
    ours.backend.on_call = lambda name: None
    assert_true(ours.engine)
    for number in range(5, 9):
        assert ours.put([number] * P) == 1
    assert ours.match(A) == 0
    ours.close()


def test_a_page_that_is_deleted_and_captured_again_in_a_transaction_that_fails_can_be_evicted():
    store = store_on(MemoryPages(), max_entries=3)
    store.put(A[:4])

    def capture_and_fail(name):
        if name == "delete":
            capture_and_fail.batch = store.announce(A[:4])
        if name == "commit":
            raise UnavailableError("fails on purpose")

    store.backend.on_call = capture_and_fail
    with pytest.raises(UnavailableError):
        store.engine.delete([partial(of_namespaces, namespaces={NS})])
    store.backend.on_call = lambda name: None
    # captured while it was deleted, and given up: it is stored all the same
    store.engine._catalog.abandon(capture_and_fail.batch)
    assert_true(store.engine)
    store.close()


# -- at random ---------------------------------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
failing = st.none() | st.integers(1, 60)


whose = st.integers(0, 1)


class Machine(RuleBasedStateMachine):
    """Two engines on one location, whose operations fail at any call; both catalogs say what is stored after each."""

    def __init__(self):
        super().__init__()
        backend = MemoryPages()
        self.stores = [store_on(backend, max_entries=8, quota=Quota(9 * entry())) for _ in range(2)]
        self.waiting = [[], []]

    def teardown(self):
        self.stores[0].match(A)
        self.stores[0].close()

    def fail(self, which, at, act):
        backend = self.stores[which].backend
        backend.fails_at = at
        try:
            act()
        except StorageError:
            pass
        finally:
            backend.fails_at = None

    @rule(which=whose, tokens=tokens, at=failing, namespace=st.sampled_from([NS, OTHER]))
    def put(self, which, tokens, at, namespace):
        self.put_later(which, tokens, namespace)
        self.commit(which, at)

    @rule(which=whose, tokens=tokens, namespace=st.sampled_from([NS, OTHER]))
    def put_later(self, which, tokens, namespace):
        store = self.stores[which]
        store.engine.match(namespace, as_tokens(tokens), P)
        self.waiting[which] += store.announce(tokens, namespace=namespace)

    @rule(which=whose, at=failing)
    def commit(self, which, at):
        batch, self.waiting[which] = self.waiting[which], []
        self.fail(which, at, lambda: self.stores[which].engine.commit(batch))
        for new in batch:
            new.buffer.release()

    @rule(which=whose, tokens=tokens, at=failing)
    def use(self, which, tokens, at):
        engine = self.stores[which].engine
        engine.touch(NS, engine.match(NS, as_tokens(tokens), P).pages)
        self.fail(which, at, lambda: engine.commit([]))

    @rule(which=whose, tokens=tokens, at=failing, pinned=st.booleans())
    def pin(self, which, tokens, at, pinned):
        self.fail(which, at, lambda: self.stores[which].engine.pin(NS, as_tokens(tokens), P, pinned=pinned))

    @rule(which=whose, tokens=tokens, at=failing)
    def unpin_page(self, which, tokens, at):
        engine = self.stores[which].engine
        path = engine.match(NS, as_tokens(tokens), P)
        if path.pages:
            self.fail(which, at, lambda: engine.pin_page(path.pages[0], pinned=False))

    @rule(which=whose, tokens=tokens, at=failing, fits=st.booleans())
    def condemn(self, which, tokens, at, fits):
        engine = self.stores[which].engine
        path = engine.match(NS, as_tokens(tokens), P)
        if path.pages:
            engine.condemn(path.pages[-1], lambda *_: fits)
            self.fail(which, at, lambda: engine.commit([]))

    @rule(which=whose, at=failing, namespace=st.sampled_from([NS, OTHER]))
    def clear(self, which, at, namespace):
        self.fail(which, at, lambda: self.stores[which].engine.clear(namespace))

    @rule(which=whose, at=failing, number=st.integers(0, 9))
    def import_one(self, which, at, number):
        self.fail(which, at, lambda: self.stores[which].engine.import_pages([imported(number)], {OTHER: SETTINGS}))

    @invariant()
    def the_catalogs_say_what_is_stored(self):
        for store, waiting in zip(self.stores, self.waiting, strict=True):
            store.match(A)
            if not store.engine._catalog._contents.deferred.damaged and not waiting:
                assert_true(store.engine)
            with store.backend.inner.view() as view:
                assert violations(view, store.engine._budget) == []


TestFailuresAtRandom = pytest.mark.attack(Machine.TestCase)
TestFailuresAtRandom.settings = settings(max_examples=60 * TORTURE, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_after_the_commit_leaves_a_catalog_that_finds_what_was_stored(tmp_path, monkeypatch, error):
    with two_stores(tmp_path) as (one, two):
        waiting = one.announce(A)

        def keep(*_):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(one.engine._ram, "keep", keep)
            with pytest.raises(error):
                one.engine.commit(waiting)
        two.put(B)
        assert (one.match(A), one.match(B)) == (12, 12)
        assert one.engine.check() == []


def test_a_lookup_that_is_interrupted_while_it_waits_for_a_transaction_does_not_hold_its_end_up(monkeypatch):
    monkeypatch.setattr(follow, "LONGEST_END", 0.01)
    store = Store(MemoryPages())
    catalog = store.engine._catalog
    catalog._contents.journal = Journal()
    n = places_in(catalog._wait_for_outcome)
    for at in range(1, n + 1):
        catalog._contents.journal = journal = Journal()
        where = interrupted(catalog._wait_for_outcome, at)
        ending = in_thread(journal.ended.set)
        ending.join(30)
        assert not ending.is_alive(), where
    catalog._contents.journal = None
    store.engine.close()
