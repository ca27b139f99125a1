"""A ``SequenceCache`` for llama-cpp-python's example server: states of sequences, cut into the pages of a store.

What the scheduler of that server does with a request, and what happens here:

    lookup(tokens)                       how much of the prompt is stored, to the token where the memory allows it
    load(match)                          its pages, joined into the state of a sequence
    save(tokens, state, prompt_logits)   after the prompt: the pages that are not stored yet

If all of a prompt is found, the scheduler needs logits, which are not stored: so the last token is always computed.

Of a sliding window, llama.cpp writes only the rows that the last token sees. The scheduler may go back to any token of
a sequence later, so a page is stored only with all of its rows: as long as a conversation grows by less than a window
at a time. Pages that a ``Llama`` has stored have all rows: warm long prompts with ``prefixstore warm``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixstore.buffers import BufferPool
from prefixstore.engine.compute_rate import ComputeRate
from prefixstore.engine.engine import Engine
from prefixstore.engine.miss import Guard, miss_reason
from prefixstore.errors import ContextError, CorruptError
from prefixstore.format.keys import Tokens, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Buffer
from prefixstore.llama.capture import Capture, memory_of
from prefixstore.llama.restore import Found, Positions, Restore
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.shape import StateShape
from prefixstore.llama.state.view import Assembly, StateView
from prefixstore.server.example_model import ModelStates, parse_state, states_of
from prefixstore.store import PrefixStore

__all__ = ["Load", "Match", "StoredSequences", "sequence_cache"]

log = logging.getLogger("prefixstore")


@dataclass(frozen=True)
class Match:
    """What was found of a prompt, if the server has no class for it."""

    tokens: tuple[int, ...]
    has_prompt_logits: bool = False

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.tokens)


@dataclass
class Load:
    """The state of what was found, if the server has no class for it."""

    tokens: list[int]
    state_bytes: npt.NDArray[np.uint8]
    prompt_logits: npt.NDArray[np.float32] | None = None


def sequence_cache(store: PrefixStore, model: Any, *, settings: object = None, protocol: Any = None) -> StoredSequences:
    """A sequence cache for ``CompletionScheduler(model, sequence_cache=...)`` of the example server.

    Parameters
    ----------
    store
        An open store that is not attached to a ``Llama``. It stays the caller's to close, after the scheduler.
    model
        The ``Model`` of the server, before its first request: a few tokens are evaluated with it.
    settings
        What the ``Model`` was made with, such as ``config.model`` of the server's configuration file. With it, pages
        are shared with a ``Llama`` of the same settings whose store has the same `namespace` and `salt`; without it,
        with servers that compute the same.
    protocol
        Has the classes `Match` and `Load`; by default the ``SequenceCache`` of the module that defines `model`.

    Returns
    -------
    StoredSequences
        The cache. If the states of this model cannot be stored, one that never finds anything.

    Raises
    ------
    MisuseError
        If the model is in use, or has several LoRA adapters.

    Examples
    --------
    >>> store = PrefixStore("lmdb:///var/cache/kv", namespace="chat")  # doctest: +SKIP
    >>> cache = sequence_cache(store, model, settings=config.model)  # doctest: +SKIP
    >>> scheduler = CompletionScheduler(model, sequence_cache=cache)  # doctest: +SKIP
    """
    if protocol is None:
        protocol = getattr(sys.modules.get(type(model).__module__), "SequenceCache", None)
    states = None
    try:
        states = states_of(model, store.parameters, settings)
    except ContextError as error:
        log.warning("the sequence cache stores nothing: %s", error)
    return StoredSequences(store, states, getattr(protocol, "Match", Match), getattr(protocol, "Load", Load))


class StoredSequences:
    """States of sequences in a store. A fault of the store is a miss, counted and logged.

    Parameters
    ----------
    store
        The store.
    states
        How states are stored; None if they cannot be.
    match_type, load_type
        Classes of the results.
    """

    def __init__(
        self, store: PrefixStore, states: ModelStates | None, match_type: type[Any], load_type: type[Any]
    ) -> None:
        self._store = store
        self._states = states
        self._match_type = match_type
        self._load_type = load_type
        self._rate, self._buffers = ComputeRate(store.parameters.max_delay), BufferPool(limit=None)
        # a prompt that waits for its turn is looked up again and again, and is counted once
        self._asked: list[int] | None = None

    @property
    def namespace(self) -> Namespace | None:
        """Where states are stored; None if they cannot be."""
        return self._states.namespace if self._states is not None else None

    # -- the protocol -------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Sequence[int]) -> Any:
        """The longest stored prefix of a prompt from which the scheduler can continue; None for a miss."""
        engine, states = self._store.engine, self._states
        if states is None:
            return None
        with Guard(engine.counters, "miss:error", "miss:unavailable", states.namespace.key):
            is_new, self._asked = self._asked != tokens, list(tokens)
            prompt = as_tokens(tokens)
            # not its last token, and nothing from an image on
            n = self._find(states, states.text_of(prompt)[: max(len(prompt) - 1, 0)]).n_tokens
            if n >= max(self._store.min_tokens, 1):
                if is_new:
                    engine.counters.asked(states.namespace.key, len(tokens), n, "store")
                return self._match_type(tokens=tuple(tokens[:n]), has_prompt_logits=False)
            if is_new:
                engine.touch(states.namespace.key, (), len(tokens))
                least = self._store.min_tokens
                reason = miss_reason(
                    engine, states.namespace.key, as_tokens(tokens), states.page_tokens, n_matched=n, min_tokens=least
                )
                engine.counters.count(f"miss:{reason}", namespace=states.namespace.key)
                engine.counters.asked(states.namespace.key, len(tokens), 0, reason)
        return None

    def load(self, match: Any) -> Any:
        """The state of a match; None if it is gone, or cannot be read."""
        engine, states = self._store.engine, self._states
        if states is None:
            return None
        started = time.perf_counter()
        with Guard(engine.counters, "miss:error", "miss:unavailable", states.namespace.key):
            tokens = as_tokens(match.tokens)
            found = self._find(states, tokens)
            state = self._joined(states, tokens, found) if found.n_tokens == len(tokens) else None
            if state is None:
                engine.counters.count("miss:unreadable", namespace=states.namespace.key)
                return None
            engine.touch(states.namespace.key, found.pages, len(tokens))
            engine.nudge()
            seconds = time.perf_counter() - started
            engine.counters.restored(len(tokens), seconds, namespace=states.namespace.key)
            return self._load_type(tokens=tokens.tolist(), state_bytes=state)
        return None

    def save(self, tokens: Sequence[int], state_bytes: npt.NDArray[np.uint8], prompt_logits: object) -> None:
        """Store what is missing of a prompt. `prompt_logits` are not stored."""
        del prompt_logits
        store, states = self._store, self._states
        if states is None or store.read_only:
            return
        engine = store.engine
        started = time.perf_counter()
        with Guard(engine.counters, "dropped:error"):
            prompt = as_tokens(tokens)
            text = states.text_of(prompt)
            # a snapshot is valid at its end only
            is_usable = len(text) == len(prompt) or not states.form.has_snapshots
            if len(text) < max(store.min_tokens, 1) or not is_usable:
                return
            data = np.ascontiguousarray(state_bytes, np.uint8).data
            capture = _SequenceCapture(engine, states, self._restore(states), store)
            reason = capture.store(text, self._parsed(states, data), memory_of(data)).reason
            if reason is not None:
                engine.counters.count(f"dropped:{reason}")
        engine.counters.time("capture", time.perf_counter() - started)

    def _restore(self, states: ModelStates) -> Restore:
        return Restore(self._store.engine, states.form, self._rate, self._buffers)

    def _find(self, states: ModelStates, tokens: Tokens) -> Found:
        return self._restore(states).find(states.place, tokens, len(tokens))

    def _joined(self, states: ModelStates, tokens: Tokens, found: Found) -> npt.NDArray[np.uint8] | None:
        """The state of what was found; None if something of it is missing."""

        def frame(shape: StateShape, positions: Positions, n_tokens: int, recurrent: Buffer) -> Assembly:
            return Assembly(shape, positions, recurrent=recurrent, streams=states.streams)

        with self._restore(states).joined(tokens, found, frame) as joined:
            if joined.data is None or joined.n_good < len(tokens):
                return None
            state: npt.NDArray[np.uint8] = np.frombuffer(joined.data, np.uint8).copy()
            return state

    def _parsed(self, states: ModelStates, state: memoryview) -> StateView | None:
        if states.form.shape is None:
            return None
        parsed = parse_state(state)
        if parsed.streams != states.streams or parsed.shape != states.form.shape:
            raise CorruptError("the state is not one of this model")
        return parsed


class _SequenceCapture(Capture):
    """Stores states of sequences whose rows may have left a sliding window."""

    def __init__(self, engine: Engine, states: ModelStates, restore: Restore, store: PrefixStore) -> None:
        super().__init__(engine, states.place, states.form, _unknown_cost, store.parameters, wait=False)
        self._states, self._stored, self._engine = states, restore, engine

    def _rows(self, tokens: Tokens, state: StateView | None, start: int) -> Sequence[StateView]:
        """As in `Capture`, or with the shorter page that was stored at the end of an earlier prompt.

        It has the rows that have left the window since.
        """
        end = len(tokens)
        found = (
            Found() if state is None or state.holds(start, end) else self._stored.find(self._states.place, tokens, end)
        )
        n, tail = found.n_tokens, found.pages[-1:]
        if state is None or not (start < n < end and tail[0].start == start and state.holds(n, end)):
            return super()._rows(tokens, state, start)
        with self._engine.fetching(tail, look=self._stored.fits, admit=self._stored.admits) as fetched:
            stored = [parse_sequence(bytes(one)).cut(start, n) for one in fetched]
        return [*stored, state.cut(n, end)] if stored else []


def _unknown_cost(_: int) -> int:
    return 0
