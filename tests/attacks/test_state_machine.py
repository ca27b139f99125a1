"""The machines of tests/engine/test_state_machine.py, at length."""

from __future__ import annotations

from tests.engine.test_state_machine import (
    LMDB,
    NAMESPACES,
    Machine,
    SmallMemory,
    TwoOnLMDB,
    TwoSmallOnLMDB,
    bounded,
)


def longer(machine, examples):
    # of its own, because a machine keeps the settings of its test
    return bounded(type(machine.__name__, (machine,), {}), examples)


TestMemoryWithoutLimit = longer(Machine, 200)
TestMemoryWithinABudget = longer(SmallMemory, 200)
TestLMDBWithoutLimit = longer(LMDB, 100)
TestTwoEnginesOnOneLocation = longer(TwoOnLMDB, 100)
TestTwoEnginesWithinABudget = longer(TwoSmallOnLMDB, 100)


def test_a_page_evicted_by_its_own_commit_is_not_counted():
    one = TwoSmallOnLMDB()
    steps = [
        lambda: one.put(which=0, namespace=NAMESPACES[1], tokens=(1, 1)),
        lambda: one.clear(which=0, namespace=None),
        lambda: one.put_later(which=0, namespace=NAMESPACES[1], tokens=(1, 1)),
        lambda: one.put(which=0, namespace=NAMESPACES[0], tokens=(0, 0, 0, 0, 0)),
        lambda: one.put(which=0, namespace=NAMESPACES[0], tokens=(0, 0, 0, 1, 0, 0, 0, 0, 0)),
        one.flush,
    ]
    for step in steps:
        step()
        one.every_invariant_holds()
    one.teardown()
