"""The states of llama-cpp-python beside a store: what a saved one is known to hold, and what a lookup returns.

A state that an attached ``Llama`` saved can be stored later: llama.cpp itself loads it again, and what it holds is
captured as ever. So every kind of memory is stored in one way, and a state whose tokens or whose model are not known is
never stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llama_cpp.llama import LlamaState

from prefixstore.errors import InvalidParameterError, MisuseError
from prefixstore.format.keys import Tokens, as_tokens
from prefixstore.llama.binding import live_tokens, seed_of

if TYPE_CHECKING:
    from prefixstore.llama.context import Context
    from prefixstore.llama.hook import Hook

__all__ = ["LiveState", "SavedStates", "load_live", "store_state"]


class LiveState(LlamaState):
    """Stands for what the context held when a lookup returned it; there are no bytes to load."""

    # its key
    namespace: bytes = b""

    @classmethod
    def of(cls, context: Context) -> LiveState:
        """What a context holds now."""
        llm = context.llm
        tokens = live_tokens(llm).copy()
        state = cls(tokens, np.empty((0, 0), np.single), len(tokens), b"", 0, seed_of(llm))
        state.namespace = context.lineage.namespace
        return state


@dataclass(frozen=True)
class _Saved:
    """What a state that the user saved is known to hold."""

    tokens: Tokens
    state: bytes
    unscored: int


class SavedStates:
    """The states that the users of a ``Llama`` have saved, and what they are known to hold. Keeps none of them."""

    def __init__(self) -> None:
        self._saved: weakref.WeakKeyDictionary[LlamaState, _Saved] = weakref.WeakKeyDictionary()

    def note(self, state: LlamaState, context: Context) -> None:
        """Note that a state was saved just now, if it is known what the context holds."""
        if context.catch_up():
            lineage = context.lineage
            self._saved[state] = _Saved(lineage.tokens.copy(), state.llama_state, lineage.unscored)

    def find(self, state: LlamaState) -> _Saved | None:
        """What a state holds; None if that is not known, or if it was changed."""
        saved = self._saved.get(state)
        if saved is None:
            return None
        n = len(saved.tokens)
        is_same = (
            state.llama_state is saved.state
            and state.llama_state_size == len(saved.state)
            and state.n_tokens == n
            and np.array_equal(state.input_ids[:n], saved.tokens)
        )
        return saved if is_same else None


def store_state(hooks: Sequence[Hook], state: object) -> None:
    """Store what a state holds that the ``Llama`` of one of these hooks has saved; its context is left as it was.

    Raises `MisuseError` if none of them has saved it, or if it is not known what it holds.
    """
    if not isinstance(state, LlamaState):
        raise InvalidParameterError(f"a store takes states from llm.save_state(), not {type(state).__name__}")
    if isinstance(state, LiveState):
        return  # a lookup returned it: it is stored
    for hook in hooks:
        saved = hook.saved.find(state)
        if saved is not None:
            break
    else:
        raise MisuseError(
            "this state was not saved by a Llama that the store is attached to, or its tokens are not known: "
            "call attach(llm) before llm.save_state(), or evaluate the tokens"
        )
    hook.context.settle()  # raises if the Llama is closed
    if _holds(hook, saved.tokens):
        hook.completed()
        return
    before = hook.save_state()
    try:
        hook.load_state(state)
        hook.completed()
    finally:
        hook.load_state(before)


def load_live(hook: Hook, state: LiveState) -> None:
    """Make a state live again that a lookup returned; it has no bytes, but its tokens are known.

    Raises `MisuseError` if it can no longer be restored.
    """
    if state.namespace != hook.context.lineage.namespace:
        raise MisuseError("this state belongs to another model; look the prompt up in the store of this Llama")
    tokens = as_tokens(state.input_ids)
    n = len(tokens)
    if _holds(hook, tokens):
        return
    hook.before_leaving()
    if hook.strategy.stored(tokens, n) == n:
        hook.context.empty()
        hook.restore_up_to(tokens, n, always=True)
        if _holds(hook, tokens):
            return
    raise MisuseError(
        f"this state stands for {n:,} tokens that were in the context when the store returned it; the context has "
        "moved on, and not all of them are stored; call store.restore(tokens) and evaluate the others"
    )


def _holds(hook: Hook, tokens: Tokens) -> bool:
    """Whether the context is known to hold these tokens, and nothing else."""
    return hook.context.catch_up() and np.array_equal(hook.context.lineage.tokens, tokens)
