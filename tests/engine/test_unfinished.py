"""What is left in the middle, by an interrupt or an outage, is read again: the index, and the table of pages."""

from __future__ import annotations

import numpy as np
import pytest
from prefixstore.engine.page_table import PageTable
from prefixstore.engine.totals import Totals

from prefixstore.engine import contents, table_load
from prefixstore.engine.duel import Access, Duel, Mode
from prefixstore.engine.hazards import AGES, CLASSES
from prefixstore.errors import UnavailableError
from prefixstore.format.keys import as_tokens
from tests.support.engines import MIB, NS, A, B, C, MemoryPages, P, Store, store_of


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["index", "table", "totals"])
def test_an_interrupt_in_the_middle_of_a_change_leaves_nothing_half_done(monkeypatch, where):
    with store_of(MemoryPages(), max_bytes=MIB) as store:
        store.put(A)
        store.engine.evict_to(MIB)
        assert store.engine._catalog.has_table
        target = {"index": (bytes, "__len__"), "table": (PageTable, "_offer"), "totals": (Totals, "_totals_of")}[where]
        if where == "index":
            # between the tokens of a child and what is known of its gaps
            index = store.engine._catalog._contents.index
            node = index.node(NS, NS)
            node.sealed = Interrupting(node.sealed)
        else:
            monkeypatch.setattr(*target, interrupt)
        with pytest.raises(KeyboardInterrupt):
            submit(store, B)
        monkeypatch.undo()
        assert store.fetch(A) == 3
        submit(store, B)
        store.engine.flush()
        assert store.fetch(B) == 3
        store.engine.evict_to(MIB)
        assert table_of(store) == stored_in(store)
        assert store.engine.check() == []
        # and what is evicted is right
        store.engine.evict_to(0)
        assert stored_in(store) == set()


def submit(store, tokens):
    for new in store.pages(tokens):
        store.engine.submit(new)


class Interrupting(list):
    def insert(self, *_):
        raise KeyboardInterrupt


def table_of(store):
    table = store.engine._catalog._table.table
    keys = [table.key(slot) for slot in table if table.entry(slot).is_stored]
    assert len(keys) == len(set(keys)) == len(table)
    assert table.totals.of(None).pages == len(keys)
    assert keys
    return set(keys)


def stored_in(store):
    with store.backend.view() as view:
        return {key for key, _, _ in view.scan()}


@pytest.mark.parametrize("error", [UnavailableError("gone"), KeyboardInterrupt()])
def test_a_table_that_was_filled_in_part_is_filled_anew(monkeypatch, error):
    monkeypatch.setattr(table_load, "FACTS_AT_ONCE", 2)
    backend = MemoryPages()
    for tokens in (A, B, C):
        Store(backend, max_bytes=MIB).put(tokens)
    store = Store(backend, max_bytes=MIB)
    catalog = store.engine._catalog
    enter, left = catalog._enter, [2]

    def fail(*arguments):
        left[0] -= 1
        if not left[0]:
            raise error
        return enter(*arguments)

    monkeypatch.setattr(catalog, "_enter", fail)
    with pytest.raises(type(error)):
        catalog.load_table(backend)
    assert not catalog.has_table
    catalog.load_table(backend)
    assert table_of(store) == stored_in(store)


def test_a_transaction_that_needs_the_table_while_another_thread_fills_it_has_all_of_it(monkeypatch):
    monkeypatch.setattr(table_load, "FACTS_AT_ONCE", 2)
    backend = MemoryPages()
    for tokens in (A, B, C):
        Store(backend, max_bytes=MIB).put(tokens)
    store = Store(backend, max_bytes=MIB)
    catalog = store.engine._catalog
    enter, n_entered = catalog._enter, [0]

    def and_a_transaction(*arguments):
        after = enter(*arguments)
        n_entered[0] += 1
        if n_entered[0] == 2:
            # as another thread does: the lock is free between two slices
            with catalog.update(backend) as transaction:
                catalog.require_table(transaction)
                assert catalog.has_table
                assert table_of(store) == stored_in(store)
        return after

    monkeypatch.setattr(catalog, "_enter", and_a_transaction)
    catalog.load_table(backend)
    assert table_of(store) == stored_in(store)


