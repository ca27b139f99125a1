"""What is left in the middle, by an interrupt or an outage, is read again."""

from __future__ import annotations

import numpy as np
import pytest

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


def test_maintenance_sees_a_page_that_is_committed_while_it_begins(monkeypatch):
    with store_of(MemoryPages(), max_bytes=MIB) as store:
        store.put(A)
        news = store.pages(B)
        assert all(store.engine.announce(new) for new in news)
        view, backend = store.backend.view, store.backend

        def view_after_a_commit():
            monkeypatch.setattr(backend, "view", view)
            assert store.engine.commit(news) == 3
            return view()

        monkeypatch.setattr(backend, "view", view_after_a_commit)
        assert len(store.engine.pages()) == 6
        assert len(store.engine.pages()) == 6
