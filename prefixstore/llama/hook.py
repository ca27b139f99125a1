"""Connects a ``Llama`` to the engine: restores at a lookup, captures as tokens are evaluated.

What llama-cpp-python does in a completion, and what the hook does:

    self.cache[prompt]                        lookup: what is stored of the prompt is restored into the context
    self.eval(...)  for each batch            pages are captured as their boundaries are crossed
    self.save_state()                         copies nothing
    self.cache[prompt + completion] = state   the tail is captured

A fault of the store never breaks a completion: it is a miss, or a page that is not stored; counted and logged.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import llama_cpp
from llama_cpp.llama import LlamaState

from prefixstore.counters import Kind
from prefixstore.engine.compute_rate import SMALLEST_BATCH
from prefixstore.engine.engine import Engine
from prefixstore.engine.miss import BYPASSED, Guard
from prefixstore.errors import ContextError
from prefixstore.format.keys import Tokens, as_tokens
from prefixstore.llama.attachment import Attachment
from prefixstore.llama.binding import (
    asks_for_prompt_logits,
    check_versions,
    is_closed,
    is_completion,
    keeps_all_logits,
    live_tokens,
    n_places,
    pointer_of,
    running_completion,
    set_end,
)
from prefixstore.llama.context import Context
from prefixstore.llama.fingerprint import namespace_of
from prefixstore.llama.kv_memory import ContextMemory, kind_of, page_tokens_for
from prefixstore.llama.lineage import Unknown
from prefixstore.llama.llama_state import LiveState, SavedStates, load_live
from prefixstore.llama.page_strategy import PageStrategy
from prefixstore.llama.paged_memory import PagedMemory
from prefixstore.llama.snapshot_strategy import SnapshotStrategy
from prefixstore.llama.strategy import Strategy
from prefixstore.models.file import model_name
from prefixstore.parameters import Parameters
from prefixstore.results import PromptMeter

if TYPE_CHECKING:
    from prefixstore.sessions.sessions import Sessions


class Hook:
    """Stands between a ``Llama``, which it does not keep alive, and its caller.

    Raises `IncompatibleError` if this version of llama-cpp-python lacks something that the store needs, and
    `ContextError` if a file of the model cannot be read, or is not the one that was loaded.

    Attributes
    ----------
    n_evaluated
        How many tokens this ``Llama`` has evaluated since it was attached.
    sessions
        A weak reference to the sessions of the store on this ``Llama``.
    """

    def __init__(self, llm: llama_cpp.Llama, engine: Engine, parameters: Parameters) -> None:
        check_versions(llm)
        self.strategy = _strategy(llm, engine, parameters)
        self.context = self.strategy.context
        namespace = self.context.namespace
        engine.describe(namespace, model_name(llm.metadata))
        self.attachment = Attachment(self.context)
        self.saved = SavedStates()
        self.n_evaluated = 0
        self.sessions: Callable[[], Sessions | None] = lambda: None

    @property
    def kind(self) -> Kind:
        """What is stored of the context, or why nothing is."""
        return self.context.kind

    @property
    def llm(self) -> llama_cpp.Llama:
        """The model. Raises `MisuseError` if it is gone."""
        return self.context.llm

    @property
    def page_tokens(self) -> int:
        """Length of a page in this context."""
        return self.context.parameters.page_tokens

    @property
    def is_attached(self) -> bool:
        """Whether the methods of the ``Llama`` are replaced by the hook's."""
        return self.attachment.is_alive

    # -- what replaces the Llama's methods ----------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """``Llama.eval``. Looks up the text before the first image of a chat, for which its handler asks no cache."""
        context = self.context
        if len(tokens) < 2 or not context.begins_with_text():
            self._eval(tokens)
            return
        context.is_text = True
        try:
            self._eval(tokens[self.restore(as_tokens(tokens)) :])
            # an image may be next, after which nothing can be stored
            self._capture(tail=True)
        finally:
            context.is_text = False

    def _eval(self, tokens: Sequence[int]) -> None:
        """``Llama.eval`` in the same batches, with pages captured in between; a batch also ends at each snapshot."""
        context = self.context
        llm, lineage, watch = context.llm, context.lineage, context.watch
        assert watch is not None, "the store is attached"
        was_cleared = context.settle()
        unscored = self._unscored()
        if unscored:
            context.empty()
            tokens = [*unscored, *tokens]
        if len(tokens) == 0:
            if was_cleared:
                # generate() would sample from logits that are gone, and never end
                raise ContextError("an interrupted restore has emptied the context; evaluate the prompt again")
            return
        known = self._knows_context(before=tokens)
        step = llm.n_batch
        if context.memory.overwrites_window and llm.draft_model is None:
            # pages are captured after each micro-batch
            step = min(step, llm.context_params.n_ubatch)
        stops = self._stops(tokens, step) if known else []
        start = llm.n_tokens
        context.prompt.begun(start)
        n_computed, began = 0, time.perf_counter()
        for batch in _batches(tokens, [stop - lineage.n for stop in stops], step):
            known = self._evaluate(batch)
            n_computed += len(batch)
            if known and self.strategy.is_due(lineage.n - len(batch), stops):
                self._note_computed(n_computed, began)
                watch.note_decoded()
                self._capture(tail=False)
                n_computed, began = 0, time.perf_counter()
        if n_computed:
            self._note_computed(n_computed, began)
        watch.note_decoded()
        if known and len(tokens) > 1 and self._is_written:
            with self.guard():
                self.strategy.prompt_evaluated()
        if not known and context.skip_reason() is None:
            self._count_unknown(llm.n_tokens // lineage.page_tokens - start // lineage.page_tokens)

    def _unscored(self) -> list[int]:
        """The live tokens, if a completion asks for the logits of its prompt and some were never computed."""
        llm = self.context.llm
        if not (self.context.lineage.unscored and keeps_all_logits(llm)) or not asks_for_prompt_logits(llm):
            return []
        live: list[int] = live_tokens(llm).tolist()
        # placeholders cannot be computed again
        return live if min(live, default=-1) >= 0 else []

    def _knows_context(self, *, before: Sequence[int]) -> bool:
        """Whether everything in the context is known, before these tokens are evaluated."""
        context, lineage = self.context, self.context.lineage
        reason = context.skip_reason()
        if reason is None:
            return context.catch_up(compare=len(before) > 1)
        if reason == BYPASSED and lineage.unknown is None:
            # capture what was evaluated before the bypass began
            self.before_leaving()
        lineage.lose(Unknown.BYPASSED if reason == BYPASSED else Unknown.CHANGED)
        return False

    def _stops(self, tokens: Sequence[int], step: int) -> list[int]:
        """Positions at which to end a batch, in addition to every `step` tokens."""
        if not self._is_written:
            return []
        with self.guard():
            llm, start, stops = self.context.llm, self.context.lineage.n, self.strategy.stops(tokens)
            # A draft model asks for logits by their place in a batch, and logprobs are equal bit by bit only if the
            # batches are those of a run without a store: then no batch is split.
            if stops and (llm.draft_model is not None or running_completion(llm).get("logprobs") is not None):
                return [stop for stop in stops if (stop - start) % step == 0]
            return stops
        return []

    def _evaluate(self, batch: Sequence[int]) -> bool:
        """Evaluate a batch; returns whether everything in the context is known after that."""
        context, lineage = self.context, self.context.lineage
        llm = context.llm
        before = lineage.begin()
        # if the evaluation is interrupted, generate() must not sample from the logits of an uncounted token
        set_end(llm, llm.n_tokens)
        self.attachment.original("eval")(batch)
        if before is None:
            lineage.extend(batch)
            if not context.agrees(len(batch)):
                before = Unknown.CHANGED
        lineage.end(before)
        self.n_evaluated += len(batch)
        context.engine.counters.count("tokens_computed", len(batch), namespace=lineage.namespace)
        return before is None

    def _note_computed(self, n_tokens: int, began: float) -> None:
        """Note that this many tokens were computed since `began`."""
        context = self.context
        if n_tokens >= SMALLEST_BATCH:
            # wait for a GPU that is still computing
            llama_cpp.llama_synchronize(pointer_of(context.llm))
        seconds = time.perf_counter() - began
        context.rate.computed(n_tokens, seconds)
        context.prompt.evaluated(n_tokens, seconds)

    def _count_unknown(self, n_pages: int) -> None:
        """Count pages that are not stored because the contents of the context are unknown."""
        unknown = self.context.lineage.unknown
        if n_pages and unknown is not None and not self.context.parameters.read_only:
            self.context.engine.counters.count(f"dropped:{unknown.value}", n_pages)

    def reset(self) -> None:
        """``Llama.reset``, after what is left in the context was captured."""
        context = self.context
        context.settle()
        self.before_leaving()
        unknown = context.lineage.begin()
        self.attachment.original("reset")()
        if context.llm.n_tokens == 0:
            context.lineage.replace(())
        else:
            context.lineage.end(unknown or Unknown.CHANGED)

    def save_state(self) -> LlamaState:
        """``Llama.save_state``; called by a completion whose cache is this store, it copies nothing."""
        self.context.settle()
        if is_completion(2) and self.attachment.store_is_cache:
            return LiveState.of(self.context)
        state: LlamaState = self.attachment.original("save_state")()
        self.saved.note(state, self.context)
        return state

    def load_state(self, state: LlamaState) -> None:
        """``Llama.load_state``; a state that a lookup returned is in the context already, or is restored again.

        Raises `MisuseError` if that is no longer possible. If loading another state fails, the context is emptied:
        llama-cpp-python would go on with the tokens of the state, and a part of its rows.
        """
        context, lineage = self.context, self.context.lineage
        context.settle()
        if isinstance(state, LiveState):
            # a completion itself compares the tokens of the context
            if not is_completion(2):
                load_live(self, state)
            return
        self.before_leaving()
        saved = self.saved.find(state)
        lineage.begin()
        with context.loading():
            self.attachment.original("load_state")(state)
        if saved is not None:
            lineage.replace(saved.tokens, unscored=saved.unscored)
        else:
            lineage.lose(Unknown.LOADED_STATE)
            lineage.unscored = 0  # its logits came with it
            lineage.end(Unknown.LOADED_STATE)

    # -- what the store calls -----------------------------------------------------------------------------------------

    def lookup(self, tokens: Tokens) -> LlamaState | None:
        """Restore what is stored of a prompt; returns a state that stands for what is live then, None for a miss."""
        with self._serving(tokens):
            if not is_closed(self.llm):
                self.context.settle()
            return LiveState.of(self.context) if self.restore_up_to(tokens, len(tokens) - 1) else None

    def restore(self, tokens: Tokens, *, always: bool = False) -> int:
        """Restore for a caller who continues with ``eval`` or ``generate``; returns how many tokens are live."""
        context, llm = self.context, self.llm
        with self._serving(tokens):
            context.settle()
            if not self.is_attached:
                # nothing is captured: keep what llama-cpp-python would reuse
                context.adopt()
            # the caller evaluates at least one token: the last of the prompt, or the last that has a place
            limit = max(min(len(tokens), n_places(llm)) - 1, 0)
            if llm.n_tokens > limit:
                # the caller will evaluate a token, even if there are logits
                set_end(llm, llm.n_tokens)
            self.restore_up_to(tokens, limit, always=always)
            live = min(self.strategy.live_prefix(tokens), limit)
            if live < llm.n_tokens:
                # recurrent memory cannot step back, and a window may have moved on
                self.cut(live if context.memory.holds(live) else 0)
            return llm.n_tokens

    @contextmanager
    def _serving(self, tokens: Tokens) -> Iterator[None]:
        """A block that looks a prompt up; at its end, the outcome is counted."""
        context, started = self.context, time.perf_counter()
        context.prompt = prompt = PromptMeter()
        try:
            yield
        finally:
            context.engine.counters.count("prompt_tokens", len(tokens), namespace=context.lineage.namespace)
            prompt.looked_up(len(tokens), context.live_prefix(tokens), time.perf_counter() - started)

    def cut(self, n: int) -> None:
        """Cut the context after its first `n` tokens; the caller evaluates the next."""
        if n:
            set_end(self.llm, n)
        else:
            self.context.empty()

    def rewind(self, tokens: Tokens) -> int:
        """Cut the context to the prefix of a sequence from which it can continue; returns its length."""
        context = self.context
        context.settle()
        if context.bypass_reason() is not None:
            raise ContextError("the contents of the context are unknown; evaluate a whole prompt instead")
        n = context.continued(tokens)
        if n < context.llm.n_tokens or context.lineage.unknown is not None:
            self.before_leaving()
            self.cut(n)
        return n

    def completed(self) -> None:
        """Capture the tail of a completion that has ended."""
        if not is_closed(self.llm):
            self.context.settle()
        # this completion has used what was prepared for it
        self.context.lineage.is_fresh = False
        self._capture(tail=True)

    def capture(self, *, wait: bool = True) -> int:
        """Capture all of the context that is not stored; returns how many pages. With `wait`, waits for the queue."""
        self.context.settle()
        if not self.is_attached:
            # the store has not seen these tokens: the caller vouches for them
            self.context.adopt()
        return self._write(tail=True, wait=wait)

    # -- guarded against faults ---------------------------------------------------------------------------------------

    def guard(self, fault: str = "dropped:error", unavailable: str | None = None) -> Guard:
        """A block whose faults do not break a completion; see `Guard`."""
        return Guard(self.context.engine.counters, fault, unavailable, self.context.lineage.namespace)

    def restore_up_to(self, tokens: Tokens, limit: int, *, always: bool = False) -> bool:
        """Restore at most `limit` tokens of a prompt; for `always`, and what is returned, see `Strategy.restore`."""
        context, llm = self.context, self.llm
        reason = context.skip_reason() or ("logprobs" if asks_for_prompt_logits(llm) else None)
        if reason is not None:
            context.count_miss(reason)
            if reason in (BYPASSED, "logprobs"):
                self._prepare_bypassed(tokens)
            return False
        self.before_leaving()
        # the next token needs a place
        limit = min(limit, n_places(llm) - 1)
        # the same batches as without a store give the same logits, bit by bit
        multiple_of = llm.n_batch if running_completion(llm).get("logprobs") is not None else 1
        guard = self.guard(context.lookup("miss:error"), context.lookup("miss:unavailable"))
        with guard:
            context.catch_up()
            unknown = context.lineage.unknown
            if unknown is not None and self.strategy.keeps(unknown, tokens, limit):
                context.count_miss(unknown.value)
                return False
            context.engine.token_seconds = context.rate.token_seconds
            return self.strategy.restore(tokens, limit, always=always, multiple_of=multiple_of)
        # an exception ended the block
        context.prompt.miss = (guard.counted or "").rpartition(":")[2]
        return False

    def _prepare_bypassed(self, tokens: Tokens) -> None:
        """Leave llama-cpp-python a context from which it can continue this prompt, or an empty one."""
        context = self.context
        # capture what was evaluated before the bypass began
        self.before_leaving()
        with self.guard():
            context.catch_up()
            if context.lineage.unknown in (Unknown.INTERRUPTED, Unknown.STEPPED_BACK):
                context.empty()
            else:
                context.reusable_prefix(tokens)

    @property
    def _is_written(self) -> bool:
        """Whether anything is captured."""
        return not self.context.parameters.read_only

    def _write(self, *, tail: bool, wait: bool = False) -> int:
        """Capture the context if its contents are known; see `Strategy.capture`."""
        if not self._is_written or self.context.skip_reason() is not None:
            return 0
        if not self.context.catch_up():
            self._count_unknown(1)
            return 0
        return self.strategy.capture(tail=tail, wait=wait)

    def _capture(self, *, tail: bool) -> None:
        with self.guard():
            # in a `storing_all` block, wait instead of skipping pages
            self._write(tail=tail, wait=self.context.engine.write_queue.stores_all > 0)

    def before_leaving(self) -> None:
        """Capture what is not stored yet, before the context moves to other tokens."""
        if self.is_attached and self._is_written and self.context.bypass_reason() is None:
            with self.guard():
                self.strategy.before_leaving()


def _batches(tokens: Sequence[int], stops: Sequence[int], step: int) -> Iterator[Sequence[int]]:
    """The tokens in batches of `step`, counted from their start and from each of the `stops`."""
    for start, end in itertools.pairwise([0, *stops, len(tokens)]):
        for i in range(start, end, step):
            yield tokens[i : min(i + step, end)]


def _strategy(llm: llama_cpp.Llama, engine: Engine, parameters: Parameters) -> Strategy:
    """The strategy for the memory of a ``Llama``, in the namespace of its context."""
    parameters = replace(parameters, page_tokens=page_tokens_for(llm, parameters.page_tokens))
    namespace = namespace_of(llm, page_tokens=parameters.page_tokens, salt=parameters.salt, label=parameters.label)
    if kind_of(llm).has_snapshots:
        return SnapshotStrategy(Context(llm, engine, namespace, parameters, ContextMemory(llm)))
    memory = PagedMemory(llm)
    return PageStrategy(Context(llm, engine, namespace, parameters, memory), memory)
