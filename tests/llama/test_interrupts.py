"""Ctrl-C at the steps of everything that a store does with a context: never a wrong answer, never a wrong page."""

from __future__ import annotations

import pytest

from tests.support.interrupted_llama import KINDS, OPERATIONS, attempt, bench, interrupts
from tests.support.models import TORTURE_OF_LONG, volume

# what is raised in a finalizer, Python ignores
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# at how many steps, in which contexts
FEW = [pytest.param((kind, 1), id=kind) for kind in ("llama", "lfm2")]
STEPS = volume(4, TORTURE_OF_LONG)
MANY = [pytest.param((kind, STEPS), id=f"{kind}, {STEPS} steps", marks=pytest.mark.attack) for kind in KINDS]


@pytest.fixture(scope="module", params=[*FEW, *MANY])
def contexts(request, tmp_path_factory):
    kind, n_steps = request.param
    return bench(tmp_path_factory.getbasetemp(), kind), n_steps


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_follows_an_interrupt_is_right(contexts, operation):
    on, n_steps = contexts
    happened = [attempt(on, operation, step) for step in interrupts(on, operation, n_steps, seed=n_steps)]
    # threads take turns at the work, so an operation does not always have as many steps
    assert sum(happened) >= 0.5 * len(happened)
