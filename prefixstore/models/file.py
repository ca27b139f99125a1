"""The files of a model: which there are, the digest of their content, their metadata. Does not need llama.cpp."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from prefixstore.backends.location import cache_directory
from prefixstore.backends.trusted import require_trusted_files
from prefixstore.errors import ContextError, LocationError
from prefixstore.format.namespace import model_digits

log = logging.getLogger("prefixstore")

Metadata = dict[str, "str | int | float | bool"]

BLOCK = 8 << 20
SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<parts>\d{5})\.gguf")

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
CACHE_TYPE_NAMES = {number: name for name, number in CACHE_TYPES.items()}
# what people call the numbers of settings
VALUE_NAMES: dict[str, dict[int, str]] = {
    "type_k": CACHE_TYPE_NAMES,
    "type_v": CACHE_TYPE_NAMES,
    "flash_attn_type": {-1: "auto", 0: "disabled", 1: "enabled"},
}
# types of files, by their numbers in llama_ftype; "-" is not in use
FILE_TYPES = """
F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S
IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0
""".split()  # noqa: SIM905 - to be read at a glance

# llama_rope_scaling_type
LONGROPE = 3

DIGEST = re.compile("[0-9a-f]{64}")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
# of a text, or of a list of numbers
MOST_BYTES = 1 << 28
TEXT, LIST = 8, 9
# by the number of the type
SCALARS = {number: struct.Struct("<" + code) for number, code in enumerate("BbHhIif?")} | {
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def model_parts(model_path: str) -> list[str]:
    """All files of a model, in order."""
    split = SPLIT.fullmatch(model_path)
    if split is None:
        return [model_path]
    n = int(split["parts"])
    return [f"{split['stem']}-{i:05d}-of-{n:05d}.gguf" for i in range(1, n + 1)]


def file_digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's whole content, as 64 hexadecimal digits: what Hugging Face shows for it.

    It is cached in the user's cache directory by path, device, inode, size and times, so that a file is read once and
    not at every start. Raises `ContextError` if the file cannot be read.
    """
    try:
        real = Path(path).resolve(strict=True)
        with real.open("rb", buffering=0) as file:
            identity = file_identity(os.fstat(file.fileno()))
            known = _remembered(real, identity)
            if known is not None:
                return known
            log.info("reading %s for its fingerprint", real)
            hasher, buffer = hashlib.sha256(), memoryview(bytearray(BLOCK))
            while n := file.readinto(buffer):
                hasher.update(buffer[:n])
            digest = hasher.hexdigest()
            if file_identity(os.fstat(file.fileno())) == identity:
                _remember(real, identity, digest)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise ContextError(f"cannot read the model file {path} for its fingerprint: {error}") from error
    return digest


def file_identity(stat: os.stat_result) -> list[int]:
    """The facts that show whether a file is still the same one, with the same content."""
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _memory_of(path: Path) -> Path:
    """Where the identity and the digest of a file are kept."""
    return cache_directory() / "digests" / hashlib.sha256(os.fsencode(path)).hexdigest()


def _remembered(path: Path, identity: list[int]) -> str | None:
    with contextlib.suppress(OSError, ValueError, LocationError):
        memory = _memory_of(path)
        # one of another user could have one model take the states of another
        require_trusted_files(memory)
        found, _, digest = memory.read_text().rpartition(" ")
        # a process that was interrupted has written a part of it
        if found == str(identity) and DIGEST.fullmatch(digest):
            return digest
    return None


