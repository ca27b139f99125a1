"""What a location keeps of how it was used: merged, bounded, honest, and never in the way."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from types import SimpleNamespace

import pytest

from prefixstore import stats as stats_module
from prefixstore.engine.figures import read_history
from prefixstore.engine.keyspace import everything
from prefixstore.format.figure_note import NOTE, FigureNote
from prefixstore.format.figures import DAY, HOUR, WEEK, Figures
from prefixstore.format.namespace import Namespace
from prefixstore.format.saved_state import pack_state
from prefixstore.stats import PERIODS_KEPT, short
from tests.support.engines import MIB, NS, A, B, Store, store_of, two_stores
from tests.support.places import opened

NOW = 1_800_000_000.0  # within an hour and a day


@pytest.fixture
def clock(monkeypatch):
    """The time, to be set; of counters, and of the stores that `told` has told."""
    time = SimpleNamespace(now=NOW)
    monkeypatch.setattr(stats_module, "time", SimpleNamespace(time=lambda: time.now))
    time.told = lambda store: setattr(store.engine.keeper, "_clock", lambda: time.now)
    return time


def ask(store, n=1, *, hits=0, namespace=NS):
    """Count `n` lookups, of which some are hits."""
    for i in range(n):
        is_hit = i < hits
        counters = store.engine.counters
        counters.count("hits" if is_hit else "miss:not_found", namespace=namespace)
        counters.count("tokens_restored", 90 * is_hit, namespace=namespace)
        counters.time("saved", 0.5 * is_hit, namespace=namespace)
        counters.asked(namespace, 100, 90 * is_hit, "store" if is_hit else "not_found")


def keep(store):
    """Have what was counted written."""
    store.engine.flush()


def note(store, name):
    with store.backend.view() as view:
        return view.note(name)


def put_note(store, name, value):
    with store.backend.update() as transaction:
        transaction.put_note(name, value)


# -- kept and merged --------------------------------------------------------------------------------------------------


def notes_of(store):
    """All notes of a location."""
    with store.backend.rows.view() as rows:
        return {row.key[1:]: row.value for row in rows.ranges([everything(b"o")])[0]}


def test_what_was_counted_is_there_after_a_restart():
    with store_of() as store:
        ask(store, 3, hits=1)
        store.put(A)
        store.open()
        figures = store.engine.history().total()
        assert figures == Figures(1, 0, {"not_found": 2}, 300, 90, 0, 0.5, 0)
        assert (figures.hit_rate, figures.restored_share, figures.lookups) == (1 / 3, 0.3, 3)
        assert [one.source for one in store.engine.history().requests] == ["store", "not_found", "not_found"]


def test_two_stores_add_to_each_others_figures(tmp_path):
    with two_stores(tmp_path / "kv") as (one, two):
        for store in (one, two, one, two):
            ask(store, 5, hits=2)
            keep(store)
        for store in (one, two):
            assert store.engine.history().total() == Figures(8, 0, {"not_found": 12}, 2000, 720, 0, 4.0, 0)
            assert len(store.engine.history().writers) == 2


def test_a_forked_child_does_not_count_again_what_its_parent_has_counted(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        store = Store(backend)
        ask(store, 3)
        preloaded = Namespace({"salt": "of the child"})
        store.engine.keeper.describe(preloaded)
        child = os.fork()
        if child == 0:
            ask(store, 1, namespace=preloaded.key)
            store.engine.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        keep(store)
        assert store.engine.history().total().lookups == 4
        with backend.view() as view:
            assert [one.tenant for one in read_history(view, NOW).described.values()] == ["of the child"]


def test_evictions_are_counted_for_the_namespace_of_the_page(clock):
    with store_of(max_bytes=4500) as store:
        clock.told(store)
        store.put(A)
        store.put(B)
        (found,) = store.engine.history().days
        assert (found.namespace, found.figures.evictions) == (short(NS), store.counters["evictions"])
        assert found.figures.evictions > 0


# -- hours and days ---------------------------------------------------------------------------------------------------


def test_minutes_hours_and_days_are_kept_for_so_long(clock):
    with store_of() as store:
        clock.told(store)
        for step, n in ((DAY, 400), (HOUR, 180), (60, 90)):
            for _ in range(n):
                ask(store, 1)
                clock.now += step
        keep(store)
        history = store.engine.history()
        assert len(history.minutes) == history.total(HOUR).lookups == 59
        assert history.total(600).lookups == 10
        assert history.total(WEEK).lookups == sum(one.figures.lookups for one in history.hours)
        assert 166 <= len(history.hours) <= 169
        assert 365 <= len(history.days) <= PERIODS_KEPT[DAY]
        assert {one.figures.lookups for one in history.days[:300]} == {1}
        assert set(notes_of(store)) == {NOTE}


# -- bounded ----------------------------------------------------------------------------------------------------------


def with_period(number):
    note = FigureNote()
    note.periods[HOUR, number] = {("a", "serving"): Counter(hits=1)}
    return note


def test_figures_never_evict_a_page_and_never_exceed_the_budget():
    with store_of(max_bytes=1 << 20, options={"write_behind": False}) as store:
        while store.counters["evictions"] == 0:
            store.put([store.counters["allocations"] + 1] * 40, 5000)
        keep(store)
        before, kept = store.stored_keys(), note(store, NOTE)
        ask(store, 3)
        store.engine.keeper._budget = SimpleNamespace(max_bytes=0, max_entries=None)
        keep(store)
        assert store.stored_keys() == before
        assert store.engine.counters.has_unwritten
        assert note(store, NOTE) == kept is not None


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "short", "of another version", "other json", "not json", "no dates"])
def test_damaged_figures_are_replaced_with_one_warning(damage, caplog, clock):
    with store_of() as store:
        clock.told(store)
        ask(store, 2)
        keep(store)
        whole = note(store, NOTE)
        damaged = {
            "flipped": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:],
            "short": whole[:9],
            "of another version": pack_state({"1": b"{}"}),
            "other json": pack_state({"2": json.dumps({"rows": 3}).encode()}),
            "not json": pack_state({"2": b"{"}),
            "no dates": with_period(1 << 62).pack(MIB),
        }[damage]
        put_note(store, NOTE, damaged)
        store.open()
        clock.told(store)
        store.engine.keeper.describe(Namespace({"salt": "b"}))
        with caplog.at_level(logging.WARNING, "prefixstore"):
            assert store.put(A) == 3
            ask(store, 5, namespace=Namespace({"salt": "b"}).key)
            keep(store)
            keep(store)
        assert [record.message.count("figures kept in") for record in caplog.records] == [1]
        history = store.engine.history()
        assert history.total().lookups == 5
        assert history.describe(short(Namespace({"salt": "b"}).key)).tenant == "b"


def test_a_store_that_only_reads_writes_no_figures(tmp_path):
    with store_of() as store:
        store.put(A)
        store.open(read_only=True)
        ask(store, 2)
        keep(store)
        assert note(store, NOTE) is None
        assert store.engine.history().total().lookups == 2


def test_names_are_forgotten_and_counts_stay():
    tenants = [Namespace({"salt": name}) for name in ("a", "b")]
    with store_of() as store:
        for one in tenants:
            store.engine.keeper.describe(one)
            ask(store, 1, namespace=one.key)
        keep(store)
        store.open()
        store.engine.keeper.forget([tenants[0].key])
        assert set(store.engine.history().described) == {short(tenants[1].key)}
        store.engine.keeper.forget((), "b")
        assert not store.engine.history().described
        assert store.engine.history().total().lookups == 2
        store.engine.keeper.forget(None)
        assert store.engine.history().days == ()
        assert not [name for name in notes_of(store) if name.startswith(NOTE)]
