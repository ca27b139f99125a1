"""Checks that a file is the one that a ``Llama`` has loaded: the path may lead to another file by now."""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

__all__ = ["Loaded", "adapter_is_from", "changed_since_start", "model_is_from"]

SAMPLE = 4096
# Buffers whose bytes can be read, and are those of the file. Others are repacked for a kind of processor.
READABLE = re.compile(r"CPU|CPU_Mapped|\w+_Host|(CUDA|ROCm|MUSA|Vulkan|SYCL|MTL)\d+(_Mapped|_Private)?|Metal(_Mapped)?")
IMPORTED = time.time()

# name: what it returns, what it takes
C_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "gguf_free": (None, [c_void_p]),
    "gguf_get_n_kv": (c_int64, [c_void_p]),
    "gguf_get_key": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_kv_type": (c_int, [c_void_p, c_int64]),
    "gguf_get_val_str": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_val_data": (c_void_p, [c_void_p, c_int64]),
    "gguf_get_data_offset": (c_size_t, [c_void_p]),
    "gguf_get_n_tensors": (c_int64, [c_void_p]),
    "gguf_get_tensor_name": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_tensor_offset": (c_size_t, [c_void_p, c_int64]),
    "gguf_get_tensor_size": (c_size_t, [c_void_p, c_int64]),
    "ggml_get_name": (c_char_p, [c_void_p]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_backend_buffer_name": (c_char_p, [c_void_p]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "llama_model_meta_val_str": (c_int32, [c_void_p, c_char_p, c_void_p, c_size_t]),
    "llama_adapter_meta_val_str": (c_int32, [c_void_p, c_char_p, c_void_p, c_size_t]),
    # methods of C++: llama_model::get_tensor(const char *), llama_adapter_lora::get_weight(ggml_tensor *)
    "_ZNK11llama_model10get_tensorEPKc": (c_void_p, [c_void_p, c_char_p]),
    "_ZN18llama_adapter_lora10get_weightEP11ggml_tensor": (POINTER(c_void_p * 2), [c_void_p, c_void_p]),
}
# numbers of the types in GGUF
NUMBERS: dict[int, type[ctypes._SimpleCData[Any]]] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}
STRING = 8


class Loaded(enum.Enum):
    """What a comparison of a file with what is in memory has shown."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


class _Parameters(ctypes.Structure):
    _fields_ = (("no_alloc", c_bool), ("ctx", c_void_p))


@functools.cache
def _functions() -> dict[str, Any] | None:
    """The functions of llama.cpp that are needed; None if this build does not export them."""
    library = llama_cpp.llama_cpp._lib
    try:
        found = {name: library[name] for name in C_FUNCTIONS} | {"gguf_init_from_file": library["gguf_init_from_file"]}
    except (AttributeError, TypeError):
        return None
    for name, (result, arguments) in C_FUNCTIONS.items():
        found[name].restype, found[name].argtypes = result, arguments
    found["gguf_init_from_file"].restype = c_void_p
    found["gguf_init_from_file"].argtypes = [c_char_p, _Parameters]
    return found


def model_is_from(llm: llama_cpp.Llama, path: Path, *, is_first: bool) -> Loaded:
    """Whether the model in memory was loaded from this file.

    Where llama.cpp has mapped the file, the mapping of a tensor says so. Otherwise the metadata is compared, and of
    every tensor that can be read three samples.

    Parameters
    ----------
    llm
        The model.
    path
        A file, or one of the files of a split model.
    is_first
        Whether it is the first one, whose metadata is that of the model.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    call = _functions()
    if call is None:
        return Loaded.UNKNOWN
    model = llm._model.model

    find = partial(call["_ZNK11llama_model10get_tensorEPKc"], model)
    with _gguf(call, path) as file:
        if file is None:
            return Loaded.OTHER
        if is_first and not _has_metadata(call, file, "llama_model_meta_val_str", model):
            return Loaded.OTHER
        return _compare(call, file, path, find, SAMPLE)


def adapter_is_from(llm: llama_cpp.Llama, path: Path) -> Loaded:
    """Whether the LoRA adapter in memory was loaded from this file: as `model_is_from`."""
    call = _functions()
    model, adapter = llm._model.model, llm._lora_adapter
    if call is None or adapter is None:
        return Loaded.UNKNOWN

    def find(name: bytes) -> int | None:
        base, _, half = name.rpartition(b".lora_")
        tensor = call["_ZNK11llama_model10get_tensorEPKc"](model, base)
        if not tensor or half not in (b"a", b"b"):
            return None
        weight = call["_ZN18llama_adapter_lora10get_weightEP11ggml_tensor"](adapter, tensor)
        return weight.contents[0 if half == b"a" else 1] if weight else None

    # an adapter is small: all of it is compared
    with _gguf(call, path) as file:
        if file is None or not _has_metadata(call, file, "llama_adapter_meta_val_str", adapter):
            return Loaded.OTHER
        return _compare(call, file, path, find, None)


