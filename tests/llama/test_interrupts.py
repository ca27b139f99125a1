"""Ctrl-C in the middle of what a store does with a context. A few points each; the rest is among the attacks."""

from __future__ import annotations

import pytest

from tests.support.interrupted_llama import OPERATIONS, attempt, bench, interrupts

# what is raised in a finalizer, Python ignores
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def context_of(tmp_path_factory):
    benches = {}

    def get(kind):
        if kind not in benches:
            benches[kind] = bench(tmp_path_factory.getbasetemp(), kind)
        return benches[kind]

    return get


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_follows_an_interrupt_is_right(context_of, kind, operation):
    context = context_of(kind)
    for step in interrupts(context, operation, 1, seed=2):
        attempt(context, operation, step)
