"""Small GGUF models with random weights, for the demo, the tests and the benchmarks.

The files are real GGUF files: llama.cpp loads them, tokenizes text with them and generates from them. They are not
trained, so they generate random words; but the words are the *same* for the same seed and prompt, they depend on the
whole context, and they continue for as many tokens as were requested. Only words are generated, each of them one token
with a leading space, so that a completion tokenizes back to its tokens.

>>> from prefixstore.testing.models import TINY, write_model
>>> path = write_model("tiny.gguf", TINY["llama"])  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixstore.errors import MissingExtraError

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The residual stream has about unit variance per channel after the embedding. Channel 0 is a constant: the embedding
# sets it and no block writes to it, so the output rows can use it as a bias (the formats have none).
_BIAS = 4.0  # value of channel 0
_SUPPRESS = -16.0  # output weight on channel 0 for tokens that must not be generated
_LOGIT_STD = 4.0  # spread of the logits of the other tokens
_SHARPNESS = 4.0  # spread of the attention scores: uniform attention would average the context away
_ATTN_GAIN = 1.0  # magnitude that an attention (or recurrent) block adds to the stream
_FFN_GAIN = 0.5  # magnitude that a feed-forward block adds

WINDOWED = ("gemma3", "olmo2")

_F16 = NDArray[np.float16]
_F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """Hyperparameters of a model to write.

    Parameters
    ----------
    arch
        Architecture, by its name in llama.cpp: ``"llama"``, ``"gemma3"``, ``"olmo2"``, ``"mamba"`` or ``"lfm2"``.
    n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff
        Sizes of the network. ``mamba`` has no heads and no feed-forward blocks; ``lfm2`` and
        ``olmo2`` need ``n_head * head_dim == n_embd``. Keep `head_dim` a multiple of 32 for quantized KV caches.
    n_vocab
        Rows of the embedding. Tokens beyond the trained ones are padding and never generated.
    n_trained
        Size of the trained part of the vocabulary, at most `n_vocab`.
    n_ctx_train
        The context length in the metadata.
    sliding_window
        Window of the sliding layers, 0 for none (``gemma3``: every sixth layer has full attention; ``olmo2``: every
        fourth).
    attn_every
        One layer in this many has attention (``lfm2`` only: the others are convolutions).
    conv, d_state, dt_rank
        Length of the convolutions (``mamba``, ``lfm2``), size of the state per channel and rank of the
        time step (``mamba``).
    rope_freq_base, norm_eps
        Base of the rotary embedding and epsilon of the RMS norms.
    """

    arch: str = "llama"
    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 128
    n_vocab: int = 4096
    n_trained: int = 8192
    n_ctx_train: int = 32768
    sliding_window: int = 0
    attn_every: int = 3
    conv: int = 4
    d_state: int = 16
    dt_rank: int = 8
    rope_freq_base: float = 10000.0
    norm_eps: float = 1e-5


TINY: dict[str, Shape] = {
    "llama": Shape(),
    "gemma3": Shape("gemma3", n_layer=6, sliding_window=256, rope_freq_base=1e6, norm_eps=1e-6),
    "olmo2": Shape("olmo2", n_layer=8, n_head=2, n_head_kv=1, sliding_window=128, rope_freq_base=5e5, norm_eps=1e-6),
    "mamba": Shape("mamba", n_head=0, n_head_kv=0, head_dim=0, n_ff=0),
    "lfm2": Shape("lfm2", n_layer=6, n_head=2, n_head_kv=1, conv=3, rope_freq_base=1e6),
}
"""Shapes for each kind of memory, all below 3 MB: full attention, sliding window (two), recurrent, hybrid."""

DEMO = Shape(n_layer=16, n_embd=512, n_head=16, n_head_kv=8, head_dim=64, n_ff=1536, n_vocab=32000)
"""A Llama with 32 KiB of f16 KV per token (as Llama 3.2 1B), with a prefill slow enough to be worth avoiding."""


def write_model(path: str | os.PathLike[str], shape: Shape, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a GGUF model with random weights.

    The file gets its name only when it is complete. The same shape and seed give the same bytes, with the same versions
    of the packages and of Python, on whose documentation the vocabulary is trained.

    Parameters
    ----------
    path
        The file to write; an existing one is replaced.
    shape
        Hyperparameters, for instance ``TINY["llama"]`` or ``DEMO``.
    seed
        Seed of the weights. Vocabulary and shape do not depend on it.
    **overrides
        Fields of `shape` to change, for instance ``n_layer=2``.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    MissingExtraError
        If ``gguf`` or ``tokenizers`` is not installed.
    """
    gguf = _extra("gguf")
    shape = replace(shape, **overrides)
    path = Path(path)
    vocabulary = _vocabulary(min(shape.n_trained, shape.n_vocab))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    writer = gguf.GGUFWriter(temporary, shape.arch)
    try:
        _write_hyperparameters(writer, shape)
        _write_tokenizer(writer, gguf.TokenType, vocabulary, shape.n_vocab)
        for name, tensor in _tensors(shape, vocabulary.words, np.random.default_rng(seed)):
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        temporary.replace(path)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    return path


