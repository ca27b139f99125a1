"""A view of a location in object storage: records from memory, payloads from the server."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from prefixstore.backends.base import Entry, Used, View, facts_after
from prefixstore.backends.objects.client import Client
from prefixstore.backends.objects.log import Log
from prefixstore.backends.objects.manifest import Stored, name_of
from prefixstore.backends.objects.pages import Siblings
from prefixstore.backends.objects.read_ahead import Arrived, ahead
from prefixstore.backends.objects.strays import strays
from prefixstore.errors import CorruptError, StorageError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT
from prefixstore.format.record import Buffer, Record, Usage

__all__ = ["ObjectsView"]

_ABOVE_KEYS = b"\xff" * (KEY_BYTES + 1)
# how often a payload is asked for again because the page was put again meanwhile
READS = 8


class ObjectsView(View):
    """Reads the known state of the log; later commits may become visible.

    Parameters
    ----------
    log, client
        Of the location.
    read_only
        Whether nothing is ever written.
    """

    def __init__(self, log: Log, client: Client, *, read_only: bool) -> None:
        self._log = log
        self._client = client
        self._read_only = read_only

    # what a transaction has changed lies over these four

    def _stored(self, key: bytes) -> Stored | None:
        return self._log.pages.entries.get(key)

    def _items(self) -> list[tuple[bytes, Stored]]:
        pages = self._log.pages
        with pages.lock:
            return list(pages.entries.items())

    def _siblings(self, parent: bytes, form: int) -> Siblings:
        """The children of a page that have one form; it is used while the lock is held."""
        return self._log.pages.children.get((parent, form), [])

    def _keys(self) -> list[bytes]:
        """All keys in order."""
        return self._log.pages.ordered()

    # -- records ------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self._log.pages.shown_generation

    def changes(self, since: int) -> list[bytes] | None:
        return self._log.pages.changed_since(since)

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        for key, stored in self._items():
            yield key, stored.record, stored.usage

    def record(self, key: bytes) -> Record | None:
        stored = self._stored(key)
        if stored is None:
            return None
        if isinstance(stored.record, Record):
            return stored.record
        raise stored.record

    def usage(self, key: bytes) -> Usage | None:
        stored = self._stored(key)
        return stored.usage if stored is not None else None

    def records(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Record | StorageError, Usage]]:
        return {entry.key: (entry.record, entry.usage) for entry in self._entries(keys)}

    def _entries(self, keys: Iterable[bytes]) -> list[Entry]:
        """Those of these pages that are there."""
        found = ((key, self._stored(key)) for key in keys)
        return [Entry(key, stored.record, stored.usage) for key, stored in found if stored is not None]

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        with self._log.pages.lock:
            siblings = self._siblings(parent, PAGE)
            n_below = bisect_right(siblings, (tokens, _ABOVE_KEYS))
            return self._entries([key for _, key in siblings[max(n_below - 1, 0) : n_below + 1]])

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        with self._log.pages.lock:
            lists = (self._siblings(parent, form)[:at_most] for parent in dict.fromkeys(parents))
            return self._entries([key for siblings in lists for _, key in siblings])

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        with self._log.pages.lock:
            if self._log.pages.unreadable:
                return set(keys)
            return {key for key in keys if any(self._siblings(key, form) for form in (PAGE, SNAPSHOT))}

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        return facts_after(self._keys(), self._entries, after, at_most)

    def namespaces(self) -> Mapping[bytes, bytes]:
        pages = self._log.pages
        with pages.lock:
            return dict(pages.namespaces)

    def namespace(self, key: bytes) -> bytes | None:
        return self._log.pages.namespaces.get(key)

    def note(self, name: bytes) -> bytes | None:
        return self._log.pages.notes.get(name)

    @property
    def sizes(self) -> tuple[int, int]:
        return self._log.pages.sizes

    @property
    def used(self) -> Used:
        pages = self._log.pages
        with pages.lock:
            return Used(pages.bytes, len(pages.entries))

    # -- payloads -----------------------------------------------------------------------------------------------------

    def payload(self, key: bytes) -> Buffer | None:
        stored = self._stored(key)
        found = self._read(key, stored) if stored is not None else None
        return found[1] if found is not None else None

    def fetch(self, keys: Sequence[bytes]) -> Iterator[tuple[Record, Buffer]]:
        wanted: list[tuple[bytes, Stored]] = []
        for key in keys:
            stored = self._stored(key)
            if stored is None:
                break
            wanted.append((key, stored))
        for (key, _), found in self._ahead(wanted):
            if found is None:
                return
            stored, payload = found
            if not isinstance(stored.record, Record):
                raise stored.record
            if payload is None:
                raise CorruptError(f"page {key.hex()} has no payload")
            yield stored.record, payload

    def stored(self) -> Iterator[tuple[bytes, Record | StorageError, Buffer | StorageError | None]]:
        for (key, _), found in self._ahead(self._items()):
            if found is not None:
                stored, payload = found
                yield key, stored.record, payload

    def _ahead(
        self, wanted: list[tuple[bytes, Stored]]
    ) -> Iterator[tuple[tuple[bytes, Stored], tuple[Stored, Buffer | None] | None]]:
        self.arrived = 0
        if len(wanted) == 1:
            return iter([(wanted[0], self._read(*wanted[0], self._add_arrived))])
        return ahead(
            wanted,
            lambda one: one[1].stored_bytes,
            lambda one, arrived: self._read(*one, arrived),
            self._client.window,
            self._note_arrived,
        )

    def _add_arrived(self, n_bytes: int) -> None:
        self.arrived += n_bytes

    def _note_arrived(self, n_bytes: int) -> None:
        self.arrived = n_bytes

    def _read(
        self, key: bytes, stored: Stored, arrived: Arrived = lambda _: None
    ) -> tuple[Stored, Buffer | None] | None:
        """A page with its payload, as it is now if it was put again since; None if it was deleted since.

        The payload is None if it is missing.
        """
        for _ in range(READS):
            if not isinstance(stored.record, Record):
                return stored, None
            if stored.record.stored_bytes == 0:
                return stored, b""
            found = self._client.receive(name_of(key, stored.nonce), arrived)
            if found is not None:
                return stored, found
            self._log.refresh()
            now = self._log.pages.entries.get(key)
            if now is None:
                return None
            if now.nonce == stored.nonce:
                return stored, None
            stored = now
        return stored, None

    def flaws(self) -> Iterator[tuple[str, bytes, str]]:
        found = strays(self._client, self._log, read_only=self._read_only)
        if found:
            n_bytes = sum(one.size for one in found)
            yield (
                "index",
                b"",
                f"{len(found)} objects ({n_bytes:,} bytes) belong to no page, left by processes that died",
            )
