"""Prompts in files, for commands that take one: the text, or the messages of a chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prefixstore.errors import InvalidParameterError
from prefixstore.units import format_bytes

__all__ = ["STANDARD", "chat_in", "text_in"]

STANDARD = "-"
MAX_PROMPT = 64 << 20


def text_in(path: Path) -> str:
    """The text of a file; of stdin for ``-``. Raises `InvalidParameterError`."""
    try:
        if str(path) == STANDARD:
            raw = sys.stdin.buffer.read(MAX_PROMPT + 1)
        else:
            with path.open("rb") as file:
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
