"""A location in front of another one: who gives which page, what is kept, what is passed on, and what a loss costs."""

import os
import time
from contextlib import closing, contextmanager, suppress

import pytest

from prefixstore.counters import Counters
from prefixstore.engine import breaker
from prefixstore.engine.budget import Budget
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.engine.tiers import FarEngine, TieredEngine
from prefixstore.errors import MisuseError, UnavailableError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.keys import as_tokens
from prefixstore.format.namespace import Namespace
from tests.support import PATIENCE, in_fork, keys_of
from tests.support.engines import MIB, A, C, MemoryPages, P, Store, state_of, wait_for
from tests.support.faults import FlakyBackend, Until
from tests.support.places import KEY, place

SPACE = Namespace({"n": 1})
LONG = list(range(100, 100 + 10 * P))


class Tiers(Store):
    """A store in front of another one."""

    def __init__(self, near: Pages, far: Pages, **options):
        self.far_backend = far
        super().__init__(near, namespace=SPACE.key, settings=SPACE.canonical, options=options)

    def open(self, *, max_delay=None, near_bytes=64 * MIB, queue_bytes=MIB, **options):
        self.counters, lru = Counters(), POLICIES["lru"]
        options["queue_bytes"] = queue_bytes

        def make_far(near):
            far = self.far_backend, Budget(64 * MIB), lru(), Encoder("raw"), Counters()
            return FarEngine(*far, nearer=near, **options)

        near = self.backend, Budget(near_bytes), lru(), Encoder("raw"), self.counters
        self.engine = TieredEngine(*near, make_far=make_far, max_delay=max_delay, **options)
        self.engine.describe(SPACE)

    def capture(self, tokens):
        """Store a sequence as a completion does; the number of pages that were wanted."""
        self.match(tokens)
        return self.submit(tokens)

    def restore(self, tokens, **options):
        """Restore as a completion does; how many pages."""
        return self.fetch(tokens, streamed=True, **options)

    @property
    def far(self):
        return self.engine.far

    def given(self):
        near, far = self.engine.tiers()
        return near.pages, far.pages


def test_neither_location_is_closed_in_the_block_of_a_restore():
    with tiers() as store:
        store.capture(A)
        store.engine.flush()
        with closing(Tiers(MemoryPages(), store.far_backend)) as other:
            path = other.path(A)
            assert all(page.is_far for page in path.pages)
            with other.engine.fetching(path.pages) as states:
                with pytest.raises(MisuseError, match="leave it first"):
                    other.engine.close()
                assert len(list(states)) == len(path.pages)
            assert not other.engine.is_closed


@contextmanager
def tiers(near=None, far=None, **options):
    with closing(Tiers(near or MemoryPages(), far or MemoryPages(), **options)) as store:
        yield store


@pytest.fixture(params=["memory", "lmdb", "sqlite", "postgresql", "valkey", "s3"])
def far(request, tmp_path):
    """A far location of every kind, which several stores use one after the other."""
    backend = open_pages(place(request.param, tmp_path, request, "far"), max_bytes=64 * MIB)
    with closing(backend), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "close", lambda: None)
        yield backend


@pytest.fixture
def near(tmp_path):
    return open_pages(f"lmdb://{tmp_path / 'near'}", max_bytes=64 * MIB)


def failing():
    """A location that fails, or hangs, while it is told to."""
    return FlakyBackend(MemoryPages())


def test_what_is_captured_is_in_both_locations_and_another_host_restores_and_keeps_it(near, far, clock):
    with tiers(MemoryPages(), far) as one:
        assert one.capture(LONG) == 10
        one.engine.flush()
        assert len(keys_of(one.backend)) == 10
        assert keys_of(one.backend) == keys_of(far)
        assert one.restore(LONG) == 10
        assert one.given() == (10, 0)
        # older than what the other one keeps without a use
        clock[0] += 61 * 10**9
        with tiers(near, far, ttl=60) as other:
            assert other.restore(LONG) == 10
            assert other.given() == (0, 10)
            other.engine.flush()
            assert len(keys_of(near)) == 10
            assert other.restore(LONG) == 10
            assert other.given() == (10, 10)
            assert other.engine.tiers()[0].kept == 10


# -- the far queue -----------------------------------------------------------------------------------------------------


def test_the_queue_of_the_far_location_is_bounded_and_does_not_hold_up_the_near_one():
    near, far = MemoryPages(), FlakyBackend(MemoryPages(), "update")
    with tiers(near, far, queue_bytes=10_000) as store:
        far.gate.clear()
        sequences = [[100 * i + j for j in range(P)] for i in range(1, 31)]
        for tokens in sequences:
            assert store.capture(tokens) == 1
        wait_for(lambda: len(keys_of(near)) == 30, "the near location has all")
        assert store.far.queued_bytes <= 10_000
        assert store.far.counters["dropped:queue_full"] > 10
        far.gate.set()
        store.engine.flush()
        assert store.far.queued_bytes == 0
        # what was dropped is made up for when it goes on
        for tokens in sequences:
            store.capture([*tokens, *range(P)])
            store.engine.flush()
        assert keys_of(near) == keys_of(far)


