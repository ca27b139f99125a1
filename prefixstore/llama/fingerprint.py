"""The namespace of a live ``Llama``: the content of the model, and all settings that change its state.

The content is that of the file that was loaded: its path may lead to another file by now.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp
import numpy as np

from prefixstore.counters import Kind
from prefixstore.errors import ContextError
from prefixstore.format.namespace import Namespace
from prefixstore.llama.binding import adapter_of, library, lora_of, model_of, pointer_of
from prefixstore.llama.kv_memory import kind_of, streams_of
from prefixstore.models.file import file_digest, file_identity, model_parts, read_gguf, settings_of_model

SAMPLE = 4096
# Buffers whose bytes can be read, and equal those of the file. Others are repacked for a kind of processor. The one for
# AMX repacks only quantized tensors, but has no function to read them: its memory is read directly.
DIRECT = "AMX"
NOT_QUANTIZED = (0, 1, 30)  # ggml_type: F32, F16, BF16
READABLE = re.compile(r"CPU|CPU_Mapped|\w+_Host|(CUDA|ROCm|MUSA|Vulkan|SYCL|MTL)\d+(_Mapped|_Private)?|Metal(_Mapped)?")
IMPORTED = time.time()

# methods of C++: llama_model::get_tensor(const char *), llama_adapter_lora::get_weight(ggml_tensor *)
GET_TENSOR = "_ZNK11llama_model10get_tensorEPKc"
GET_WEIGHT = "_ZN18llama_adapter_lora10get_weightEP11ggml_tensor"
# by name: the type of the result, and those of the arguments
C_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_name": (c_char_p, [c_void_p]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_backend_buffer_name": (c_char_p, [c_void_p]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    GET_TENSOR: (c_void_p, [c_void_p, c_char_p]),
    GET_WEIGHT: (POINTER(c_void_p * 2), [c_void_p, c_void_p]),
}


@functools.cache
def _functions() -> dict[str, Any] | None:
    """The functions of llama.cpp that are needed; None if this build does not export them."""
    symbols = library()
    try:
        found = {name: symbols[name] for name in C_FUNCTIONS}
    except (AttributeError, TypeError):
        return None
    for name, (result, arguments) in C_FUNCTIONS.items():
        found[name].restype, found[name].argtypes = result, arguments
    return found


def model_is_from(llm: llama_cpp.Llama, path: Path, *, is_first: bool) -> bool | None:
    """Whether the model in memory was loaded from this file; None if that cannot be found out.

    The metadata is compared, which a split model has in its first file (`is_first`). Of a tensor that llama.cpp has
    mapped, the mapping is compared, and of any other that can be read, three samples.

    Raises `ContextError` or `OSError` if the file cannot be read.
    """
    call, model = _functions(), model_of(llm)
    if call is None:
        return None
    value_of = partial(llama_cpp.llama_model_meta_val_str, model) if is_first else None
    return _is_from(path, call, value_of, partial(call[GET_TENSOR], model))


def adapter_is_from(llm: llama_cpp.Llama, path: Path) -> bool | None:
    """Whether the LoRA adapter in memory was loaded from this file: as `model_is_from`."""
    call = _functions()
    model, adapter = model_of(llm), adapter_of(llm)
    if call is None or adapter is None:
        return None

    def find(name: bytes) -> int | None:
        base, _, half = name.rpartition(b".lora_")
        tensor = call[GET_TENSOR](model, base)
        weight = call[GET_WEIGHT](adapter, tensor) if tensor and half in (b"a", b"b") else None
        return weight.contents[half == b"b"] if weight else None

    # an adapter is small: whole tensors are compared
    return _is_from(path, call, partial(llama_cpp.llama_adapter_meta_val_str, adapter), find, sys.maxsize)


def changed_since_import(path: str) -> bool:
    """Whether a file, or the link that leads to it, may have changed since this module was imported."""
    return max(Path(path).stat().st_ctime, Path(path).lstat().st_ctime) >= IMPORTED - 1


def _is_from(
    path: Path,
    call: dict[str, Any],
    value_of: Callable[[bytes, Any, int], int] | None,
    find: Callable[[bytes], int | None],
    sample_bytes: int = SAMPLE,
) -> bool | None:
    """Compare a file with what is loaded: `value_of` writes a metadata value, `find` finds a tensor by name."""
    metadata, tensors = read_gguf(path)
    if value_of is not None and not all(_has(value_of, name, value) for name, value in metadata.items()):
        return False
    is_same = None
    with path.open("rb", buffering=0) as content, mmap.mmap(content.fileno(), 1, access=mmap.ACCESS_READ) as here:
        # mapped: some file systems (overlay, Btrfs) show other inode numbers for mappings than for files
        address, mapped = np.frombuffer(here, np.uint8).ctypes.data, _mapped_files()
        own_file = _file_at(mapped, address)
        for name, start in tensors.items():
            tensor = find(name.encode())
            if tensor and call["ggml_get_name"](tensor) != name.encode():
                return None  # an unknown kind of build
            buffer, read = _reader_of(tensor, call) if tensor else ("", None)
            if read is None:
                continue
            # others were copied: to a GPU, or to memory that its driver has mapped, which looks like a file as well
            there = _file_at(mapped, call["ggml_get_data"](tensor)) if buffer.endswith("_Mapped") else None
            if there is not None and own_file is not None:
                if there != own_file:
                    return False
                is_same = True
                continue
            size = call["ggml_nbytes"](tensor)
            length = min(sample_bytes, size)
            for at in {0, (size - length) // 2, size - length}:
                content.seek(start + at)
                if content.read(length) != read(at, length):
                    return False
            is_same = True
    return is_same


def _reader_of(tensor: int, call: dict[str, Any]) -> tuple[str, Callable[[int, int], bytes] | None]:
    """The name of the buffer of a tensor, and a function that reads this many bytes of the tensor at a position.

    The function is None if the bytes cannot be read, or differ from those of the file.
    """
    # the first two fields of a ggml_tensor are its type and its buffer; they have no functions
    kind, holder = c_int.from_address(tensor).value, c_void_p.from_address(tensor + 8).value
    buffer = call["ggml_backend_buffer_name"](holder).decode("ascii", "replace") if holder else ""
    if buffer == DIRECT and kind in NOT_QUANTIZED:
        data = call["ggml_get_data"](tensor)
        return buffer, lambda at, length: ctypes.string_at(data + at, length)
    if not READABLE.fullmatch(buffer):
        return buffer, None

    def read(at: int, length: int) -> bytes:
        sample = ctypes.create_string_buffer(length)
        call["ggml_backend_tensor_get"](tensor, sample, at, length)
        return sample.raw

    return buffer, read


def _mapped_files() -> list[tuple[int, int, str]]:
    """The files that are mapped into this process: first and last address, device and inode. Linux only."""
    found: list[tuple[int, int, str]] = []
    with suppress(OSError), Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, _, _, device, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                first, last = (int(limit, 16) for limit in span.split("-"))
                found.append((first, last, f"{device} {inode}"))
    return found


def _file_at(mapped: list[tuple[int, int, str]], address: int) -> str | None:
    return next((file for first, last, file in mapped if first <= address < last), None)


def _has(value_of: Callable[[bytes, Any, int], int], name: str, value: object) -> bool:
    text = f"{value:f}" if isinstance(value, float) else str(value)
    wanted = (text.lower() if isinstance(value, bool) else text).encode()
    buffer = ctypes.create_string_buffer(len(wanted) + 1)
    return value_of(name.encode(), buffer, len(buffer)) == len(wanted) and buffer.value == wanted


# by Llama: the digests of its files
_KNOWN: WeakKeyDictionary[llama_cpp.Llama, tuple[str, str | None]] = WeakKeyDictionary()

# Fields of llama_context_params that change the content or the layout of a state. Embeddings and pooling do not: they
# concern what is computed from the last layer. `attention_type` is how tokens see each other.
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
    """The namespace of a context, for a tenant (`salt`), with the name that the user gave it (`label`).

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
    """The build that computes states: the commit of llama.cpp, as ``llama-server --version`` shows it.

    If the libraries do not know their commit, the version of llama-cpp-python.
    """
    # where the loader finds the symbol of libggml-base through the library that depends on it: not on Windows
    with suppress(AttributeError, UnicodeDecodeError):
        ask = library().ggml_commit
        ask.restype, ask.argtypes = ctypes.c_char_p, []
        # packages are built from sources with files of their own: "-dirty" says nothing
        commit = (ask() or b"").decode("ascii").removesuffix("-dirty")
        if re.fullmatch("[0-9a-f]{7,40}", commit):
            return commit
    return f"llama-cpp-python {llama_cpp.__version__}"


def _digests(llm: llama_cpp.Llama) -> tuple[str, str | None]:
    """The digests of the model and of its LoRA adapter, of the files that were loaded.

    Computed once for each Llama: what is in memory does not change when a file does.
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
    """The digest of a file. Raises `ContextError` if it is not the one that was loaded."""
    try:
        real = Path(path).resolve(strict=True)
        before = file_identity(real.stat())
        found = is_loaded(real)  # before gigabytes are read in vain
        is_same = not changed_since_import(path) if found is None else found
        digest = file_digest(real) if is_same else ""
        is_same = is_same and file_identity(real.stat()) == before
    except (OSError, ValueError) as error:  # a NUL
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
