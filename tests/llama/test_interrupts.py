"""Ctrl-C at the steps of everything that a store does with a context: never a wrong answer, never a wrong page."""

from __future__ import annotations

import random
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from prefixstore.testing.models import write_model
from tests.support.ctrl_c import PACKAGE, interrupted, places_in
from tests.support.models import SHAPES, TORTURE_OF_LONG, caching, forget, load, logits, prompt, volume
from tests.support.trust import CLOSE, assert_right, failing

# what is raised in a finalizer, Python ignores
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Ctrl-C may come in any of these
WITHIN = (PACKAGE, str(Path(llama_cpp.__file__).parent))

TEXT = prompt(90)
NEXT = TEXT[:70] + prompt(30, seed=1)
PAGES = {"page_tokens": 16, "min_tokens": 8, "snapshot_interval": 32}
SMALL = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32}
KINDS = {
    "llama": ("llama", {}),
    "gemma3, full cache": ("gemma3", {"swa_full": True}),
    "gemma3, window cache": ("gemma3", {"swa_full": False}),
    "mamba": ("mamba", {}),
    "lfm2": ("lfm2", {}),
}
# at how many steps, in which contexts
FEW = [pytest.param((kind, 1), id=kind) for kind in ("llama", "lfm2")]
STEPS = volume(4, TORTURE_OF_LONG)
MANY = [pytest.param((kind, STEPS), id=f"{kind}, {STEPS} steps", marks=pytest.mark.attack) for kind in KINDS]


@pytest.fixture(scope="module", params=[*FEW, *MANY])
def contexts(request, tmp_path_factory):
    """One context that is used, one to restore into and one to compute in; the logits after two prompts; how often."""
    kind, n_steps = request.param
    arch, options = KINDS[kind]
    # a window that prompts of this length leave
    shape = replace(SHAPES[arch], sliding_window=32) if arch == "gemma3" else SHAPES[arch]
    path = tmp_path_factory.getbasetemp() / f"interrupts-{arch}.gguf"
    if not path.exists():
        write_model(path, shape)
    llm, warm, cold = (load(path, **SMALL, **options) for _ in range(3))
    expected = []
    for tokens in (TEXT, NEXT):
        forget(cold)
        expected.append(after_completion(cold, tokens))
    return llm, warm, cold, expected, n_steps


def after_completion(llm, tokens):
    """The logits after a prompt, in a completion."""
    llm(tokens, max_tokens=1, temperature=0)
    return logits(llm)


# -- what is interrupted ----------------------------------------------------------------------------------------------


def stored(llm, store):
    """The prompt is in the store, and not in the context."""
    llm.eval(TEXT)
    store.capture()
    forget(llm)


def live(llm, store):
    """The prompt is in the context; its tail is not in the store."""
    llm.eval(TEXT)


def saved(llm, store):
    live(llm, store)
    store.kept = llm.save_state()
    llm.eval(prompt(5, seed=3))


def nothing(llm, store):
    pass


def on_top(llm, store):
    """The store has the prompt, and the context has some of it and then something else."""
    stored(llm, store)
    llm.eval(TEXT[:40] + prompt(10, seed=4))


OPERATIONS = {
    "eval": (nothing, lambda llm, store: llm.eval(TEXT)),
    "completion": (nothing, lambda llm, store: llm(TEXT, max_tokens=2)),
    "completion from the store": (on_top, lambda llm, store: llm(TEXT, max_tokens=2)),
    "lookup": (on_top, lambda llm, store: store[TEXT]),
    "restore": (stored, lambda llm, store: store.restore(TEXT, always=True)),
    "capture": (live, lambda llm, store: store.capture()),
    "completed": (live, lambda llm, store: store._find(llm).completed()),
    "save_state": (live, lambda llm, store: llm.save_state()),
    "load_state": (saved, lambda llm, store: llm.load_state(store.kept)),
    "reset": (live, lambda llm, store: llm.reset()),
    "detach": (live, lambda llm, store: store.detach()),
    "attach": (lambda llm, store: (llm.eval(TEXT), store.detach()), lambda llm, store: store.attach(llm)),
}


@contextmanager
def prepared(llm, operation):
    """A store, and an operation that is about to be done."""
    prepare, act = OPERATIONS[operation]
    forget(llm)
    with caching("memory:", llm, **PAGES) as store:
        prepare(llm, store)
        if store._current is not None:
            # whether a restore pays depends on the speed of the machine
            store._current.context.rate.is_worth = lambda *_: True
        yield store, lambda: act(llm, store)
        llm.set_cache(None)


def at_place(k):
    """Interrupts some work at the `k`-th place where Python lets that in, from 0; false if it ended before."""
    return lambda work: interrupted(work, k + 1, WITHIN) != ""


def at_call(k):
    """Interrupts some work before a call of llama.cpp for an even `k`, after it for an odd one."""

    def interrupt(work):
        with suppress(KeyboardInterrupt), failing(k // 2, after=bool(k % 2), error=KeyboardInterrupt()):
            work()
            return False
        return True

    return interrupt


def interrupts(llm, operation, n):
    """At most `n` of the places, and `n` of the calls, at which the operation can be interrupted."""
    with prepared(llm, operation) as (_, work):
        n_places = places_in(work, WITHIN)
    with prepared(llm, operation) as (_, work), failing(1 << 40, after=False) as steps:
        work()
    chosen = random.Random(n)
    for at, n_points in ((at_place, n_places), (at_call, 2 * steps.made)):
        yield from map(at, sorted(chosen.sample(range(n_points), min(n, n_points))))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_follows_an_interrupt_is_right(contexts, operation):
    llm, *_, n_steps = contexts
    happened = []
    for interrupt in interrupts(llm, operation, n_steps):
        with prepared(llm, operation) as (store, work):
            happened.append(interrupt(work))
            if operation == "attach" and store.llm is None:
                store.attach(llm)
            if operation == "detach":
                store.close()
            follow(contexts, store)
        if operation == "detach":
            with caching("memory:", llm, **PAGES) as store:
                follow(contexts, store)
        assert type(llm._ctx) is llama_cpp._internals.LlamaContext
        assert not {"eval", "reset", "save_state", "load_state"} & vars(llm).keys()
    # threads take turns at the work, so an operation does not always have as many steps
    assert sum(happened) >= 0.5 * len(happened)


def follow(contexts, store):
    """The answer, the next answer, the one after a reset, and everything that is stored are right."""
    llm, warm, cold, expected, _ = contexts
    # without a lookup, as well: generate() reuses what it believes to be in the context
    next(llm.generate(TEXT, temp=0))
    assert np.allclose(logits(llm), expected[0], atol=CLOSE), "generate()"
    for tokens, right in zip((TEXT, NEXT), expected, strict=True):
        assert np.allclose(after_completion(llm, tokens), right, atol=CLOSE), "the next answers"
    llm.reset()
    assert np.allclose(after_completion(llm, NEXT), expected[1], atol=CLOSE), "the answer after a reset"
    memory = vars(llm._ctx)["memory"]
    assert llama_cpp.llama_memory_seq_pos_max(memory, 1) == -1 or llm._is_recurrent or llm._is_hybrid
    if store.llm is not None:
        store.engine.drain()
        assert store.engine.queued_bytes == 0, "a buffer was lost"
        store.detach()
        assert_right(store, warm, cold)
