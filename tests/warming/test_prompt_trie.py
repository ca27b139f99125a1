"""The trie of prompts: where others branch off; that it counts its nodes is seen in jobs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.format.keys import as_tokens
from prefixstore.warming.prompt_trie import PromptTrie

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=14)


def plan_of(prompts: list[list[int]], min_tokens: int = 0) -> PromptTrie:
    return PromptTrie(((as_tokens(tokens), f"prompt {i}") for i, tokens in enumerate(prompts)), min_tokens)


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
