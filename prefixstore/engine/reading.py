"""What those who read stored pages have in common: threads, buffers, and how a page is known to be the wanted one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from prefixstore.backends.base import Snapshot
from prefixstore.buffers import Buffers
from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.record import Buffer, Record

__all__ = ["Look", "MisfitError", "Readers", "accept", "compare", "fetched"]

# of all restores that go on at a time; they are started as they are needed
THREADS = 64


class Readers:
    """The threads of all restores, and the buffers that pages are decoded into."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prefixstore-read")
        # bounded by the room of each restore
        self.buffers = Buffers(1 << 62)

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown()


def fetched(snapshot: Snapshot, keys: Sequence[bytes]) -> Generator[tuple[Record, Buffer], None, None]:
    """As `Snapshot.fetch`; nothing happens before the first is asked for, and it can be closed."""
    yield from snapshot.fetch(keys)


class MisfitError(IncompatibleError):
    """A state is what was written, and not what its user can use."""


Look: TypeAlias = Callable[[Page, memoryview], bool]
"""Whether a state can be used for a page."""


def compare(page: Page, record: Record) -> None:
    """The hash nominated a page; its tokens prove it. Raises `CorruptError`."""
    if (record.tokens, record.parent, record.start) != (page.tokens, page.parent, page.start):
        raise CorruptError(f"page {page.key.hex()} holds other tokens than its key stands for")


def accept(look: Look | None, page: Page, state: memoryview) -> memoryview:
    """The state, which is what was written, if its user can use it; otherwise raise `MisfitError`."""
    if look is not None and not look(page, state):
        raise MisfitError(f"page {page.key.hex()} has another shape than what it is for")
    return state
