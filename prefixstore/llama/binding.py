"""The parts of llama-cpp-python that are not its public interface, and that a new version or a fork may change.

Other modules use a ``Llama`` only through these functions and constants, through public attributes (`REQUIRED` has most
of them), and through the C functions of llama.cpp. `check_versions` says which of them a version lacks.

Tried with llama-cpp-python 0.3.36, whose llama.cpp is 0c1e5709.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp._internals import LlamaContext, LlamaModel, LlamaSampler

from prefixstore.errors import ContextError, IncompatibleError
from prefixstore.models.boundaries import TokenKind

# the methods of a Llama that a hook replaces
REPLACED = ("eval", "reset", "save_state", "load_state")
# the attributes of a LlamaContext that give access to it
POINTERS = ("ctx", "memory")
# attributes of chat handlers that bring images or sound into the context
MEDIA_ATTRIBUTES = ("clip_model_path", "mtmd_ctx", "mmproj_path")
# bytes of a token; longer ones count as text
LONGEST_TOKEN = 1024

ContextClass = LlamaContext

# the attributes that classes must have; in the case of a Llama, its instances
REQUIRED: dict[type, str] = {
    llama_cpp.Llama: """
        _create_completion _ctx _init_sampler _logits_all _lora_adapter _model _n_ctx _requires_eval _seed cache
        chat_handler context_params create_chat_completion ctx detokenize draft_model eval generate input_ids
        kv_overrides load_state lora_path lora_scale metadata model_path n_batch n_tokens reset sample save_state
        set_cache tokenize
    """,
    LlamaContext: "get_logits kv_cache_clear kv_cache_seq_rm reset_timings",
    LlamaModel: "add_bos_token token_cls",
}

# Functions that may read the pointer, since they change nothing that a state depends on. A name that a version lacks
# does no harm.
READERS: dict[type, str] = {
    llama_cpp.Llama: "_create_completion sample save_state",
    LlamaSampler: "sample",
    LlamaContext: """
        get_embeddings get_embeddings_ith get_embeddings_seq get_logits get_logits_ith get_state_size n_ctx pooling_type
        print_timings set_n_threads
    """,
}


def _code(cls: type, name: str) -> CodeType | None:
    found = getattr(cls, name, None)
    return getattr(found.fget if isinstance(found, property) else found, "__code__", None)


_READING = frozenset(_code(cls, name) for cls, names in READERS.items() for name in names.split()) - {None}
_COMPLETION = _code(llama_cpp.Llama, "_create_completion")
# a property that passes the pointer on: its caller counts as the reader
_PASSING_ON = _code(llama_cpp.Llama, "ctx")


def check_versions(llm: llama_cpp.Llama) -> None:
    """Raises `IncompatibleError` if a ``Llama`` lacks anything that a store needs; the message names it."""
    missing = [
        f"{cls.__name__}.{name}"
        for cls, names in REQUIRED.items()
        for name in names.split()
        if not hasattr(cls, name) and not (cls is llama_cpp.Llama and hasattr(llm, name))
    ]
    if "Llama.eval" not in missing and list(inspect.signature(llama_cpp.Llama.eval).parameters) != ["self", "tokens"]:
        missing.append("Llama.eval(tokens)")
    if missing:
        raise IncompatibleError(
            f"llama-cpp-python {llama_cpp.__version__} lacks, or has changed, what the store needs: "
            f"{', '.join(missing)}; it works with 0.3.36 of abetlen/llama-cpp-python, not with this version or fork"
        )


# -- frames -----------------------------------------------------------------------------------------------------------


def is_completion(depth: int) -> bool:
    """Whether the frame `depth` calls above the caller's is ``Llama._create_completion``.

    A ``save_state()`` that it makes for the cache looks like a user's. The calling frame is the one place where this
    can be seen for certain; in any other frame, everything behaves as for a user.
    """
    return sys._getframe(depth + 1).f_code is _COMPLETION


def running_completion(llm: llama_cpp.Llama | None = None) -> Mapping[str, Any]:
    """The local variables of the innermost completion, of this ``Llama`` if given, that called this; empty outside one.

    llama-cpp-python does not tell a cache which ``Llama`` asks (``self``), nor with which arguments; the frame does.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _COMPLETION and (llm is None or frame.f_locals["self"] is llm):
            return frame.f_locals
        frame = frame.f_back
    return {}


def asks_for_prompt_logits(llm: llama_cpp.Llama) -> bool:
    """Whether this runs inside a completion that returns the logits of its prompt, which are not stored."""
    asked = running_completion(llm)
    return asked.get("logprobs") is not None and bool(asked.get("echo"))


def only_reads(frame: FrameType) -> bool:
    """Whether the code that reads a pointer in this frame changes nothing that a state depends on."""
    reader = frame.f_back if frame.f_code is _PASSING_ON else frame
    return reader is not None and reader.f_code in _READING


# -- the model and the context ----------------------------------------------------------------------------------------


def library() -> Any:
    """The shared library of llama.cpp."""
    return llama_cpp.llama_cpp._lib


