"""The portable hook: a store without an attached ``Llama``, on the ``LlamaState`` objects of llama-cpp-python.

    state = self.cache[prompt]                lookup: pages are joined into a state that ``load_state`` accepts
    self.load_state(state)
    self.cache[prompt + completion] = state   save: the state is cut into pages, and new ones are stored

The calling frame shows which ``Llama`` is asking. So the namespace is the one that an attached store of the same name
and salt has for this ``Llama``, the pages are the same bytes, and both kinds of stores share them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

import llama_cpp
import numpy as np
from llama_cpp.llama import LlamaState

from prefixstore.buffers import released_on_error
from prefixstore.engine.engine import Engine
from prefixstore.engine.missing import missing_ranges
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import CorruptError, InvalidParameterError
from prefixstore.format.keys import ENDLESS, Tokens, TokenSequence, as_tokens, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.format.whole_state import WholeState
from prefixstore.last_prompt import PromptMeter
from prefixstore.llama.bypass import BYPASSED, Bypass
from prefixstore.llama.context import bypass_reason, live_prefix_length, reusable_prefix
from prefixstore.llama.gguf import model_names
from prefixstore.llama.guard import Guard
from prefixstore.llama.kv_memory import kind_of
from prefixstore.llama.portable.lookup import match_whole
from prefixstore.llama.portable.restore import StateBuilder
from prefixstore.llama.portable.target import PortableTarget, nameless_target, target_for
from prefixstore.llama.state.parse import parse_context
from prefixstore.llama.state.shape import shape_of
from prefixstore.llama.state.view import Assembly, StateView
from prefixstore.parameters import Parameters
from prefixstore.stats import Kind

__all__ = ["PortableHook"]


class PortableHook:
    """The hook of a store that is not attached to a ``Llama``.

    Parameters
    ----------
    engine
        Of the store.
    parameters
        The store's parameters.
    bypass
        Whether the running code bypasses the store.
    """

    def __init__(self, engine: Engine, parameters: Parameters, bypass: Bypass) -> None:
        self._bypass = bypass
        self._engine = engine
        self._parameters = parameters
        self._builder = StateBuilder(engine, parameters.min_tokens, parameters.max_delay)
        self._targets: weakref.WeakKeyDictionary[llama_cpp.Llama, PortableTarget] = weakref.WeakKeyDictionary()
        self._nameless = nameless_target(parameters)
        self._last = self._nameless
        engine.describe(self._nameless.namespace)

    @property
    def kind(self) -> Kind:
        """How the states of the ``Llama`` that asked last are stored."""
        if self._last is self._nameless:
            return Kind.PORTABLE
        return Kind.PORTABLE_PAGES if self._last.pages is not None else Kind.PORTABLE_WHOLE

    @property
    def namespace(self) -> Namespace:
        """Of the ``Llama`` that asked last; before any has asked, of the states that were stored without one."""
        return self._last.pages or self._last.whole

    @property
    def page_tokens(self) -> int:
        """Length of a page in `namespace`."""
        return self._last.page_tokens if self._last.pages is not None else ENDLESS

    @property
    def namespaces(self) -> list[Namespace]:
        """All namespaces in which this hook may have stored something in this process."""
        targets = [self._nameless, self._last, *self._targets.values()]
        found = [namespace for target in targets for namespace in (target.pages, target.whole) if namespace is not None]
        return list({namespace.key: namespace for namespace in found}.values())

    # -- as llama-cpp-python calls a cache ----------------------------------------------------------------------------

    def lookup(
        self, prompt: TokenSequence, completion: FrameType | None, meter: PromptMeter | None = None
    ) -> LlamaState | None:
        """The longest stored state of a prompt.

        Parameters
        ----------
        prompt
            The tokens.
        completion
            The frame of the calling completion, if there is one. Outside a completion, a state that was stored outside
            one is found, or one that the ``Llama`` that asked last has stored.
        meter
            Counts what happens to the prompt.

        Returns
        -------
        LlamaState or None
            None if nothing is stored, or no more than the context holds already.
        """
        started = time.perf_counter()
        tokens = as_tokens(prompt)
        meter = meter or PromptMeter(sees_evaluation=False)
        live = 0
        try:
            llm = completion.f_locals["self"] if completion is not None else None
            live, state = self._lookup(llm, tokens, meter)
        finally:
            source = "store" if meter.restored else meter.miss or "live"
            self._engine.counters.asked(self._last.key, len(tokens), meter.restored, source)
            meter.looked_up(len(tokens), live + meter.restored, time.perf_counter() - started)
        return state

    def _lookup(self, llm: llama_cpp.Llama | None, tokens: Tokens, meter: PromptMeter) -> tuple[int, LlamaState | None]:
        """How much of a prompt the context holds, and the state to load, if that has more."""
        counters = self._engine.counters
        live = 0
        started = time.perf_counter()
        guard = Guard(counters, "miss:error", "miss:unavailable", self._last.key)
        with guard:
            reason = bypass_reason(llm, kind_of(llm)) if llm is not None else None
            if reason is None and self._bypass.is_active:
                reason = BYPASSED
                live = self._live_without(llm, tokens) if llm is not None else 0
            if reason is not None:
                counters.count(f"miss:{reason}", namespace=self._last.key)
                meter.miss = reason
                return live, None
            if llm is None:
                state = self._lookup_nameless(tokens, meter)
            else:
                target = self._last = self._target(llm)
                assert target.memory is not None
                target.memory.settle()
                live = reusable_prefix(llm, target.memory, tokens)
                # the last token is evaluated in any case; the seed stays as it is
                state = self._builder.build(target, tokens[:-1], live, llm._seed, meter)
            self._engine.nudge()
            if state is not None:
                seconds = time.perf_counter() - started
                counters.restored(state.n_tokens - live, seconds, namespace=self._last.key)
                meter.restored, meter.restore_seconds = state.n_tokens - live, seconds
            return live, state
        meter.miss = (guard.counted or "").partition(":")[2] or None
        return live, None

    def _live_without(self, llm: llama_cpp.Llama, tokens: Tokens) -> int:
        """How much of a prompt the context holds and can continue from, for a request that bypasses the store."""
        target = self._targets.get(llm)
        if target is None or target.memory is None:
            return live_prefix_length(llm, tokens)
        target.memory.settle()
        return reusable_prefix(llm, target.memory, tokens)

    def _lookup_nameless(self, tokens: Tokens, meter: PromptMeter) -> LlamaState | None:
        seed = int(llama_cpp.LLAMA_DEFAULT_SEED)
        target = self._nameless
        if self._last is not target and not match_whole(self._engine, target.whole.key, tokens).n_shared:
            target = self._last
        return self._builder.build(target, tokens, 0, seed, meter)

    def save(self, state: LlamaState, completion: FrameType | None) -> None:
        """Store a state. The state says which tokens it covers; the key also has some that were never evaluated.

        Parameters
        ----------
        state
            As ``Llama.save_state`` made it.
        completion
            The frame of the completion that saves, if one does. Outside one, the namespace= label identifies the
            model.

        Raises
        ------
        InvalidParameterError
            If it is not a ``LlamaState``.
        """
        if not isinstance(state, LlamaState):
            raise InvalidParameterError(
                f"a store takes states from llm.save_state(), and cannot store a {type(state).__name__}"
            )
        llm = completion.f_locals["self"] if completion is not None else None
        if self._parameters.read_only or self._bypass.is_active:
            return
        started = time.perf_counter()
        with Guard(self._engine.counters, "dropped:error"):
            if llm is not None and bypass_reason(llm, kind_of(llm)) is not None:
                return
            target = self._nameless
            if llm is not None:
                target = self._last = self._target(llm)
            self._save(target, state)
        self._engine.counters.time("capture", time.perf_counter() - started)

    def _target(self, llm: llama_cpp.Llama) -> PortableTarget:
        target = self._targets.get(llm)
        if target is None:
            target = self._targets[llm] = target_for(llm, self._parameters)
            for place in (target.namespace, target.whole):
                self._engine.describe(place, model_names(llm.metadata, place.settings))
        return target

    # -- storing ------------------------------------------------------------------------------------------------------

    def _save(self, target: PortableTarget, state: LlamaState) -> None:
        counters = self._engine.counters
        tokens = np.asarray(state.input_ids[: state.n_tokens], "<i4")
        # a number below 0 is not a token: an image, or something that was never evaluated
        if len(tokens) < max(self._parameters.min_tokens, 1) or (tokens < 0).any():
            return
        if state.llama_state_size != len(state.llama_state):
            raise CorruptError(
                f"a state has {len(state.llama_state)} bytes, and llama_state_size is {state.llama_state_size}"
            )
        parsed = _parse(state.llama_state)
        if parsed is not None and target.memory is not None:
            target.memory.shape = shape_of(parsed)
        if parsed is not None and not _covers(parsed, target, len(tokens)):
            counters.count("dropped:incomplete")
            return
        if parsed is not None and target.pages is not None and parsed.architecture == target.architecture:
            step = target.page_tokens
            keys = page_keys(target.pages.key, tokens, step)
            wanted = missing_ranges(self._engine, target.pages.key, keys, tokens, step, tail=True)
            # if rows of a page have left a window, the whole state still has what its next token needs
            if all(parsed.holds(start, end) for start, end in wanted):
                self._save_pages(target.pages, [target.pages.key, *keys], step, tokens, parsed, wanted)
                return
        self._save_whole(target, tokens, state)

    def _save_pages(
        self,
        namespace: Namespace,
        parents: Sequence[bytes],
        page_tokens: int,
        tokens: Tokens,
        parsed: StateView,
        wanted: Sequence[tuple[int, int]],
    ) -> None:
        for start, end in wanted:
            piece = parsed.cut(start, end)
            assembly = Assembly(piece, piece.positions)
            page = parents[start // page_tokens], start, tokens[start:end].tobytes()
            if not self._submit(namespace, page, assembly.size, partial(assembly.write, pieces=[piece])):
                return

    def _save_whole(self, target: PortableTarget, tokens: Tokens, state: LlamaState) -> None:
        scores = None
        if target.n_vocab:
            scores = state.scores
            if scores.shape != (len(tokens), target.n_vocab):
                raise CorruptError(f"scores of shape {scores.shape} are not those of {len(tokens)} tokens")
        namespace = target.whole
        match = match_whole(self._engine, namespace.key, tokens)
        if match.contained and match.contained[-1].end == len(tokens):
            return
        parent, start = (match.parent.key, match.parent.end) if match.parent else (namespace.key, 0)
        own = tokens[start:].tobytes()
        if self._engine.wants(namespace.key, parent, own):
            whole = WholeState(len(tokens), len(state.input_ids), memoryview(state.llama_state), scores)
            self._submit(namespace, (parent, start, own), whole.size, whole.write)

    def _submit(
        self, namespace: Namespace, page: tuple[bytes, int, bytes], size: int, write: Callable[[memoryview], None]
    ) -> bool:
        """Have a page written: its parent, its start and its tokens; false if there is no space in the queue."""
        counters = self._engine.counters
        buffer = self._engine.acquire(size)
        if buffer is None:
            counters.count("dropped:queue_full")
            return False
        with released_on_error(buffer):
            write(buffer.view)
        pending = PendingPage.of(namespace.key, namespace.canonical, *page, buffer)
        counters.count("pages_captured", self._engine.submit(pending))
        return True


def _parse(state: bytes) -> StateView | None:
    try:
        return parse_context(state)
    except CorruptError:
        return None


def _covers(parsed: StateView, target: PortableTarget, n: int) -> bool:
    """Whether a state holds everything that is needed to continue from position `n`."""
    if parsed.recurrent is not None and parsed.recurrent.position != n - 1:
        return False
    # outside a completion it is not known which rows have left a window
    return parsed.holds(0, n, window_from=target.window_from(n)) or target.architecture is None
