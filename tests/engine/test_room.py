"""Water marks: room is made in idle time, in short steps, by packing before evicting."""

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
    state_of,
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
    with store_of(max_bytes=100 * ENTRY, max_entries=102, codec="auto", state_of=compressible) as store:
        for number in range(96):
            store.put(single(number), SIZE)
        rest(store.engine)
        assert used(store).entries == 96
        assert used(store).bytes <= 90 * ENTRY


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


# -- packing before evicting -------------------------------------------------------------------------------------------


def test_the_coldest_pages_are_packed_and_none_is_evicted():
    store = filled(20)
    assert store.engine.has_idle_work
    rest(store.engine)
    found = codecs(store)
    n_packed = found.count("planes")
    assert 0 < n_packed < 20
    assert found == ["planes"] * n_packed + ["raw"] * (20 - n_packed)
    assert (store.counters["packed"], store.counters["evictions"]) == (n_packed, 0)
    assert used(store).bytes <= store.max_bytes * 0.9
    assert [store.fetch(single(number)) for number in range(20)] == [1] * 20
    assert not store.engine._encode.is_short_of_space
    store.close()


def test_pages_that_others_follow_are_packed_too():
    store = Store(MemoryPages(), 20 * ENTRY, codec="auto", state_of=compressible)
    tokens = list(range(20 * P))
    store.put(tokens[: 19 * P + 1], SIZE)
    store.engine.commit([])
    rest(store.engine)
    assert store.counters["packed"] > 1
    assert store.counters["evictions"] == 0
    assert store.fetch(tokens[: 19 * P + 1]) == 20
    store.close()


def test_when_all_is_packed_the_first_victims_are_evicted_and_new_pages_are_packed_at_once():
    store = filled(20)
    for number in range(20, 60):
        store.put(single(number), SIZE)
        rest(store.engine)
    assert set(codecs(store)) == {"planes"}
    assert store.counters["evictions"] > 0
    assert store.engine._encode.is_short_of_space
    # no page was evicted while one was raw: more are here than would be without packing
    assert used(store).entries >= 20
    before = store.counters["packed"]
    store.put(single(60), SIZE)
    rest(store.engine)
    assert store.counters["packed"] == before
    assert store.fetch(single(60)) == 1
    # with room again, pages are raw again
    store.engine.evict_to(5 * ENTRY)
    for number in range(61, 63):
        store.put(single(number), SIZE)
    assert codecs(store)[-1] == "raw"
    store.close()


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes"])
def test_a_codec_that_was_chosen_is_kept(codec):
    store = filled(20, codec="raw")
    store.codec = codec
    store.open()
    store.put(single(20), SIZE)
    rest(store.engine)
    assert store.counters["packed"] == 0
    assert set(codecs(store)) <= {"raw", codec}
    assert used(store).bytes <= store.max_bytes * 0.95
    store.close()


def test_pages_that_do_not_get_smaller_are_evicted_and_not_tried_again(monkeypatch):
    store = filled(20, state_of=state_of)
    tried = []
    smallest = store.engine._encode.smallest
    monkeypatch.setattr(
        store.engine._encode, "smallest", lambda namespace, raw: tried.append(bytes(raw)) or smallest(namespace, raw)
    )
    for number in range(20, 40):
        store.put(single(number), SIZE)
        rest(store.engine)
    assert len(tried) == len(set(tried)) < 5, "the namespace is known not to get smaller"
    assert store.counters["packed"] == 0
    assert store.counters["evictions"] > 0
    store.close()


def test_a_few_pages_that_do_not_get_smaller_are_each_tried_once(monkeypatch):
    """In a namespace whose other pages do."""

    def mixed(key, size):
        return (state_of if key[0] % 4 == 0 else compressible)(key, size)

    store = filled(40, state_of=mixed)
    tried = []
    smallest = store.engine._encode.smallest
    monkeypatch.setattr(
        store.engine._encode, "smallest", lambda namespace, raw: tried.append(bytes(raw)) or smallest(namespace, raw)
    )
    monkeypatch.setattr(store.engine._encode, "may_save", lambda namespace: True)
    for number in range(40, 60):
        store.put(single(number), SIZE)
        rest(store.engine)
    assert store.counters["packed"] > 0
    assert len(tried) == len(set(tried)) > store.counters["packed"]
    store.close()


# -- unpacking when there is room --------------------------------------------------------------------------------------


def packed_with_room():
    """A store whose pages are packed, in which there is room now."""
    store = filled(20)
    for number in range(20, 30):
        store.put(single(number), SIZE)
        rest(store.engine)
    store.engine.evict_to(10 * ENTRY)
    store.engine.commit([])
    rest(store.engine)
    assert "planes" in codecs(store)
    return store


