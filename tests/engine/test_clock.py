"""A clock that is wrong, here or on another machine, does not end the order of last use."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

import pytest

from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.record import CLOCK_SLACK
from tests.engine.test_commit import stored_pages
from tests.support.engines import NS, MemoryPages, P, Store, store_of

YEAR = 365 * 86_400 * 10**9


@pytest.fixture
def clock(monkeypatch):
    now = [time.time_ns()]
    monkeypatch.setattr("time.time_ns", lambda: now[0])
    return now


def first_page(number):
    return [number] * P


def used_in_the_future(store, number, ahead=YEAR):
    """As a process does whose clock is wrong."""
    (key,) = page_keys(NS, as_tokens(first_page(number)), P)
    with store.backend.update() as transaction:
        usage = transaction.usage(key)
        transaction.touch(key, replace(usage, last_used=time.time_ns() + ahead))
    return key


def use(store, number):
    store.engine.touch(NS, store.engine.match(NS, as_tokens(first_page(number)), P).pages)
    store.engine.commit([])


@pytest.mark.parametrize("reopen", [True, False])
def test_a_use_in_the_future_does_not_make_all_later_uses_equal(reopen, clock):
    with store_of(max_entries=3) as store:
        for number in range(3):
            clock[0] += 10**9
            store.put(first_page(number))
        used_in_the_future(store, 1)
        clock[0] += 10**9
        if reopen:
            store.open()
        for number in (2, 0, 1):
            clock[0] += 10**9
            use(store, number)
        latest = store.engine.match(NS, as_tokens(first_page(1)), P).pages[0].last_used
        assert latest <= clock[0] + CLOCK_SLACK
        clock[0] += 10**9
        store.put(first_page(7))
        assert [store.match(first_page(number)) for number in (2, 0, 1, 7)] == [0, 4, 4, 4]


def test_an_imported_page_cannot_carry_a_time_in_the_future_in(clock):
    (page,) = stored_pages(1)
    page = page._replace(usage=replace(page.usage, last_used=clock[0] + YEAR))
    with store_of() as store:
        assert store.engine.importer.import_pages([page], {NS: b"{}"}).pages == 1
        with store.backend.view() as view:
            assert view.usage(page.key).last_used == clock[0]
        store.put(first_page(3))
        assert store.engine.match(NS, as_tokens(first_page(3)), P).pages[0].last_used <= clock[0] + CLOCK_SLACK


def test_uses_are_in_order_even_while_the_clock_stands_still_or_was_set_back(clock):
    with store_of(max_entries=3) as store:
        for number in range(3):
            store.put(first_page(number))
        clock[0] -= YEAR
        for number in (1, 2, 0):
            use(store, number)
        store.put(first_page(7))
        assert [store.match(first_page(number)) for number in (1, 2, 0, 7)] == [0, 4, 4, 4]


def test_two_processes_with_clocks_minutes_apart_agree_on_the_order(clock):
    backend = MemoryPages()
    with closing(Store(backend, max_entries=2)) as one:
        two = Store(backend, max_entries=2)
        clock[0] += 120 * 10**9
        two.put(first_page(0))
        clock[0] -= 120 * 10**9
        one.put(first_page(1))
        one.put(first_page(2))
        assert [one.match(first_page(number)) for number in range(3)] == [0, 4, 4]
