"""What the index forgets, and finds again: its bounds hold for any lookups, and good pages come back."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from prefixstore.engine import contents, index
from prefixstore.engine.adaptive_policy import SAVED, Adaptive
from prefixstore.engine.delete import beginning_with
from prefixstore.engine.duel import Access, Mode, _Cache
from prefixstore.engine.hazards import AGES, CLASSES
from prefixstore.format.keys import as_tokens
from prefixstore.format.saved_state import pack_state
from tests.support.engines import MIB, NS, A, B, P, store_of, two_stores, writer_of


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(contents, "CACHED_PAGES", 16)


def known(store):
    return store.engine._catalog._contents


def test_an_engine_that_reads_only_forgets_pages_and_notes_no_uses():
    with store_of() as store:
        for number in range(40):
            store.put([number] * 4)
        with writer_of(store, read_only=True):
            for number in range(40):
                assert store.fetch([number] * 4) == 1
                # and what was just looked up is not read again
                assert store.engine._catalog._unknown(NS, as_tokens([number] * 4), P, snapshots=False) is None
            assert not known(store).deferred.uses
            assert len(known(store).index) <= 16


def test_namespaces_of_which_nothing_is_stored_are_forgotten(monkeypatch):
    monkeypatch.setattr(index, "EMPTY_ROOTS", 8)
    with store_of() as store:
        store.put(A)
        for number in range(100):
            assert store.match(A, namespace=number.to_bytes(32, "little")) == 0
            assert len(known(store).index._roots) <= 2 * 8 + 2
        assert store.match(A) == 12


def test_the_pages_that_a_lookup_finds_are_not_forgotten_by_it():
    with store_of() as store:
        long = list(range(20 * P))
        store.put(long)
        store.engine.commit([])
        assert store.match(long) == 20 * P
        # the end of it may be continued without capturing anything twice
        assert len(store.pages([*long, 1])) == 1


def test_pages_that_have_to_stay_are_not_looked_through_at_each_lookup():
    with store_of() as store:
        for number in range(40):
            store.put([number] * 4)
        for number in range(40):
            store.fetch([number] * 4)
        pages, index = known(store).index.pages, known(store).index
        assert len(pages) > 16
        assert not index.is_full
        store.engine.commit([])
        for number in range(40, 43):
            store.put([number] * 4)
        store.match(A)
        assert len(pages) <= 16


def test_a_page_that_was_taken_for_damaged_is_found_again_when_it_turns_out_to_be_good():
    with store_of() as store:
        store.put(A)
        store.put(B)
        store.engine._catalog.mark_damaged(store.engine.match(NS, as_tokens(A), P).pages[0].key)
        assert store.match(A) == 0
        assert store.match(B) == 12
        store.engine.commit([])
        assert store.match(A) == 12


def test_a_purge_deletes_what_was_taken_for_damaged_and_what_it_follows():
    with store_of() as store:
        store.put(A)
        store.engine._catalog.mark_damaged(store.engine.match(NS, as_tokens(A), P).pages[1].key)
        choice = partial(beginning_with, tokens=as_tokens(A[:4]).tobytes(), namespaces=None)
        assert store.engine.delete([choice]).pages == 3


def test_a_damaged_page_that_another_engine_has_replaced_is_found_by_one_that_reads_only(tmp_path):
    with two_stores(tmp_path / "kv", max_bytes=4 * MIB) as (one, two):
        one.put(A)
        with writer_of(two, read_only=True):
            two.engine._catalog.mark_damaged(two.engine.match(NS, as_tokens(A), P).pages[1].key)
            assert two.match(A) == 4
            one.engine.clear(NS)
            one.put(A)
            assert two.match(A) == 12


def test_what_was_used_by_a_later_prompt_is_the_newest_for_the_duel():
    worth = np.tile(np.arange(AGES, 0, -1, dtype=np.float64), CLASSES)
    cache = _Cache(Mode.LEARNED, 2)
    for number, clock in ((1, 1490), (2, 1501), (3, 1500)):
        cache.access([Access(number, 0, 1, clock, 4, 1.0)], worth)
    assert sorted(cache._numbers) == [2, 3]


def test_a_forged_clock_of_a_policy_is_refused():
    parts = Adaptive().parts()
    numbers = [(1 << 64) - 1, *SAVED.unpack(parts["numbers"])[1:]]
    policy = Adaptive()
    assert not policy.load(pack_state({**parts, "numbers": SAVED.pack(*numbers)}))
    assert policy.parts() == parts
