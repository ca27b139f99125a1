"""``Llama`` with a store: prompts to a new one, as after a restart."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from prefixstore import PrefixStore
from tests.models.records import Answer, Settings
from tests.support.models import load, logits, state_bytes

N_PREDICT = 16
TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}


def opened(model: Path, settings: Settings) -> llama_cpp.Llama:
    """A `Llama` with these settings. Without flash attention V cannot be quantized."""
    kinds = {"type_k": TYPES[settings.kv], "type_v": TYPES[settings.kv if settings.fa == "on" else "f16"]}
    return load(model, flash_attn=settings.fa == "on", swa_full=settings.swa_full, **kinds)


def tokens_of(llm: llama_cpp.Llama, text: str) -> list[int]:
    return llm.tokenize(text.encode(), add_bos=False, special=True)


def answers(llm: llama_cpp.Llama, store: PrefixStore | None, prompts: Sequence[str]) -> list[Answer]:
    """Answer prompts, one after the other."""
    return [_answer(llm, store, tokens_of(llm, prompt)) for prompt in prompts]


def _answer(llm: llama_cpp.Llama, store: PrefixStore | None, tokens: list[int]) -> Answer:
    scored: list[Any] = []

    def note(_: Any, scores: Any) -> Any:
        scored.append(np.array(scores, np.float32))
        return scores

    found = llm(
        tokens, max_tokens=N_PREDICT, temperature=0, logits_processor=llama_cpp.LogitsProcessorList([note]), stop=[]
    )
    tops = [np.partition(scores, -2)[-2:] for scores in scored]
    last = None if store is None else store.last
    return Answer(
        tokens=tokens,
        ids=[int(scores.argmax()) for scores in scored],
        text=found["choices"][0]["text"],
        gaps=[round(float(best - second), 4) for second, best in tops],
        computed=len(tokens) if last is None else last.computed,
        note="" if last is None else last.miss or "",
    )


def served(model: Path, settings: Settings, store: Path, prompts: Sequence[str]) -> list[Answer]:
    """Answers of a new `Llama`, whose cache is a store."""
    with closing(opened(model, settings)) as llm, PrefixStore(str(store), llm) as kept:
        llm.set_cache(kept)
        return answers(llm, kept, prompts)


@dataclass(frozen=True)
class Digests:
    """How many tokens were restored, and digests of the state and of the logits 100 tokens later."""

    restored: int
    state: str
    logits: str
    # of the logits after llama.cpp itself has restored these bytes into an empty context: it puts the rows of a window
    # into other cells than they were computed in, and then rounds in another order
    beside: str


def is_restored_exactly(model: Path, settings: Settings, store: Path, prompt: str, cut: int) -> bool | None:
    """Whether a restored state, and the logits after it, are those that were computed; None if nothing was restored."""
    found = []
    for _ in range(2):
        with (
            closing(opened(model, settings)) as llm,
            closing(opened(model, settings)) as beside,
            PrefixStore(str(store), llm) as kept,
        ):
            llm.set_cache(kept)
            found.append(_digests(llm, kept, tokens_of(llm, prompt), cut, beside))
    before, after = found
    if after.restored != cut:
        return None
    return before.state == after.state and after.logits in (before.logits, before.beside)


def _digests(llm: llama_cpp.Llama, store: PrefixStore, tokens: list[int], cut: int, beside: llama_cpp.Llama) -> Digests:
    """Restore the first tokens or compute and capture them, and compute on; `beside` has no store."""
    n = store.restore(tokens[: cut + 1])
    if n < cut:
        llm.eval(tokens[n:cut])
        store.capture()
        store.flush()
    state, rest = state_bytes(llm), tokens[cut : cut + 100]
    # it would stop where a message begins, and batches of other sizes round in another order
    store.detach()
    llm.eval(rest)
    data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    assert llama_cpp.llama_state_seq_set_data(beside.ctx, data, len(state), 0) == len(state)
    beside.n_tokens = cut
    beside.eval(rest)
    return Digests(n, *(hashlib.sha256(part).hexdigest() for part in (state, logits(llm), logits(beside))))
