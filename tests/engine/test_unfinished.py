"""What is left in the middle, by an interrupt or an outage, is read again."""

from __future__ import annotations

import numpy as np
import pytest

from prefixstore.engine import contents
from prefixstore.engine.duel import Access, Duel, Mode
from prefixstore.engine.hazards import AGES, CLASSES
from prefixstore.errors import UnavailableError
from tests.support.engines import MIB, NS, A, B, MemoryPages, Store, store_of


def test_an_interrupt_in_the_middle_of_a_change_leaves_nothing_half_done():
    with store_of(MemoryPages(), max_bytes=MIB) as store:
        store.put(A)
        # between the tokens of a child and what is known of its gaps
        node = store.engine._catalog._contents.index.node(NS, NS)
        node.sealed = Interrupting(node.sealed)
        with pytest.raises(KeyboardInterrupt):
            submit(store, B)
        assert store.fetch(A) == 3
        submit(store, B)
        store.engine.flush()
        assert store.fetch(B) == 3
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


def stored_in(store):
    with store.backend.view() as view:
        return {key for key, _, _ in view.scan()}


def test_a_page_that_is_given_up_in_a_transaction_that_fails_leaves_nothing():
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
    assert len(catalog._contents.pending) == 0
    assert stored_in(store) == set()


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
