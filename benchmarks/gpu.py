"""A prompt in the memory of a GPU: is it restored bit for bit, how fast, and what does storing it cost?

It needs an NVIDIA GPU, and a llama-cpp-python built for CUDA. The model has the shape of Llama 3 8B, with random
weights. Whatever is timed ends when the GPU has ended.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.common import CACHE, forget, pointer_of, prompt_tokens, state_of
from benchmarks.tables import milliseconds, paragraph, table
from prefixstore import PrefixStore
from prefixstore.testing.models import DEMO, write_model

SHAPE = replace(DEMO, n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, head_dim=128, n_ff=14336)
LENGTHS = (256, 1024, 4096, 16384)
ROUNDS = 5
CONTEXTS: dict[str, dict[str, Any]] = {
    "flash attention": {"flash_attn": True},
    "V transposed": {"flash_attn": False},
    "flash attention, q8_0": {
        "flash_attn": True,
        "type_k": llama_cpp.GGML_TYPE_Q8_0,
        "type_v": llama_cpp.GGML_TYPE_Q8_0,
    },
    "flash attention, half of the layers": {"flash_attn": True, "n_gpu_layers": 16},
}


def model() -> Path:
    """14 GB, written once."""
    path = CACHE / "gpu-8b.gguf"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        write_model(path, SHAPE)
    return path


def load(longest: int, **options: Any) -> llama_cpp.Llama:
    llm = llama_cpp.Llama(str(model()), n_ctx=longest + 512, verbose=False, **{"n_gpu_layers": -1, **options})
    # kernels are chosen, and memory is taken, at the first use
    llm.eval(prompt_tokens(llm, 1024, seed=99))
    return llm


def seconds(llm: llama_cpp.Llama, work: Callable[[], object]) -> float:
    llama_cpp.llama_synchronize(pointer_of(llm))
    started = time.perf_counter()
    work()
    llama_cpp.llama_synchronize(pointer_of(llm))
    return time.perf_counter() - started


def logits(llm: llama_cpp.Llama) -> bytes:
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).tobytes()


def completion(llm: llama_cpp.Llama, tokens: list[int]) -> tuple[float, float]:
    """Seconds to the first text of a completion, and to its end."""
    started = time.perf_counter()
    chunks = llm.create_completion(tokens, max_tokens=8, temperature=0, stream=True)
    next(chunks)
    first = time.perf_counter() - started
    for _ in chunks:
        pass
    return first, time.perf_counter() - started


def completions(llm: llama_cpp.Llama, tokens: list[int], store: PrefixStore | None) -> dict[str, float]:
    """A prompt that is not stored, in an empty context: medians of its times, and what a flush takes after that."""
    llm.set_cache(store)
    times = []
    for _ in range(ROUNDS):
        forget(llm)
        if store is not None:
            store.clear(everything=True)
        first, end = completion(llm, tokens)
        started = time.perf_counter()
        if store is not None:
            store.flush()
        times.append((first, end, time.perf_counter() - started))
    llm.set_cache(None)
    return dict(zip(("first", "end", "flush"), map(statistics.median, zip(*times, strict=True)), strict=True))


def restores(llm: llama_cpp.Llama, tokens: list[int], store: PrefixStore) -> dict[str, Any]:
    """A stored prompt, back in the context: what llama.cpp needs for it, what we need, and what a completion needs."""
    n, ctx = len(tokens) - 1, pointer_of(llm)
    forget(llm)
    llm.eval(tokens[:n])
    state = state_of(llm)
    llm.eval(tokens[n:])
    expected = logits(llm)
    forget(llm)
    assert store.restore(tokens) == n
    found: dict[str, Any] = {"state_bytes": len(state), "equal_state": bytes(state_of(llm)) == bytes(state)}
    llm.eval(tokens[n:])
    found["equal_logits"] = logits(llm) == expected
    works: dict[str, Callable[[], object]] = {
        "set_data": lambda: llama_cpp.llama_state_seq_set_data(ctx, state, len(state), 0),
        "get_data": lambda: llama_cpp.llama_state_seq_get_data(ctx, state, len(state), 0),
        "restore": lambda: store.restore(tokens),
        "compute": lambda: llm.eval(tokens[:n]),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            if name != "get_data":
                forget(llm)
            times[name].append(seconds(llm, work))
    llm.set_cache(store)
    forget(llm)
    found["first"] = completion(llm, tokens)[0]
    llm.set_cache(None)
    return found | {name: statistics.median(taken) for name, taken in times.items()}


def measure(lengths: tuple[int, ...], **options: Any) -> dict[str, Any]:
    llm = load(max(lengths), **options)
    found: dict[str, Any] = {}
    for n in lengths:
        tokens = prompt_tokens(llm, n + 1, seed=n)
        with tempfile.TemporaryDirectory() as directory:
            figures: dict[str, Any] = {"without": completions(llm, tokens, None)}
            with PrefixStore(directory, llm, codec="raw", max_bytes="40GiB", queue_bytes="4GiB") as store:
                figures["with"] = completions(llm, tokens, store)
                forget(llm)
                llm.eval(tokens[:n])
                store.capture()
                store.flush()
                stats = store.stats()
                rate = store._current.context.rate
                figures |= {"dropped": dict(stats.dropped), "token_us": (rate.token_seconds or 0) * 1e6}
            with PrefixStore(directory, llm, codec="raw", read_only=True, max_delay=None) as store:
                figures["stored"] = restores(llm, tokens, store)
        found[str(n)] = figures
    llm.close()
    return found


def run() -> dict[str, Any]:
    device = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    return {"device": device, **{context: measure(LENGTHS, **options) for context, options in CONTEXTS.items()}}


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = []
    for context in CONTEXTS:
        for n, found in result.get(context, {}).items():
            stored, new, bare = found["stored"], found["with"], found["without"]
            assert stored["equal_state"]
            assert stored["equal_logits"]
            # a store that found computing faster has restored nothing
            is_restored = stored["restore"] > stored["set_data"] / 2
            rows.append(
                [
                    context,
                    f"{int(n):,}",
                    milliseconds(stored["compute"]),
                    milliseconds(stored["restore"]) if is_restored else "computed instead",
                    milliseconds(stored["set_data"]),
                    f"{milliseconds(new['first'])} ({milliseconds(bare['first'])})",
                    f"{milliseconds(new['end'])} ({milliseconds(bare['end'])})",
                    milliseconds(stored["first"]),
                ]
            )
    head = [
        "context",
        "tokens",
        "compute",
        "restore",
        "limit",
        "new prompt: first text (without a store)",
        "its end, 8 tokens later",
        "stored prompt: first text",
    ]
    return [
        f"## On a GPU, {result['device']}: 8B, 128 KiB of state a token; LMDB, raw",
        "",
        *paragraph(
            f"""The model has the shape of Llama 3 8B; all of it and of its KV memory is on the GPU, unless said
            otherwise. Medians of {ROUNDS} rounds. The limit is one `llama_state_seq_set_data` of the same state. Why
            copying counts there: [design.md](design.md#what-llamacpp-does-measured-llama-cpp-python-0336), point 10."""
        ),
        *table(head, rows),
    ]
