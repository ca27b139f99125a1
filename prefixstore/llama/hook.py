"""Between a ``Llama`` and the engine: restores at a lookup, captures as tokens are evaluated.

What llama-cpp-python does in a completion, and what happens here:

    self.cache[prompt]                        lookup: pages behind the live prefix go into the context
    self.eval(...)  for each batch            pages are captured as their boundaries are crossed
    self.save_state()                         copies nothing
    self.cache[prompt + completion] = state   the tail page is captured
"""

from __future__ import annotations

import itertools
import logging
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
from prefixstore.engine.engine import Engine as Writer
from prefixstore.errors import MisuseError, PrefixStoreError
from prefixstore.format.keys import Tokens, TokenSequence, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.llama.lineage import Lineage
from prefixstore.llama.memory import KINDS, Memory, kind_of
from prefixstore.llama.pages import Capturer
from prefixstore.llama.rate import Pace
from prefixstore.llama.restore import Restorer
from prefixstore.llama.resume import Resumer
from prefixstore.llama.snapshots import SnapshotCapturer
from prefixstore.llama.standing import Standing
from prefixstore.llama.turns import SnapshotPolicy, Vocabulary
from prefixstore.stats import Counters

__all__ = ["Hook", "calling_completion", "register_cache"]

log = logging.getLogger("prefixstore")

REPLACED = ("eval", "reset", "save_state", "load_state")
COMPLETION = llama_cpp.Llama._create_completion.__code__
# what chat handlers that bring images or sound into the context have
MEDIA_ATTRIBUTES = ("clip_model_path", "mtmd_ctx", "mmproj_path")


def register_cache(cls: type) -> None:
    """Make a class count as a cache of llama-cpp-python."""
    BaseLlamaCache.register(cls)


def calling_completion(depth: int) -> FrameType | None:
    """The frame `depth` calls above the caller's, if it is ``Llama._create_completion``.

    llama-cpp-python tells a cache neither which ``Llama`` asks nor what for, and a ``save_state()`` that it makes for
    the cache looks like a user's. The calling frame is the one place where this can be seen for certain; where it is
    something else, everything behaves as for a user.
    """
    frame = sys._getframe(depth + 1)
    return frame if frame.f_code is COMPLETION else None


