"""Replayed traces: the hit rule, by hand, and the limit that no policy can beat."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from benchmarks.replay import read


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


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_read_plain_or_compressed_and_its_blocks_are_numbered(tmp_path, packed):
    path = written(tmp_path / "trace", [[70, 9], [70, 12]], packed=packed)
    assert read(path) == [[0, 1], [0, 2]]
    assert read(path, 1) == [[0, 1]]
