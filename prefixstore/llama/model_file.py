"""The files of a model: which there are, and the digest of their content. Pure; does not need llama.cpp."""

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

from prefixstore.backends.location import cache_directory
from prefixstore.backends.trusted import require_trusted_files
from prefixstore.errors import ContextError, LocationError

__all__ = ["file_digest", "file_identity", "model_parts"]

log = logging.getLogger("prefixstore")

BLOCK = 8 << 20
SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<parts>\d{5})\.gguf")


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
    not at every start.

    Raises
    ------
    ContextError
        If the file cannot be read.
    """
    try:
        real = Path(path).resolve(strict=True)
        with real.open("rb", buffering=0) as file:
            identity = file_identity(os.fstat(file.fileno()))
            known = _remembered().get(str(real))
            if isinstance(known, dict) and known.get("identity") == identity and isinstance(known.get("sha256"), str):
                return str(known["sha256"])
            log.info("reading %s for its fingerprint", real)
            digest = _hash(file)
            if file_identity(os.fstat(file.fileno())) == identity:
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


def file_identity(stat: os.stat_result) -> list[int]:
    """The facts that show whether a file is still the same one, with the same content."""
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _memory_file() -> Path:
    return cache_directory() / "fingerprints.json"


def _remembered() -> dict[str, Any]:
    try:
        # one of another user could have one model take the states of another
        require_trusted_files(_memory_file())
        known = json.loads(_memory_file().read_bytes())
    except (OSError, ValueError, RecursionError, LocationError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(path: str, identity: list[int], digest: str) -> None:
    """Replace the file as a whole; if another process does so at the same time, a model is read once more later."""
    known = _remembered() | {path: {"identity": identity, "sha256": digest}}
    with contextlib.suppress(OSError, LocationError):
        target = _memory_file()
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(known, file)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
