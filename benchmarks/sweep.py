"""Restore time against the number of tokens, with the limits and with what llama-cpp-python and llama.cpp offer."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.common import LIGHT, forget, load, model_path, prompt_tokens, seconds, summary
from benchmarks.tables import paragraph
from prefixstore import PrefixStore

SIZES = (256, 512, 1024, 2048, 4096, 8192)
ROUNDS = 9
CODECS = ("raw", "auto")


def works_for(
    llm: Any, n: int, directory: Path, tokens: list[int], memory: list[np.ndarray]
) -> dict[str, Callable[[], object]]:
    """Ways to put the `n` tokens that the context holds back into it. All sizes use the same two pieces of memory."""
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    source, target = (piece[:size] for piece in memory)
    state = ctypes.cast(source.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(llm.ctx, state, size, 0) == size
    saved = llm.save_state()
    path = bytes(directory / f"{n}.state")
    array = (ctypes.c_int32 * n)(*tokens[:n])
    out, count = (ctypes.c_int32 * llm.n_ctx())(), ctypes.c_size_t()
    assert llama_cpp.llama_state_save_file(llm.ctx, path, array, n)
    return {
        "memcpy": lambda: np.copyto(target, source),
        "limit": lambda: llama_cpp.llama_state_seq_set_data(llm.ctx, state, size, 0),
        "load_file": lambda: llama_cpp.llama_state_load_file(llm.ctx, path, out, len(out), ctypes.byref(count)),
        "load_state": lambda: llm.load_state(saved),
    }


def measure(
    llm: Any, stores: dict[str, PrefixStore], n: int, directory: Path, memory: list[np.ndarray]
) -> dict[str, dict[str, float]]:
    tokens = prompt_tokens(llm, SIZES[-1] + 1)
    # remove what is left of a longer prompt
    forget(llm)
    assert stores["raw"].restore(tokens[: n + 1], llm) == n
    works = works_for(llm, n, directory, tokens, memory)
    for codec, store in stores.items():
        works[codec] = lambda store=store: store.restore(tokens[: n + 1], always=True)
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, work in works.items():
            forget(llm)
            if name in stores:
                stores[name].attach(llm)
            taken = seconds(work)
            if name in stores:
                assert llm.n_tokens == n
                stores[name].detach()
            # the first round warms files and buffers
            if turn:
                times[name].append(taken)
    return {name: summary(taken) for name, taken in times.items()}


def run() -> dict[str, Any]:
    llm = load(model_path(**{**LIGHT, "n_vocab": 32000}), n_ctx=SIZES[-1] + 256)
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        stores = {codec: PrefixStore(directory / codec, namespace=codec, codec=codec) for codec in CODECS}
        llm.eval(prompt_tokens(llm, SIZES[-1]))
        for store in stores.values():
            store.capture(llm)
            store.flush()
        memory = [np.zeros(llama_cpp.llama_state_seq_get_size(llm.ctx, 0), np.uint8) for _ in range(2)]
        for piece in memory:
            piece.fill(1)
        results = {str(n): measure(llm, stores, n, directory, memory) for n in reversed(SIZES)}
        for store in stores.values():
            store.close()
    return {str(n): results[str(n)] for n in SIZES}


def section(_: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    return [
        "## Restore against the number of tokens",
        "",
        *paragraph(
            f"""32 KiB of state a token, V transposed (the default of `Llama`), files are in the system's memory;
            medians of {ROUNDS} rounds, in turns. One `set_data` is the limit of a restore. `Llama.load_state` copies a
            state that is in memory, and the scores of a batch. `llama_state_load_file` verifies nothing."""
        ),
        "![Restore against the number of tokens](plots/restore.png)",
        "",
    ]
