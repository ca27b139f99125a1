"""Sliding windows: no restore leaves one with missing rows. Proven on rows and logits, against a cold evaluation.

The rows are equal bit by bit. So are the logits, as long as the cells of the window lie in the same order: a window
cache that has written over its oldest rows begins anywhere, one that was restored does not, and sums of floats depend
on their order (0.02 at most here). With rows missing they differ by much more.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from prefixstore import PrefixStore
from prefixstore.llama.state.parse import parse_sequence
from tests.support.models import logits, prompt, state_bytes

# windows of 256 and 128 tokens, beside full attention in every sixth and fourth layer
WINDOWS = {"gemma3": 256, "olmo2": 128}
SUFFIX = prompt(40, seed=99)

pytestmark = [
    pytest.mark.parametrize("arch", WINDOWS),
    pytest.mark.parametrize("swa_full", [True, False], ids=["full cache", "window cache"]),
]


def rows(llm) -> list[tuple[list[int], list[bytes]]]:
    """What the context holds of full attention and of the window: positions, and the rows in their order."""
    return [
        (section.positions.tolist(), [tensor.rows.tobytes() for tensor in section.tensors])
        for section in parse_sequence(state_bytes(llm)).sections
    ]


def next_logits(llm) -> np.ndarray:
    llm.eval(SUFFIX)
    return logits(llm)


def assert_agree(llm, cold, cut: int, window: int) -> None:
    """Two contexts continue alike, and have all that the window sees."""
    in_window = set(range(max(0, cut - window + 1), cut))
    assert set(parse_sequence(state_bytes(llm)).positions[1]) >= in_window, f"cut at {cut}"
    assert np.allclose(next_logits(llm), next_logits(cold), atol=0.1), f"cut at {cut}"


def cuts(page: int, window: int, n: int, seed: int) -> list[int]:
    """Around the boundaries, around where the window begins to move, and anywhere."""
    near = [place + off for place in (3 * page, window, 5 * window) for off in (-1, 0, 1)]
    anywhere = random.Random(seed).sample(range(20, n), 2)
    # a single token in the last batch of the cold evaluation would go through other kernels
    return sorted({cut for cut in (*near, *anywhere, n) if 20 < cut <= n and cut % 512 != 1})


@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [100, *(pytest.param(n, marks=pytest.mark.attack) for n in (48, 1000))])
def test_the_next_logits_are_those_of_a_cold_evaluation_wherever_a_restore_ends(llama, arch, swa_full, page_tokens):
    window, tokens = WINDOWS[arch], prompt(1400, seed=page_tokens)
    llm, cold = llama(arch, swa_full=swa_full), llama(arch, swa_full=swa_full)
    with PrefixStore("memory:", llm, page_tokens=page_tokens) as store:
        page = store._current.context.parameters.page_tokens
        assert page == min(page_tokens, window)
        llm.eval(tokens)
        store.capture()
        assert store.stats().dropped == {}
        for cut in cuts(page, window, len(tokens), seed=page_tokens):
            llm.reset()
            assert store.restore([*tokens[:cut], 7]) == cut
            cold.reset()
            cold.eval(tokens[:cut])
            assert rows(llm) == rows(cold), f"cut at {cut}"
            assert_agree(llm, cold, cut, window)
        assert store.check() == []


@pytest.mark.slow
def test_pages_captured_after_a_restore_are_complete(llama, arch, swa_full):
    llm, cold = llama(arch, swa_full=swa_full), llama(arch, swa_full=swa_full)
    with PrefixStore("memory:", llm, page_tokens=100) as store:
        tokens = prompt(1200, seed=1)
        llm.eval(tokens)
        store.capture()
        for seed, cut in enumerate((1150, 333), start=2):
            llm.reset()
            fork = tokens[:cut] + prompt(500, seed)
            assert store.restore(fork) == cut
            llm.eval(fork[cut:])
            store.capture()
            for end in (cut + 5, cut + 257, len(fork)):
                llm.reset()
                assert store.restore([*fork[:end], 7]) == end
                cold.reset()
                cold.eval(fork[:end])
                assert_agree(llm, cold, end, WINDOWS[arch])
        assert store.stats().dropped == {}
        assert store.check() == []


@pytest.mark.slow
def test_a_store_that_was_attached_late_stores_no_page_with_missing_rows(llama, arch, swa_full):
    llm, tokens = llama(arch, swa_full=swa_full), prompt(1600)
    llm.eval(tokens)
    with PrefixStore("memory:") as store:
        taken = store.capture(llm)
        store.flush()
        assert store.stats().dropped == ({} if swa_full else {"incomplete": 1})
        assert taken == (-(-1600 // WINDOWS[arch]) if swa_full else 0)
        other, cold = llama(arch, swa_full=swa_full), llama(arch, swa_full=swa_full)
        n = store.restore(tokens, other)
        assert n == (1599 if swa_full else 0)
        other.eval(tokens[n:])
        cold.eval(tokens[:n] or tokens)
        if n:
            cold.eval(tokens[n:])
        assert np.array_equal(logits(other), logits(cold))
