"""Faults of the store are misses."""

from __future__ import annotations

import logging

import pytest

from prefixstore.counters import Counters
from prefixstore.engine.miss import Guard
from prefixstore.errors import UnavailableError


def test_a_guard_counts_and_logs_a_fault_and_ends_the_block(caplog):
    counters = Counters()
    with caplog.at_level(logging.WARNING, "prefixstore"):
        with Guard(counters, "miss:error", "miss:unavailable"):
            raise ZeroDivisionError("a fault")
        with Guard(counters, "miss:error", "miss:unavailable"):
            raise UnavailableError("no answer")
        with Guard(counters, "dropped:error"):
            raise UnavailableError("no answer")
    assert counters.group("miss") == {"error": 1, "unavailable": 1}
    assert counters.group("dropped") == {"error": 1}
    unexpected, unavailable, dropped = caplog.records
    # only what is not an error of the store comes with its traceback
    assert unexpected.exc_info is not None
    assert unexpected.exc_info[0] is ZeroDivisionError
    assert not unavailable.exc_info
    assert not dropped.exc_info


def test_a_guard_lets_an_interrupt_through():
    counters = Counters()
    with pytest.raises(KeyboardInterrupt), Guard(counters, "miss:error"):
        raise KeyboardInterrupt
    assert counters.group("miss") == {}
