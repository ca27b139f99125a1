"""The trie of prompts: its counts, its order, and where others branch off."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.format.keys import as_tokens
from prefixstore.warming.prompt_trie import PromptTrie
from tests.support.warming import unique_tokens

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=14)


def plan_of(prompts: list[list[int]], min_tokens: int = 0) -> PromptTrie:
    return PromptTrie(((as_tokens(tokens), f"prompt {i}") for i, tokens in enumerate(prompts)), min_tokens)


@given(PROMPTS)
def test_it_counts_the_nodes_of_the_trie(prompts):
    made = plan_of(prompts)
    assert made.prompts == len(prompts)
    assert made.prompt_tokens == sum(map(len, prompts))
    assert made.unique_tokens == unique_tokens(prompts)
    # each prompt once, in the order of a walk
    assert [tuple(made.tokens(i)) for i in range(len(made))] == sorted(set(map(tuple, prompts)))


@given(PROMPTS, st.integers(0, 6))
def test_stops_are_where_other_prompts_branch_off(prompts, start):
    made = plan_of(prompts)

    def common(one, other):
        n = min(len(one), len(other))
        return int(np.argmin([*(one[:n] == other[:n]), False]))

    for i in range(len(made)):
        row = made.tokens(i)
        shared = {common(row, made.tokens(j)) for j in range(len(made)) if j != i}
        assert made.stops(i, start) == tuple(sorted(n for n in shared if start < n < len(row)))


def test_it_keeps_the_origin_of_a_prompt():
    made = plan_of([[3], [1], [1]])
    assert [made.where(i) for i in range(2)] == ["prompt 1", "prompt 0"]
