"""Which tensors a model has, by llama.cpp's own loader: ``python -m tests.models.discover METADATA OUT``.

Metadata that do not fit abort the process, so it is one of its own. The names and shapes go to `OUT` as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp

# of ggml_tensor: a type and a pointer stand before the four extents
EXTENTS_AT = 16


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob(f"{name}.*"))))


def discover(path: Path) -> dict[str, list[int]]:
    """The tensors that llama.cpp asks for: name and shape, as numpy has it."""
    base, llama = _library("libggml-base"), _library("libllama")
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    base.ggml_get_name.restype = ctypes.c_char_p
    base.ggml_get_name.argtypes = [ctypes.c_void_p]
    found: dict[str, list[int]] = {}

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    def note(tensor: int, _: Any) -> None:
        shape = list((ctypes.c_int64 * 4).from_address(tensor + EXTENTS_AT))
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        found[base.ggml_get_name(tensor).decode()] = shape[::-1]

    llama.llama_model_init_from_user.restype = ctypes.c_void_p
    llama.llama_model_init_from_user.argtypes = [
        ctypes.c_void_p,
        type(note),
        ctypes.c_void_p,
        llama_cpp.llama_model_params,
    ]
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.load_mtp = True
    metadata = base.gguf_init_from_file(str(path).encode(), _InitParams(no_alloc=True, context=None))
    if not llama.llama_model_init_from_user(metadata, note, None, params):
        sys.exit("error: llama.cpp does not take these metadata")
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(discover(Path(sys.argv[1]))))
