"""What an engine does with a location on a server, which may refuse any part of it, or not survive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError
from tests.support.engines import MIB, A, B, Store


@contextmanager
def stored(url: str, *sequences: list[int], max_bytes: int = 64 * MIB) -> Iterator[Store]:
    """A store that has these sequences."""
    with closing(Store(open_pages(url, max_bytes=max_bytes), max_bytes=max_bytes)) as store:
        for tokens in sequences:
            store.put(tokens)
        yield store


def is_intact(url: str, *sequences: list[int]) -> None:
    """Another process finds the store sound, and at least these sequences."""
    with stored(url) as other:
        assert other.engine.upkeep.check() == []
        for tokens in sequences:
            assert other.fetch(tokens) == 3


def lookup(store: Store, tokens: list[int]) -> int:
    """How many pages of a sequence are restored, each with the right state."""
    try:
        return store.fetch(tokens)
    except StorageError:
        return 0


def tried(work: Callable[[Store], object]) -> Callable[[Store], None]:
    def done(store: Store) -> None:
        with suppress(StorageError):
            work(store)

    return done


def _check(store: Store) -> None:
    assert store.engine.upkeep.check() == []


WORK: dict[str, Callable[[Store], object]] = {
    "look up": lambda store: lookup(store, A),
    "put": tried(lambda store: store.put(B)),
    "pin": tried(lambda store: store.pin(A)),
    "check": tried(_check),
}