def _extra(name: str) -> Any:
    """Import a package of the ``demo`` extra."""
    try:
        return importlib.import_module(name)
    except ImportError:
        message = f'a model with random weights is written with {name}; pip install "prefixstore[demo]"'
        # the first traceback would tell no more
        raise MissingExtraError(message) from None


class _Vocabulary(NamedTuple):
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    words: NDArray[np.bool_]  # whether a token is a space and a whole word


@functools.cache
def _vocabulary(size: int) -> _Vocabulary:
    """Train a byte-level BPE on the documentation that comes with Python."""
    tokenizers = _extra("tokenizers")
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics

    corpus = "\n".join(topics[name] for name in sorted(topics))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer=trainer)
    model = json.loads(tokenizer.to_str())["model"]  # merges are public only in this form
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    spaced = {"Ġ" + word for word in re.findall("[A-Za-z]{2,}", corpus)}  # "Ġ" stands for a space
    return _Vocabulary(tuple(tokens), tuple(merges), np.array([token in spaced for token in tokens]))


def _write_hyperparameters(writer: Any, shape: Shape) -> None:
    writer.add_name(f"synthetic {shape.arch}")
    writer.add_file_type(1)  # mostly f16
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    if shape.arch == "mamba":
        writer.add_ssm_conv_kernel(shape.conv)
        writer.add_ssm_inner_size(2 * shape.n_embd)  # llama.cpp accepts no other factor
        writer.add_ssm_state_size(shape.d_state)
        writer.add_ssm_time_step_rank(shape.dt_rank)
        return
    if shape.arch == "lfm2":  # layers without KV heads are recurrent
        writer.add_head_count_kv([shape.n_head_kv * _has_attention(shape, i) for i in range(shape.n_layer)])
        writer.add_shortconv_l_cache(shape.conv)
    else:
        writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_freq_base)
    if shape.sliding_window:
        writer.add_sliding_window(shape.sliding_window)


