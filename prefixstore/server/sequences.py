"""A ``SequenceCache`` for llama-cpp-python's example server: states of sequences, cut into the pages of a store.

What the scheduler of that server does with a request, and what happens here:

    lookup(tokens)                       how much of the prompt is stored, to the token where the memory allows it
    load(match)                          its pages, joined into the state of a sequence
    save(tokens, state, prompt_logits)   after the prompt: the pages that are not stored yet

If all of a prompt is found, the scheduler needs logits, which are not stored: so the last token is always computed.

Of a sliding window, llama.cpp writes only the rows that the last token sees. The scheduler may go back to any token of
a sequence later, so a page is stored only with all of its rows: as long as a conversation grows by less than a window
at a time. Pages that a ``Llama`` has stored have all rows: warm long prompts with ``prefixstore warm``.

The ``Model`` of that server does not say with which settings its context was created, and llama.cpp cannot be asked.
They are given, or a short evaluation represents them: its result depends on all of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import llama_cpp
import numpy as np
import numpy.typing as npt

from prefixstore.buffers import BufferPool
from prefixstore.counters import Kind
from prefixstore.engine.compute_rate import ComputeRate
from prefixstore.engine.miss import Guard, miss_reason
from prefixstore.engine.page import Path
from prefixstore.errors import ContextError, CorruptError, InvalidParameterError, MisuseError
from prefixstore.format.keys import Tokens, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Buffer
from prefixstore.llama.capture import Capture, Place, memory_of
from prefixstore.llama.fingerprint import namespace_of
from prefixstore.llama.kv_memory import kind_of, page_tokens_for
from prefixstore.llama.restore import Positions, Restore
from prefixstore.llama.state.form import Form
from prefixstore.llama.state.parse import parse_memory, parse_sequence
from prefixstore.llama.state.shape import PAIR, StateShape
from prefixstore.llama.state.view import Assembly, StateView
from prefixstore.parameters import Parameters
from prefixstore.server.model_settings import YARN_DEFAULTS, yarn_factor
from prefixstore.store import PrefixStore

log = logging.getLogger("prefixstore")

PROBE_TOKENS = 32


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
    InvalidParameterError
        If `model` or `protocol` is not one of that server.

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
    if not hasattr(protocol, "Match") or not hasattr(protocol, "Load"):
        raise InvalidParameterError("protocol= must have the classes Match and Load of the server's SequenceCache")
    return StoredSequences(store, states, protocol)


class StoredSequences:
    """States of sequences in a store. A fault of the store is a miss, counted and logged.

    `states` says how they are stored; None if they cannot be. `protocol` has the classes of the results.
    """

    def __init__(self, store: PrefixStore, states: ModelStates | None, protocol: Any) -> None:
        self._store, self._states, self._protocol = store, states, protocol
        rate, form = ComputeRate(store.parameters.max_delay), Form() if states is None else states.form
        self._restore = Restore(store.engine, form, rate, BufferPool(limit=None))
        # a prompt that waits for its turn is looked up again and again, and is counted once
        self._asked: list[int] | None = None

    @property
    def namespace(self) -> Namespace | None:
        """Where states are stored; None if they cannot be."""
        return self._states.place.namespace if self._states is not None else None

    # -- the protocol -------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Sequence[int]) -> Any:
        """The longest stored prefix of a prompt from which the scheduler can continue; None for a miss."""
        engine, states = self._store.engine, self._states
        if states is None:
            return None
        key, least = states.place.namespace.key, self._store.min_tokens
        with Guard(engine.counters, "miss:error", "miss:unavailable", key):
            is_new, self._asked = self._asked != tokens, list(tokens)
            prompt = as_tokens(tokens)
            # not its last token, and nothing from an image on
            n = self._find(states, states.text_of(prompt)[: max(len(prompt) - 1, 0)]).n_tokens
            is_found = n >= max(least, 1)
            if is_new:
                if not is_found:
                    engine.touch(key, (), len(prompt))
                    step = states.place.page_tokens
                    reason = miss_reason(engine, key, prompt, step, n_matched=n, min_tokens=least)
                    engine.counters.count(f"miss:{reason}", namespace=key)
                engine.counters.count("prompt_tokens", len(prompt), namespace=key)
            if is_found:
                return self._protocol.Match(tokens=tuple(tokens[:n]), has_prompt_logits=False)
        return None

    def load(self, match: Any) -> Any:
        """The state of a match; None if it is gone, or cannot be read."""
        engine, states = self._store.engine, self._states
        if states is None:
            return None
        started = time.perf_counter()
        with Guard(engine.counters, "miss:error", "miss:unavailable", states.place.namespace.key):
            tokens = as_tokens(match.tokens)
            found = self._find(states, tokens)
            state = self._joined(states, tokens, found) if found.n_tokens == len(tokens) else None
            if state is None:
                engine.counters.count("miss:unreadable", namespace=states.place.namespace.key)
                return None
            engine.touch(states.place.namespace.key, found.pages, len(tokens))
            engine.write_queue.nudge()
            seconds = time.perf_counter() - started
            engine.counters.restored(len(tokens), seconds, namespace=states.place.namespace.key)
            return self._protocol.Load(tokens=tokens.tolist(), state_bytes=state)
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
            capture = _SequenceCapture(store, states, self._restore)
            reason = capture.store(text, self._parsed(states, data), memory_of(data)).reason
            if reason is not None:
                engine.counters.count(f"dropped:{reason}")
        engine.counters.time("capture", time.perf_counter() - started)

    def _find(self, states: ModelStates, tokens: Tokens) -> Path:
        return self._restore.find(states.place, tokens, len(tokens))

    def _joined(self, states: ModelStates, tokens: Tokens, found: Path) -> npt.NDArray[np.uint8] | None:
        """The state of what was found; None if something of it is missing."""

        def frame(shape: StateShape, positions: Positions, n_tokens: int, recurrent: Buffer) -> Assembly:
            return Assembly(shape, positions, recurrent=recurrent, streams=states.streams)

        with self._restore.joined(tokens, found, frame) as joined:
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

    def __init__(self, store: PrefixStore, states: ModelStates, restore: Restore) -> None:
        super().__init__(store.engine, states.place, states.form, lambda _: 0, store.parameters, wait=False)
        self._stored = restore

    def _rows(self, tokens: Tokens, state: StateView | None, start: int) -> Sequence[StateView]:
        """As in `Capture`, or with the shorter page that was stored at the end of an earlier prompt.

        It has the rows that have left the window since.
        """
        end = len(tokens)
        if state is None or state.holds(start, end):
            return super()._rows(tokens, state, start)
        found = self._stored.find(self._place, tokens, end)
        n, tail = found.n_tokens, found.pages[-1:]
        if not (start < n < end and tail[0].start == start and state.holds(n, end)):
            return super()._rows(tokens, state, start)
        with self._engine.fetching(tail, look=self._stored.fits, admit=self._stored.admits) as fetched:
            stored = [parse_sequence(bytes(one)).cut(start, n) for one in fetched]
        return [*stored, state.cut(n, end)] if stored else []


@dataclass(frozen=True)
class ModelStates:
    """How the states of a model are stored, which name this many streams.

    The namespace is that of a ``Llama`` with the same settings, if the settings are known. Numbers from `n_vocab` on,
    and negative ones, stand for images and sound.
    """

    place: Place
    form: Form
    streams: int
    n_vocab: int

    def text_of(self, tokens: Tokens) -> Tokens:
        """The tokens before the first image or sound."""
        other = np.flatnonzero((tokens < 0) | (tokens >= self.n_vocab))
        return tokens[: other[0]] if len(other) else tokens


def parse_state(state: Buffer) -> StateView:
    """Parse what ``llama_state_seq_get_data`` wrote for any sequence, as if it were sequence 0 of one stream.

    Raises
    ------
    CorruptError
        If a byte is not accounted for.
    """
    return parse_memory(memory_of(state), sequence=PAIR.unpack(memoryview(state)[: PAIR.size])[1])


def states_of(model: Any, parameters: Parameters, settings: object = None) -> ModelStates:
    """How the states of a ``Model`` are stored, which evaluates a few tokens before its first request.

    `settings` are what it was made with: a mapping, or an object with attributes, such as the `model` of the server's
    ``ConfigFile``. None if that is not known: then the namespace is of this server alone.

    Raises
    ------
    MisuseError
        If the model is in use.
    InvalidParameterError
        If it has several LoRA adapters.
    ContextError
        If its states cannot be stored, or its file is not the one that was loaded.
    """
    if not hasattr(model, "llama_model") or not hasattr(model, "mem"):
        raise InvalidParameterError(f"model must be the Model of the example server, not {type(model).__name__}")
    if len(model.loras) > 1:
        raise InvalidParameterError("a store keeps states of one LoRA adapter at most; merge them, or use no store")
    if model.embedding or model.mem is None:
        raise ContextError("an embedding model keeps no state between its requests")
    llama = cast("llama_cpp.Llama", _ModelAsLlama(model, settings))
    kind = kind_of(llama)
    if not kind.is_stored:
        raise ContextError(f"states of this model cannot be stored: {kind.reason}")
    if llama_cpp.llama_model_n_swa(model.llama_model) and _value(settings, "swa_full") is False:
        # the scheduler steps back to where the rows of a window are gone, and is not told
        raise ContextError("rows that leave the sliding window are overwritten (swa_full=False)")
    parsed = _evaluate(model, 0)
    if parsed.sections:
        # what `auto` has become: without flash attention V is transposed
        transposed, _ = PAIR.unpack(parsed.sections[0].head)
        llama.context_params.flash_attn_type = 0 if transposed else 1
    page_tokens = page_tokens_for(llama, parameters.page_tokens)
    namespace = namespace_of(llama, page_tokens=page_tokens, salt=parameters.salt, label=parameters.label)
    if settings is None:
        namespace = Namespace({**namespace.settings, "probe": _digest(model, parsed, kind)})
    form = Form.ends(parsed) if parsed.recurrent is not None else Form.rows(parsed.shape)
    return ModelStates(Place(namespace, page_tokens), form, parsed.streams, model.n_vocab)


class _ModelAsLlama:
    """What the namespace is made of, where a ``Llama`` has it."""

    def __init__(self, model: Any, settings: object) -> None:
        self._model = SimpleNamespace(model=model.llama_model)
        self._ctx = SimpleNamespace(ctx=model.ctx)
        self.ctx = model.ctx
        self.model_path = model.model_path
        self.metadata = _metadata(model)
        self.lora_path = model.loras[0].path if model.loras else None
        self.lora_scale = float(model.loras[0].scale) if model.loras else 1.0
        self._lora_adapter = model._lora_adapters[0] if model.loras else None  # noqa: SLF001 - what is loaded
        self.kv_overrides = _value(settings, "kv_overrides")
        self.context_params = _context_params(model, settings, self.metadata)


def _value(settings: object, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def _context_params(model: Any, settings: object, metadata: Mapping[str, str]) -> Any:
    build = type(model).build_context_params
    given = {name: _value(settings, name) for name in inspect.signature(build).parameters}
    params = build(**{**given, "n_ctx": model.n_ctx, "embedding": False, "kv_unified": True, "ctx_other": None})
    # rows are the same, however sequences are divided into streams
    params.n_seq_max = 1
    for name in YARN_DEFAULTS:
        setattr(params, name, yarn_factor(name, getattr(params, name), metadata))
    return params


def _metadata(model: Any) -> dict[str, str]:
    found = {}
    for i in range(llama_cpp.llama_model_meta_count(model.llama_model)):
        key = model._model_meta_key_by_index(model.llama_model, i)  # noqa: SLF001 - as its own code reads them
        value = model._model_meta_value(model.llama_model, key) if key is not None else None  # noqa: SLF001
        if key is not None and value is not None:
            found[key] = value
    return found


# -- a short evaluation -----------------------------------------------------------------------------------------------


def _digest(model: Any, parsed: StateView, kind: Kind) -> str:
    """A digest of what the model computes, at the beginning and, where that matters, at large positions."""
    states = [parsed]
    has_positions = llama_cpp.llama_model_rope_type(model.llama_model) != llama_cpp.LLAMA_ROPE_TYPE_NONE
    if kind is Kind.PAGES and has_positions:
        states.append(_evaluate(model, max(model.n_ctx_train - PROBE_TOKENS, 0)))
    hasher = hashlib.sha256()
    for state in states:
        # as it would be in one stream
        hasher.update(repr(state.shape).encode())
        for section in state.sections:
            for tensor in section.tensors:
                hasher.update(tensor.rows.tobytes())
        hasher.update(state.recurrent.data if state.recurrent is not None else b"")
    return hasher.hexdigest()


def _evaluate(model: Any, start: int) -> StateView:
    """The state after a few tokens at positions from `start` on; the memory is empty afterwards."""
    if any(llama_cpp.llama_memory_seq_pos_max(model.mem, i) != -1 for i in range(model.n_seq_max)):
        raise MisuseError("the model is in use; make the sequence cache before its first request")
    n = min(PROBE_TOKENS, model.n_batch, model.request_context_limit)
    tokens = [(7 * i + 11) % model.n_vocab for i in range(n)]
    model.clear_batch()
    try:
        model.add_batch_tokens(seq_id=0, start_pos=start, tokens=tokens, output_indices=[None] * (n - 1) + [0])
        model.decode()
        size = llama_cpp.llama_state_seq_get_size(model.ctx, 0)
        state: npt.NDArray[np.uint8] = np.empty(size, np.uint8)
        source = ctypes.cast(state.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        if llama_cpp.llama_state_seq_get_data(model.ctx, source, size, 0) != size:
            raise ContextError("llama.cpp did not write the state of a sequence")
    finally:
        model.clear_batch()
        model.clear_memory()
    try:
        return parse_state(state.data)
    except CorruptError as error:
        raise ContextError(f"states of this model have a layout that is not known: {error}") from error
