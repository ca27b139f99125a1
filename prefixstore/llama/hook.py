"""Connects a ``Llama`` to the engine: restores at a lookup, captures as tokens are evaluated.

What llama-cpp-python does in a completion, and what happens here:

    self.cache[prompt]                        lookup: what is stored of the prompt is restored into the context
    self.eval(...)  for each batch            pages are captured as their boundaries are crossed
    self.save_state()                         copies nothing
    self.cache[prompt + completion] = state   the tail is captured

A fault of the store never breaks a completion: it costs a miss or a page, and is counted and logged.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama import LlamaState
from llama_cpp.llama_cache import BaseLlamaCache

from prefixstore.engine.engine import Engine
from prefixstore.errors import ContextError, MisuseError, PrefixStoreError
from prefixstore.format.keys import Tokens, TokenSequence, as_tokens, common_prefix
from prefixstore.format.namespace import Namespace
from prefixstore.last_prompt import PromptMeter
from prefixstore.llama.attachment import Attachment, own_method
from prefixstore.llama.bypass import BYPASSED, Bypass
from prefixstore.llama.context import live_prefix_length, reusable_prefix
from prefixstore.llama.gguf import model_names
from prefixstore.llama.guard import Guard
from prefixstore.llama.inactivity import Inactivity
from prefixstore.llama.kv_memory import is_closed
from prefixstore.llama.lineage import Unknown
from prefixstore.llama.paged_memory import PagedMemory
from prefixstore.llama.strategy import strategy_for
from prefixstore.parameters import Parameters
from prefixstore.stats import Kind

__all__ = ["Hook", "calling_completion", "register_cache"]

# what llama-cpp-python raises when llama.cpp finds no free cells for a batch
NO_CELLS = "llama_decode returned 1"

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


def asks_for_prompt_logits(llm: llama_cpp.Llama) -> bool:
    """Whether this runs inside a completion that returns the logits of its prompt."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is COMPLETION:
            asked = frame.f_locals
            if asked.get("self") is llm:
                return asked.get("logprobs") is not None and bool(asked.get("echo"))
        frame = frame.f_back
    return False


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
    bypass
        Whether the running code bypasses the store.

    Attributes
    ----------
    strategy
        How this context is stored.
    context
        The context.
    reads
        Whether prompts are restored from the store; a session can turn that off.
    writes
        Whether anything is captured.

    Raises
    ------
    ContextError
        If a file of the model cannot be read, or is not the one that was loaded.
    """

    def __init__(
        self, llm: llama_cpp.Llama, engine: Engine, parameters: Parameters, bypass: Bypass | None = None
    ) -> None:
        self.strategy = strategy_for(llm, engine, parameters)
        self.context = self.strategy.context
        namespace = self.context.namespace
        engine.describe(namespace, model_names(llm.metadata, namespace.settings))
        if bypass is not None:
            self.context.bypass = bypass
        self.reads = True
        self.writes = True
        # a lookup asked for logprobs: the batches must be the same as without a store
        self._exact = False
        self._attachment: Attachment | None = None
        # states that the user saved, and what they are known to hold
        self._saved: weakref.WeakKeyDictionary[LlamaState, _Saved] = weakref.WeakKeyDictionary()
        self._inactivity = Inactivity(engine.counters, read_only=parameters.read_only)
        # whether the prompt that is evaluated next was looked up
        self._is_looked_up = False
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
    def n_live(self) -> int:
        """How many tokens the context holds; 0 if the ``Llama`` is gone."""
        llm = self.context.llm_or_none
        return llm.n_tokens if llm is not None else 0

    @property
    def overwrites_window(self) -> bool:
        """Whether rows that have left the sliding window are overwritten, so that pages must be captured in time."""
        return self.context.memory.overwrites_window

    # -- attaching ----------------------------------------------------------------------------------------------------

    def attach(self, cache: object) -> None:
        """Replace the Llama's methods by the hook's. A completion that saves to `cache` saves for this store.

        Raises
        ------
        MisuseError
            If another store is attached.
        """
        self._attachment = Attachment(self, cache)
        self._attachment.install()
        # those that a store has left which was dropped
        self.context.memory.drop_residents()

    def detach(self, cache: object, *, settles: bool = True) -> None:
        """Restore the Llama's own methods, and remove `cache` if the Llama uses it.

        Without `settles`, nothing is done to the context: another thread uses it.
        """
        with contextlib.suppress(PrefixStoreError):  # a Llama that is closed or gone: there is nothing to undo
            if settles:
                self.context.settle()
        if self._attachment is not None:
            self._attachment.remove()
        llm = self.context.llm_or_none
        if llm is not None and llm.cache is cache:
            llm.set_cache(None)

    @property
    def is_attached(self) -> bool:
        """Whether the methods of the ``Llama`` are replaced by the hook's."""
        return self._attachment is not None and self._attachment.is_alive

    def _original(self, name: str) -> Callable[..., Any]:
        return self._attachment.original(name) if self._attachment is not None else own_method(self.llm, name)

    # -- what replaces the Llama's methods ----------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """``Llama.eval`` in the same batches, with pages captured in between; it stops where a snapshot is taken."""
        context = self.context
        llm, lineage, counters = context.llm, context.lineage, context.engine.counters
        was_cleared = context.settle()
        unscored = self._unscored()
        if len(unscored):
            context.empty()
            tokens = [*unscored, *tokens]
        if len(tokens) == 0:
            if was_cleared:
                # a generation that samples from logits which are gone would never end
                raise ContextError("an interrupted restore has emptied the context; evaluate the prompt again")
            return
        self._note_evaluated_prompt(len(tokens))
        original = self._original("eval")
        bypassed = context.skip_reason()
        if bypassed == BYPASSED and lineage.unknown is None:
            # what was evaluated before the caller went past the store
            self._before_leaving()
        known = bypassed is None and context.catch_up(compare=len(tokens) > 1)
        if bypassed is not None:
            lineage.lose(Unknown.BYPASSED if bypassed == BYPASSED else Unknown.CHANGED)
        # with a draft model, logits are asked for by their place in a batch: the batches are those of `Llama.eval`
        is_drafted = llm.draft_model is not None
        is_exact = self._exact or len(unscored) > 0
        step = llm.n_batch if is_drafted else self._step
        stops = self._stops(tokens, step, keep_batches=is_exact or is_drafted) if known else []
        start = llm.n_tokens
        context.prompt.begun(start)
        for batch in _batches(tokens, [stop - lineage.n for stop in stops], step):
            started = time.perf_counter()
            known = self._evaluate(original, batch)
            seconds = time.perf_counter() - started
            context.rate.computed(len(batch), seconds)
            context.prompt.evaluated(len(batch), seconds)
            counters.count("tokens_computed", len(batch), namespace=lineage.namespace)
            if known and self.strategy.is_due(lineage.n - len(batch), stops):
                self._note_decoded()
                self._capture(tail=False)
        self._note_decoded()
        if known and len(tokens) > 1 and self.writes:
            with self._guard("dropped:error"):
                self.strategy.prompt_evaluated()
        if not known and bypassed is None:
            self._count_unknown(llm.n_tokens // self.page_tokens - start // self.page_tokens)

    def _unscored(self) -> list[int]:
        """The live tokens, if a completion asks for the logits of its prompt and some of them were never computed.

        The lookup knows that, but it is not asked for each completion: another cache may be set, or none.
        """
        llm = self.context.llm
        if not (self.context.lineage.unscored and llm._logits_all and asks_for_prompt_logits(llm)):
            return []
        live: list[int] = llm.input_ids[: llm.n_tokens].tolist()
        # what is not a token cannot be computed again
        return live if min(live, default=-1) >= 0 else []

    def _evaluate(self, original: Callable[[Sequence[int]], None], batch: Sequence[int]) -> bool:
        """Evaluate a batch; whether everything in the context is known after that."""
        llm, lineage = self.context.llm, self.context.lineage
        before = lineage.begin()
        # if this is interrupted, the logits may be those of a token that does not count; generate() would sample them
        llm._requires_eval = True
        self._decode(original, batch)
        if before is None:
            lineage.extend(batch)
            if not lineage.agrees(llm, self.context.memory, len(batch)):
                before = Unknown.CHANGED
        lineage.end(before)
        return before is None

    def _decode(self, original: Callable[[Sequence[int]], None], batch: Sequence[int]) -> None:
        """Evaluate a batch; residents go, one by one, as long as there are too few cells for it."""
        llm, memory = self.context.llm, self.context.memory
        if memory.residents.has_tags:
            memory.make_room(llm.input_ids[: llm.n_tokens], len(batch))
        while True:
            try:
                original(batch)
            except RuntimeError as error:
                # then llama.cpp has changed nothing
                if str(error) != NO_CELLS or not memory.drop_oldest():
                    raise
            else:
                return

    def _note_decoded(self) -> None:
        """What was decoded up to now was decoded by the store."""
        watch = self.context.watch
        if watch is not None:
            watch.note_decoded()

    def _note_evaluated_prompt(self, n: int) -> None:
        """Count a prompt that was not looked up before."""
        is_prompt = n >= max(self.context.parameters.min_tokens, 2) and not self._is_looked_up
        if is_prompt and not self.context.bypass.is_active:
            self._inactivity.prompt(is_looked_up=False)
        self._is_looked_up = False

    def continues_prompt(self) -> None:
        """Note that the next evaluation continues a prompt, so it needs no lookup."""
        self._is_looked_up = True

    def _count_unknown(self, n_pages: int) -> None:
        """Count pages that are not stored because it is not known what the context holds."""
        unknown = self.context.lineage.unknown
        if n_pages and unknown is not None and not self.context.parameters.read_only:
            self.context.engine.counters.count(f"dropped:{unknown.value}", n_pages)

    def _stops(self, tokens: Sequence[int], step: int, *, keep_batches: bool) -> list[int]:
        """Where to stop while these tokens are evaluated; only between batches if these must stay as they are."""
        if not self._is_written:
            return []
        with self._guard("dropped:error"):
            start, stops = self.context.lineage.n, self.strategy.stops(tokens)
            return [stop for stop in stops if not keep_batches or (stop - start) % step == 0]
        return []

    def reset(self) -> None:
        """``Llama.reset``, after pending snapshots were captured."""
        context = self.context
        context.settle()
        self._before_leaving()
        unknown = context.lineage.begin()
        self._original("reset")()
        if context.llm.n_tokens == 0:
            context.lineage.replace(())
        else:
            context.lineage.end(unknown or Unknown.CHANGED)

    def save_state(self) -> LlamaState:
        """``Llama.save_state``; inside a completion that saves for this store, an empty state."""
        llm = self.llm
        self.context.settle()
        if calling_completion(2) is not None and self._attachment is not None and self._attachment.is_cache(llm.cache):
            return self._live_state()
        # a state also has their cells, which belong to no session after it is loaded
        self.context.memory.drop_residents()
        state: LlamaState = self._original("save_state")()
        if self.context.catch_up():
            lineage = self.context.lineage
            self._saved[state] = _Saved(lineage.tokens.copy(), state.llama_state, lineage.unscored)
        return state

    def load_state(self, state: LlamaState) -> None:
        """``Llama.load_state``; a state that a lookup returned is in the context already, or is restored.

        If it fails, the context is empty after it: llama-cpp-python would go on with the tokens of the state, and
        whatever of it llama.cpp has taken.

        Raises
        ------
        MisuseError
            If a lookup returned the state, and it can no longer be restored.
        """
        context = self.context
        context.settle()
        if isinstance(state, _LiveState):
            # a completion compares the tokens of the context before it continues
            if calling_completion(2) is None:
                self._load_live(state)
            return
        self._before_leaving()
        saved = self._saved.get(state)
        context.memory.drop_residents()
        context.lineage.begin()
        with context.loading():
            self._original("load_state")(state)
        if saved is not None and saved.is_still(state):
            context.lineage.replace(saved.tokens)
            context.lineage.unscored = saved.unscored
        else:
            context.lineage.lose(Unknown.LOADED_STATE)
            context.lineage.unscored = 0  # its logits came with it
            context.lineage.end(Unknown.LOADED_STATE)

    def _load_live(self, state: _LiveState) -> None:
        """Make a state live again that a lookup returned; it has no bytes, but its tokens are known."""
        context = self.context
        if state.namespace != context.lineage.namespace:
            raise MisuseError("this state belongs to another model; look the prompt up in the store of this Llama")
        tokens = as_tokens(state.input_ids)
        n = len(tokens)
        if self._holds_exactly(tokens):
            return
        self._before_leaving()
        if self.strategy.stored(tokens, n) == n:
            context.empty()
            self._restore(tokens, n, always=True)
            if self._holds_exactly(tokens):
                return
        raise MisuseError(
            f"this state stands for {n:,} tokens that were in the context when the store returned it; the context has "
            "moved on, and not all of them are stored; call store.restore(tokens) and evaluate the others"
        )

    def _holds_exactly(self, tokens: Tokens) -> bool:
        """Whether the context is known to hold these tokens, and nothing else."""
        return self.context.catch_up() and np.array_equal(self.context.lineage.tokens, tokens)

    # -- what the store calls -----------------------------------------------------------------------------------------

    def lookup(
        self, prompt: TokenSequence, completion: FrameType | None, meter: PromptMeter | None = None
    ) -> LlamaState | None:
        """Restore what is stored of a prompt.

        Parameters
        ----------
        prompt
            The tokens.
        completion
            The frame of the calling completion, if there is one.
        meter
            Counts what happens to the prompt.

        Returns
        -------
        LlamaState or None
            Stands for what is live now; None for a miss.
        """
        started = time.perf_counter()
        llm = self.llm
        tokens = as_tokens(prompt)
        self.context.prompt = meter or PromptMeter()
        try:
            return self._lookup(llm, tokens, completion)
        finally:
            self._looked_up(len(tokens), live_prefix_length(llm, tokens), started)

    def _lookup(self, llm: llama_cpp.Llama, tokens: Tokens, completion: FrameType | None) -> LlamaState | None:
        if not is_closed(llm):
            self.context.settle()
        limit, multiple_of = len(tokens) - 1, 1
        self._note_prompt(len(tokens))
        asked = completion.f_locals if completion is not None else {}
        self._exact = asked.get("logprobs") is not None
        if self._exact:
            if asked.get("echo"):
                # the logits of the prompt itself are asked for; they are not stored
                lineage = self.context.lineage
                if (lineage.unscored or lineage.unknown is not None) and not self.context.has_placeholders(tokens):
                    llm.reset()
                self.context.count_miss("miss:logprobs")
                return None
            # the same batches as without a store give the same logits, bit by bit
            multiple_of = llm.n_batch
        return self._live_state() if self._restore(tokens, limit, multiple_of=multiple_of) else None

    def restore(self, tokens: Tokens, *, always: bool = False, meter: PromptMeter | None = None) -> int:
        """Restore for a caller who continues with ``eval`` or ``generate``; the number of tokens that are live."""
        started = time.perf_counter()
        self.context.prompt = meter or PromptMeter()
        live = 0
        try:
            live = self._restore_for_caller(tokens, always=always)
        finally:
            self._looked_up(len(tokens), live, started)
        return live

    def _looked_up(self, n: int, reused: int, started: float) -> None:
        """Count a prompt of `n` tokens that was looked up, of which the context now holds `reused`."""
        context, prompt = self.context, self.context.prompt
        source = "store" if prompt.restored else prompt.miss or "live"
        context.engine.counters.asked(context.lineage.namespace, n, prompt.restored, source)
        prompt.looked_up(n, reused, time.perf_counter() - started)

    def _restore_for_caller(self, tokens: Tokens, *, always: bool) -> int:
        llm = self.llm
        self.context.settle()
        if not self.is_attached:
            # nothing is captured here: what llama-cpp-python would reuse is kept
            self.context.adopt()
        self._note_prompt(len(tokens))
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
                self.context.empty()
            llm.n_tokens = live
            llm._requires_eval = True
        return live

    def resume(self, tokens: Tokens, *, uses_live: bool, uses_store: bool) -> tuple[int, int]:
        """Prepare the context to continue a sequence after its last token.

        Parameters
        ----------
        tokens
            The sequence.
        uses_live
            Whether what the context holds may be used; if not, it is emptied.
        uses_store
            Whether what is stored may be.

        Returns
        -------
        int
            How many of the tokens the context had, and could continue from.
        int
            How many more were restored.
        """
        started = time.perf_counter()
        context = self.context
        context.settle()
        # what is restored is counted, but no lookup: a prompt follows
        context.prompt = PromptMeter(is_prompt=False)
        if not uses_live:
            self._before_leaving()
            context.empty()
        n_live = self.continued(tokens)
        if uses_store and n_live < len(tokens):
            self._restore(tokens, len(tokens))
        n = self.continued(tokens)
        context.prompt.looked_up(len(tokens), n, time.perf_counter() - started)
        return n_live, max(n - n_live, 0)

    def rewind(self, tokens: Tokens) -> int:
        """Cut the context to the prefix of a sequence that it can continue from; returns its length."""
        context = self.context
        context.settle()
        if context.bypass_reason() is not None:
            raise ContextError("the contents of the context are unknown; evaluate a whole prompt instead")
        n, llm = self.continued(tokens), context.llm
        if n < llm.n_tokens or context.lineage.unknown is not None:
            self._before_leaving()
            if n == 0:
                context.empty()
            llm.n_tokens = n
            llm._requires_eval = True
        return n

    @property
    def _is_written(self) -> bool:
        """Whether anything is captured."""
        return self.writes and not self.context.parameters.read_only

    def shift(self, keep: int, drop: int) -> None:
        """Drop `drop` tokens after the first `keep`, and move the others to their places; see `llama.moving_window`.

        From here on it is not known what the context holds, and no prompt continues what was moved.
        """
        context = self.context
        context.settle()
        llm, memory = context.llm, context.memory
        if not isinstance(memory, PagedMemory):
            raise ContextError("this context cannot be shifted")
        n = llm.n_tokens
        # a cell has one position, however many share it
        memory.drop_residents()
        context.lineage.lose(Unknown.SHIFTED)
        with context.loading():
            # first the names: a prompt never seems to begin with what was moved
            llm.input_ids[keep:n] = -1
            memory.shift(keep, drop)
            llm.n_tokens = n - drop

    def forget_context(self) -> None:
        """Make the context empty."""
        if not is_closed(self.context.llm):
            self.context.settle()
            self.context.empty()

    def known_tokens(self) -> Tokens | None:
        """A copy of what the context holds; None if that is not known, or not stored (`Context.bypass_reason`)."""
        self.context.settle()
        if self.context.bypass_reason() is not None or not self.context.catch_up():
            return None
        tokens: Tokens = self.context.lineage.tokens.copy()
        return tokens

    def keys(self) -> list[bytes]:
        """The keys of the full pages of what the context is known to hold."""
        return list(self.context.lineage.keys())

    def bring(self, tokens: Tokens, take: Callable[[], bool]) -> bool:
        """Make parked rows, those of these tokens, live; if that fails, the context is empty.

        Parameters
        ----------
        tokens
            The tokens.
        take
            Makes the rows those of the live sequence; whether that has worked.
        """
        context = self.context
        self._before_leaving()
        context.lineage.begin()
        # first the count, as in `ContextMemory.discard`
        context.llm.n_tokens = 0
        context.llm._requires_eval = True
        is_live = take()
        if is_live:
            context.set_live(tokens)
        else:
            context.empty()
        return is_live

    def continued(self, tokens: Tokens) -> int:
        """How many tokens of a sequence the context is known to hold, and can continue from."""
        context = self.context
        if context.bypass_reason() is not None or not context.catch_up():
            return 0
        n = common_prefix(context.lineage.tokens, tokens)
        return n if n == context.llm.n_tokens or context.memory.holds(n) else 0

    def completed(self) -> None:
        """Capture the tail of a completion that has ended."""
        if not is_closed(self.llm):
            self.context.settle()
        # whatever was prepared for this completion has been used
        self.context.lineage.is_fresh = False
        self._capture(tail=True)

    def capture(self, *, wait: bool = True) -> int:
        """Capture all of the context that is not stored, by default waiting for space in the queue; returns a count."""
        self.context.settle()
        if not self._is_written or self.context.skip_reason() is not None:
            return 0
        if not self.is_attached:
            # not attached: the store never saw these tokens, so the caller vouches for them
            self.context.adopt()
        elif not self.context.catch_up():
            self._count_unknown(1)
            return 0
        return self.strategy.capture(tail=True, wait=wait)

    # -- guarded ------------------------------------------------------------------------------------------------------

    def _guard(self, fault: str, unavailable: str | None = None) -> Guard:
        return Guard(self.context.engine.counters, fault, unavailable, self.context.lineage.namespace)

    def _restore(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        context = self.context
        reason = context.skip_reason()
        if reason is not None:
            context.count_miss(f"miss:{reason}")
            if reason == BYPASSED:
                self._prepare_bypassed(tokens)
            return False
        self._before_leaving()
        # of a prompt that is longer than the context, the next token needs a place
        limit = min(limit, len(self.llm.input_ids) - 1)
        guard = self._guard(context.lookup("miss:error"), context.lookup("miss:unavailable"))
        with guard:
            context.catch_up()
            unknown = context.lineage.unknown
            if unknown is not None and self._is_kept(unknown, tokens, limit):
                context.count_miss(f"miss:{unknown.value}")
                return False
            if not self.reads:
                context.count_miss("miss:session")
                # a context that cannot step back to what it shares with the prompt is emptied
                self.strategy.live_prefix(tokens)
                return False
            return self.strategy.restore(tokens, limit, always=always, multiple_of=multiple_of)
        context.note_miss(guard.counted)
        return False

    def _prepare_bypassed(self, tokens: Tokens) -> None:
        """Leave llama-cpp-python a context from which it can continue this prompt, or an empty one."""
        context = self.context
        # what was evaluated before the caller went past the store
        self._before_leaving()
        with self._guard("dropped:error"):
            context.catch_up()
            if context.lineage.unknown in (Unknown.INTERRUPTED, Unknown.STEPPED_BACK):
                context.empty()
            else:
                reusable_prefix(context.llm, context.memory, tokens, context.empty)

    def _is_kept(self, unknown: Unknown, tokens: Tokens, limit: int) -> bool:
        """Whether an unknown context stays for this prompt; if not, it is emptied.

        It stays if user code has prepared it since the last completion, and it has more of the prompt than the store.
        llama-cpp-python then continues from it, as it does without a store. It stays for one prompt only, since
        nothing that is computed after it can be stored; but always where it has what cannot be computed again.
        """
        context = self.context
        lineage = context.lineage
        is_fresh, lineage.is_fresh = lineage.is_fresh, False
        if context.has_placeholders(tokens):
            return True
        if unknown.is_deliberate and is_fresh:
            llm = context.llm
            live = live_prefix_length(llm, tokens)
            # a loaded state may be continued from its middle; what a handler has put together, from its end
            is_continued = unknown is Unknown.LOADED_STATE or live == llm.n_tokens == context.memory.end()
            if (
                is_continued
                and live >= (context.parameters.min_tokens if unknown is Unknown.LOADED_STATE else 1)
                and context.memory.holds(live)
                and live > self.strategy.stored(tokens, limit)
            ):
                return True
        context.empty()
        return False

    def _live_state(self) -> _LiveState:
        """A state without bytes, for the tokens that the context holds."""
        llm = self.context.llm
        state = _LiveState(
            input_ids=llm.input_ids[: llm.n_tokens].copy(),
            scores=np.empty((0, 0), np.single),
            n_tokens=llm.n_tokens,
            llama_state=b"",
            llama_state_size=0,
            seed=llm._seed,
        )
        state.namespace = self.context.lineage.namespace
        return state

    def _note_prompt(self, n: int) -> None:
        self._is_looked_up = True
        if n >= self.context.parameters.min_tokens and not self.context.bypass.is_active:
            self._inactivity.prompt(is_looked_up=True)

    def _capture(self, *, tail: bool) -> None:
        if self._is_written and self.context.skip_reason() is None:
            with self._guard("dropped:error"):
                if self.context.catch_up():
                    self.strategy.capture(tail=tail)
                else:
                    self._count_unknown(1)

    def _before_leaving(self) -> None:
        """Capture what the context still has, before it moves to other tokens."""
        is_stored = self.is_attached and self._is_written
        if is_stored and self.context.bypass_reason() is None:
            with self._guard("dropped:error"):
                self.strategy.before_leaving()


def _batches(tokens: Sequence[int], stops: Sequence[int], step: int) -> Iterator[Sequence[int]]:
    """The tokens in batches of `step`, counted from their start and from each of the `stops`."""
    for start, end in itertools.pairwise([0, *stops, len(tokens)]):
        for i in range(start, end, step):
            yield tokens[i : min(i + step, end)]


@dataclass(frozen=True)
class _Saved:
    """What a state that the user saved is known to hold."""

    tokens: Tokens
    state: bytes
    unscored: int

    def is_still(self, state: LlamaState) -> bool:
        """Whether the state is still as it was saved."""
        n = len(self.tokens)
        return (
            state.llama_state is self.state
            and state.llama_state_size == len(self.state)
            and state.n_tokens == n
            and np.array_equal(state.input_ids[:n], self.tokens)
        )


class _LiveState(LlamaState):
    """Stands for what the context held when a lookup returned it; there are no bytes to load.

    Attributes
    ----------
    namespace
        Key of the namespace of the context.
    """

    namespace: bytes = b""
