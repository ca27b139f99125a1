"""Files named on the command line: prompts that are read, exports and settings that are written."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from prefixstore.backends.files import sync_path
from prefixstore.errors import InvalidParameterError
from prefixstore.units import format_bytes

# stdin or stdout, in place of a file
STANDARD = "-"
MAX_PROMPT = 64 << 20


@contextmanager
def reading(path: str) -> Iterator[BinaryIO]:
    """An open file; stdin for ``-``. Raises `InvalidParameterError`."""
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    try:
        opened = Path(path).open("rb")  # noqa: SIM115 - closed below; an OSError in the block does not come from the file
    except OSError as error:
        raise InvalidParameterError(f"{path} cannot be read: {error.strerror or error}") from error
    with opened:
        yield opened


def is_replaced(path: Path, begins: tuple[bytes, ...] = (b"",)) -> bool:
    """Whether something is there that will be replaced: a file that is empty, or begins in one of these ways.

    Anything else was named by mistake. Raises `InvalidParameterError`.
    """
    if path.exists() and not path.is_file():
        # a device would be replaced, and a pipe waited for
        raise InvalidParameterError(f"{path} exists and is not a file; choose another name")
    try:
        with path.open("rb") as file:
            begin = file.read(max(map(len, begins)))
    except OSError:
        # a link that leads nowhere is there; of all else, writing says why
        return os.path.lexists(path)
    if begin and not begin.startswith(begins):
        raise InvalidParameterError(f"{path} exists and was not written by this command; choose another name")
    return True


@contextmanager
def writing(path: str, *, mode: int = 0o600, replace: bool = True) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete, or stdout for ``-``. Raises `InvalidParameterError`.

    By default only its owner can read it, since most of them contain prompts. Without `replace`, a file that has
    appeared in the meantime is left as it is.
    """
    if path == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target, part = Path(path), None
    try:
        is_replaced(target)
        # a new name: an existing file may be a link, or readable by others
        new = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part") if replace else target
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123 - it is open
            part = new
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
        part = None
        sync_path(target.absolute().parent)
    except OSError as error:
        advice = f"{'delete it, or ' if isinstance(error, FileExistsError) else ''}choose another place"
        raise InvalidParameterError(f"{path} cannot be written: {error.strerror or error}; {advice}") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def text_in(path: Path) -> str:
    """The text of a file; of stdin for ``-``. Raises `InvalidParameterError`."""
    try:
        with reading(str(path)) as file:
            raw = file.read(MAX_PROMPT + 1)
        if len(raw) > MAX_PROMPT:
            raise InvalidParameterError(f"{path} is longer than {format_bytes(MAX_PROMPT)}")
        # without a BOM, as in a warming job
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise InvalidParameterError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidParameterError(f"{path} is not valid UTF-8 text") from None


def chat_in(path: Path) -> dict[str, Any]:
    """The object of a file with ``"messages"``; a list alone is taken for these. Raises `InvalidParameterError`."""
    text = text_in(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidParameterError(f"{path} is not valid JSON") from None
    if isinstance(found, list):
        found = {"messages": found}
    if not isinstance(found, dict) or not isinstance(found.get("messages"), list):
        raise InvalidParameterError(f'{path} must hold a list of messages, or an object with "messages"')
    return found
