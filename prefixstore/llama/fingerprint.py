"""The namespace of a live ``Llama``: the content of the model, and all settings that change its state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

from prefixstore.backends.location import cache_directory
from prefixstore.errors import ContextError
from prefixstore.format.namespace import Namespace
from prefixstore.llama.kv_memory import kind_of

__all__ = ["file_digest", "namespace_of"]

log = logging.getLogger("prefixstore")

BLOCK = 8 << 20
SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<parts>\d{5})\.gguf")

# Fields of llama_context_params that change the content or the layout of a state.
CONTEXT_SETTINGS = (
    "type_k",
    "type_v",
    "flash_attn_type",
    "swa_full",
    "kv_unified",
    "n_seq_max",
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "embeddings",
    "pooling_type",
    "attention_type",
)


def namespace_of(llm: llama_cpp.Llama, *, page_tokens: int, salt: str | None, label: str | None) -> Namespace:
    """The namespace of a context.

    Parameters
    ----------
    llm
        A loaded model with its context.
    page_tokens
        Length of its pages.
    salt
        The tenant, whose pages must not be shared with others.
    label
        The name that the user gave the namespace.

    Raises
    ------
    ContextError
        If a file of the model cannot be read.
    """
    params = llm.context_params
    settings: dict[str, str | int | float | bool | None] = {name: getattr(params, name) for name in CONTEXT_SETTINGS}
    settings |= {
        "model": "+".join(file_digest(part) for part in _parts(llm.model_path)),
        "lora": file_digest(llm.lora_path) if llm.lora_path else None,
        "lora_scale": llm.lora_scale if llm.lora_path else None,
        "kv_overrides": json.dumps(llm.kv_overrides, sort_keys=True) if llm.kv_overrides else None,
        "long_context": _is_long(llm),
        # llama.cpp promises nothing about states across its versions
        "llama_cpp_python": llama_cpp.__version__,
        "state_version": llama_cpp.LLAMA_STATE_SEQ_VERSION,
        # the kind does not change a state, but is of interest in a list of namespaces
        "kind": kind_of(llm).value,
        "page_tokens": page_tokens,
        "salt": salt,
        "label": label,
    }
    return Namespace(settings)


def _is_long(llm: llama_cpp.Llama) -> bool:
    """Whether the context is longer than in training; some models then use other RoPE factors."""
    architecture = llm.metadata.get("general.architecture", "")
    original = llm.metadata.get(f"{architecture}.rope.scaling.original_context_length")
    return original is not None and llm.n_ctx() > int(original)


def _parts(model_path: str) -> list[str]:
    """All files of a model, in order."""
    split = SPLIT.fullmatch(model_path)
    if split is None:
        return [model_path]
    n = int(split["parts"])
    return [f"{split['stem']}-{i:05d}-of-{n:05d}.gguf" for i in range(1, n + 1)]


def file_digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's whole content, as 64 hexadecimal digits: what Hugging Face shows for it.

    It is cached in the user's cache directory by path, inode, size and times, so that a file is read once and not at
    every start.

    Raises
    ------
    ContextError
        If the file cannot be read.
    """
    try:
        real = Path(path).resolve(strict=True)
        with real.open("rb", buffering=0) as file:
            identity = _identity(os.fstat(file.fileno()))
            known = _remembered().get(str(real))
            if isinstance(known, dict) and known.get("identity") == identity and isinstance(known.get("sha256"), str):
                return str(known["sha256"])
            log.info("reading %s for its fingerprint", real)
            digest = _hash(file)
            if _identity(os.fstat(file.fileno())) == identity:
                _remember(str(real), identity, digest)
    except OSError as error:
        raise ContextError(f"cannot read the model file {path} for its fingerprint: {error}") from error
    return digest


def _hash(file: Any) -> str:
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK))
    while n := file.readinto(buffer):
        hasher.update(buffer[:n])
    return hasher.hexdigest()


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _memory_file() -> Path:
    return cache_directory() / "fingerprints.json"


def _remembered() -> dict[str, Any]:
    try:
        known = json.loads(_memory_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(path: str, identity: list[int], digest: str) -> None:
    """Replace the file as a whole; if another process does so at the same time, a model is read once more later."""
    target = _memory_file()
    known = _remembered() | {path: {"identity": identity, "sha256": digest}}
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        with os.fdopen(handle, "w") as file:
            json.dump(known, file)
        Path(temporary).replace(target)
