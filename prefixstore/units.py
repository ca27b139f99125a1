"""Sizes and durations as text: ``"20GiB"``, ``"30d"``."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from prefixstore.errors import InvalidParameterError

__all__ = ["format_bytes", "parse_bytes", "parse_seconds", "shown"]

# 1 EiB: no location holds more, and what is computed from it fits into 64 bits
LARGEST_BYTES = 1 << 60
SHOWN = 80

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(size: int | str, parameter: str) -> int:
    """Bytes from an int or from text such as ``"20GiB"`` or ``"500MB"``.

    Raises
    ------
    InvalidParameterError
        If the value is not valid or not positive; the message names `parameter`.
    """
    given = size
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if found is None or found[2].upper() not in _UNITS:
            raise InvalidParameterError(_not_a_size(parameter, size))
        # bounded first, since infinity is not an int
        size = int(min(float(found[1]) * _UNITS[found[2].upper()], 2.0 * LARGEST_BYTES))
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidParameterError(_not_a_size(parameter, size))
    if size <= 0:
        raise InvalidParameterError(f"{parameter}={shown(size)} must be positive")
    if size > LARGEST_BYTES:
        raise InvalidParameterError(f"{parameter}={shown(given)} must be at most 1024 PiB")
    return size


def shown(value: object) -> str:
    """A value as it is repeated in a message: its repr, at most a line of it."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - such as a number of too many digits
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _not_a_size(parameter: str, size: object) -> str:
    return f'{parameter}={shown(size)} is not a valid size; pass an int (bytes) or text such as "20GiB"'


def format_bytes(size: float) -> str:
    """Bytes as text: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def parse_seconds(duration: float | str | timedelta, parameter: str) -> float:
    """Seconds from a number, a `timedelta`, or text such as ``"90s"``, ``"12h"`` or ``"30d"``.

    Raises
    ------
    InvalidParameterError
        If the value is not valid or not positive; the message names `parameter`.
    """
    seconds: float = math.nan
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", duration)
        if found is not None and found[2] in _SECONDS:
            seconds = float(found[1]) * _SECONDS[found[2]]
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool):
        seconds = duration
    if not 0 < seconds < 100 * 366 * 86_400:
        raise InvalidParameterError(
            f'{parameter}={shown(duration)} is not a valid duration; pass seconds, a timedelta or text such as "30d"'
        )
    return seconds
