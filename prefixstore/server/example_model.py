"""A ``Model`` of llama-cpp-python's example server: its namespace, and the layout of its states.

The ``Model`` does not say with which settings its context was created, and llama.cpp cannot be asked. They are given,
or a short evaluation represents them: its result depends on all of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import llama_cpp
import numpy as np
import numpy.typing as npt

from prefixstore.errors import ContextError, CorruptError, InvalidParameterError, MisuseError
from prefixstore.format.keys import Tokens
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Buffer
from prefixstore.llama.capture import Place, memory_of
from prefixstore.llama.fingerprint import namespace_of
from prefixstore.llama.kv_memory import kind_of, page_tokens_for
from prefixstore.llama.state.form import Form
from prefixstore.llama.state.parse import parse_memory
from prefixstore.llama.state.shape import PAIR
from prefixstore.llama.state.view import StateView
from prefixstore.parameters import Parameters
from prefixstore.server.model_settings import YARN_DEFAULTS, yarn_factor
from prefixstore.stats import Kind

__all__ = ["ModelStates", "parse_state", "states_of"]

PROBE_TOKENS = 32


@dataclass(frozen=True)
class ModelStates:
    """How the states of a model are stored.

    Attributes
    ----------
    namespace
        That of a ``Llama`` with the same settings, if the settings are known.
    page_tokens
        Length of a page.
    form
        What goes into pages, and what into snapshots.
    streams
        How many streams its states name.
    n_vocab
        Numbers from here on, and negative ones, stand for images and sound.
    """

    namespace: Namespace
    page_tokens: int
    form: Form
    streams: int
    n_vocab: int

    @property
    def place(self) -> Place:
        """Where they are."""
        return Place(self.namespace, self.page_tokens)

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
    """How the states of a ``Model`` are stored.

    Parameters
    ----------
    model
        The ``Model``, before its first request: it evaluates a few tokens, and is empty afterwards.
    parameters
        Of the store.
    settings
        What the ``Model`` was made with: a mapping, or an object with attributes, such as the `model` of the server's
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
    return ModelStates(namespace, page_tokens, form, parsed.streams, model.n_vocab)


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
