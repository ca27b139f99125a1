"""What a location keeps of how it was used: merged, bounded, honest, and never in the way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from prefixstore import stats as stats_module
from prefixstore.backends.contract import ConflictError
from prefixstore.engine.figures import read_history
from prefixstore.engine.keyspace import everything
from prefixstore.errors import CorruptError, FullError, IncompatibleError, UnavailableError
from prefixstore.format import figure_note
from prefixstore.format.figure_note import DAYS_KEPT, HOURS_KEPT, NOTE, FigureNote, Periods
from prefixstore.format.figures import DAY, HOUR, OTHERS, WEEK, Figures
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import checksum
from prefixstore.format.saved_state import pack_state, unpack_state
from prefixstore.stats import Purpose, short
from tests.support import PATIENCE, ROOT
from tests.support.engines import MIB, NS, A, B, MemoryPages, Store, store_of, two_stores
from tests.support.faults import FaultyBackend
from tests.support.places import SCHEMES, opened, place

NOW = 1_800_000_000.0  # within an hour and a day


@pytest.fixture
def clock(monkeypatch):
    """The time, to be set; of counters, and of the stores that `told` has told."""
    time = SimpleNamespace(now=NOW)
    monkeypatch.setattr(stats_module, "time", SimpleNamespace(time=lambda: time.now))
    time.told = lambda store: setattr(store.engine.keeper, "_clock", lambda: time.now)
    return time


def key_of(n):
    return n.to_bytes(4, "big") * 8


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


def test_what_is_not_written_yet_is_told_by_the_store_that_has_counted_it():
    with store_of() as store:
        ask(store, 2)
        assert store.engine.history().total(HOUR).lookups == 2
        assert note(store, NOTE) is None
        keep(store)
        ask(store, 1)
        assert store.engine.history().total().lookups == 3
        with store.backend.view() as view:
            assert read_history(view, NOW).total().lookups == 2


def test_what_is_committed_is_told_once_also_before_its_writer_knows_of_it(monkeypatch):
    with store_of() as store:
        ask(store, 3, hits=1)
        keeper, told = store.engine.keeper, []
        committed = keeper.committed

        def late():
            told.append(store.engine.history().total().lookups)
            committed()

        monkeypatch.setattr(keeper, "committed", late)
        keep(store)
        assert told == [3]
        assert store.engine.history().total().lookups == 3


@pytest.mark.parametrize("scheme", [*SCHEMES, "memory"])
def test_every_backend_keeps_figures(scheme, tmp_path, request):
    with opened(place(scheme, tmp_path, request)) as backend:
        store = Store(backend)
        ask(store, 2, hits=1)
        keep(store)
        ask(store, 1)
        keep(store)
        assert store.engine.counters.has_unwritten is False
        store.open()
        assert store.engine.history().total().misses == {"not_found": 2}


def test_two_stores_add_to_each_others_figures(tmp_path):
    with two_stores(tmp_path / "kv") as (one, two):
        for store in (one, two, one, two):
            ask(store, 5, hits=2)
            keep(store)
        for store in (one, two):
            assert store.engine.history().total() == Figures(8, 0, {"not_found": 12}, 2000, 720, 0, 4.0, 0)
            assert len(store.engine.history().writers) == 2


WORKER = """
import sys
from tests.support.engines import Store
from tests.engine.test_history import ask, keep
from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.pages import Pages
store = Store(Pages(LMDBBackend(sys.argv[1], 1 << 20)))
for _ in range(20):
    ask(store, 3, hits=1)
    keep(store)
