"""The trie of prompts: its counts, its order and its division."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
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
    """Walk the parts, each as soon as its needs are stored, and count the new tokens."""
    known: set[bytes] = set()
    count = 0
    done: set[int] = set()
    for i, part in enumerate(trie.parts()):
        assert done.issuperset(part.needs)
        for j in range(part.first, part.end):
            raw = trie.tokens(j)[: part.depth].tobytes()
            prefixes = {raw[:end] for end in range(4, len(raw) + 1, 4)}
            count += len(prefixes - known)
            known |= prefixes
        done.add(i)
    return count


def evaluated_apart(trie: PromptTrie) -> int:
    """As `evaluated`, by jobs that have only what each part needs: all parts are done at the same time."""
    parts = trie.parts()

    def prefixes(part):
        raws = [trie.tokens(j)[: part.depth].tobytes() for j in range(part.first, part.end)]
        return {raw[:end] for raw in raws for end in range(4, len(raw) + 1, 4)}

    return sum(len(prefixes(part).difference(*(prefixes(parts[need]) for need in part.needs))) for part in parts)


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
        assert sum(part.end - part.first for part in made.parts() if part.depth is None) == len(made)
        assert evaluated(made) == made.unique_tokens


@given(PROMPTS)
def test_a_prefix_of_another_prompt_is_not_kept(prompts):
    made = plan_of(prompts)
    kept = [made.tokens(i).tolist() for i in range(len(made))]
    assert kept == sorted(kept)
    for tokens in prompts:
        assert any(other[: len(tokens)] == tokens for other in kept)
    for tokens in kept:
        assert [other[: len(tokens)] for other in kept].count(tokens) == 1


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


def test_prompts_are_sorted_by_token_number():
    made = plan_of([[256], [1], [70_000], [255]])
    assert [made.tokens(i).tolist() for i in range(4)] == [[1], [255], [256], [70_000]]


def test_short_prompts_are_counted_and_left_out():
    made = plan_of([[1] * 15, [2] * 16], min_tokens=16)
    assert (made.short, len(made), made.prompts, made.unique_tokens) == (1, 1, 2, 16)


def test_it_keeps_the_origin_of_a_prompt():
    made = plan_of([[3], [1], [1]])
    assert [made.where(i) for i in range(2)] == ["prompt 1", "prompt 0"]


def test_parts_are_the_same_for_the_same_list_in_any_order():
    prompts = shared_prompts()
    assert plan_of(prompts).parts() == plan_of(prompts[::-1]).parts()
    assert len({part.name for part in plan_of(prompts).parts()}) == len(plan_of(prompts).parts())


def test_a_prefix_shared_by_two_parts_is_a_part_that_both_need(monkeypatch):
    monkeypatch.setattr(module, "SMALLEST_PART", 50)
    prompts = [[7] * 100 + [i] * 60 for i in range(4)]
    made = plan_of(prompts)
    stem, *runs = made.parts()
    assert (stem.depth, stem.needs) == (100, ())
    assert [(run.first, run.end, run.depth, run.needs) for run in runs] == [
        (0, 1, None, (0,)),
        (1, 2, None, (0,)),
        (2, 3, None, (0,)),
        (3, 4, None, (0,)),
    ]
    assert evaluated(made) == made.unique_tokens == 340


def test_stems_within_stems_need_each_other(monkeypatch):
    monkeypatch.setattr(module, "SMALLEST_PART", 20)
    prompts = [[1] * 50 + [document] * 40 + [question] * 30 for document in range(2, 5) for question in range(9, 12)]
    made = plan_of(prompts)
    parts = made.parts()
    stems = [part for part in parts if part.depth is not None]
    assert sorted(part.depth for part in stems) == [50, 90, 90, 90]
    assert [part.needs for part in stems if part.depth == 90] == [(parts.index(stems[0]),)] * 3
    assert evaluated(made) == made.unique_tokens == 50 + 3 * 40 + 9 * 30


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [8, 30, 60])
def test_jobs_at_the_same_time_compute_hardly_anything_twice(n, seed):
    # runs that begin in the middle of a document share that, and all documents share a system prompt
    made = plan_of(shared_prompts(n, seed))
    assert made.unique_tokens <= evaluated_apart(made) <= 1.02 * made.unique_tokens


def test_a_conversation_that_branches_at_every_turn_has_few_parts():
    turns = [[i % 7 + 10] * 5 for i in range(600)]
    prompts = [[token for turn in turns[:n] for token in turn] + [1, 2, 3, n + 100] for n in range(1, 600)]
    made = plan_of(prompts)
    assert len(made.parts()) <= 2 * module.SHARE + 2


def test_an_empty_list_has_no_parts():
    made = plan_of([])
    assert (made.parts(), made.unique_tokens) == ([], 0)
