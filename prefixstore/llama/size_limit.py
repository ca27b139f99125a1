"""How large a state of a context can be, from the sizes in the metadata of its model: a loose upper bound.

A record says how many bytes its payload unpacks to. Until a context has seen a state of its own, this keeps
a forged record from claiming more than the context could ever hold.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import llama_cpp

__all__ = ["SizeLimit", "size_limit"]

# of a number; no type of a KV cache or of a recurrent state is longer
VALUE_BYTES = 4
# what the bound allows for what the metadata does not say, such as padded rows
SLACK = 2
# of a cell, and of the head of a tensor: more than any version writes
CELL_BYTES = 64
HEAD_BYTES = 64
# sizes of recurrent layers, where the metadata do not have them
STATE_SIZE = 128
CONVOLUTION = 8


class SizeLimit(NamedTuple):
    """The bound: bytes that any state may have, and bytes for each of its tokens."""

    fixed: int
    per_token: int

    def of(self, n_tokens: int) -> int:
        """The most bytes that a state of so many tokens can have."""
        return self.fixed + n_tokens * self.per_token


def size_limit(llm: llama_cpp.Llama) -> SizeLimit:
    """The bound for the states of a ``Llama``."""
    model = llm._model.model
    n_layer, n_embd = llama_cpp.llama_model_n_layer(model), llama_cpp.llama_model_n_embd(model)
    heads = _numbers(llm, "attention.head_count", "attention.head_count_kv")
    widths = _numbers(llm, "attention.key_length", "attention.value_length")
    head_dim = max([*widths, -(-n_embd // min([head for head in heads if head] or [1]))])
    row = max(n_embd, max(heads, default=1) * head_dim)
    per_layer = 2 * row * VALUE_BYTES
    state = max([STATE_SIZE, head_dim, *_numbers(llm, "ssm.state_size", "wkv.head_size", "kda.head_dim")])
    inner = max([2 * n_embd, row, *_numbers(llm, "ssm.inner_size")])
    groups = max([1, *_numbers(llm, "ssm.group_count")])
    taps = max([CONVOLUTION, *_numbers(llm, "ssm.conv_kernel", "shortconv.l_cache")])
    recurrent = (taps * (inner + 2 * groups * state) + inner * state) * VALUE_BYTES
    return SizeLimit(
        SLACK * n_layer * (recurrent + 4 * HEAD_BYTES) + (1 << 16),
        SLACK * n_layer * per_layer + CELL_BYTES,
    )


def _numbers(llm: llama_cpp.Llama, *names: str) -> list[int]:
    """The numbers in the metadata whose names begin so: one for the model, or one for each layer."""
    arch = llm.metadata.get("general.architecture", "")
    return [
        int(number)
        for key, text in llm.metadata.items()
        if key.startswith(tuple(f"{arch}.{name}" for name in names))
        for number in re.findall(r"\d{1,9}", text)
    ]
