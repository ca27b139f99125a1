"""Small models, prompts, and the bytes of a context, for tests in one process or in several."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from prefixstore import PrefixStore
from prefixstore.testing.models import TINY, write_model

N_CTX = 4096
# `make torture` runs the attacks this many times as long
TORTURE = 20 if os.environ.get("PREFIXSTORE_TORTURE") else 1
# those whose bounded form is long already
TORTURE_OF_LONG = 5 if TORTURE > 1 else 1


def volume(n: int, times: int = TORTURE) -> int:
    """How many of ``n`` cases are tried: half of them in a bounded run, and so many times as many at length."""
    return n * times if TORTURE > 1 else (n + 1) // 2


# the models are tiny, and llama.cpp's threads wait for each other by spinning: two processes would starve each other
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}
# Attention is most of what they compute: two heads take half of the time of four, and the state is the same. Heads that
# share a row of K and V are in olmo2 and lfm2.
SHAPES = TINY | {arch: replace(TINY[arch], n_head=2) for arch in ("llama", "gemma3")}


def write(directory: Path, arch: str, **options: Any) -> Path:
    name = "-".join([arch, *(f"{key}{value}" for key, value in sorted(options.items()))])
    path = directory / f"{name}.gguf"
    if not path.exists():
        write_model(path, SHAPES[arch], **options)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write a file of which all is known."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_lora(path: Path, scale: float, *, alpha: float = 8.0) -> None:
    """An adapter for the query projection of the first layer."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, shape in (("lora_a", (4, 64)), ("lora_b", (64, 4))):
        writer.add_tensor(f"blk.0.attn_q.weight.{name}", (scale * rng.standard_normal(shape)).astype(np.float32))
    finish(writer)


def load(path: str | Path, **options: Any) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(path), verbose=False, **{"n_ctx": N_CTX, **ONE_THREAD, **options})


def prompt(n: int, seed: int = 0) -> list[int]:
    """`n` tokens, the same for the same seed."""
    return np.random.default_rng(seed).integers(300, 3000, n).tolist()


def state_bytes(llm: llama_cpp.Llama) -> bytes:
    """What the context holds, as llama.cpp writes it."""
    pointer = vars(llm._ctx)["ctx"]  # whoever reads llm.ctx has changed the context, for an attached store
    size = llama_cpp.llama_state_seq_get_size(pointer, 0)
    buffer = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(pointer, buffer, size, 0) == size
    return bytes(buffer)


def state_digest(llm: llama_cpp.Llama, n: int) -> str:
    """Digest of the state of the first `n` tokens; the context is cut there."""
    assert llm._ctx.kv_cache_seq_rm(0, n, -1)
    llm.n_tokens = n
    return hashlib.sha256(state_bytes(llm)).hexdigest()


def logits(llm: llama_cpp.Llama) -> np.ndarray:
    """The logits of the last evaluated token."""
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy()


def answer(llm: llama_cpp.Llama, tokens: list[int], n: int = 12, **options: Any) -> str:
    """A greedy completion."""
    return llm(tokens, max_tokens=n, temperature=0, **options)["choices"][0]["text"]


def forget(llm: llama_cpp.Llama) -> None:
    """An empty context, as a restarted process has it."""
    llm.reset()
    llm._ctx.kv_cache_clear()


def attached(store: PrefixStore, llm: llama_cpp.Llama) -> llama_cpp.Llama:
    """The `Llama`, with the store as its cache."""
    store.attach(llm)
    llm.set_cache(store)
    return llm


@contextmanager
def caching(location: str | Path, llm: llama_cpp.Llama, **options: Any) -> Iterator[PrefixStore]:
    """A store that is attached to a `Llama`, and is its cache."""
    with PrefixStore(location, llm, **options) as store:
        llm.set_cache(store)
        yield store


def evaluated(store: PrefixStore, work: Callable[[], object]) -> int:
    """How many tokens go through eval while `work` runs."""
    before = store.stats().tokens_computed
    work()
    return store.stats().tokens_computed - before
