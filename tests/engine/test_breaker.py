"""How long a location may take to answer before its circuit opens."""

from __future__ import annotations

import threading

import pytest

from prefixstore.engine import breaker as module
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.errors import CorruptError, UnavailableError
from prefixstore.stats import Counters


@pytest.fixture
def clock():
    """Seconds, moved by hand."""
    return [100.0]


@pytest.fixture
def breaker(clock):
    made = CircuitBreaker(lambda page: 0, Counters(), clock=lambda: clock[0])
    yield made
    made.close()
    for thread in threading.enumerate():
        if thread.name == "prefixstore-probe":
            thread.join()


@pytest.mark.parametrize(("n_records", "opens"), [(0, True), (100, True), (10_000, False)])
def test_reading_many_records_may_take_longer(breaker, clock, n_records, opens):
    with breaker.asking() as question:
        clock[0] += 2.0
        question.n_records = n_records
    assert breaker.is_open is opens


def test_an_answer_in_time_changes_nothing(breaker, clock):
    with breaker.asking():
        clock[0] += module.SLOW_SECONDS
    assert not breaker.is_open


def ask_in_vain(breaker, clock, error, page=None):
    with pytest.raises(type(error)):
        ask(breaker, clock, error, page)


def ask(breaker, clock, error, page):
    with breaker.asking(page):
        clock[0] += 0.01
        raise error


def test_after_a_fast_failure_the_circuit_is_open_only_briefly(breaker, clock):
    ask_in_vain(breaker, clock, UnavailableError("no"))
    assert breaker.is_open
    with pytest.raises(UnavailableError, match="circuit open"), breaker.asking():
        pytest.fail("nothing is asked")
    clock[0] += 0.011 * module.OPEN_FACTOR
    assert not breaker.is_open


def test_a_damaged_page_does_not_open_the_circuit(breaker, clock):
    ask_in_vain(breaker, clock, CorruptError("no"), page=object())
    assert not breaker.is_open
