"""``Llama`` with a store: prompts in a process of its own, as after a restart of everything.

``python -m tests.models.python_door`` reads a job as JSON, and writes what came of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from prefixstore import PrefixStore
from tests.models.prompts import ANSWER
from tests.models.records import Answer, Settings
from tests.support import PATIENCE, ROOT
from tests.support.models import load, logits, state_bytes
from tests.support.timeouts import disable_timeouts

__all__ = ["N_PREDICT", "DoorFailedError", "Exact", "Session", "answers", "in_process", "is_exact", "opened"]

N_PREDICT = 16
TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
RESULT = "RESULT "


class DoorFailedError(Exception):
    """A process ended without a result."""


@dataclass(frozen=True)
class Session:
    """Prompts, one after the other, to a `Llama` of their own.

    Attributes
    ----------
    prompts
        The prompts; `ANSWER` in one stands for the first answer of the first session.
    store
        A location; None: no store.
    """

    prompts: list[str]
    store: str | None = None


@dataclass(frozen=True)
class Exact:
    """A prompt that is computed up to a token, captured there, and computed on; or restored up to there.

    Attributes
    ----------
    prompt
        The text.
    store
        A location.
    cut
        How many tokens.
    """

    prompt: str
    store: str
    cut: int


@dataclass(frozen=True)
class Digests:
    """Digests of a state, and of the logits 100 tokens later.

    Attributes
    ----------
    restored
        How many tokens were restored.
    state
        Of the state.
    logits
        Of the logits after it.
    beside
        Of those after llama.cpp itself has restored these bytes into an empty context. It puts the rows of a window
        into other cells than they were computed in, and then rounds in another order.
    """

    restored: int
    state: str
    logits: str
    beside: str


@dataclass
class Found:
    """What came of a job."""

    answers: list[list[Answer]] = field(default_factory=list)
    exact: Digests | None = None


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


def exactly(llm: llama_cpp.Llama, store: PrefixStore, tokens: list[int], cut: int, beside: llama_cpp.Llama) -> Digests:
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


def is_exact(before: Digests | None, after: Digests | None, cut: int) -> bool | None:
    """Whether what was restored is what was computed; None if nothing was restored."""
    if before is None or after is None or after.restored != cut:
        return None
    return before.state == after.state and after.logits in (before.logits, before.beside)


def run(job: dict[str, Any]) -> Found:
    """What a job asks for: each session with a `Llama` of its own."""
    model, settings, found = Path(job["model"]), Settings(**job["settings"]), Found()
    first = job["answer"]
    for given in job["sessions"]:
        session = Session(**given)
        llm = opened(model, settings)
        store = PrefixStore(session.store, llm) if session.store else None
        if store is not None:
            llm.set_cache(store)
        found.answers.append(answers(llm, store, [prompt.replace(ANSWER, first) for prompt in session.prompts]))
        first = first or found.answers[0][0].text
        if store is not None:
            store.close()
        llm.close()
    if job["exact"]:
        exact = Exact(**job["exact"])
        llm, beside = opened(model, settings), opened(model, settings)
        with PrefixStore(exact.store, llm) as store:
            llm.set_cache(store)
            found.exact = exactly(llm, store, tokens_of(llm, exact.prompt), exact.cut, beside)
        llm.close()
        beside.close()
    return found


def in_process(
    model: Path, settings: Settings, sessions: list[Session], *, answer: str = "", exact: Exact | None = None
) -> Found:
    """Do all that in a process of its own.

    Raises
    ------
    DoorFailedError
        If it ends without a result.
    """
    job = {
        "model": str(model),
        "settings": asdict(settings),
        "sessions": [asdict(session) for session in sessions],
        "answer": answer,
        "exact": asdict(exact) if exact else None,
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=10 * PATIENCE,
    )
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            found = json.loads(line.removeprefix(RESULT))
            exact_found = Digests(**found["exact"]) if found["exact"] else None
            return Found([[Answer(**answer) for answer in one] for one in found["answers"]], exact_found)
    lines = done.stderr.splitlines()
    told = [line for line in lines if "rror" in line or "ASSERT" in line]
    raise DoorFailedError(f"exit code {done.returncode}: {' | '.join((told or lines)[-2:])}")


if __name__ == "__main__":
    disable_timeouts()
    print(RESULT + json.dumps(asdict(run(json.load(sys.stdin)))), flush=True)
