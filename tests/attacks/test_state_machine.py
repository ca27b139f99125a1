"""The machines of tests/engine/test_state_machine.py, at length."""

from __future__ import annotations

from tests.engine.test_interleaving import Interleaving, interleave
from tests.engine.test_state_machine import (
    LMDB,
    NAMESPACES,
    Machine,
    SmallMemory,
    TwoOnLMDB,
    TwoSmallOnLMDB,
    bounded,
)
from tests.support.models import TORTURE, TORTURE_OF_LONG
from tests.support.places import place


def longer(machine, examples):
    # A class of its own, because a machine keeps the settings of its test. At length five times as many examples:
    # twenty times would be a third of the whole torture.
    return bounded(type(machine.__name__, (machine,), {}), examples // 4 if TORTURE > 1 else examples)


TestMemoryWithoutLimit = longer(Machine, 200)
TestMemoryWithinABudget = longer(SmallMemory, 200)
TestLMDBWithoutLimit = longer(LMDB, 100)
TestTwoEnginesOnOneLocation = longer(TwoOnLMDB, 100)
TestTwoEnginesWithinABudget = longer(TwoSmallOnLMDB, 100)


def test_engines_whose_steps_are_interleaved_leave_a_sound_store(request):
    class OnLMDB(Interleaving):
        def location(self, directory):
            return place("lmdb", directory, request)

    interleave(OnLMDB, 50 * TORTURE_OF_LONG)


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