def test_what_is_captured_while_the_far_location_is_away_is_made_up_for():
    near, far = MemoryPages(), failing()
    with tiers(near, far) as store:
        far.fails = True
        assert store.capture(LONG[: 6 * P]) == 6
        # behind memory nothing else is durable
        with pytest.raises(UnavailableError):
            store.engine.flush()
        assert store.far.counters["dropped:unavailable"] == 6
        far.fails = False
        assert keys_of(far) == set()
        # a page that follows those that are missing brings them along
        assert store.capture(LONG) == 4
        store.engine.flush()
        assert len(keys_of(far)) == 10


def test_what_the_nearer_location_has_no_space_for_is_written_to_the_far_one():
    far = MemoryPages()
    with tiers(MemoryPages(), far, near_bytes=1) as store:
        assert store.capture(LONG) == 10
        store.engine.flush()
        assert keys_of(store.backend) == set()
        assert len(keys_of(far)) == 10
        assert store.restore(LONG) == 10


def test_the_far_location_is_thinned_as_well_and_not_waited_for(monkeypatch):
    thinned = set()
    monkeypatch.setattr("prefixstore.engine.write_queue.too_many", lambda view, catalog, *_: thinned.add(catalog) or [])
    with tiers() as store:
        store.engine.write_queue.thin(SPACE.key, as_tokens(A), P, 1, P)
        wait_for(lambda: len(thinned) == 2, "both are thinned")
    assert thinned == {store.engine._catalog, store.far._catalog}


# -- a far location that fails ----------------------------------------------------------------------------------------


def test_the_far_location_is_not_asked_while_its_circuit_is_open(near, monkeypatch):
    monkeypatch.setattr(breaker, "FAST_SECONDS", 0.0)
    monkeypatch.setattr(breaker, "OPEN_FACTOR", 1e9)
    monkeypatch.setattr(breaker, "FIRST_PROBE", 1000.0)
    far = failing()
    with tiers(near, far) as store:
        far.fails = True
        store.match(LONG)
        assert store.far.is_failing
        assert not store.engine.is_failing
        far.view = None  # whoever asked would fail
        assert store.restore(LONG) == 0
        store.capture(LONG)
        assert store.restore(LONG) == 10
        assert not store.engine.tiers()[1].is_available
        del far.view
        far.fails = False
        store.far._breaker._open_until = 0.0


@pytest.mark.parametrize("max_delay", [None, 20.0])
def test_a_far_location_with_a_fault_of_its_own_costs_nothing_that_is_near(max_delay, caplog):
    broken = FlakyBackend(MemoryPages(), "view", error=ValueError("a fault of a plug-in"))
    broken.fails = True
    store = Tiers(MemoryPages(), broken, max_delay=max_delay)
    with closing(store.engine):
        store.capture(A)
        assert store.restore([*A, 7, 7]) == 3
        assert "a fault of a plug-in" in caplog.text


def test_near_pages_are_used_if_the_far_location_fails_after_the_lookup(near):
    far = failing()
    with tiers(MemoryPages(), far) as one, tiers(near, far) as other:
        one.capture(LONG)
        one.engine.flush()
        other.capture(LONG[: 4 * P])
        other.engine.drain()
        path = other.path(LONG)
        assert path.n_tokens == len(LONG)
        far.fails = True
        with other.engine.fetching(path.pages, streamed=True) as states:
            assert [bytes(state) for state in states] == [state_of(page.key) for page in path.pages[:4]]
            assert states.verified() == 4
        assert other.far.counters["unreadable:unavailable"] == 1
        far.fails = False


def test_a_lookup_does_not_wait_for_a_far_location_that_hangs(near):
    far = failing()
    with tiers(near, far, max_delay=0.05) as store:
        store.engine.token_seconds = 1e-9
        store.capture(LONG)
        store.engine.drain()
        before = store.engine.tiers()[1].late
        far.gate.clear()
        assert store.match([*LONG, *A]) == len(LONG)
        assert store.match([*LONG, *A]) == len(LONG)
        assert store.engine.tiers()[1].late == before + 2
        far.gate.set()
        wait_for(lambda: store.engine._overdue.is_there, "the question is answered")
        assert store.match([*LONG, *A]) == len(LONG)


