"""Memory for payloads that are received: it is used again once nothing refers to it. Fresh memory is slower by half."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from prefixstore.errors import UnavailableError

KEPT_BYTES = 128 << 20
# below that fresh memory is as good
SMALL = 64 << 10


class ReceivedMemory:
    """A supply of memory. Any thread may use it, and there is no lock: what is looked at is taken out meanwhile."""

    def __init__(self) -> None:
        self._kept: deque[bytearray] = deque()

    def take(self, size: int) -> memoryview:
        """Memory of this size, taken back when no view of it is left. Raises `UnavailableError` if there is none."""
        with suppress(IndexError):  # other threads have taken out what is left
            for _ in range(len(self._kept) if size >= SMALL else 0):
                memory = self._kept.popleft()
                view = memoryview(memory)[:size] if size <= len(memory) <= 2 * size and _is_free(memory) else None
                self._kept.append(memory)
                if view is not None:
                    return view
        try:
            memory = bytearray(size)
        except (MemoryError, OverflowError, ValueError) as error:
            raise UnavailableError(f"there is no memory for a payload of {size:,} bytes") from error
        view = memoryview(memory)
        if size >= SMALL:
            self._keep(memory)
        return view

    def _keep(self, memory: bytearray) -> None:
        self._kept.append(memory)
        with suppress(IndexError):
            # the oldest ones stay with those who refer to them
            while sum(map(len, list(self._kept))) > KEPT_BYTES:
                self._kept.popleft()


def _is_free(memory: bytearray) -> bool:
    try:
        # Python refuses to resize what a view shows
        memory.append(0)
    except BufferError:
        return False
    del memory[-1]
    return True
