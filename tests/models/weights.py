"""Random values for the tensors of a model, so scaled that answers are words and depend on the whole prompt.

Channel 0 of the residual stream is a constant: the embedding sets it, no block writes to it, and the output rows of
what is no word use it as a bias. A model whose output is its embedding has no such rows: its words are longer vectors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.models.architectures import Model

Array = np.ndarray[Any, np.dtype[np.float32]]

BIAS, SUPPRESS, LOGIT_STD = 4.0, -16.0, 4.0
# what blocks add to the stream
TO_STREAM = re.compile(
    r"(attn_output|ffn_down\w*|ssm_out|shortconv\.out_proj|time_mix_output|channel_mix_value|attn_out)\.weight"
)
# these normalize queries: a factor would have no effect
NORMALIZES = ("qwen3", "qwen3moe", "gemma3", "gemma4", "lfm2", "qwen3vl", "olmo2")


@dataclass
class Weights:
    """Makes values."""

    model: Model
    # which rows of the vocabulary are
    words: np.ndarray[Any, np.dtype[np.bool_]]
    # whether the embedding is the output, too
    is_tied: bool
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.n_embd: int = self.model.metadata["embedding_length"]
        self.rules: tuple[tuple[str, Callable[[str, list[int]], Array]], ...] = (
            (r"token_embd\.weight", self.embedding),
            (r"output\.weight", self.output),
            (r"rope_factors_long.*", lambda _, shape: np.linspace(1.0, 8.0, shape[-1], dtype=np.float32)),
            (r"rope_(factors_short|freqs).*", lambda _, shape: np.linspace(1.0, 2.0, shape[-1], dtype=np.float32)),
            (r"ssm_dt.*bias|ssm_dt_b", self.steps),
            (r".*(\.bias|_b)|exp_probs_b.*", lambda _, shape: np.zeros(shape, np.float32)),
            (r"attn_q_norm\.weight", lambda _, shape: np.full(shape, 4.0, np.float32)),
            (r".*norm.*", self.norm),
            (r"ffn_gate_tid2eid.*", self.experts_of_tokens),
            (r"ssm_a(_log)?(\..*)?", self.decay),
            (r"ssm_d(\..*)?", lambda _, shape: np.full(shape, 0.5, np.float32)),
            (r"ssm_dt.*weight", lambda _, shape: self.normal(shape, 0.25)),
            (r"layer_output_scale\.weight", lambda _, shape: np.ones(shape, np.float32)),
            (r"attn_sinks.*", lambda _, shape: self.rng.standard_normal(shape, dtype=np.float32)),
            (r".*lerp.*", lambda _, shape: self.rng.uniform(0.1, 0.9, shape).astype(np.float32)),
            (r"attn_q(_b)?\.weight", lambda _, shape: self.normal(shape, self.sharpness)),
        )

    @property
    def sharpness(self) -> float:
        """The spread of attention scores: uniform attention would average the context away."""
        return 1.0 if self.model.arch in NORMALIZES else 3.0

    def values(self, tensor: str, shape: list[int]) -> Array:
        """The values of a tensor, by its name."""
        name = re.sub(r"^blk\.\d+\.", "", tensor)
        for pattern, make in self.rules:
            if re.fullmatch(pattern, name):
                return make(name, shape)
        if name.startswith("time_mix_") and len(shape) == 1:
            return self.rng.uniform(0.1, 0.9, shape).astype(np.float32)
        out = self.normal(shape)
        if TO_STREAM.fullmatch(name) and len(shape) >= 2 and shape[-2] == self.n_embd:
            out *= 3.0 if self.is_tied else 0.5 if "ffn" in name else 1.0
            out[..., 0, :] = 0
        return out

    def normal(self, shape: list[int], gain: float = 1.0) -> Array:
        """Rows that keep the variance of what they are multiplied with, times a gain."""
        return self.rng.standard_normal(shape, dtype=np.float32) * np.float32(gain / math.sqrt(shape[-1]))

    def no_words(self, n: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return ~np.pad(self.words, (0, n - len(self.words)))

    def embedding(self, _: str, shape: list[int]) -> Array:
        out = self.rng.standard_normal(shape, dtype=np.float32)
        if self.is_tied:
            out[self.no_words(shape[0])] *= 0.3
        else:
            out[:, 0] = BIAS
        # gemma multiplies by this root after the lookup
        return out / np.float32(math.sqrt(self.n_embd)) if self.model.arch.startswith("gemma") else out

    def output(self, _: str, shape: list[int]) -> Array:
        out, suppressed = self.normal(shape, LOGIT_STD), self.no_words(shape[0])
        out[:, 0] = 0
        out[suppressed] = 0
        out[suppressed, 0] = SUPPRESS
        return out

    def norm(self, name: str, shape: list[int]) -> Array:
        out = np.ones(shape, np.float32)
        if name.startswith("post_") and shape == [self.n_embd] and self.model.arch.startswith(("gemma", "olmo2")):
            out[:] = 3.0 if self.is_tied else 0.7
            out[0] = 0
        return out

    def steps(self, _: str, shape: list[int]) -> Array:
        """Slow time steps: a long memory."""
        return np.log(np.expm1(np.exp(self.rng.uniform(math.log(2e-3), math.log(0.05), shape)))).astype(np.float32)

    def decay(self, _: str, shape: list[int]) -> Array:
        if len(shape) == 2 and shape[1] > 1:
            return np.tile(-np.arange(1, shape[1] + 1, dtype=np.float32), (shape[0], 1))
        return -np.linspace(0.3, 3.0, math.prod(shape), dtype=np.float32).reshape(shape)

    def experts_of_tokens(self, _: str, shape: list[int]) -> Any:
        """Which experts a token goes to, by its number."""
        n = self.model.metadata["expert_count"]
        return ((np.arange(math.prod(shape)) * 7) % n).astype(np.int32).reshape(shape)
