"""``LlamaState`` objects: which tokens a saved one holds, and the one that a lookup returns.

To store a state that an attached ``Llama`` has saved, llama.cpp loads it again, and the context is captured as usual.
So there is one way to store each kind of memory, and a state of unknown tokens or of another model is never stored.
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


class LiveState(LlamaState):
    """Stands for what the context held when a lookup returned it. There are no bytes to load."""

    namespace: bytes = b""  # its key

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
    """What a saved state holds."""

    tokens: Tokens
    state: bytes
    unscored: int


class SavedStates:
    """What the states hold that users of a ``Llama`` have saved. The states are not kept alive."""

    def __init__(self) -> None:
        self._saved: weakref.WeakKeyDictionary[LlamaState, _Saved] = weakref.WeakKeyDictionary()

    def note(self, state: LlamaState, context: Context) -> None:
        """Note that a state was just saved, if the contents of the context are known."""
        if context.catch_up():
            lineage = context.lineage
            self._saved[state] = _Saved(lineage.tokens.copy(), state.llama_state, lineage.unscored)

    def find(self, state: LlamaState) -> _Saved | None:
        """What a state holds; None if that is unknown, or the state was changed."""
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
    """Store a state that the ``Llama`` of one of these hooks has saved, and leave its context as it was.

    Raises `MisuseError` if none of them has saved it, or its tokens are unknown.
    """
    if not isinstance(state, LlamaState):
        raise InvalidParameterError(f"a store takes states from llm.save_state(), not {type(state).__name__}")
    if isinstance(state, LiveState):
        return  # a lookup has returned it: it is stored already
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
    """Restore the tokens of a state that a lookup returned. Raises `MisuseError` if they are no longer stored."""
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
    """Whether the context is known to hold exactly these tokens."""
    return hook.context.catch_up() and np.array_equal(hook.context.lineage.tokens, tokens)