def test_a_packed_page_that_is_restored_becomes_raw_again_when_there_is_room():
    store = packed_with_room()
    store.match([])
    here = [number for number in range(30) if store.match(single(number))]
    unpacked = store.counters["unpacked"]
    for number in here[:3]:
        assert store.fetch(single(number)) == 1
    assert store.engine.has_idle_work
    rest(store.engine)
    assert store.counters["unpacked"] == unpacked + 3
    for number in here[:3]:
        (page,) = store.engine.match(NS, as_tokens(single(number)), P).pages
        assert page.stored_bytes == page.raw_bytes == SIZE
        assert store.fetch(single(number)) == 1
    rest(store.engine)
    # those that were not used stay packed
    assert codecs(store).count("planes") == len(here) - 3
    store.close()


def test_without_room_a_page_stays_packed():
    store = filled(20)
    rest(store.engine)
    before = codecs(store)
    assert store.fetch(single(0)) == 1
    rest(store.engine)
    assert store.counters["unpacked"] == 0
    assert sorted(codecs(store)) == sorted(before)
    store.close()


def test_unpacking_ends_at_the_low_mark():
    store = packed_with_room()
    here = [number for number in range(30) if store.match(single(number))]
    # what is left of the room: less than one page grows by
    store.engine._room._low = type(used(store))(used(store).bytes + 100, 2**63)
    for number in here:
        store.fetch(single(number))
    rest(store.engine)
    assert used(store).bytes <= store.engine._room._low.bytes
    store.close()


def test_a_location_that_is_slow_to_read_keeps_its_pages_packed(monkeypatch):
    store = packed_with_room()
    monkeypatch.setattr(type(store.engine._encode.read_rate), "seconds_per_byte", property(lambda _: 1e-6))
    for number in range(30):
        store.fetch(single(number))
    rest(store.engine)
    assert store.counters["unpacked"] == 0
    store.close()


# -- several engines ---------------------------------------------------------------------------------------------------


def test_another_process_restores_the_pages_that_were_packed(tmp_path):
    options = {"max_bytes": 26 * 6 * 4096, "codec": "auto", "state_of": compressible}
    options |= {"high_water": 0.8, "low_water": 0.75}
    with two_stores(tmp_path, **options) as (one, two):
        for number in range(20):
            one.put(single(number), SIZE)
        assert [two.fetch(single(number)) for number in range(20)] == [1] * 20
        one.engine.commit([])
        rest(one.engine)
        assert one.counters["packed"] > 0
        for streamed in (False, True):
            assert [two.fetch(single(number), streamed=streamed) for number in range(20)] == [1] * 20
        assert two.counters.group("unreadable") == {}
        assert two.counters["evictions"] == one.counters["evictions"] == 0


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


@pytest.mark.parametrize("operation", ["view", "record", "payload", "update", "put", "commit"])
def test_a_location_that_fails_is_left_alone_for_a_while_and_nothing_is_lost(operation, caplog, monkeypatch):
    monkeypatch.setattr("prefixstore.engine.repack.STEP_PAGES", 2)
    store = filled(20)
    inner = store.backend
    faulty = FaultyBackend(inner, operation, at=2, times=3)
    room = store.engine._room
    room._backend = faulty
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
    assert [store.fetch(single(number)) for number in range(20)] == [1] * 20
    assert store.counters["evictions"] == 0
    store.close()


def test_where_there_is_space_to_pack_a_few_pages_only_these_are_packed_at_a_time(monkeypatch):
    monkeypatch.setattr("prefixstore.engine.room.SHARE_OF_BUDGET", 1)
    store = filled(20)
    room = store.engine._room
    room._backend = FaultyBackend(store.backend, "put", FullError("no space"), at=3, times=1)
    rest(store.engine)
    assert room._backend.failures == 1
    assert store.counters["packed"] > 0
    assert store.counters["evictions"] == 0
    store.close()


def test_a_location_without_space_to_pack_evicts_instead():
    store = filled(20)
    room = store.engine._room
    room._backend = FaultyBackend(store.backend, "put", FullError("no space"), times=None)
    rest(store.engine)
    assert store.counters["packed"] == 0
    assert store.counters["evictions"] > 0
    assert used(store).bytes <= store.max_bytes * 0.9
    assert not store.engine._encode.is_short_of_space
    store.close()


def test_a_fault_of_the_store_ends_the_work_until_the_next_commit(monkeypatch):
    store = filled(20)
    monkeypatch.setattr(type(store.engine._encode), "smallest", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        store.engine.do_idle_work()
    assert not store.engine.has_idle_work
    monkeypatch.undo()
    store.engine.commit([])
    rest(store.engine)
    assert store.counters["packed"] > 0
    store.close()


def test_while_the_circuit_is_open_nothing_is_asked(monkeypatch):
    store = filled(20)
    monkeypatch.setattr(type(store.engine._breaker), "is_open", property(lambda _: True))
    assert store.engine.do_idle_work() is None
    assert store.counters["packed"] == 0
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