class Hook:
    """One ``Llama`` and its pages in the engine.

    Parameters
    ----------
    llm
        Kept by a weak reference: the store does not keep a model in memory.
    engine, writer, counters
        Of the store.
    namespace
        Of the context.
    page_tokens
        Length of a page, no longer than the model's sliding window.
    min_tokens
        Sequences shorter than this are neither stored nor restored.
    snapshot_interval, max_snapshots
        Where memory cannot step back: tokens between snapshots, and how many of a sequence are kept.
    read_only
        Whether nothing is captured.
    """

    def __init__(
        self,
        llm: llama_cpp.Llama,
        engine: Engine,
        writer: Writer,
        counters: Counters,
        namespace: Namespace,
        *,
        page_tokens: int,
        min_tokens: int,
        snapshot_interval: int,
        max_snapshots: int,
        read_only: bool,
    ) -> None:
        self._kind = kind_of(llm)
        self.namespace = namespace
        self.page_tokens = page_tokens
        self._llm = weakref.ref(llm)
        self._counters = counters
        self._read_only = read_only
        self._lineage = lineage = Lineage(namespace.key, page_tokens, llm.n_ctx())
        self._pace = pace = Pace()
        self._memory: Memory
        self._restorer: Restorer | Resumer
        self._capturer: Capturer | SnapshotCapturer
        settings = namespace.canonical
        if self.has_snapshots:
            self._memory = standing = Standing(llm)
            policy = SnapshotPolicy(
                snapshot_interval, max_snapshots, min_tokens, Vocabulary(llm).kind, self._kind == "pages and snapshots"
            )
            self._capturer = SnapshotCapturer(engine, writer, counters, standing, lineage, settings, pace, policy)
            self._restorer = Resumer(
                engine, counters, standing, lineage, pace, writer.nudge, self._settle_quietly, min_tokens
            )
        else:
            self._memory = memory = Memory(llm)
            self._capturer = Capturer(engine, writer, counters, memory, lineage, settings, pace, min_tokens)
            self._restorer = Restorer(engine, counters, memory, lineage, pace, writer.nudge, min_tokens)
        memory = self._memory
        # what was asked for: the numbers of the same batches as without a store
        self._exact = False
        self._originals: dict[str, Callable[..., Any] | None] = {}
        # states that the user saved, and the tokens that they are known to hold
        self._saved: weakref.WeakKeyDictionary[LlamaState, Tokens] = weakref.WeakKeyDictionary()
        # where rows are overwritten, pages are taken after each batch that llama.cpp really computes at once
        self._step = min(llm.n_batch, llm.context_params.n_ubatch) if memory.forgets else llm.n_batch

    @property
    def kind(self) -> str:
        """What is stored of this context, or why nothing is; see `kind_of`."""
        if self._kind == "pages and snapshots" and not getattr(self._capturer, "cuts_rows", True):
            return "snapshots"
        return self._kind

    @property
    def has_snapshots(self) -> bool:
        """Whether the context can be put to stored snapshots only."""
        return self._kind in ("snapshots", "pages and snapshots")

    @property
    def llm(self) -> llama_cpp.Llama:
        """The model.

        Raises
        ------
        MisuseError
            If it is gone.
        """
        llm = self._llm()
        if llm is None:
            raise MisuseError("the Llama is gone; keep a reference to it as long as the store is attached")
        return llm

    # -- in and out of the Llama --------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hook's methods in the place of the Llama's."""
        methods = self.llm.__dict__
        if any(isinstance(methods.get(name), _Replacement) for name in REPLACED):
            raise MisuseError("llm is attached to another PrefixStore; detach() that one first")
        for name in REPLACED:
            self._originals[name] = methods.get(name)
            methods[name] = _Replacement(self, name)

    def detach(self, cache: object) -> None:
        """Give the Llama its own methods back, and take `cache` away from it if it is there."""
        llm = self._llm()
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

    def _original(self, name: str) -> Callable[..., Any]:
        llm = self.llm
        bound: Callable[..., Any] = self._originals.get(name) or getattr(type(llm), name).__get__(llm)
        return bound

    def _excuse(self) -> str | None:
        """Why nothing is done for this context now."""
        if self._kind not in KINDS:
            return self._kind
        handler = self.llm.chat_handler
        if handler is not None and any(hasattr(handler, name) for name in MEDIA_ATTRIBUTES):
            return "multimodal"
        return None

    # -- what stands in the place of the Llama's methods --------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """``Llama.eval`` in the same batches, with pages captured in between; it stops where a snapshot is taken."""
        llm, lineage = self.llm, self._lineage
        original = self._original("eval")
        known = self._excuse() is None and lineage.catch_up(llm, self._memory)
        if not known:
            lineage.rewind(0)
        stops = self._stops(tokens) if known else []
        for batch in _batches(tokens, [stop - lineage.n for stop in stops], self._step):
            started = time.perf_counter()
            original(batch)
            self._pace.computed(len(batch), time.perf_counter() - started)
            self._counters.count("tokens_computed", len(batch))
            if known:
                before = lineage.n
                lineage.extend(batch)
                if self._capturer.is_due(before, stops):
                    self._capture_quietly(tail=False)
        if known and len(tokens) > 1:
            self._evaluated_quietly()

    def _stops(self, tokens: Sequence[int]) -> list[int]:
        """Where to stop while these tokens are evaluated; only between batches if their numbers are asked for."""
        if self._read_only:
            return []
        try:
            stops = self._capturer.stops(tokens)
        except Exception as error:  # noqa: BLE001 - the promise
            self._report("dropped:error", error)
            return []
        start = self._lineage.n
        return [stop for stop in stops if not self._exact or (stop - start) % self._step == 0]

    def reset(self) -> None:
        """``Llama.reset``; what comes into the context next may be no tokens."""
        self._settle_quietly()
        self._lineage.rewind(0)
        self._original("reset")()

    def save_state(self) -> LlamaState:
        """``Llama.save_state``; inside a completion that saves for this store, an empty state."""
        llm = self.llm
        if calling_completion(2) is not None and getattr(llm.cache, "_hook", None) is self:
            return live_state(llm)
        state: LlamaState = self._original("save_state")()
        if self._lineage.catch_up(llm, self._memory):
            self._saved[state] = self._lineage.tokens.copy()
        return state

    def load_state(self, state: LlamaState) -> None:
        """``Llama.load_state``; a state that a lookup returned is in the context already."""
        if isinstance(state, _LiveState):
            return
        self._settle_quietly()
        self._original("load_state")(state)
        self._lineage.replace(self._saved.get(state, np.empty(0, "<i4")))

    # -- what the store asks for --------------------------------------------------------------------------------------

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
                # the logits of the prompt itself are wanted; they are not stored
                if self._lineage.unscored:
                    llm.reset()
                self._counters.count("miss:logprobs")
                return None
            # the same batches as without a store give the same logits, bit by bit
            multiple_of = llm.n_batch
        return live_state(llm) if self._restore_quietly(tokens, limit, multiple_of=multiple_of) else None

    def restore(self, tokens: Tokens, *, always: bool = False) -> int:
        """Restore for a caller who goes on with ``eval`` or ``generate``; the number of tokens that are live."""
        llm = self.llm
        limit = max(len(tokens) - 1, 0)
        if llm.n_tokens > limit:
            # the caller will evaluate a token, whatever logits there are
            llm._requires_eval = True
        self._restore_quietly(tokens, limit, always=always)
        live = min(self._restorer.live_prefix(llm, tokens)[0], limit)
        if live < llm.n_tokens:
            # recurrent memory cannot go back, and a window may have moved on
            if not self._memory.holds(live):
                live = 0
            if live == 0:
                llm.reset()
            llm.n_tokens = live
            llm._requires_eval = True
        return live

    def completed(self) -> None:
        """A completion is over: capture its tail."""
        self._capture_quietly(tail=True)

    def capture(self) -> int:
        """Capture all of the context that is not stored, waiting for room in the queue; the number of pages."""
        if self._read_only or self._excuse() is not None:
            return 0
        if not self._originals:
            # not attached: nobody has watched, the caller knows
            self._capturer.vouch(self.llm)
        return self._capturer.capture(self.llm, tail=True, wait=True)

    # -- the promise: a fault of the store never breaks a completion --------------------------------------------------

    def _restore_quietly(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        if (excuse := self._excuse()) is not None:
            self._counters.count(f"miss:{excuse}")
            return False
        try:
            return self._restorer.restore(self.llm, tokens, limit, always=always, multiple_of=multiple_of)
        except Exception as error:  # noqa: BLE001 - the promise
            self._report("miss:error", error)
            return False

    def _capture_quietly(self, *, tail: bool) -> None:
        if self._read_only or self._excuse() is not None:
            return
        try:
            self._capturer.capture(self.llm, tail=tail)
        except Exception as error:  # noqa: BLE001 - the promise
            self._report("dropped:error", error)

    def _evaluated_quietly(self) -> None:
        try:
            self._capturer.evaluated(self.llm)
        except Exception as error:  # noqa: BLE001 - the promise
            self._report("dropped:error", error)

    def _settle_quietly(self) -> None:
        if self._excuse() is None:
            try:
                self._capturer.settle(self.llm)
            except Exception as error:  # noqa: BLE001 - the promise
                self._report("dropped:error", error)

    def _report(self, name: str, error: Exception) -> None:
        self._counters.count(name)
        log.warning(
            "the completion goes on without the store: %s", error, exc_info=not isinstance(error, PrefixStoreError)
        )


def _batches(tokens: Sequence[int], stops: Sequence[int], step: int) -> Iterator[Sequence[int]]:
    """The tokens in batches of `step`, counted from their start and from each of the `stops`."""
    for start, end in itertools.pairwise([0, *stops, len(tokens)]):
        for i in range(start, end, step):
            yield tokens[i : min(i + step, end)]
    if not tokens:
        yield tokens


class _Replacement:
    """A method of the hook in the place of a method of the Llama."""

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
