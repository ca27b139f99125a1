"""The namespace of a live ``Llama``: the content of the model, and all settings that change its state."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import llama_cpp

from prefixstore.errors import ContextError
from prefixstore.format.namespace import Namespace
from prefixstore.llama.binding import library, lora_of, model_of, pointer_of
from prefixstore.llama.kv_memory import kind_of, streams_of
from prefixstore.llama.loaded_file import adapter_is_from, changed_since_import, model_is_from
from prefixstore.models.file import file_digest, file_identity, model_parts, settings_of_model
from prefixstore.stats import Kind

__all__ = ["CONTEXT_SETTINGS", "llama_cpp_build", "namespace_of"]

# by Llama: what its files were when it was first seen
_KNOWN: WeakKeyDictionary[llama_cpp.Llama, tuple[str, str | None]] = WeakKeyDictionary()

# Fields of llama_context_params that change the content or the layout of a state. Embeddings and pooling are not among
# them: they decide what is computed from the last layer. How tokens see each other is `attention_type`.
CONTEXT_SETTINGS = (
    "type_k",
    "type_v",
    "flash_attn_type",
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
)


def namespace_of(llm: llama_cpp.Llama, *, page_tokens: int, salt: str | None, label: str | None) -> Namespace:
    """The namespace of a context, of a tenant (`salt`), and of the name that the user gave it (`label`).

    Raises `ContextError` if a file of the model cannot be read, or is not the one that was loaded.
    """
    params = llm.context_params
    kind = kind_of(llm)
    settings: dict[str, str | int | float | bool | None] = {name: getattr(params, name) for name in CONTEXT_SETTINGS}
    if llama_cpp.llama_model_is_recurrent(model_of(llm)):
        # without attention it has no effect
        settings["flash_attn_type"] = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    model, lora = _digests(llm)
    settings |= {
        "model": model,
        "lora": lora,
        "lora_scale": found[1] if (found := lora_of(llm)) else None,
        # of attention; n_seq_max and kv_unified change nothing else
        "streams": streams_of(llm) if kind is not Kind.SNAPSHOTS else None,
        **settings_of_model(
            llm.metadata,
            llm.kv_overrides or {},
            llama_cpp.llama_n_ctx_seq(pointer_of(llm)),
            params.rope_scaling_type,
        ),
        # llama.cpp promises nothing about states across its versions
        "llama_cpp": llama_cpp_build(),
        "state_version": llama_cpp.LLAMA_STATE_SEQ_VERSION,
        # the kind does not change a state, but is of interest in a list of namespaces
        "kind": kind.value,
        "page_tokens": page_tokens,
        "salt": salt,
        "label": label,
    }
    return Namespace(settings)


def llama_cpp_build() -> str:
    """The build that computes the states: the commit of llama.cpp, as ``llama-server --version`` shows it.

    The version of llama-cpp-python, where the libraries do not know their commit.
    """
    # where the loader finds the symbol of libggml-base through the library that depends on it: not on Windows
    with contextlib.suppress(AttributeError, UnicodeDecodeError):
        ask = library().ggml_commit
        ask.restype, ask.argtypes = ctypes.c_char_p, []
        # packages are built from sources with files of their own: "-dirty" says nothing
        commit = (ask() or b"").decode("ascii").removesuffix("-dirty")
        if re.fullmatch("[0-9a-f]{7,40}", commit):
            return commit
    return f"llama-cpp-python {llama_cpp.__version__}"


def _digests(llm: llama_cpp.Llama) -> tuple[str, str | None]:
    """The digests of the model and of its LoRA adapter, of the files that were loaded.

    They are taken once: what is in memory does not change when a file does.
    """
    known = _KNOWN.get(llm)
    if known is None:
        parts = model_parts(llm.model_path)
        model = "+".join(
            _digest_of_loaded(part, partial(model_is_from, llm, is_first=part == parts[0])) for part in parts
        )
        adapter = lora_of(llm)
        lora = _digest_of_loaded(adapter[0], partial(adapter_is_from, llm)) if adapter else None
        known = _KNOWN[llm] = model, lora
    return known


def _digest_of_loaded(path: str, is_loaded: Callable[[Path], bool | None]) -> str:
    """The digest of a file, if it is the one that was loaded."""
    try:
        real = Path(path).resolve(strict=True)
        before = file_identity(real.stat())
        found = is_loaded(real)  # before gigabytes are read in vain
        is_same = not changed_since_import(path) if found is None else found
        digest = file_digest(real) if is_same else ""
        is_same = is_same and file_identity(real.stat()) == before
    except OSError as error:
        raise ContextError(f"cannot read the model file {path} for its fingerprint: {error}") from error
    if not is_same:
        if found is None:
            raise ContextError(
                f"{path} changed after prefixstore was imported, and llama.cpp does not say which file was loaded. "
                "Restart the process"
            )
        raise ContextError(
            f"{path} is not the file that was loaded: it was replaced, or a link or the working directory changed. "
            "Load the model again, by an absolute path, and attach the store right after"
        )
    return digest
