"""Ctrl-C in the middle of what a store does with a context. A few points each; the rest is among the attacks."""

from __future__ import annotations

import pytest

from tests.support.interrupted_llama import OPERATIONS, at_call, attempt, bench, count, interrupts


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


@pytest.mark.slow
def test_the_tags_of_a_window_are_put_back_wherever_a_capture_is_interrupted(context_of):
    # each page is taken with all cells of the context tagged as another sequence
    context = context_of("gemma3, window cache")
    for k in range(0, 2 * count(context, "capture", at_call), 3):
        assert attempt(context, "capture", at_call(k))