def test_the_table_has_a_page_that_the_open_transaction_has_put_before_it_is_filled(monkeypatch):
    monkeypatch.setattr(table_load, "FACTS_AT_ONCE", 2)
    backend = MemoryPages()
    store = Store(backend, max_bytes=MIB)
    store.put(A)
    catalog = store.engine._catalog
    # left by an attempt that failed
    catalog._begin_table()
    store.put(B)
    catalog.load_table(backend)
    assert table_of(store) == stored_in(store)
    assert {page.n_tokens for page in store.engine.match(NS, as_tokens(B), P).pages} == {P}


def test_a_page_that_is_given_up_in_a_transaction_that_fails_leaves_no_row():
    store = Store(MemoryPages(), max_bytes=MIB)
    catalog = store.engine._catalog
    batch = store.announce(A)
    put = catalog.put

    def put_and_given_up(new, *arguments, **options):
        put(new, *arguments, **options)
        catalog.abandon([new])
        raise UnavailableError("the location does not answer")

    catalog.put = put_and_given_up
    assert store.engine.commit(batch) == 0
    del catalog.put
    assert len(catalog._table.table) == len(catalog._contents.pending) == 0
    assert catalog.total().pages == 0


def test_a_duel_goes_on_after_an_interrupt_between_a_page_and_its_place():
    duel = Duel()
    duel.resize(8)
    duel._limit = 1 << 32
    worth = np.ones(CLASSES * AGES)
    cache = duel._caches[Mode.LRU]
    cache._numbers.append(7)
    for number in range(20):
        duel.access(Access(number, 0, 1, number, 1, 1.0), worth)
    assert len(cache._place) <= len(cache._numbers)


# -- maintenance, while others work --------------------------------------------------------------------------------


def many(store, n=12):
    """Sequences of three pages each, more than the index may have."""
    sequences = [[i] * 12 for i in range(1, n + 1)]
    for tokens in sequences:
        assert store.put(tokens) == 3
    return sequences


@pytest.mark.parametrize("name", ["load_all", "refresh"])
def test_maintenance_sees_all_pages_while_lookups_forget_some(monkeypatch, name):
    monkeypatch.setattr(contents, "CACHED_PAGES", 4)
    with store_of(MemoryPages(), max_bytes=MIB) as store:
        sequences = many(store)
        before = stored_in(store)
        lookups, inside = [], []
        catalog = store.engine._catalog
        method = getattr(catalog, name)

        def and_a_lookup(*arguments, **options):
            found = method(*arguments, **options)
            if not inside and len(lookups) < 3:
                inside.append(True)
                lookups.append(store.match(sequences[0]))
                inside.pop()
            return found

        monkeypatch.setattr(catalog, name, and_a_lookup)
        assert len(store.engine.pages()) == 36
        lookups.clear()
        assert store.engine.delete_strays(None).pages == 0
        assert stored_in(store) == before
        lookups.clear()
        assert store.engine.clear(NS) == 36
        assert stored_in(store) == set()


def test_maintenance_sees_all_pages_while_another_engine_adds_some(monkeypatch):
    backend = MemoryPages()
    with store_of(backend, max_bytes=4 * MIB) as store:
        other = Store(backend, max_bytes=4 * MIB)
        sequences = many(other)
        catalog = store.engine._catalog
        load_all, n_loads = catalog.load_all, [0]

        def and_a_commit(view, epoch):
            n_loads[0] += 1
            scan = view.scan

            def then_others_commit():
                pages = list(scan())
                other.put([100 + n_loads[0]] * 12)
                store.match(sequences[0])
                return iter(pages)

            view.scan = then_others_commit
            return load_all(view, epoch)

        monkeypatch.setattr(catalog, "load_all", and_a_commit)
        found = {page.key for page in store.engine.pages()}
        # at least what was there when the last attempt began
        assert len(found) >= 36 + 3 * (n_loads[0] - 1)
        store.match([1] * 12)
        assert {page.key for page in catalog._contents.index} == stored_in(store)