def _remember(path: Path, identity: list[int], digest: str) -> None:
    with contextlib.suppress(OSError, LocationError):
        memory = _memory_of(path)
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        memory.unlink(missing_ok=True)
        # a link that someone has planted there is not followed
        with os.fdopen(os.open(memory, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"{identity} {digest}")


def model_name(metadata: Mapping[str, object]) -> str | None:
    """The name of a model for people, with its quantization, from the metadata of its GGUF file."""
    name, kind = str(metadata.get("general.name") or "").strip(), str(metadata.get("general.file_type", ""))
    quantization = FILE_TYPES[int(kind)] if kind.isdecimal() and int(kind) < len(FILE_TYPES) else "-"
    return name if not name or quantization == "-" or quantization.lower() in name.lower() else f"{name} {quantization}"


def model_title(settings: Mapping[str, object], names: Mapping[str, str]) -> str:
    """What a model is called, with the types of its KV cache if they are not f16, by the settings of its namespace.

    `names` of models are by the first digits of their digests; see `History`.
    """
    digest = model_digits(settings)
    name = names.get(digest) or str(settings.get("label") or settings.get("server") or digest or "unknown")
    kinds = [setting_text(one, settings[one]) for one in ("type_k", "type_v") if settings.get(one) is not None]
    return name if set(kinds) <= {"f16"} else f"{name} (KV {'/'.join(dict.fromkeys(kinds))})"


def setting_name(name: str) -> str:
    """What a setting of a namespace is called in commands, files and a `Llama`."""
    return "flash_attn" if name == "flash_attn_type" else name


def setting_text(name: str, value: object) -> str:
    """The value of a setting, by its name if it has one."""
    if value is None:
        return "not set"
    known = VALUE_NAMES.get(name, {}) if isinstance(value, int) else {}
    return next((text for number, text in known.items() if number == value), str(value))


def settings_of_model(
    metadata: Mapping[str, Any], overrides: Mapping[str, Any], n_ctx: int, scaling_type: int = -1
) -> dict[str, bool | int | str | None]:
    """Settings of a namespace that depend on the metadata: the overrides that can change a state, and RoPE's factors.

    Without a length in the model, llama.cpp compares with that of its training (``llama_model::get_rope_factors``). If
    the model says that its factors depend on the length, pages are shared by contexts of one length only, and do not
    depend on how llama.cpp chooses the factors.

    Parameters
    ----------
    metadata, overrides
        Of the model, and what replaces some of it.
    n_ctx
        Tokens in one sequence of the context.
    scaling_type
        The ``rope_scaling_type`` of the context.
    """
    model = {**metadata, **overrides}
    architecture = model.get("general.architecture", "")
    original = model.get(f"{architecture}.rope.scaling.original_context_length")
    kind = model.get(f"{architecture}.rope.scaling.type")
    usual = model.get(f"{architecture}.context_length", 0) if original is None else original
    is_longrope = original is not None if kind is None else kind == "longrope" or scaling_type == LONGROPE
    # those of the tokenizer only change which tokens are evaluated
    kept = {name: value for name, value in overrides.items() if not name.startswith("tokenizer.")}
    return {
        "kv_overrides": json.dumps(kept, sort_keys=True) if kept else None,
        "long_context": n_ctx > int(usual),
        "n_ctx": n_ctx if is_longrope else None,
    }


# -- the metadata of a GGUF file ---------------------------------------------------------------------------------------


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as GGUF files do. Raises `OSError`."""
    with Path(path).open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The numbers and texts in the metadata of a GGUF file; its lists are left out.

    Raises `ContextError` if the file cannot be read, or is not a GGUF file.
    """
    return read_gguf(path)[0]


def read_gguf(path: str | os.PathLike[str], lists: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, int]]:
    """As `read_metadata`, with the lists that have one of these names; and where the data of each tensor begins."""
    try:
        with Path(path).open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC or _number(file, U32) not in VERSIONS:
                raise ValueError("it is not a GGUF file of version 2 or 3")
            n_tensors, n_keys = _number(file, U64), _number(file, U64)
            metadata: dict[str, Any] = {}
            offsets: dict[str, int] = {}
            for _ in range(n_keys):
                name, kind = _text(file), _number(file, U32)
                value = _list(file) if kind == LIST else _value(file, kind)
                if kind != LIST or name in lists:
                    metadata[name] = value
            for _ in range(n_tensors):
                name = _text(file)
                _take(file, _number(file, U32) * U64.size + U32.size)  # its shape and its type
                offsets[name] = _number(file, U64)
            alignment = metadata.get("general.alignment", ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 1:
                raise ValueError(f"it cannot have an alignment of {alignment!r}")
            start = -(-file.tell() // alignment) * alignment
    except (OSError, ValueError, ArithmeticError) as error:
        raise ContextError(f"cannot read the metadata of the model file {path}: {error}") from error
    return metadata, {name: start + offset for name, offset in offsets.items()}


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == TEXT:
        return _text(file)
    if kind not in SCALARS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _number(file, SCALARS[kind])


def _list(file: BinaryIO) -> list[Any]:
    kind, n = _number(file, U32), _number(file, U64)
    if kind == TEXT:
        return [_text(file, "replace") for _ in range(n)]
    if kind not in SCALARS:
        raise ValueError(f"it has a list of the unknown type {kind}")
    return [value for (value,) in SCALARS[kind].iter_unpack(_take(file, n * SCALARS[kind].size))]


def _text(file: BinaryIO, errors: str = "strict") -> str:
    return _take(file, _number(file, U64)).decode(errors=errors)


def _number(file: BinaryIO, layout: struct.Struct) -> Any:
    return layout.unpack(_take(file, layout.size))[0]


def _take(file: BinaryIO, size: int) -> bytes:
    data = file.read(size) if size <= MOST_BYTES else b""
    if len(data) < size:
        raise ValueError("it ends too early")
    return data
