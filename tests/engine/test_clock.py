"""A clock that is wrong, here or on another machine, does not end the order of last use."""

import time
from contextlib import closing
from dataclasses import replace

import pytest

from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.record import CLOCK_SLACK
from tests.support.engines import NS, MemoryPages, P, Store, store_of

YEAR = 365 * 86_400 * 10**9


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
    store.engine.touch(NS, store.path(first_page(number)).pages)
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
        latest = store.path(first_page(1)).pages[0].last_used
        assert latest <= clock[0] + CLOCK_SLACK
        clock[0] += 10**9
        store.put(first_page(7))
        assert [store.match(first_page(number)) for number in (2, 0, 1, 7)] == [0, 4, 4, 4]


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
