"""Sizes, durations and numbers as text: ``"20GiB"``, ``"30d"``; parsed, and formatted for people."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from prefixstore.errors import InvalidParameterError

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
        _require_unit(found[2], parameter, size, "20GiB, or 20B for bytes")
        # bounded first, since infinity is not an int
        size = int(min(float(found[1]) * _UNITS[found[2].upper()], 2.0 * LARGEST_BYTES))
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidParameterError(_not_a_size(parameter, size))
    if size <= 0:
        raise InvalidParameterError(f"{parameter}={shown(size)} must be positive")
    if size > LARGEST_BYTES:
        raise InvalidParameterError(f"{parameter}={shown(given)} must be at most 1024 PiB")
    return size


def parse_target(target: float | str, capacity: int | None, parameter: str) -> int:
    """Bytes from a share of a capacity (a float such as 0.8, or ``"80%"``), or from a size, possibly 0.

    Raises
    ------
    InvalidParameterError
        If the value is not valid, or is a share and there is no capacity; the message names `parameter`.
    """
    share: float | None = None
    if isinstance(target, float):
        share = target
    elif isinstance(target, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", target)) is not None:
        share = float(found[1]) / 100
    if share is not None:
        if not 0 <= share <= 1:
            raise InvalidParameterError(
                f"{parameter}={shown(target)} is not a share from 0.0 to 1.0; pass bytes as an int, or text such as "
                '"20GiB"'
            )
        if capacity is None:
            raise InvalidParameterError(
                f"{parameter}={shown(target)} is a share of max_bytes; pass max_bytes (--max-bytes) too, or a size"
            )
        return math.floor(capacity * share)
    is_nothing = isinstance(target, (int, str)) and not isinstance(target, bool) and target in (0, "0")
    return 0 if is_nothing else parse_bytes(target, parameter)  # type: ignore[arg-type] # it is no float


def _require_unit(unit: str, parameter: str, given: str, example: str) -> None:
    """Refuse a text that is a number alone: pages are deleted for it, and a guess of its unit may be wrong."""
    if not unit:
        raise InvalidParameterError(f"{parameter}={shown(given)} has no unit; pass one, as in {example}")


def shown(value: object) -> str:
    """A value as it is repeated in a message: its repr, at most a line of it."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - such as a number of too many digits
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _not_a_size(parameter: str, size: object) -> str:
    return f'{parameter}={shown(size)} is not a valid size; pass one such as "20GiB"'


def format_bytes(size: float) -> str:
    """Bytes as text: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration in the largest unit of which there is more than one and a half: ``63 ms``, ``12 s``, ``3.5 h``."""
    size, unit = next(
        (each for each in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")) if abs(seconds) >= 1.5 * each[0]), (1.0, "s")
    )
    if abs(seconds) < 1 and seconds:
        size, unit = 1e-3, "ms"
    n = seconds / size
    return f"{n:,.0f} {unit}" if abs(n) >= 9.95 or n == int(n) else f"{n:.2g} {unit}"


def format_share(share: float | None, digits: int = 0) -> str:
    """A share from 0 to 1 with this many digits after the point: ``81 %``; a dash if it is unknown."""
    return f"{share:.{digits}%}".replace("%", " %") if share is not None else "-"


def format_number(n: float) -> str:
    """A number in at most seven characters: ``12,345``, ``1.2 M``, and less than ten that is no integer: ``0.25``."""
    if 0 < n < 10 and n != int(n):
        return f"{n:.1f}" if n >= 1 else f"{n:.2f}"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(n) >= size * 0.99995:
            return f"{n / size:.3g} {unit}"
    return f"{n:,.0f}"


def counted(n: int, one: str) -> str:
    """A number of things: ``1 page``, ``1,234 pages``."""
    return f"{n:,} {one if n == 1 else one + 's'}"


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
            _require_unit(found[2], parameter, duration, "30d, 12h, 90s")
            seconds = float(found[1]) * _SECONDS[found[2]]
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool):
        seconds = duration
    if not 0 < seconds < 100 * 366 * 86_400:
        raise InvalidParameterError(
            f'{parameter}={shown(duration)} is not a valid duration; pass one such as "30d", "12h"'
        )
    return seconds
