"""Traces of prompts that continue each other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

__all__ = ["conversations", "requests", "written"]


def requests(cache: Any, prompts: list[list[int]]) -> list[int]:
    return [cache.request(prompt) for prompt in prompts]


def written(path: Path, prompts: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": blocks}) + "\n" for blocks in prompts))
    return path


def conversations(seed: int, n_prompts: int) -> list[list[int]]:
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
