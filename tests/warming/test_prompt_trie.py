"""The trie of prompts: its counts, its order and its division."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.format.keys import as_tokens
from prefixstore.warming import prompt_trie as module
from prefixstore.warming.prompt_trie import PromptTrie
from tests.support.warming import shared_prompts, unique_tokens

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=14)


def plan_of(prompts: list[list[int]], min_tokens: int = 0) -> PromptTrie:
    return PromptTrie(((as_tokens(tokens), f"prompt {i}") for i, tokens in enumerate(prompts)), min_tokens)


def evaluated(trie: PromptTrie) -> int:
    """The new tokens of all parts, each done by a job that has only what it shares with the one before."""
    count = 0
    for part in trie.parts():
        raws = [trie.tokens(j).tobytes() for j in range(part.first, part.end)]
        prefixes = {raw[:end] for raw in raws for end in range(4, len(raw) + 1, 4)}
        shared = trie.tokens(part.first)[: trie.shared[part.first]].tobytes()
        # it is in the last prompt of the part before
        assert not part.first or trie.tokens(part.first - 1).tobytes().startswith(shared)
        count += len(prefixes - {shared[:end] for end in range(4, len(shared) + 1, 4)})
    return count


@given(PROMPTS)
def test_it_counts_the_nodes_of_the_trie(prompts):
    made = plan_of(prompts)
    assert made.prompts == len(prompts)
    assert made.prompt_tokens == sum(map(len, prompts))
    assert made.unique_tokens == unique_tokens(prompts)
    assert evaluated(made) == made.unique_tokens


@given(PROMPTS)
def test_no_token_is_in_two_parts_however_fine_the_division(prompts):
    made = plan_of(prompts)
    with mock.patch.object(module, "SMALLEST_PART", 1):
        assert [i for part in made.parts() for i in range(part.first, part.end)] == list(range(len(made)))
        assert evaluated(made) == made.unique_tokens


@given(PROMPTS, st.integers(0, 6), st.integers(1, 12))
def test_stops_are_where_other_prompts_branch_off_or_end(prompts, start, end):
    made = plan_of(prompts)

    def common(one, other):
        n = min(len(one), len(other))
        return int(np.argmin([*(one[:n] == other[:n]), False]))

    for i in range(len(made)):
        row = made.tokens(i)
        shared = {common(row, as_tokens(other)) for other in prompts}
        assert made.stops(i, start, end) == tuple(sorted(n for n in shared if start < n < min(end, len(row))))


def test_parts_are_the_same_for_the_same_list_in_any_order():
    prompts = shared_prompts()
    assert plan_of(prompts).parts() == plan_of(prompts[::-1]).parts()
    assert len({part.name for part in plan_of(prompts).parts()}) == len(plan_of(prompts).parts())


def test_a_part_is_a_share_of_the_work(monkeypatch):
    monkeypatch.setattr(module, "SMALLEST_PART", 50)
    made = plan_of([[7] * 100 + [i] * 60 for i in range(4)])
    assert [(part.first, part.end) for part in made.parts()] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert evaluated(made) == made.unique_tokens == 340
