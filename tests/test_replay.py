"""Replayed traces: the hit rule, by hand, and the limit that no policy can beat."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from benchmarks.replay import OURS, PEERS, Belady, InEngine, cache_of, rates
from tests.support import seeds

EVERY = [*OURS, *PEERS]


def requests(cache, prompts):
    return [cache.request(prompt) for prompt in prompts]


def written(path, prompts, *, packed=False):
    raw = "".join(json.dumps({"timestamp": 0, "hash_ids": blocks}) + "\n" for blocks in prompts).encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    return path


def conversations(seed, n_prompts=150):
    """Prompts that continue others, or start after one of three beginnings; blocks name their prefix."""
    chance = random.Random(seed)
    known = [[0], [1], [2]]
    fresh = 3
    prompts = []
    for _ in range(n_prompts):
        before = chance.choice(known[-30:] if chance.random() < 0.6 else known[:3])
        n = chance.randint(0, 5)
        prompts.append([*before, *range(fresh, fresh + n)])
        fresh += n
        known.append(prompts[-1])
    return prompts


@pytest.mark.parametrize("policy", EVERY)
def test_a_block_is_a_hit_only_if_all_blocks_before_it_hit(policy):
    prompts = [[1, 2, 3], [1, 2, 4], [5, 2], [1, 2, 3, 6]]
    if policy in OURS:
        # for the engine a block is what it follows, too: [5, 2] is another prompt
        assert requests(cache_of(policy, 10, prompts), prompts) == [0, 2, 0, 3]
    else:
        assert requests(cache_of(policy, 10, prompts), [[1, 2, 3], [1, 2, 4], [5, 2], [1, 2, 3, 6]]) == [0, 2, 0, 3]


def test_the_least_recently_used_goes_first_and_the_end_of_a_prompt_before_its_beginning():
    assert requests(InEngine("lru", 3), [[1, 2], [3], [4], [1, 2], [3]]) == [0, 0, 0, 1, 0]


def test_a_prompt_does_not_evict_itself():
    assert requests(InEngine("lru", 3), [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == [0, 3]


def test_belady_drops_the_block_needed_last():
    prompts = [[1], [2], [3], [1], [2], [3]]
    assert requests(Belady(2, prompts), prompts) == [0, 0, 0, 1, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_nothing_is_better_than_belady(seed):
    prompts = conversations(seed)
    found = rates(prompts, ["0.02", "0.1", "0.4"], EVERY)
    for policy in EVERY:
        for capacity, rate in found[policy].items():
            assert 0 <= rate <= found["belady"][capacity]


def test_the_share_of_written_blocks_counts_each_block_as_often_as_it_is_stored():
    prompts = [[1], [2], [1], [2], [1]]
    for policy in ("lru", "gdsf"):
        assert rates(prompts, ["0.5"], [policy], written=True) == {policy: {"0.5": 1.0}}
        assert rates(prompts, ["1"], [policy], written=True) == {policy: {"1": 0.4}}
