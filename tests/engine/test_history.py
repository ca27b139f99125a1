"""What a location keeps of how it was used: merged, bounded, honest, and never in the way."""

import logging
import time
from types import SimpleNamespace

import pytest

from prefixstore import counters as counters_module
from prefixstore.counters import DAY, OTHERS, short
from prefixstore.engine.keyspace import everything
from prefixstore.format.figures import DAYS_KEPT, NOTE, Figures, History
from prefixstore.format.namespace import Namespace
from prefixstore.format.saved_state import pack_state, unpack_state
from tests.support import in_fork
from tests.support.engines import MIB, NS, A, B, Store, store_of, two_stores
from tests.support.places import contents, opened

NOW = time.time()
TODAY = int(NOW // DAY)


@pytest.fixture
def clock(monkeypatch):
    """The time by which counters count, to be set."""
    found = SimpleNamespace(now=NOW)
    monkeypatch.setattr(counters_module, "time", SimpleNamespace(time=lambda: found.now))
    return found


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
        counters.count("prompt_tokens", 100, namespace=namespace)


def keep(store):
    """Have what was counted written."""
    store.engine.flush()


def kept(backend):
    with backend.view() as view:
        return History.of(view.note(NOTE))


def notes_of(store):
    """All notes of a location."""
    with store.backend.rows.view() as rows:
        return {row.key[1:]: row.value for row in rows.ranges([everything(b"o")])[0]}


# -- kept and merged --------------------------------------------------------------------------------------------------


def test_what_was_counted_is_there_after_a_restart():
    with store_of() as store:
        ask(store, 3, hits=1)
        store.put(A)
        keep(store)
        store.open()
        figures = store.engine.history().total()
        assert figures._replace(bytes_written=0) == Figures(
            1, 2, 300, 90, 0, 500_000, allocations=3, misses_not_found=2
        )
        assert figures.bytes_written == 3 * 1000
        assert (figures.hit_rate, figures.lookups) == (1 / 3, 3)


def test_two_stores_add_to_each_others_figures(tmp_path):
    with two_stores(tmp_path / "kv") as (one, two):
        for store in (one, two, one, two):
            ask(store, 5, hits=2)
            keep(store)
        for store in (one, two):
            assert store.engine.history().total() == Figures(8, 12, 2000, 720, 0, 4_000_000, misses_not_found=12)


def test_a_forked_child_does_not_count_again_what_its_parent_has_counted(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        store = Store(backend)
        ask(store, 3)
        store.engine.describe(Namespace({"model": "b" * 64}), "a model")

        def child():
            ask(store, 1)
            store.engine.close()

        in_fork(child)
        assert kept(backend).models == {"b" * 12: "a model"}
        keep(store)
        assert store.engine.history().total().lookups == 4


def test_prompts_of_a_job_and_those_that_bypass_the_store_do_not_count_and_pages_do():
    with store_of(max_bytes=4500) as store:
        with store.engine.counters.not_serving():
            ask(store, 4, hits=4)
            store.put(A)
            store.put(B)
        ask(store, 1)
        store.engine.counters.count("miss:bypassed", namespace=NS)
        keep(store)
        figures = store.engine.history().total()
        assert (figures.hits, figures.misses, figures.prompt_tokens) == (0, 1, 100)
        assert (figures.allocations, figures.evictions) == (
            store.counters["allocations"],
            store.counters["evictions"],
        )
        assert figures.evictions > 0


def test_what_was_counted_is_written_after_a_while_without_a_page(monkeypatch):
    with store_of() as store:
        ask(store, 1)
        assert not store.engine.write_queue.has_deferred
        monkeypatch.setattr("prefixstore.engine.saved_notes.FIGURE_SECONDS", 0.0)
        assert store.engine.write_queue.has_deferred
        store.engine.commit([])
        assert kept(store.backend).total().lookups == 1
        assert not store.engine.write_queue.has_deferred


def test_a_fault_after_a_commit_costs_none_of_its_pages(monkeypatch):
    with store_of() as store:
        with monkeypatch.context() as patch:
            patch.setattr(store.engine._notes, "save", lambda: 1 / 0)
            assert store.put(A) == 3
        assert store.counters.group("dropped") == {}
        assert store.fetch(A) == 3


# -- days -------------------------------------------------------------------------------------------------------------


def test_what_waited_is_counted_on_the_day_on_which_it_happened_and_kept_for_a_month(clock):
    with store_of() as store:
        for ago in range(40):
            clock.now = NOW - ago * DAY
            ask(store, 1)
        keep(store)
        history = store.engine.history()
        assert sorted(day for day, _ in history.days) == list(range(TODAY - DAYS_KEPT + 1, TODAY + 1))
        assert (history.total(1).lookups, history.total(7).lookups, history.total().lookups) == (1, 7, DAYS_KEPT)
        assert history.since == (TODAY - DAYS_KEPT + 1) * DAY
        assert set(notes_of(store)) == {NOTE}


def test_a_clock_that_was_wrong_costs_what_it_has_counted(clock):
    with store_of() as store:
        for jump in (0, 365 * DAY, -DAY, 10 * DAY, -365 * DAY):
            clock.now = NOW + jump
            ask(store, 2)
            keep(store)
        assert store.engine.history().total().lookups == 6


# -- bounded ----------------------------------------------------------------------------------------------------------


def test_of_more_namespaces_than_there_may_be_those_of_the_first_days_and_with_least_are_one():
    history = History()
    for day in (TODAY - 1, TODAY):
        history.add({(day, short(key_of(n)), "prompt_tokens"): n for n in range(1, 31)})
    before, limited = history.total(), History.of(history.pack(40))
    assert (limited.total(), limited.total(1)) == (before, Figures(prompt_tokens=sum(range(31))))
    assert sorted(limited.days)[:2] == [(TODAY - 1, OTHERS), (TODAY - 1, short(key_of(21)))]
    assert {name for day, name in limited.days if day == TODAY} == {short(key_of(n)) for n in range(1, 31)}
    assert set(History.of(history.pack(0)).days) == {(TODAY - 1, OTHERS), (TODAY, OTHERS)}


def test_what_cannot_be_written_is_bounded_in_memory(monkeypatch):
    monkeypatch.setattr(counters_module, "MOST_WAITING", 100)
    with store_of() as store:
        for n in range(200):
            ask(store, 1, namespace=key_of(n))
        assert len(store.engine.counters.unwritten()) <= 105
        assert store.engine.history().total().lookups == 200


def test_figures_never_exceed_the_budget():
    with store_of(max_bytes=1 << 20, options={"write_behind": False}) as store:
        while store.counters["evictions"] == 0:
            store.put([store.counters["allocations"] + 1] * 40, 5000)
        for n in range(1000):
            ask(store, 1, namespace=key_of(n))
        keep(store)
        assert kept(store.backend).total().lookups == 1000
        assert store.engine.upkeep.used()[0].bytes <= 1 << 20


# -- faults -----------------------------------------------------------------------------------------------------------


def damaged(kind, whole):
    """A note in which something is wrong."""
    parts = unpack_state(whole)
    return {
        "flipped": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:],
        "short": whole[:9],
        "of another version": pack_state({"2": b"{}"}),
        "cut": pack_state(parts | {"days": parts["days"][:-1]}),
        "too large": pack_state(parts | {"days": b"\x7f" * 84}),
        "no budget": pack_state(parts | {"budget": b""}),
    }[kind]


@pytest.mark.parametrize("kind", ["flipped", "short", "of another version", "cut", "too large", "no budget"])
def test_damaged_figures_are_replaced_with_a_warning(kind, caplog):
    with store_of() as store:
        ask(store, 2)
        keep(store)
        with store.backend.update() as transaction:
            transaction.put_note(NOTE, damaged(kind, transaction.note(NOTE)))
        with caplog.at_level(logging.WARNING, "prefixstore"):
            assert store.put(A) == 3
            ask(store, 5)
            keep(store)
            keep(store)
        assert [record.message.count("cannot be used, and are counted anew") for record in caplog.records] == [1]
        assert kept(store.backend).total().lookups == 5


def test_a_store_that_only_reads_writes_nothing():
    with store_of() as store:
        store.put(A)
        before = contents(store.backend)
        store.open(read_only=True)
        ask(store, 2)
        assert store.fetch(A) == 3
        store.engine.write_queue.nudge()
        keep(store)
        assert contents(store.backend) == before
        assert NOTE not in notes_of(store)
        # nothing waits for a commit that never comes
        assert not store.engine.write_queue.has_deferred
        assert store.counters.group("dropped") == {}
        assert store.engine.history().total().lookups == 2
        assert store.engine.counters.unwritten()


def test_figures_are_of_the_store_that_was_the_last_to_write():
    with store_of(max_bytes=8 * MIB, max_entries=7) as store:
        ask(store, 1)
        keep(store)
        assert (kept(store.backend).max_bytes, kept(store.backend).max_entries) == (8 * MIB, 7)