def _write_tokenizer(writer: Any, types: Any, vocabulary: _Vocabulary, n_vocab: int) -> None:
    tokens = vocabulary.tokens
    unused = [f"<unused_{i}>" for i in range(n_vocab - len(tokens))]
    kinds = [types.CONTROL if token in SPECIAL else types.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*kinds, *[types.UNUSED] * len(unused)])
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(tokens.index(SPECIAL[0]))
    writer.add_pad_token_id(tokens.index(SPECIAL[0]))
    writer.add_eos_token_id(tokens.index(SPECIAL[2]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _has_attention(shape: Shape, layer: int) -> bool:
    return shape.arch in ("llama", *WINDOWED) or (shape.arch == "lfm2" and (layer + 1) % shape.attn_every == 0)


def _tensors(  # noqa: C901 - one branch for each kind of block
    shape: Shape, words: NDArray[np.bool_], rng: np.random.Generator
) -> Iterator[tuple[str, Any]]:
    """Yield the weights. llama.cpp wants vectors, convolutions and state-space parameters in f32."""
    arch, n_embd = shape.arch, shape.n_embd
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim

    def normal(n_out: int, n_in: int, gain: float = 1.0) -> _F32:
        weights = rng.standard_normal((n_out, n_in), dtype=np.float32)
        weights *= gain / math.sqrt(n_in)
        return weights

    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> _F16:
        return normal(n_out, n_in, gain).astype(np.float16)

    def to_stream(n_in: int, gain: float) -> _F16:
        weights = matrix(n_embd, n_in, gain)
        weights[0] = 0  # the constant channel
        return weights

    def vector(size: int, value: float = 1.0) -> _F32:
        return np.full(size, value, np.float32)

    embedding = rng.standard_normal((shape.n_vocab, n_embd), dtype=np.float32)
    embedding[:, 0] = _BIAS
    if arch == "gemma3":  # it multiplies by this root after the lookup
        embedding /= math.sqrt(n_embd)
    output = normal(shape.n_vocab, n_embd, _LOGIT_STD)
    output[:, 0] = 0
    suppressed = ~np.pad(words, (0, shape.n_vocab - len(words)))
    output[suppressed] = 0
    output[suppressed, 0] = _SUPPRESS
    yield "token_embd.weight", embedding.astype(np.float16)
    yield "token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight", vector(n_embd)
    yield "output.weight", output.astype(np.float16)

    for layer in range(shape.n_layer):
        block = f"blk.{layer}."
        if arch != "olmo2":  # it has norms after its blocks only
            yield block + "attn_norm.weight", vector(n_embd)
        if _has_attention(shape, layer):
            normalized = arch != "llama"  # queries and keys are normalized: the sharpness goes into the norm
            yield block + "attn_q.weight", matrix(n_q, n_embd, 1.0 if normalized else _SHARPNESS)
            yield block + "attn_k.weight", matrix(n_kv, n_embd)
            yield block + "attn_v.weight", matrix(n_kv, n_embd)
            yield block + "attn_output.weight", to_stream(n_q, _ATTN_GAIN)
            if normalized:
                yield block + "attn_q_norm.weight", vector(n_q if arch == "olmo2" else shape.head_dim, _SHARPNESS)
                yield block + "attn_k_norm.weight", vector(n_kv if arch == "olmo2" else shape.head_dim)
        elif arch == "lfm2":
            yield block + "shortconv.in_proj.weight", matrix(3 * n_embd, n_embd)
            yield block + "shortconv.conv.weight", normal(n_embd, shape.conv)
            yield block + "shortconv.out_proj.weight", to_stream(n_embd, _ATTN_GAIN)
        else:
            yield from _mamba_block(shape, block, normal, to_stream, rng)
            continue
        if arch in WINDOWED:
            yield block + "post_attention_norm.weight", vector(n_embd, _ATTN_GAIN)
            yield block + "post_ffw_norm.weight", vector(n_embd, _FFN_GAIN)
        if arch != "olmo2":
            yield block + "ffn_norm.weight", vector(n_embd)
        yield block + "ffn_gate.weight", matrix(shape.n_ff, n_embd)
        yield block + "ffn_up.weight", matrix(shape.n_ff, n_embd)
        yield block + "ffn_down.weight", to_stream(shape.n_ff, _FFN_GAIN)


def _mamba_block(
    shape: Shape, block: str, normal: Any, to_stream: Any, rng: np.random.Generator
) -> Iterator[tuple[str, Any]]:
    n_inner, n_x = 2 * shape.n_embd, shape.dt_rank + 2 * shape.d_state
    steps = np.exp(rng.uniform(math.log(2e-4), math.log(0.05), n_inner))  # slow steps: a long memory
    yield block + "ssm_in.weight", normal(2 * n_inner, shape.n_embd).astype(np.float16)
    yield block + "ssm_conv1d.weight", normal(n_inner, shape.conv)
    yield block + "ssm_conv1d.bias", np.zeros(n_inner, np.float32)
    yield block + "ssm_x.weight", normal(n_x, n_inner, 5.0).astype(np.float16)
    yield block + "ssm_dt.weight", normal(n_inner, shape.dt_rank, 0.25)
    yield block + "ssm_dt.bias", np.log(np.expm1(steps)).astype(np.float32)  # softplus gives the step
    yield block + "ssm_a", np.tile(-np.arange(1, shape.d_state + 1, dtype=np.float32), (n_inner, 1))
    yield block + "ssm_d", np.full(n_inner, 0.5, np.float32)
    yield block + "ssm_out.weight", to_stream(n_inner, _ATTN_GAIN)