store.engine.close()
"""


@pytest.mark.slow
def test_processes_lose_nothing_of_each_other(tmp_path):
    command = [sys.executable, "-c", WORKER, str(tmp_path / "kv")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, env=environment, cwd=ROOT) for _ in range(3)]
    assert [one.wait(PATIENCE) for one in running] == [0, 0, 0]
    with opened(str(tmp_path / "kv")) as backend, backend.view() as view:
        assert read_history(view, NOW).total() == Figures(60, 0, {"not_found": 120}, 18_000, 5400, 0, 30.0, 0)


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


def test_purposes_are_counted_apart():
    with store_of() as store:
        with store.engine.counters.counting(Purpose.WARMING):
            ask(store, 4, hits=4)
        ask(store, 1)
        keep(store)
        history = store.engine.history()
        assert (history.total().hits, history.total(purpose="warming").hits) == (0, 4)
        assert [one.purpose for one in history.requests] == ["warming"] * 4 + ["serving"]


def test_evictions_are_counted_for_the_namespace_of_the_page(clock):
    with store_of(max_bytes=4500) as store:
        clock.told(store)
        store.put(A)
        store.put(B)
        (found,) = store.engine.history().days
        assert (found.namespace, found.figures.evictions) == (short(NS), store.counters["evictions"])
        assert found.figures.evictions > 0


def test_misses_alone_are_written_after_a_while(monkeypatch):
    with store_of() as store:
        ask(store, 1)
        assert not store.engine.has_deferred
        monkeypatch.setattr("prefixstore.engine.figures.ALONE_SECONDS", 0.0)
        assert store.engine.has_deferred
        store.engine.commit([])
        assert note(store, NOTE) is not None
        assert not store.engine.has_deferred


# -- hours and days ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hours_are_kept_for_a_week_and_days_for_a_year(clock):
    with store_of() as store:
        clock.told(store)
        for _ in range(9 * 24):
            ask(store, 1)
            keep(store)
            clock.now += HOUR
        history = store.engine.history()
        assert history.total().lookups == 9 * 24
        assert history.total(WEEK).lookups == 7 * 24
        assert history.total(DAY).lookups == 24
        assert [one.figures.lookups for one in history.days][1:-1] == [24] * 8
        for _ in range(400):
            ask(store, 1)
            keep(store)
            clock.now += DAY
        history = store.engine.history()
        assert 365 <= len(history.days) <= DAYS_KEPT + HOURS_KEPT // 24 + 1
        assert set(notes_of(store)) == {NOTE}


def test_what_waited_is_counted_in_the_hour_in_which_it_happened(clock):
    with store_of() as store:
        clock.told(store)
        ask(store, 2)
        clock.now += 3 * HOUR
        ask(store, 1)
        keep(store)
        hours = {one.start: one.figures.lookups for one in store.engine.history().hours}
        first = int(NOW // HOUR) * HOUR
        assert hours == {first: 2, first + 3 * HOUR: 1}


def test_a_clock_that_was_ahead_for_a_while_costs_nothing(clock):
    with store_of() as store:
        clock.told(store)
        for jump in (0, 365 * DAY, -HOUR, 10 * DAY, 0):
            clock.now = NOW + jump
            ask(store, 2)
            keep(store)
        history = store.engine.history()
        assert history.total().lookups == 10
        # the hours that are wrong do not push out those that are right
        for hour in range(30):
            clock.now = NOW + HOUR * hour
            ask(store, 1)
            keep(store)
        assert store.engine.history().total().lookups == 40
        assert store.engine.history().total(DAY).lookups >= 24
        assert store.engine.history().total(HOUR).lookups == 1


def test_the_last_minutes_are_kept(clock):
    with store_of() as store:
        clock.told(store)
        for _ in range(90):
            ask(store, 1)
            keep(store)
            clock.now += 60
        assert len(store.engine.history().minutes) == 60
        assert store.engine.history().total(600).lookups == 10


def test_the_minutes_of_a_machine_whose_clock_is_a_little_ahead_are_kept(clock):
    with store_of() as store:
        clock.told(store)
        for ahead in (120, 0):
            clock.now = NOW + ahead
            ask(store, 1)
            keep(store)
        assert [one.figures.lookups for one in store.engine.history().minutes] == [1, 1]
        assert store.engine.history().total(HOUR).lookups == 2


# -- bounded ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_tenants_fit_into_a_bounded_space(clock):
    with store_of(max_bytes=10 << 30) as store:
        clock.told(store)
        tenants = [Namespace({"salt": f"tenant {n}", "model": "m" * 64}) for n in range(1000)]
        for one in tenants:
            store.engine.keeper.describe(one, {"name": "a model", "type_k": "f16"})
        for _ in range(26):
            for one in tenants:
                ask(store, 1, hits=1, namespace=one.key)
            keep(store)
            clock.now += HOUR
        history = store.engine.history()
        assert len({one.namespace for one in history.days}) == 1000
        assert history.total(namespaces=[short(tenants[7].key)]).hits == 26
        assert history.describe(short(tenants[7].key)).tenant == "tenant 7"
        assert len(note(store, NOTE)) < MIB


def test_a_process_remembers_what_few_of_its_tenants_are_and_all_are_in_the_location(clock, monkeypatch):
    monkeypatch.setattr("prefixstore.engine.figures.MOST_DESCRIBED", 10)
    with store_of(max_bytes=10 << 30) as store:
        clock.told(store)
        keeper = store.engine.keeper
        for n in range(100):
            one = Namespace({"salt": f"tenant {n}"})
            keeper.describe(one)
            ask(store, 1, hits=1, namespace=one.key)
            keep(store)
            assert len(keeper._described) <= 10
            assert keeper._noted <= keeper._described.keys()
        history = store.engine.history()
        assert {one.tenant for one in history.described.values()} == {f"tenant {n}" for n in range(100)}


def test_of_more_namespaces_than_there_may_be_the_others_are_one(monkeypatch, clock):
    monkeypatch.setattr(figure_note, "MOST_ROWS", 10)
    with store_of() as store:
        clock.told(store)
        for n in range(30):
            ask(store, 1, namespace=key_of(n))
        keep(store)
        days = store.engine.history().days
        assert len(days) == 11
        assert sum(one.figures.lookups for one in days if one.namespace == OTHERS) == 20


def test_in_a_small_budget_rows_are_added_up_and_not_lost():
    rows = {(short(checksum(bytes([n]))), "serving"): Counter(hits=n + 1, saved_microseconds=-5) for n in range(64)}
    found = FigureNote(Periods({1: rows})).pack(800)
    assert found is not None
    rows = FigureNote.parse(found).hours[1]
    assert 2 <= len(rows) < 64
    assert sum(counts["hits"] for counts in rows.values()) == sum(range(65))
    assert sum(counts["saved_microseconds"] for counts in rows.values()) == -320
    # the busiest ones have rows of their own
    assert (short(checksum(bytes([63]))), "serving") in rows
    assert FigureNote(Periods({1: rows})).pack(10) is None


def test_a_note_that_is_too_large_has_days_instead_of_hours_and_loses_the_first_ones():
    def periods(n):
        return Periods(
            {
                hour: {(OTHERS, "serving"): Counter({f"miss:reason_{hour}_{n}": n + 1 for n in range(9)})}
                for hour in range(n)
            }
        )

    hours = FigureNote(periods(40))
    n_counted = hours.history(0.0).total().lookups
    kept = FigureNote.parse(hours.pack(1600))
    assert list(kept.hours) == list(range(min(kept.hours), 40)) != []
    assert kept.history(0.0).total().lookups == n_counted
    kept = FigureNote.parse(FigureNote(days=periods(40)).pack(1200))
    assert list(kept.days) == list(range(min(kept.days), 40))


def test_what_cannot_be_written_is_bounded_in_memory():
    with store_of() as store:
        for n in range(stats_module.MOST_ROWS + 500):
            ask(store, 1, namespace=checksum(n.to_bytes(32, "big")))
        ledger = store.engine.counters.unwritten()
        assert len(ledger.rows) <= stats_module.MOST_ROWS + 2
        assert sum(counts["miss:not_found"] for counts in ledger.rows.values()) == stats_module.MOST_ROWS + 500


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


@pytest.mark.parametrize("damage", ["flipped", "short", "other json", "not json", "no dates"])
def test_damaged_figures_are_replaced_with_one_warning(damage, caplog, clock):
    with store_of() as store:
        clock.told(store)
        ask(store, 2)
        keep(store)
        whole = note(store, NOTE)
        damaged = {
            "flipped": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:],
            "short": whole[:9],
            "other json": pack_state({"1": json.dumps({"rows": 3}).encode()}),
            "not json": pack_state({"1": b"{"}),
            "no dates": FigureNote(Periods({1 << 62: {("a", "serving"): Counter(hits=1)}})).pack(MIB),
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


@pytest.mark.parametrize("at", [float("nan"), float("inf"), -1, 1e300])
@pytest.mark.parametrize("of", ["requests", "writers"])
def test_times_that_are_no_dates_are_damage(at, of):
    found = {"requests": [[at, "a", "serving", "store", 1, 1]], "writers": [["w", at, 1, 1]]}
    raw = json.loads(unpack_state(FigureNote().pack(MIB))["1"])
    with pytest.raises(CorruptError, match="unexpected value"):
        FigureNote.parse(pack_state({"1": json.dumps(raw | {of: found[of]}).encode()}))


def test_figures_of_a_newer_version_are_left_alone(clock):
    with store_of() as store:
        clock.told(store)
        newer = pack_state({"2": b"something else"})
        put_note(store, NOTE, newer)
        ask(store, 2)
        clock.now += HOUR
        ask(store, 2)
        assert store.put(A) == 3
        keep(store)
        assert note(store, NOTE) == newer
        assert store.engine.history().total().lookups == 4
    with pytest.raises(IncompatibleError):
        FigureNote.parse(newer)
    with pytest.raises(CorruptError):
        FigureNote.parse(b"")


@pytest.mark.parametrize("error", [UnavailableError("no"), FullError("no")])
def test_a_commit_that_fails_loses_no_figures(error):
    inner = MemoryPages()
    with store_of(FaultyBackend(inner, "commit", error)) as store:
        ask(store, 2)
        keep(store)
        keep(store)
        with inner.view() as view:
            assert read_history(view, NOW).total().lookups == 2
        assert not store.engine.counters.has_unwritten


@pytest.mark.parametrize("is_committed", [True, False])
def test_what_was_committed_without_an_answer_is_not_counted_twice(is_committed, clock):
    """All at the same moment: which commit was the last is known however fast they follow each other."""
    with store_of() as store:
        clock.told(store)
        ask(store, 1)
        keep(store)
        update = store.backend.update

        @contextlib.contextmanager
        def without_answer():
            store.backend.update = update
            with contextlib.suppress(KeyError), update() as transaction:
                yield transaction
                if not is_committed:
                    raise KeyError
            raise UnavailableError("no answer")

        ask(store, 3, hits=1)
        store.backend.update = without_answer
        keep(store)
        ask(store, 5)
        keep(store)
        total = store.engine.history().total()
        assert (total.lookups, total.hits) == (9, 1)
        assert not store.engine.counters.has_unwritten


@pytest.mark.parametrize("n", [1, 6])
def test_figures_are_written_although_other_processes_commit_first(n):
    inner = MemoryPages()
    with store_of(FaultyBackend(inner, "commit", ConflictError("no"), times=n)) as store:
        ask(store, 2)
        keep(store)
        with inner.view() as view:
            assert read_history(view, NOW).total().lookups == 2


class NotesFail(MemoryPages):
    """A location that takes pages and no figures."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def update(self):
        made = super().update()
        enter = made.__enter__

        def entered():
            transaction = enter()
            put = transaction.put_note

            def put_note(name, value):
                if name.startswith(NOTE):
                    raise self.error
                put(name, value)

            transaction.put_note = put_note
            return transaction

        return SimpleContext(entered, made.__exit__)


class SimpleContext:
    def __init__(self, enter, leave):
        self.enter, self.leave = enter, leave

    def __enter__(self):
        return self.enter()

    def __exit__(self, *error):
        return self.leave(*error)


@pytest.mark.parametrize("error", [FullError("no space"), ValueError("a fault of the store")])
def test_pages_are_written_where_figures_cannot_be(error):
    with store_of(NotesFail(error)) as store:
        ask(store, 2)
        assert store.put(A) == 3
        assert store.match(A) == 12
        assert store.engine.counters.has_unwritten


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


def test_the_budget_is_kept():
    with store_of(max_bytes=3 * MIB, max_entries=70) as store:
        ask(store, 1)
        keep(store)
        with store.backend.view() as view:
            history = read_history(view, NOW)
        assert (history.max_bytes, history.max_entries) == (3 * MIB, 70)