def test_a_ctrl_c_in_a_restore_does_not_wait_for_the_far_location(near):
    far = failing()
    with tiers(MemoryPages(), far) as one, tiers(near, far) as other:
        one.capture(LONG)
        one.engine.flush()
        path = other.path(LONG)
        far.gate.clear()
        n_asked = far.asked.total()
        with suppress(KeyboardInterrupt), other.engine.fetching(path.pages):
            wait_for(lambda: far.asked.total() > n_asked, "it is asked")
            started = time.monotonic()
            raise KeyboardInterrupt
        assert time.monotonic() - started < PATIENCE
        far.gate.set()


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_far_location_that_cannot_be_reached_at_first_is_opened_later(near, tmp_path, key):
    attempts = []

    def open_it():
        attempts.append(1)
        if len(attempts) < 3:
            raise UnavailableError("not there")
        return open_pages(f"lmdb://{tmp_path}/far", max_bytes=64 * MIB, key=key)

    far = Pages(None, "valkey://h/0", open_it)
    with tiers(near, far) as store:
        store.capture(LONG)
        store.engine.flush()
        wait_for(lambda: store.match([*LONG, *A]) and far._backend is not None, "the far location is opened")
        store.capture([*LONG, 1])
        store.engine.flush()
        assert keys_of(far) == keys_of(near)
        assert (far.encrypted is not None) == (key is not None)


def test_a_damaged_page_of_the_near_location_comes_from_the_far_one(near):
    far = MemoryPages()
    with tiers(near, far) as store:
        store.capture(LONG)
        store.engine.flush()
        with near.update() as transaction:
            victim = store.path(LONG).pages[5].key
            record, usage = transaction.record(victim), transaction.usage(victim)
            transaction.put(victim, record, usage, bytes(record.stored_bytes))
        assert store.restore(LONG) == 5
        assert store.restore(LONG) == 10
        assert store.given()[1] == 5
        store.engine.flush()
        assert store.restore(LONG) == 10


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_clear_pin_and_check_are_about_both_locations():
    near, far = MemoryPages(), MemoryPages()
    with tiers(near, far) as store:
        store.capture(LONG)
        store.engine.flush()
        assert store.pin(LONG) == len(LONG)
        with far.view() as view:
            assert all(view.usage(key).pinned for key in keys_of(far))
        victim = next(iter(keys_of(far)))
        with far.update() as transaction:
            record, usage = transaction.record(victim), transaction.usage(victim)
            transaction.put(victim, record, usage, bytes(record.stored_bytes))
        assert [one.key for one in store.engine.upkeep.check()] == [victim.hex()]
        store.engine.upkeep.clear(SPACE.key)
        assert keys_of(near) | keys_of(far) == set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_uses_both_locations_and_closing_writes_what_waits_for_both(tmp_path):
    near = open_pages(f"lmdb://{tmp_path / 'near'}", max_bytes=64 * MIB)
    far = open_pages(f"lmdb://{tmp_path / 'far'}", max_bytes=64 * MIB)
    with tiers(near, far) as store:
        store.capture(LONG)

        def child():
            store.engine.flush()
            store.capture(A)
            store.engine.flush()
            assert store.restore(A) == 3

        in_fork(child)
        store.engine.flush()
        assert len(keys_of(far)) == len(keys_of(near)) == 13
        store.capture(C)
    # closing writes what waits
    with closing(open_pages(f"lmdb://{tmp_path / 'far'}", max_bytes=64 * MIB)) as reopened:
        assert len(keys_of(reopened)) == 16


def test_a_restore_that_is_late_uses_what_has_come_and_keeps_what_comes_late(near):
    far = failing()
    with tiers(MemoryPages(), far) as one:
        one.capture(LONG)
        one.engine.flush()
        with tiers(near, far) as other:
            gate = far.let_through(3)
            assert other.restore(LONG, deadline=Until(3)) == 3
            assert other.far.counters["late"] == 1
            gate.release(20)
            # one that was on its way is kept too
            wait_for(lambda: other.engine.tiers()[0].kept >= 3, "what has come is kept")
            other.engine.drain()
            assert other.restore(LONG) == 10


def test_a_restore_from_the_far_location_does_not_wait_for_a_near_one_that_hangs():
    near, far = failing(), MemoryPages()
    near.is_local = True
    with tiers(MemoryPages(), far) as one:
        one.capture(LONG)
        one.engine.flush()
        with tiers(near, far) as other:
            path = other.path(LONG)
            near.gate.clear()
            n_asked = near.asked.copy()
            with other.engine.fetching(path.pages, streamed=True) as states:
                assert [bytes(state) for state in states] == [state_of(page.key) for page in path.pages]
            # by its own write thread only
            assert {thread for thread, n in (near.asked - n_asked).items() if n} <= {"prefixstore-write"}
            near.gate.set()
            other.engine.drain()
            assert other.restore(LONG) == 10
            assert other.given() == (10, 10)
