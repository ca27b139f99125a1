"""The RAM tier: decoded, verified states of hot pages; a bounded cache that drops the least recently used first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from prefixstore.engine.page import Page, is_same
from prefixstore.format.record import Buffer

__all__ = ["RamTier"]

# What Python holds for a state beside its bytes and tokens: array, key, dictionary slot (measured on 3.11).
ENTRY_BYTES = 512


def _cost(page: Page, n_bytes: int) -> int:
    return len(page.tokens) + n_bytes + ENTRY_BYTES


class RamTier:
    """Keeps copies of states of stored pages, of at most so many bytes; never the only copy."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        # not bytes: NumPy asks for large pages
        self._states: OrderedDict[bytes, tuple[Page, npt.NDArray[np.uint8]]] = OrderedDict()
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes that it holds."""
        return self._used

    def lacks(self, pages: Sequence[Page]) -> bool:
        """Whether one of these pages is not here, and all of them can be."""
        size = sum(_cost(page, page.raw_bytes) for page in pages)
        return size <= self._limit and any(page.key not in self._states for page in pages)

    def state(self, page: Page) -> memoryview | None:
        """The state of a page, if it is here. It stays valid as long as it is referenced."""
        if not self._states:
            return None
        with self._lock:
            found = self._states.get(page.key)
            if found is None or not is_same(found[0], page):
                return None
            self._states.move_to_end(page.key)
            return found[1].data

    def keep(self, page: Page, state: Buffer) -> None:
        """Copy the state of a stored page."""
        size = _cost(page, len(state))
        if size > self._limit or page.key in self._states:
            return
        # without memory for it, the state is read from the location the next time
        with suppress(MemoryError):
            # not under the lock: until the least recently used ones are dropped, it takes more than the limit
            kept = page, np.frombuffer(state, np.uint8).copy()
            with self._lock:
                self._drop(page.key)
                self._states[page.key] = kept
                self._used += size
                while self._used > self._limit:
                    self._drop(next(iter(self._states)))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Drop pages that were deleted from the location."""
        if self._states:
            with self._lock:
                for key in keys:
                    self._drop(key)

    def _drop(self, key: bytes) -> None:
        if (gone := self._states.pop(key, None)) is not None:
            self._used -= _cost(gone[0], gone[1].nbytes)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._states.clear()
            self._used = 0
