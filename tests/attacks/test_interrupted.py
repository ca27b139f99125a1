"""Ctrl-C at the steps of everything that a store does with a context: never a wrong answer, never a wrong page."""

from __future__ import annotations

import pytest

from tests.support.interrupted_llama import KINDS, OPERATIONS, attempt, bench, interrupts
from tests.support.models import TORTURE_OF_LONG, volume

# what is raised in a finalizer, Python ignores
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STEPS = volume(4, TORTURE_OF_LONG)


@pytest.fixture(scope="module", params=KINDS)
def contexts(request, tmp_path_factory):
    return bench(tmp_path_factory.getbasetemp(), request.param)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_follows_an_interrupt_is_right(contexts, operation):
    happened = [attempt(contexts, operation, step) for step in interrupts(contexts, operation, STEPS, seed=1)]
    # threads take turns at the work, so an operation does not always have as many steps
    assert sum(happened) >= 0.5 * len(happened)
    print(f"{len(happened)} steps")
