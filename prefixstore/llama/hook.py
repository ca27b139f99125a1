"""Between a ``Llama`` and the engine: restores at a lookup, captures as tokens are evaluated.

What llama-cpp-python does in a completion, and what happens here:

    self.cache[prompt]                        lookup: what is stored of the prompt is restored into the context
    self.eval(...)  for each batch            pages are captured as their boundaries are crossed
    self.save_state()                         copies nothing
    self.cache[prompt + completion] = state   the tail is captured

A fault of the store never breaks a completion: it costs a miss or a page, and is counted and logged.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama import LlamaState
from llama_cpp.llama_cache import BaseLlamaCache

from prefixstore.engine.engine import Engine
from prefixstore.errors import MisuseError
from prefixstore.format.keys import Tokens, TokenSequence, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.llama.guard import Guard
from prefixstore.llama.strategy import strategy_for
from prefixstore.parameters import Parameters
from prefixstore.stats import Kind

__all__ = ["Hook", "calling_completion", "register_cache"]

REPLACED = ("eval", "reset", "save_state", "load_state")
COMPLETION = llama_cpp.Llama._create_completion.__code__


def register_cache(cls: type) -> None:
    """Make a class count as a cache of llama-cpp-python."""
    BaseLlamaCache.register(cls)


def calling_completion(depth: int) -> FrameType | None:
    """The frame `depth` calls above the caller's, if it is ``Llama._create_completion``.

    llama-cpp-python tells a cache neither which ``Llama`` is asking nor what for, and a ``save_state()`` that it makes
    for the cache looks like a user's. The calling frame is the one place where this can be seen for certain; in any
    other frame, everything behaves as for a user.
    """
    frame = sys._getframe(depth + 1)
    return frame if frame.f_code is COMPLETION else None


class Hook:
    """Puts a store between a ``Llama`` and its caller.

    Parameters
    ----------
    llm
        Kept by a weak reference: the store does not keep a model in memory.
    engine
        Of the store.
    parameters
        The store's parameters.

    Attributes
    ----------
    strategy
        How this context is stored.
    context
        The context.

    Raises
    ------
    ContextError
        If a file of the model cannot be read.
    """

    def __init__(self, llm: llama_cpp.Llama, engine: Engine, parameters: Parameters) -> None:
        self.strategy = strategy_for(llm, engine, parameters)
        self.context = self.strategy.context
        # a lookup asked for logprobs: the batches must be the same as without a store
        self._exact = False
        self._originals: dict[str, Callable[..., Any] | None] = {}
        # the cache through which a completion saves for this store; weak, so that its store can be collected
        self._cache: Callable[[], object | None] = _no_cache
        # states that the user saved, and the tokens that they are known to hold
        self._saved: weakref.WeakKeyDictionary[LlamaState, Tokens] = weakref.WeakKeyDictionary()
        # where rows are overwritten, pages are captured after each micro-batch
        self._step = min(llm.n_batch, llm.context_params.n_ubatch) if self.overwrites_window else llm.n_batch

    @property
    def kind(self) -> Kind:
        """What is stored of the context, or why nothing is."""
        return self.strategy.kind

    @property
    def llm(self) -> llama_cpp.Llama:
        """The model. Raises `MisuseError` if it is gone."""
        return self.context.llm

    @property
    def namespace(self) -> Namespace:
        """The namespace of the context."""
        return self.context.namespace

    @property
    def page_tokens(self) -> int:
        """Length of a page in this context."""
        return self.context.parameters.page_tokens

    @property
    def overwrites_window(self) -> bool:
        """Whether rows that have left the sliding window are overwritten, so that pages must be captured in time."""
        return self.context.memory.overwrites_window

    # -- attaching ----------------------------------------------------------------------------------------------------

    def attach(self, cache: object) -> None:
        """Replace the Llama's methods by the hook's. A completion that saves to `cache` saves for this store."""
        methods = self.llm.__dict__
        if any(isinstance(methods.get(name), _Replacement) for name in REPLACED):
            raise MisuseError("llm is attached to another PrefixStore; detach() that one first")
        for name in REPLACED:
            self._originals[name] = methods.get(name)
            methods[name] = _Replacement(self, name)
        self._cache = weakref.ref(cache)

    def detach(self, cache: object) -> None:
        """Restore the Llama's own methods, and remove `cache` if the Llama uses it."""
        llm = self.context.llm_or_none
        if llm is not None and llm.cache is cache:
            llm.set_cache(None)
        methods = llm.__dict__ if llm is not None else {}
        for name, original in self._originals.items():
            if methods.get(name) == _Replacement(self, name):
                if original is None:
                    del methods[name]
                else:
                    methods[name] = original
        self._originals = {}
        self._cache = _no_cache

    def _original(self, name: str) -> Callable[..., Any]:
        llm = self.llm
        bound: Callable[..., Any] = self._originals.get(name) or getattr(type(llm), name).__get__(llm)
        return bound

    # -- what replaces the Llama's methods ----------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """``Llama.eval`` in the same batches, with pages captured in between; it stops where a snapshot is taken."""
        context = self.context
        lineage, counters = context.lineage, context.engine.counters
        original = self._original("eval")
        known = context.bypass_reason() is None and context.catch_up()
        if not known:
            lineage.rewind(0)
        # with a draft model, logits are asked for by their place in a batch: the batches are those of `Llama.eval`
        is_drafted = self.llm.draft_model is not None
        step = self.llm.n_batch if is_drafted else self._step
        stops = self._stops(tokens, step, keep_batches=self._exact or is_drafted) if known else []
        for batch in _batches(tokens, [stop - lineage.n for stop in stops], step):
            started = time.perf_counter()
            original(batch)
            context.rate.computed(len(batch), time.perf_counter() - started)
            counters.count("tokens_computed", len(batch))
            if known:
                before = lineage.n
                lineage.extend(batch)
                if self.strategy.is_due(before, stops):
                    self._capture(tail=False)
        if known and len(tokens) > 1:
            with self._guard("dropped:error"):
                self.strategy.prompt_evaluated()

    def _stops(self, tokens: Sequence[int], step: int, *, keep_batches: bool) -> list[int]:
        """Where to stop while these tokens are evaluated; only between batches if these must stay as they are."""
        if self.context.parameters.read_only:
            return []
        with self._guard("dropped:error"):
            start, stops = self.context.lineage.n, self.strategy.stops(tokens)
            return [stop for stop in stops if not keep_batches or (stop - start) % step == 0]
        return []

    def reset(self) -> None:
        """``Llama.reset``; what enters the context next may not be tokens."""
        self._before_leaving()
        self.context.lineage.rewind(0)
        self._original("reset")()

    def save_state(self) -> LlamaState:
        """``Llama.save_state``; inside a completion that saves for this store, an empty state."""
        llm = self.llm
        if calling_completion(2) is not None and llm.cache is not None and llm.cache is self._cache():
            return live_state(llm)
        state: LlamaState = self._original("save_state")()
        if self.context.catch_up():
            self._saved[state] = self.context.lineage.tokens.copy()
        return state

    def load_state(self, state: LlamaState) -> None:
        """``Llama.load_state``; a state that a lookup returned is in the context already."""
        if isinstance(state, _LiveState):
            return
        self._before_leaving()
        self._original("load_state")(state)
        self.context.lineage.replace(self._saved.get(state, np.empty(0, "<i4")))

    # -- what the store calls -----------------------------------------------------------------------------------------

    def lookup(self, prompt: TokenSequence, completion: FrameType | None) -> LlamaState | None:
        """Restore what is stored of a prompt.

        Parameters
        ----------
        prompt
            The tokens.
        completion
            The frame of the completion that asks, if one does.

        Returns
        -------
        LlamaState or None
            Stands for what is live now; None for a miss.
        """
        llm = self.llm
        tokens = as_tokens(prompt)
        limit, multiple_of = len(tokens) - 1, 1
        asked = completion.f_locals if completion is not None else {}
        self._exact = asked.get("logprobs") is not None
        if self._exact:
            if asked.get("echo"):
                # the logits of the prompt itself are asked for; they are not stored
                if self.context.lineage.unscored:
                    llm.reset()
                self.context.engine.counters.count("miss:logprobs")
                return None
            # the same batches as without a store give the same logits, bit by bit
            multiple_of = llm.n_batch
        return live_state(llm) if self._restore(tokens, limit, multiple_of=multiple_of) else None

    def restore(self, tokens: Tokens, *, always: bool = False) -> int:
        """Restore for a caller who continues with ``eval`` or ``generate``; the number of tokens that are live."""
        llm = self.llm
        # the caller evaluates at least one token: of the prompt, or, if that is too long, the last that has a place
        limit = max(min(len(tokens), len(llm.input_ids)) - 1, 0)
        if llm.n_tokens > limit:
            # the caller will evaluate a token, even if there are logits
            llm._requires_eval = True
        self._restore(tokens, limit, always=always)
        live = min(self.strategy.live_prefix(tokens), limit)
        if live < llm.n_tokens:
            # recurrent memory cannot step back, and a window may have moved on
            if not self.context.memory.holds(live):
                live = 0
            if live == 0:
                llm.reset()
            llm.n_tokens = live
            llm._requires_eval = True
        return live

    def completed(self) -> None:
        """Capture the tail of a completion that has ended."""
        self._capture(tail=True)

    def capture(self) -> int:
        """Capture all of the context that is not stored, waiting for space in the queue; the number of pages."""
        if self.context.parameters.read_only or self.context.bypass_reason() is not None:
            return 0
        if not self._originals:
            # not attached: the store never saw these tokens, so the caller vouches for them
            self.context.adopt()
        return self.strategy.capture(tail=True, wait=True)

    # -- guarded ------------------------------------------------------------------------------------------------------

    def _guard(self, fault: str, unavailable: str | None = None) -> Guard:
        return Guard(self.context.engine.counters, fault, unavailable)

    def _restore(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        reason = self.context.bypass_reason()
        if reason is not None:
            self.context.engine.counters.count(f"miss:{reason}")
            return False
        with self._guard("dropped:error"):
            self.strategy.before_leaving()
        # of a prompt that is longer than the context, the next token needs a place
        limit = min(limit, len(self.llm.input_ids) - 1)
        with self._guard("miss:error", "miss:unavailable"):
            return self.strategy.restore(tokens, limit, always=always, multiple_of=multiple_of)
        return False

    def _capture(self, *, tail: bool) -> None:
        if not self.context.parameters.read_only and self.context.bypass_reason() is None:
            with self._guard("dropped:error"):
                self.strategy.capture(tail=tail)

    def _before_leaving(self) -> None:
        if self.context.bypass_reason() is None:
            with self._guard("dropped:error"):
                self.strategy.before_leaving()


def _no_cache() -> None:
    """Not attached."""


def _batches(tokens: Sequence[int], stops: Sequence[int], step: int) -> Iterator[Sequence[int]]:
    """The tokens in batches of `step`, counted from their start and from each of the `stops`."""
    for start, end in itertools.pairwise([0, *stops, len(tokens)]):
        for i in range(start, end, step):
            yield tokens[i : min(i + step, end)]
    if not tokens:
        yield tokens


class _Replacement:
    """A method of the hook that replaces a method of the Llama."""

    def __init__(self, hook: Hook, name: str) -> None:
        self._hook = hook
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._hook, self._name)(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Replacement) and (self._hook, self._name) == (other._hook, other._name)

    def __hash__(self) -> int:
        return hash((id(self._hook), self._name))


class _LiveState(LlamaState):
    """Stands for what the context holds already; there is nothing to load."""


def live_state(llm: llama_cpp.Llama) -> _LiveState:
    """A state without bytes, for the tokens that the context holds."""
    return _LiveState(
        input_ids=llm.input_ids[: llm.n_tokens].copy(),
        scores=np.empty((0, 0), np.single),
        n_tokens=llm.n_tokens,
        llama_state=b"",
        llama_state_size=0,
        seed=llm._seed,
    )
