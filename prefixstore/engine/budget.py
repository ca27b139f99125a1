"""What a location, and a tenant in it, may hold."""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.engine.page_view import Used

# the share of `max_bytes` that one note may take
PART_FOR_A_NOTE = 1 / 256
# shares of `max_bytes`: above the first, new pages are packed, until no more than the second is in use
HIGH_WATER, LOW_WATER = 0.95, 0.9


@dataclass(frozen=True)
class Budget:
    """What a location may hold.

    A write checks, evicts and stores in one exclusive transaction, so no two processes claim the same space.

    Attributes
    ----------
    max_bytes, max_entries
        The limits; None for no limit.
    quota
        What one tenant may hold, in bytes: stored bytes and tokens of all pages with its salt. Without a salt, a
        namespace is a tenant. None for no limit.
    """

    max_bytes: int
    max_entries: int | None = None
    quota: int | None = None

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
