"""The trie of prompts: counted, walked and divided."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.format.keys import as_tokens
from prefixstore.warming import trie as plan
from prefixstore.warming.trie import PromptTrie
from tests.support.warming import shared_prompts, unique_tokens

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=14)


def plan_of(prompts: list[list[int]], min_tokens: int = 0) -> PromptTrie:
    return PromptTrie(((as_tokens(tokens), f"prompt {i}") for i, tokens in enumerate(prompts)), min_tokens)


def evaluated(plan: PromptTrie) -> int:
    """Walk the parts, each as soon as it may be, and count what is not there yet."""
    known: set[bytes] = set()
    count = 0
    done: set[int] = set()
    for i, part in enumerate(plan.parts()):
        assert done.issuperset(part.needs)
        for j in range(part.first, part.end):
            raw = plan.tokens(j)[: part.depth].tobytes()
            prefixes = {raw[:end] for end in range(4, len(raw) + 1, 4)}
            count += len(prefixes - known)
            known |= prefixes
        done.add(i)
    return count


@given(PROMPTS)
def test_it_counts_what_a_trie_of_tokens_has(prompts):
    made = plan_of(prompts)
    assert made.prompts == len(prompts)
    assert made.prompt_tokens == sum(map(len, prompts))
    assert made.unique_tokens == unique_tokens(prompts)
    assert evaluated(made) == made.unique_tokens


@given(PROMPTS)
def test_however_finely_it_is_divided_no_token_is_in_two_parts(prompts):
    made = plan_of(prompts)
    with mock.patch.object(plan, "SMALLEST_PART", 1):
        assert sum(part.end - part.first for part in made.parts() if part.depth is None) == len(made)
        assert evaluated(made) == made.unique_tokens


@given(PROMPTS)
def test_a_prompt_that_another_begins_with_is_not_kept(prompts):
    made = plan_of(prompts)
    kept = [made.tokens(i).tolist() for i in range(len(made))]
    assert kept == sorted(kept)
    for tokens in prompts:
        assert any(other[: len(tokens)] == tokens for other in kept)
    for tokens in kept:
        assert [other[: len(tokens)] for other in kept].count(tokens) == 1


@given(PROMPTS, st.integers(0, 6), st.integers(1, 12))
def test_stops_are_where_other_prompts_leave_a_prompt_or_end(prompts, start, end):
    made = plan_of(prompts)

    def common(one, other):
        n = min(len(one), len(other))
        return int(np.argmin([*(one[:n] == other[:n]), False]))

    for i in range(len(made)):
        row = made.tokens(i)
        shared = {common(row, as_tokens(other)) for other in prompts}
        assert made.stops(i, start, end) == tuple(sorted(n for n in shared if start < n < min(end, len(row))))


def test_tokens_are_in_the_order_of_their_numbers():
    made = plan_of([[256], [1], [70_000], [255]])
    assert [made.tokens(i).tolist() for i in range(4)] == [[1], [255], [256], [70_000]]


def test_what_is_too_short_is_counted_and_left_out():
    made = plan_of([[1] * 15, [2] * 16], min_tokens=16)
    assert (made.short, len(made), made.prompts, made.unique_tokens) == (1, 1, 2, 16)


def test_it_knows_where_a_prompt_comes_from():
    made = plan_of([[3], [1], [1]])
    assert [made.where(i) for i in range(2)] == ["prompt 1", "prompt 0"]


def test_parts_are_the_same_for_the_same_list_in_any_order():
    prompts = shared_prompts()
    assert plan_of(prompts).parts() == plan_of(prompts[::-1]).parts()
    assert len({part.name for part in plan_of(prompts).parts()}) == len(plan_of(prompts).parts())


def test_what_two_parts_begin_with_is_a_part_before_both(monkeypatch):
    monkeypatch.setattr(plan, "SMALLEST_PART", 50)
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
    monkeypatch.setattr(plan, "SMALLEST_PART", 20)
    prompts = [[1] * 50 + [document] * 40 + [question] * 30 for document in range(2, 5) for question in range(9, 12)]
    made = plan_of(prompts)
    parts = made.parts()
    stems = [part for part in parts if part.depth is not None]
    assert sorted(part.depth for part in stems) == [50, 90, 90, 90]
    assert [part.needs for part in stems if part.depth == 90] == [(parts.index(stems[0]),)] * 3
    assert evaluated(made) == made.unique_tokens == 50 + 3 * 40 + 9 * 30


def test_a_conversation_that_branches_at_every_turn_has_few_parts():
    turns = [[i % 7 + 10] * 5 for i in range(600)]
    prompts = [[token for turn in turns[:n] for token in turn] + [1, 2, 3, n + 100] for n in range(1, 600)]
    made = plan_of(prompts)
    assert len(made.parts()) <= 2 * plan.SHARE + 2


def test_nothing_at_all_is_no_work():
    made = plan_of([])
    assert (made.parts(), made.unique_tokens) == ([], 0)
