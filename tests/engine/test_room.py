"""Water marks: beyond the upper one new pages are packed, and room is made in idle time, in short steps."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager

import numpy as np
import pytest

from prefixstore.backends.contract import ConflictError
from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.pages import Pages
from prefixstore.engine.room import PAGES_AT_ONCE, PAUSE
from prefixstore.errors import FullError
from prefixstore.format.codec import CODECS
from prefixstore.format.keys import as_tokens
from prefixstore.maintenance.archive import Archive
from tests.support.engines import (
    MIB,
    NS,
    MemoryPages,
    P,
    Store,
    compressible,
    entry,
    rest,
    store_of,
    two_stores,
    wait_for,
)
from tests.support.faults import FaultyBackend

SIZE = 24_000  # six pages of an LMDB file, five when it is packed
ENTRY = entry(P, SIZE)


def single(number):
    """A sequence of one page."""
    return [number] * P


def codecs(store) -> list[str]:
    """The codec of each stored page, the least recently used first."""
    names = {number: name for name, number in CODECS.items()}
    with store.backend.view() as view:
        pages = sorted((usage.last_used, names[record.codec]) for _, record, usage in view.scan())
    return [name for _, name in pages]


def used(store):
    with store.backend.view() as view:
        return view.used


def filled(n, *, full=True, **options):
    """A store with `n` single pages, the first one the least recently used, in a budget for as many and a half."""
    options = {"state_of": compressible, "codec": "auto", **options}
    store = Store(MemoryPages(), int((n + 0.5 if full else 2 * n) * ENTRY), **options)
    for number in range(n):
        assert store.put(single(number), SIZE) == 1
    store.engine.commit([])
    return store


# -- the marks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "auto", "planes"])
def test_below_the_high_mark_nothing_is_done(codec):
    with store_of(max_bytes=20 * ENTRY, codec=codec, state_of=compressible) as store:
        for number in range(18):
            store.put(single(number), SIZE)
        assert not store.engine.has_idle_work
        assert used(store).entries == 18


def test_beyond_the_high_mark_the_first_victims_are_evicted_down_to_the_low_mark():
    with store_of(max_bytes=100 * ENTRY) as store:
        for number in range(96):
            store.put(single(number), SIZE)
        assert store.engine.has_idle_work
        rest(store.engine)
        assert [store.match(single(number)) for number in range(96)] == [0] * 6 + [P] * 90
        assert store.counters["evictions"] == 6
        # up to the high mark there is nothing to do again
        for number in range(96, 101):
            store.put(single(number), SIZE)
        assert not store.engine.has_idle_work


def test_the_marks_apply_to_entries_and_packing_does_not_help_there():
    with store_of(max_entries=100, codec="auto", state_of=compressible) as store:
        for number in range(96):
            store.put(single(number), SIZE)
        rest(store.engine)
        assert used(store).entries == 90
        assert set(codecs(store)) == {"raw"}
        assert not store.engine._encode.is_short_of_space


def test_the_mark_of_the_other_limit_is_not_enforced():
    """Entries between their marks are not evicted because there are too many bytes."""
    with store_of(max_bytes=155 * ENTRY, max_entries=102) as store:
        for number in range(96):
            # the first victims are large
            store.put(single(number), 10 * SIZE if number < 6 else SIZE)
        rest(store.engine)
        assert used(store).entries == 95
        assert used(store).bytes <= 0.9 * 155 * ENTRY


@pytest.mark.parametrize("max_entries", [1, 2, 3, 10])
def test_a_budget_of_a_few_entries_can_be_used_up(max_entries):
    with store_of(max_entries=max_entries) as store:
        for number in range(max_entries + 2):
            store.put(single(number))
        rest(store.engine)
        assert used(store).entries == max_entries


def test_a_step_deletes_a_bounded_number_of_pages():
    with store_of(max_entries=1000, high_water=0.5, low_water=0.1) as store:
        for number in range(501):
            store.put(single(number), 10)
        left = 501
        while store.engine.has_idle_work:
            store.engine.do_idle_work()
            assert left - used(store).entries <= PAGES_AT_ONCE
            left = used(store).entries
        assert left == 100


def test_expired_pages_go_before_others():
    with store_of(max_bytes=100 * ENTRY) as store:
        for number in range(95):
            store.put(single(number), SIZE)
        # used last, and expired the moment it is stored
        store.open(ttl=1e-9)
        store.put(single(95), SIZE)
        rest(store.engine)
        assert (store.counters["expired"], store.counters["evictions"]) == (1, 5)
        assert used(store).entries == 90


def test_pinned_pages_stay_and_end_the_work():
    with store_of(max_bytes=100 * ENTRY) as store:
        for number in range(96):
            store.put(single(number), SIZE)
            store.engine.pin(NS, as_tokens(single(number)), P, pinned=True)
        store.engine.commit([])
        rest(store.engine)
        assert used(store).entries == 96
        # the next commit asks again
        store.engine.commit([])
        assert rest(store.engine) >= 1


@pytest.mark.parametrize("options", [{"write_behind": False}, {"housekeeping": False}, {"read_only": True}])
def test_an_engine_without_a_background_thread_of_its_own_makes_no_room(options):
    inner = MemoryPages()
    store = Store(inner, 100 * ENTRY, options={})
    for number in range(96):
        store.put(single(number), SIZE)
    other = Store(inner, 100 * ENTRY, options=options)
    if not options.get("read_only"):
        other.put(single(97), SIZE)
    other.fetch(single(1))
    assert not other.engine.has_idle_work


def test_an_archive_makes_no_room(tmp_path):
    with Archive(tmp_path / "kv", max_bytes=MIB, create=True) as archive:
        assert not archive.engine._room._is_active


def test_a_store_is_closed_without_an_error_if_only_its_lease_cannot_be_given_back(monkeypatch):
    store = filled(20)
    rest(store.engine)
    assert store.engine._room._lease.may_be_held
    synced = []
    monkeypatch.setattr(store.backend, "sync", lambda: synced.append(True))

    def conflicting():
        raise ConflictError("another process was faster")

    monkeypatch.setattr(store.backend, "update", conflicting)
    store.engine.close()
    assert synced == [True]


# -- packing -----------------------------------------------------------------------------------------------------------


def test_beyond_the_high_mark_new_pages_are_packed_until_there_is_room_again():
    store = filled(20)
    assert set(codecs(store)) == {"raw"}
    for number in range(20, 60):
        store.put(single(number), SIZE)
        rest(store.engine)
    assert set(codecs(store)) == {"planes"}
    assert store.counters["packed"] == 40
    assert used(store).bytes <= store.max_bytes * 0.95
    # more are here than would be without packing
    assert used(store).entries > 20
    assert store.fetch(single(59)) == 1
    store.engine.evict_to(5 * ENTRY)
    for number in range(60, 62):
        store.put(single(number), SIZE)
    assert codecs(store)[-1] == "raw"
    assert store.counters["packed"] == 41
    store.close()


def test_a_page_that_is_stored_keeps_its_form():
    store = filled(20)
    rest(store.engine)
    left = [number for number in range(20) if store.fetch(single(number))]
    rest(store.engine)
    assert codecs(store) == ["raw"] * len(left)
    store.close()


def test_a_store_that_only_writes_in_the_foreground_packs_as_well():
    store = filled(20, options={"write_behind": False})
    assert not store.engine.has_idle_work
    store.put(single(20), SIZE)
    assert codecs(store)[-1] == "planes"
    store.close()


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes"])
def test_a_codec_that_was_chosen_is_kept(codec):
    store = filled(20, codec="raw")
    store.codec = codec
    store.open()
    store.put(single(20), SIZE)
    rest(store.engine)
    assert codecs(store)[-1] == codec
    assert set(codecs(store)) <= {"raw", codec}
    assert used(store).bytes <= store.max_bytes * 0.95
    store.close()


# -- several engines ---------------------------------------------------------------------------------------------------


def test_one_engine_at_a_time_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr("prefixstore.engine.lease.SECONDS", 1000.0)
    monkeypatch.setattr("prefixstore.engine.room.PAGES_AT_ONCE", 2)
    options = {"max_bytes": 30 * 6 * 4096, "high_water": 0.5, "low_water": 0.4}
    with two_stores(tmp_path, **options) as (one, two):
        for number in range(24):
            one.put(single(number), SIZE)
        two.put(single(24), SIZE)
        assert one.engine.has_idle_work
        assert two.engine.has_idle_work
        one.engine.do_idle_work()
        before = two.counters["evictions"]
        assert two.engine._room.step() == PAUSE
        assert two.engine.has_idle_work
        assert two.counters["evictions"] == before
        rest(one.engine)
        # the other one finds that it is done
        rest(two.engine)
        assert two.counters["evictions"] == before


def test_an_engine_that_closes_leaves_the_work_to_others_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("prefixstore.engine.lease.SECONDS", 1000.0)
    monkeypatch.setattr("prefixstore.engine.room.PAGES_AT_ONCE", 2)
    options = {"max_bytes": 30 * 6 * 4096, "high_water": 0.5, "low_water": 0.4}
    with store_of(Pages(LMDBBackend(tmp_path, MIB)), **options) as two:
        with store_of(Pages(LMDBBackend(tmp_path, MIB)), **options) as one:
            for number in range(24):
                one.put(single(number), SIZE)
            one.engine.do_idle_work()
            two.engine.commit([])
            assert two.engine._room.step() == PAUSE
        assert two.engine._room.step() != PAUSE
        assert two.counters["evictions"] == 2


# -- what can go wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["view", "update", "delete", "commit"])
def test_a_location_that_fails_is_left_alone_for_a_while_and_nothing_else_is_lost(operation, caplog):
    store = filled(20)
    room = store.engine._room
    room._backend = faulty = FaultyBackend(store.backend, operation, times=3)
    pauses = []
    with caplog.at_level(logging.WARNING, "prefixstore"):
        for _ in range(60):
            if not room.has_work:
                break
            pauses.append(room.step())
    assert faulty.failures == 3
    assert not room.has_work
    assert [record.message for record in caplog.records if "no space could be freed" in record.message] != []
    assert max(pauses) >= 4 * PAUSE
    n_left = used(store).entries
    assert [store.fetch(single(number)) for number in range(20)] == [0] * (20 - n_left) + [1] * n_left
    assert store.counters["evictions"] == 20 - n_left > 0
    store.close()


def test_a_location_without_space_to_delete_many_deletes_fewer_at_a_time():
    store = filled(20)
    room = store.engine._room
    room._backend = FaultyBackend(store.backend, "delete", FullError("no space"), at=2, times=1)
    rest(store.engine)
    assert room._backend.failures == 1
    assert store.counters["evictions"] > 0
    assert used(store).bytes <= store.max_bytes * 0.9
    store.close()


def test_a_fault_of_the_store_ends_the_work_until_the_next_commit(monkeypatch):
    store = filled(20)
    monkeypatch.setattr(type(store.engine._room._evictor), "evict", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        store.engine.do_idle_work()
    assert not store.engine.has_idle_work
    monkeypatch.undo()
    store.engine.commit([])
    rest(store.engine)
    assert store.counters["evictions"] > 0
    store.close()


def test_while_the_circuit_is_open_nothing_is_asked(monkeypatch):
    store = filled(20)
    monkeypatch.setattr(type(store.engine._breaker), "is_open", property(lambda _: True))
    assert store.engine.do_idle_work() is None
    assert store.counters["evictions"] == 0
    monkeypatch.undo()
    store.close()


# -- in the background -------------------------------------------------------------------------------------------------


def test_the_write_thread_makes_room_when_it_has_nothing_to_write(tmp_path):
    backend = Pages(LMDBBackend(tmp_path, 2 * MIB))
    store = Store(backend, 2 * MIB, codec="auto", state_of=compressible)
    store.buffers = store.engine._queue._buffers
    rng = np.random.default_rng(0)
    for number in rng.permutation(96).tolist():
        for new in store.pages(single(number), SIZE):
            assert store.engine.submit(new)
        if number % 8 == 0:
            store.engine.drain()
    store.engine.flush()
    wait_for(lambda: not store.engine.has_idle_work, "room")
    assert used(store).bytes <= 0.95 * 2 * MIB
    assert store.counters["packed"] > 0
    assert store.counters.group("dropped") == {}
    store.close()


def test_the_work_is_a_share_of_the_time():
    store = filled(20)
    clock = iter(range(1000))
    store.engine._room._clock = lambda: float(next(clock))
    # a step that took a second is followed by a pause of three
    assert store.engine._room.step() == pytest.approx(3.0)
    store.engine._room._clock = time.monotonic
    store.close()


def test_a_smaller_budget_is_respected_in_short_transactions(monkeypatch):
    deleted = []

    class Counting(MemoryPages):
        @contextmanager
        def update(self):
            with super().update() as transaction:
                before = transaction.used.entries
                yield transaction
                deleted.append(before - transaction.used.entries)

    monkeypatch.setattr("prefixstore.engine.budget.PAGES_AT_ONCE", 8)
    with store_of(Counting()) as store:
        for number in range(100):
            store.put([number] * P)
        store.max_bytes = 20 * entry()
        store.open()
        deleted.clear()
        store.put([100] * P)
        assert max(deleted) <= 8
        assert store.match([100] * P) == P
        with store.backend.view() as view:
            assert view.used.bytes <= store.max_bytes


def test_nothing_is_evicted_for_a_smaller_budget_if_more_than_that_is_pinned():
    with store_of() as store:
        for number in range(20):
            store.put([number] * P)
            if number < 10:
                store.engine.pin(NS, as_tokens([number] * P), P, pinned=True)
        store.max_bytes = 5 * entry()
        store.open()
        assert store.put([100] * P) == 0
        assert len(store.stored_keys()) == 20
        store.max_bytes = MIB
        store.open()