def changed_since_start(path: str) -> bool:
    """Whether a file, or the link that leads to it, may have changed since this process began."""
    started = IMPORTED
    # fork() gives a process a later start than what it has loaded, so the earlier one counts
    with suppress(OSError, ValueError, AttributeError, IndexError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        started = min(started, time.time() - age)
    return max(Path(path).stat().st_ctime, Path(path).lstat().st_ctime) >= started - 1


@contextmanager
def _gguf(call: dict[str, Any], path: Path) -> Iterator[int | None]:
    """The header of a file; None if it is not a GGUF file."""
    path.open("rb").close()  # says why a file cannot be read
    file = call["gguf_init_from_file"](os.fsencode(path), _Parameters(no_alloc=True, ctx=None))
    try:
        yield file
    finally:
        if file:
            call["gguf_free"](file)


def _has_metadata(call: dict[str, Any], file: int, meta: str, loaded: Any) -> bool:
    """Whether what is loaded has all metadata of the file. llama.cpp keeps no lists."""
    for i in range(call["gguf_get_n_kv"](file)):
        key, kind = call["gguf_get_key"](file, i), call["gguf_get_kv_type"](file, i)
        if kind == STRING:
            value = call["gguf_get_val_str"](file, i)
        elif kind in NUMBERS:
            number = NUMBERS[kind].from_address(call["gguf_get_val_data"](file, i)).value
            text = str(number).lower() if isinstance(number, (bool, int)) else f"{number:f}"
            value = text.encode()
        else:
            continue
        buffer = ctypes.create_string_buffer(len(value) + 1)
        if call[meta](loaded, key, buffer, len(buffer)) != len(value) or buffer.value != value:
            return False
    return True


def _compare(call: dict[str, Any], file: int, path: Path, find: Any, sample_bytes: int | None) -> Loaded:
    """Compare the tensors of a file with those in memory, which `find` finds by name: samples, or all of each."""
    result = Loaded.UNKNOWN
    start = call["gguf_get_data_offset"](file)
    with path.open("rb", buffering=0) as content:
        mappings = _Mappings(content.fileno())
        for i in range(call["gguf_get_n_tensors"](file)):
            name, size = call["gguf_get_tensor_name"](file, i), call["gguf_get_tensor_size"](file, i)
            tensor = find(name)
            if tensor and call["ggml_get_name"](tensor) != name:
                return Loaded.UNKNOWN  # an unknown kind of build
            # the second field of a ggml_tensor; it has no function
            buffer = c_void_p.from_address(tensor + 8).value if tensor else None
            if not tensor or not buffer or not size:
                continue
            if call["ggml_nbytes"](tensor) != size:
                return Loaded.OTHER
            if not READABLE.fullmatch(call["ggml_backend_buffer_name"](buffer).decode("ascii", "replace")):
                continue
            is_mapped = mappings.is_of_file(call["ggml_get_data"](tensor))
            if is_mapped is False:
                return Loaded.OTHER
            result = Loaded.SAME
            if is_mapped:
                continue
            n = min(sample_bytes or size, size)
            sample = ctypes.create_string_buffer(n)
            for at in {0, (size - n) // 2, size - n}:
                call["ggml_backend_tensor_get"](tensor, sample, at, n)
                content.seek(start + call["gguf_get_tensor_offset"](file, i) + at)
                if content.read(n) != sample.raw:
                    return Loaded.OTHER
    return result


class _Mappings:
    """The files that are mapped into this process, compared with one file.

    The file is mapped too: some file systems (overlay, Btrfs) show other numbers for mappings than for files.
    """

    def __init__(self, descriptor: int) -> None:
        self._files: list[tuple[int, int, tuple[str, str]]] = []
        with mmap.mmap(descriptor, 1, access=mmap.ACCESS_READ) as mapped:
            bytes_of_it = np.frombuffer(mapped, np.uint8)
            address = bytes_of_it.ctypes.data
            del bytes_of_it  # it would keep the mapping open
            # elsewhere than on Linux nothing says what is mapped
            with suppress(OSError), Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    span, _, _, device, inode, *_ = line.split(maxsplit=5)
                    if inode != "0":
                        first, last = (int(limit, 16) for limit in span.split("-"))
                        self._files.append((first, last, (device, inode)))
            self._own = self._file_at(address)

    def _file_at(self, address: int) -> tuple[str, str] | None:
        return next((file for first, last, file in self._files if first <= address < last), None)

    def is_of_file(self, address: int) -> bool | None:
        """Whether an address is in a mapping of the file; None if it is in no mapping of a file."""
        there = self._file_at(address)
        return None if there is None or self._own is None else there == self._own
