"""Lists of prompts to warm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.support.models import prompt


def shared_prompts(n: int) -> list[list[int]]:
    """Prompts that share system prompts and documents; none of the borders is that of a page."""
    rng = np.random.default_rng(0)
    system = [prompt(700, 1), prompt(333, 2)]
    documents = [prompt(int(length), 100 + i) for i, length in enumerate(rng.integers(50, 900, 8))]
    return [system[i % 2] + documents[i % 8] + prompt(int(rng.integers(3, 120)), 1000 + i) for i in range(n)]


def unique_tokens(prompts: list[list[int]]) -> int:
    """The nodes of the trie, counted one by one."""
    return len({tuple(tokens[:end]) for tokens in map(tuple, prompts) for end in range(1, len(tokens) + 1)})


def write_jsonl(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