def context_of(llm: llama_cpp.Llama) -> LlamaContext:
    """The object that owns the ``llama_context``."""
    return llm._ctx


def pointer_of(llm: llama_cpp.Llama | None) -> int:
    """The ``llama_context`` of a ``Llama``, read past the attribute that a store watches.

    Raises `ContextError` if the ``Llama`` is closed or gone.
    """
    if llm is None or is_closed(llm):
        raise ContextError("the Llama is closed; load it again, and open a store for the new one")
    return int(vars(llm._ctx)["ctx"])


def is_closed(llm: llama_cpp.Llama) -> bool:
    """Whether the model or the context of a ``Llama`` is freed, so that no function of llama.cpp may be called."""
    return llm._model.model is None or vars(llm._ctx).get("ctx") is None


def model_of(llm: llama_cpp.Llama) -> Any:
    """The ``llama_model``; None if the ``Llama`` is closed."""
    return llm._model.model


def lora_of(llm: llama_cpp.Llama) -> tuple[str, float] | None:
    """The path and the scale of the LoRA adapter; None without one."""
    return (llm.lora_path, llm.lora_scale) if llm.lora_path else None


def adapter_of(llm: llama_cpp.Llama) -> Any:
    """The ``llama_adapter_lora``; None without one."""
    return llm._lora_adapter


def is_multimodal(llm: llama_cpp.Llama) -> bool:
    """Whether the chat handler brings images or sound into the context, which are not among the tokens."""
    handler = llm.chat_handler
    return handler is not None and any(hasattr(handler, name) for name in MEDIA_ATTRIBUTES)


def prompt_start(llm: llama_cpp.Llama) -> list[int]:
    """The tokens that a completion puts before a prompt."""
    if not llm._model.add_bos_token():
        return []
    cls = llm._model.token_cls()
    return [token for token in (cls if cls != -1 else llm.token_bos(),) if token != -1]


def token_kinds(llm: llama_cpp.Llama) -> Callable[[int], TokenKind]:
    """A function that returns the kind of a token, asking llama.cpp once for each. Numbers without a token are text."""
    weak = weakref.ref(llm)

    @cache
    def kind(token: int) -> TokenKind:
        llm = weak()
        if llm is None or not 0 <= token < llm.n_vocab():
            return TokenKind()
        vocab = llm._model.vocab
        ends = bool(llama_cpp.llama_vocab_is_eog(vocab, token))
        control = bool(llama_cpp.llama_vocab_is_control(vocab, token))
        if ends or control:
            return TokenKind(ends, control)
        # llama-cpp-python's own function gives no text for tokens of more than 32 bytes
        piece = ctypes.create_string_buffer(LONGEST_TOKEN)
        n = llama_cpp.llama_token_to_piece(vocab, token, piece, LONGEST_TOKEN, 0, True)
        return TokenKind.of_text(piece.raw[: max(n, 0)].decode(errors="replace"))

    return kind


# -- what the Llama believes its context holds ------------------------------------------------------------------------


def live_tokens(llm: llama_cpp.Llama) -> npt.NDArray[np.intc]:
    """A view of the tokens that the context holds."""
    return llm.input_ids[: llm.n_tokens]


def n_places(llm: llama_cpp.Llama) -> int:
    """For how many tokens a ``Llama`` has places: llama.cpp rounds the length of its context up.

    `input_ids` may be longer than the context, if a state of another one was loaded.
    """
    return min(llm._n_ctx, len(llm.input_ids))


def set_end(llm: llama_cpp.Llama, n: int) -> None:
    """Cut the context after its first `n` tokens; a token must be evaluated before the next is sampled."""
    llm.n_tokens = n
    llm._requires_eval = True


def needs_evaluation(llm: llama_cpp.Llama) -> bool:
    """Whether a token must be evaluated before the next is sampled."""
    return bool(llm._requires_eval)


def keeps_all_logits(llm: llama_cpp.Llama) -> bool:
    """Whether the logits of all tokens are kept (``logits_all``)."""
    return bool(llm._logits_all)


def seed_of(llm: llama_cpp.Llama) -> int:
    """What ``load_state`` sets the seed to."""
    return int(llm._seed)


def last_logits(llm: llama_cpp.Llama) -> npt.NDArray[np.single]:
    """The logits after the last token that was evaluated, shape ``(n_vocab,)``."""
    found: Any = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),))
    copied: npt.NDArray[np.single] = found.copy()
    return copied


# -- the log ----------------------------------------------------------------------------------------------------------


# A C function without side effects. In a Python function a Ctrl-C would be lost, and loading a model makes thousands of
# calls.
_discard: Any = ctypes.cast(
    ctypes.CDLL(None if os.name == "posix" else "msvcrt").abs,
    llama_cpp.llama_log_callback,  # type: ignore[arg-type,unused-ignore]
)


def silence() -> None:
    """Discard the log of llama.cpp in this process, for commands whose stderr is their own.

    ``Llama(verbose=False)`` alone lets warnings through: llama-cpp-python treats them as errors.
    """
    llama_cpp.llama_log_set(_discard, ctypes.c_void_p(0))
