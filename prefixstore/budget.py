"""Bytes and entries: what a location may hold, and sizes as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prefixstore.errors import InvalidParameterError

__all__ = ["Budget", "Used", "format_bytes", "parse_bytes"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(size: int | str, parameter: str) -> int:
    """A number of bytes from an int or from text such as ``"20GiB"`` or ``"500MB"``.

    Raises
    ------
    InvalidParameterError
        If it cannot be read, or is not positive; the message names `parameter`.
    """
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if found is None or found[2].upper() not in _UNITS:
            raise InvalidParameterError(
                f'{parameter}={size!r} is no size; write an int (bytes) or text such as "20GiB" or "500MB"'
            )
        size = int(float(found[1]) * _UNITS[found[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidParameterError(f'{parameter}={size!r} is no size; write an int (bytes) or text such as "20GiB"')
    if size <= 0:
        raise InvalidParameterError(f"{parameter}={size!r} must be positive")
    return size


def format_bytes(size: float) -> str:
    """A number of bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass(frozen=True)
class Used:
    """What a location holds, index included."""

    bytes: int
    entries: int


@dataclass(frozen=True)
class Budget:
    """What a location may hold.

    A write reserves, commits or aborts in one: inside the backend's exclusive write transaction it compares what is
    used with what it adds, evicts until there is room, and writes; so no other process can use the same room.
    """

    max_bytes: int
    max_entries: int | None = None

    def exceeded(self, used: Used, *, adding: int = 0, entries: int = 0) -> bool:
        """Whether `used` and `adding` bytes in `entries` more entries are too much."""
        too_many = self.max_entries is not None and used.entries + entries > self.max_entries
        return too_many or used.bytes + adding > self.max_bytes
