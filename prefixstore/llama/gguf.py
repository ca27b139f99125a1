"""The metadata of a GGUF file. Pure; does not need llama.cpp, and does not read the tensors."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from prefixstore.errors import ContextError

__all__ = ["CACHE_TYPES", "Metadata", "model_names", "read_metadata"]

Metadata = dict[str, "str | int | float | bool"]

# types of a KV cache, as ggml_type has them
CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
# types of files, by their numbers in llama_ftype; "-" is not in use
FILE_TYPES = dict(
    enumerate(
        """
        F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS
        Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4_MOE NVFP4
        Q1_0 Q2_0
        """.split()  # noqa: SIM905 - to be read at a glance
    )
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TEXT = 1 << 24
STRING, ARRAY = 8, 9
# by the number of the type
SCALARS = {number: struct.Struct("<" + code) for number, code in enumerate("BbHhIif?")} | {
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The numbers and texts in the metadata of a GGUF file; its lists are left out.

    Raises
    ------
    ContextError
        If the file cannot be read, or is not a GGUF file.
    """
    try:
        with Path(path).open("rb") as file:
            return _read(file)
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise ContextError(f"cannot read the metadata of the model file {path}: {error}") from error


def model_names(metadata: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, str | None]:
    """The names of a model for people: its name and quantization, and the types of its KV cache.

    Parameters
    ----------
    metadata
        Of its GGUF file.
    settings
        Of its namespace.
    """
    types = {number: name for name, number in CACHE_TYPES.items()}
    name = str(metadata.get("general.name") or "").strip()
    kind = str(metadata.get("general.file_type", ""))
    return {
        "name": name or None,
        "quantization": FILE_TYPES.get(int(kind), "-").replace("-", "") or None if kind.isdecimal() else None,
        **{one: _type_name(settings.get(one), types) for one in ("type_k", "type_v")},
    }


def _type_name(number: object, types: Mapping[int, str]) -> str | None:
    return types.get(number, f"type {number}") if isinstance(number, int) else None


def _read(file: BinaryIO) -> Metadata:
    if file.read(len(MAGIC)) != MAGIC or _number(file, U32) not in VERSIONS:
        raise ValueError("it is not a GGUF file of version 2 or 3")
    _number(file, U64)  # tensors
    n_keys = _number(file, U64)
    if n_keys > MAX_KEYS:
        raise ValueError(f"it cannot have {n_keys} keys")
    found: Metadata = {}
    for _ in range(n_keys):
        name = _text(file)
        kind = _number(file, U32)
        if kind == ARRAY:
            _skip_array(file)
        elif kind == STRING:
            found[name] = _text(file)
        else:
            found[name] = _number(file, SCALARS[kind]) if kind in SCALARS else _unknown(kind)
    return found


def _skip_array(file: BinaryIO) -> None:
    kind, n = _number(file, U32), _number(file, U64)
    if kind == STRING:
        for _ in range(n):
            _skip(file, _number(file, U64))
    elif kind in SCALARS:
        _skip(file, n * SCALARS[kind].size)
    else:
        _unknown(kind)


def _skip(file: BinaryIO, size: int) -> None:
    file.seek(size, os.SEEK_CUR)


def _text(file: BinaryIO) -> str:
    size = _number(file, U64)
    if size > MAX_TEXT:
        raise ValueError(f"it has a text of {size} bytes")
    return file.read(size).decode()


def _number(file: BinaryIO, layout: struct.Struct) -> Any:
    return layout.unpack(file.read(layout.size))[0]


def _unknown(kind: int) -> Any:
    raise ValueError(f"it has a value of the unknown type {kind}")
