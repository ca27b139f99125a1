"""Bytes and entries: what a location may hold, and sizes as people write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefixstore.backends.base import Used
from prefixstore.errors import InvalidParameterError
from prefixstore.units import parse_bytes

__all__ = ["Budget", "Quota"]


@dataclass(frozen=True)
class Quota:
    """What one tenant may hold, in bytes: stored bytes and tokens of its pages. None for no limit.

    Attributes
    ----------
    namespace
        One namespace: one model with its settings, one salt.
    salt
        All namespaces of one salt together.
    """

    namespace: int | None = None
    salt: int | None = None

    @classmethod
    def parse(cls, quota: int | str | Mapping[str, int | str] | None, max_bytes: int) -> Quota:
        """A quota from one size, which holds for each namespace and for each salt, or from sizes for either.

        Raises
        ------
        InvalidParameterError
            If a size cannot be read, or is above `max_bytes`.
        """
        if quota is None:
            return cls()
        if not isinstance(quota, Mapping):
            quota = {"namespace": quota, "salt": quota}
        if unknown := sorted(quota.keys() - {"namespace", "salt"}):
            raise InvalidParameterError(f'quota has {unknown[0]!r}; write a size, or {{"namespace": …, "salt": …}}')
        sizes = {name: parse_bytes(size, f"quota[{name!r}]") for name, size in quota.items()}
        for name, size in sizes.items():
            if size > max_bytes:
                raise InvalidParameterError(
                    f"quota: {size} bytes for each {name} are more than max_bytes={max_bytes}; lower it, or raise that"
                )
        return cls(**sizes)


@dataclass(frozen=True)
class Budget:
    """What a location may hold.

    A write reserves, commits or aborts in one: inside the backend's exclusive write transaction it compares what is
    used with what it adds, evicts until there is room, and writes; so no other process can use the same room.
    """

    max_bytes: int
    max_entries: int | None = None
    quota: Quota = Quota()

    def exceeded(self, used: Used, *, adding: int = 0, entries: int = 0) -> bool:
        """Whether `used` and `adding` bytes in `entries` more entries are too much."""
        too_many = self.max_entries is not None and used.entries + entries > self.max_entries
        return too_many or used.bytes + adding > self.max_bytes
