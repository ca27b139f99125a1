"""Ctrl-C at every step of what a store does with a ``Llama``, and what has to be true after it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import llama_cpp
import numpy as np

from prefixstore import PrefixStore
from prefixstore.testing.models import write_model
from tests.support.ctrl_c import PACKAGE, interrupted, places_in
from tests.support.models import SHAPES, forget, load, logits, prompt
from tests.support.trust import CLOSE, assert_right, failing

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


@dataclass
class Bench:
    """Contexts of one kind, and the logits that a context without a store has after some prompts."""

    llm: llama_cpp.Llama
    warm: llama_cpp.Llama
    cold: llama_cpp.Llama
    expected: dict[int, np.ndarray]


def bench(directory: Path, kind: str) -> Bench:
    arch, options = KINDS[kind]
    # a window that prompts of this length leave
    shape = replace(SHAPES[arch], sliding_window=32) if arch == "gemma3" else SHAPES[arch]
    path = directory / f"interrupts-{arch}.gguf"
    if not path.exists():
        write_model(path, shape)
    llm, warm, cold = (load(path, **SMALL, **options) for _ in range(3))
    expected = {}
    for tokens in (TEXT, NEXT):
        forget(cold)
        expected[len(tokens)] = after_completion(cold, tokens)
    return Bench(llm, warm, cold, expected)


def after_completion(llm: llama_cpp.Llama, tokens: list[int]) -> np.ndarray:
    """The logits after a prompt, in a completion."""
    llm(tokens, max_tokens=1, temperature=0)
    return logits(llm)


Work = Callable[[], object]
Interrupt: TypeAlias = "Callable[[Work], bool]"
"""Does some work, and interrupts it; false if that ended before."""


def at_place(k: int) -> Interrupt:
    """At the `k`-th place where Python lets an interrupt in, from 0."""
    return lambda work: interrupted(work, k + 1, WITHIN) != ""


def at_call(k: int) -> Interrupt:
    """Before a call of llama.cpp for an even `k`, after it for an odd one."""

    def interrupt(work: Work) -> bool:
        with contextlib.suppress(KeyboardInterrupt), failing(k // 2, after=bool(k % 2), error=KeyboardInterrupt()):
            work()
            return False
        return True

    return interrupt


# -- what is interrupted ----------------------------------------------------------------------------------------------


def stored(llm: llama_cpp.Llama, store: PrefixStore) -> None:
    """The prompt is in the store, and not in the context."""
    llm.eval(TEXT)
    store.capture()
    forget(llm)


def live(llm: llama_cpp.Llama, store: PrefixStore) -> None:
    """The prompt is in the context; its tail is not in the store."""
    llm.eval(TEXT)


def saved(llm: llama_cpp.Llama, store: PrefixStore) -> None:
    live(llm, store)
    store.kept = llm.save_state()
    llm.eval(prompt(5, seed=3))


def nothing(llm: llama_cpp.Llama, store: PrefixStore) -> None:
    pass


def on_top(llm: llama_cpp.Llama, store: PrefixStore) -> None:
    """The store has the prompt, and the context has some of it and then something else."""
    stored(llm, store)
    llm.eval(TEXT[:40] + prompt(10, seed=4))


Step = Callable[[llama_cpp.Llama, PrefixStore], object]
OPERATIONS: dict[str, tuple[Step, Step]] = {
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


def attempt(on: Bench, operation: str, interrupt: Interrupt) -> bool:
    """Interrupt an operation, and check what follows; false if it was not interrupted."""
    prepare, act = OPERATIONS[operation]
    llm = on.llm
    forget(llm)
    with PrefixStore("memory:", llm, **PAGES) as store:
        llm.set_cache(store)
        prepare(llm, store)
        if store._current is not None:
            # whether a restore pays depends on the speed of the machine
            store._current.context.rate.is_worth = lambda *_: True
        happened = interrupt(lambda: act(llm, store))
        if operation == "attach" and store.llm is None:
            store.attach(llm)
        if operation == "detach":
            store.close()
        follow(on, store, operation)
        llm.set_cache(None)
    if operation == "detach":
        with PrefixStore("memory:", llm, **PAGES) as store:
            llm.set_cache(store)
            follow(on, store, operation)
    assert type(llm._ctx) is llama_cpp._internals.LlamaContext
    assert not {"eval", "reset", "save_state", "load_state"} & vars(llm).keys()
    return happened


def follow(on: Bench, store: PrefixStore, operation: str) -> None:
    """The answer, the next answer, the one after a reset, and everything that is stored are right."""
    llm = on.llm
    # without a lookup, as well: generate() reuses what it believes to be in the context
    next(llm.generate(TEXT, temp=0))
    assert np.allclose(logits(llm), on.expected[len(TEXT)], atol=CLOSE), "generate()"
    for tokens in (TEXT, NEXT):
        assert np.allclose(after_completion(llm, tokens), on.expected[len(tokens)], atol=CLOSE), "the next answers"
    llm.reset()
    assert np.allclose(after_completion(llm, NEXT), on.expected[len(NEXT)], atol=CLOSE), "the answer after a reset"
    memory = vars(llm._ctx)["memory"]
    assert llama_cpp.llama_memory_seq_pos_max(memory, 1) == -1 or on.llm._is_recurrent or on.llm._is_hybrid
    if store.llm is not None:
        engine = store.engine
        engine.drain()
        assert engine.queued_bytes == 0, "a buffer was lost"
        store.detach()
        assert_right(store, on.warm, on.cold)


def interrupts(on: Bench, operation: str, n: int, seed: int) -> Iterator[Interrupt]:
    """At most `n` of the places, and `n` of the calls, at which the operation can be interrupted."""
    chosen = random.Random(seed)
    for at, n_points in ((at_place, count(on, operation)), (at_call, 2 * count(on, operation, calls=True))):
        yield from map(at, sorted(chosen.sample(range(n_points), min(n, n_points))))


def count(on: Bench, operation: str, *, calls: bool = False) -> int:
    """How many places an operation has, or calls of llama.cpp."""
    prepare, act = OPERATIONS[operation]
    forget(on.llm)
    with PrefixStore("memory:", on.llm, **PAGES) as store:
        on.llm.set_cache(store)
        prepare(on.llm, store)
        if store._current is not None:
            store._current.context.rate.is_worth = lambda *_: True
        if calls:
            with failing(1 << 40, after=False) as steps:
                act(on.llm, store)
            found = steps.made
        else:
            found = places_in(lambda: act(on.llm, store), WITHIN)
    on.llm.set_cache(None)
    return found
