"""What a location, and a tenant in it, may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefixstore.engine.page_view import Used
from prefixstore.errors import InvalidParameterError
from prefixstore.units import parse_bytes

__all__ = ["HIGH_WATER", "LOW_WATER", "PART_FOR_A_NOTE", "Budget", "Evicted", "Quota"]

# of `max_bytes`: as much may one note take
PART_FOR_A_NOTE = 1 / 256
# shares of `max_bytes`: above the first, new pages are packed, until no more than the second is in use
HIGH_WATER, LOW_WATER = 0.95, 0.9


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
                    f"quota: {size} bytes for each {name} exceed max_bytes={max_bytes}; lower it, or raise that"
                )
        return cls(**sizes)


@dataclass(frozen=True)
class Budget:
    """What a location may hold.

    A write checks, evicts and stores in one exclusive transaction, so no two processes claim the same space.

    Attributes
    ----------
    max_bytes, max_entries
        The limits; None for no limit.
    quota
        Of each tenant.
    """

    max_bytes: int
    max_entries: int | None = None
    quota: Quota = Quota()

    def __str__(self) -> str:
        entries = f" in {self.max_entries:,} pages" if self.max_entries is not None else ""
        return f"the limit of {self.max_bytes:,} bytes{entries}"

    def exceeded(self, used: Used, *, adding: int = 0, entries: int = 0) -> bool:
        """Whether `used` and `adding` bytes in `entries` more entries are too much."""
        too_many = self.max_entries is not None and used.entries + entries > self.max_entries
        return too_many or used.bytes + adding > self.max_bytes


@dataclass(frozen=True)
class Evicted:
    """What was evicted, or would have been.

    Attributes
    ----------
    pages
        Keys of the pages, in the order in which they were chosen.
    bytes
        By how much the location became smaller, index included.
    policy
        The policy that chose them.
    target_bytes
        What the location was to hold.
    bytes_left
        What it holds now; after a dry run, what it would.
    dry_run
        Whether nothing was evicted.
    """

    pages: tuple[str, ...]
    bytes: int
    policy: str
    target_bytes: int
    bytes_left: int
    dry_run: bool

    @property
    def is_enough(self) -> bool:
        """Whether the target is reached. If not, everything else is pinned, or the index is larger than the target."""
        return self.bytes_left <= self.target_bytes
