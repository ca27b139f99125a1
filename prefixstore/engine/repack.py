"""Packs stored pages when space is short, the coldest first, and unpacks those that are used again when there is room.

A page is read in a view, packed outside of any lock or transaction, and replaced in a transaction if it is still the
same. Its key, its tokens and its usage stay, so nothing else depends on whether it is packed; other processes learn of
it like of any change of a page.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from prefixstore.backends.base import Transaction, View
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.index import Page
from prefixstore.engine.stored_pages import Victim
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.autocodec import MIN_SAVING, Encoder
from prefixstore.format.codec import CODECS, decode
from prefixstore.format.record import Buffer, Record, checksum
from prefixstore.stats import Counters

__all__ = ["STEP_BYTES", "Found", "Repacker", "Replacement"]

log = logging.getLogger("prefixstore")

RAW = CODECS["raw"]
# What is read and written in one step at most: transactions stay short, and there is memory for all of it.
STEP_BYTES = 8 << 20
STEP_PAGES = 16
# How many of the coldest pages are asked for at a time, and at most if none of them can be packed.
COLDEST = 256
MOST_COLDEST = 4096
# keys of pages that were found not to get smaller
KEPT_RAW = 1 << 16
# used pages that wait to be unpacked
MAX_WANTED = 256


class Found(NamedTuple):
    """A page as it is stored: its record, and a copy of its payload."""

    record: Record
    payload: Buffer


@dataclass(frozen=True)
class Replacement:
    """Another form of a stored page."""

    old: Record
    new: Record
    payload: Buffer


class Repacker:
    """Packs and unpacks stored pages. Used by one thread, except `want`.

    Parameters
    ----------
    catalog
        Knows the coldest pages; damaged ones are reported to it.
    encode
        Packs states, and says which pages may be replaced.
    counters
        Counts pages that were packed and unpacked.
    """

    def __init__(self, catalog: Catalog, encode: Encoder, counters: Counters) -> None:
        self._catalog = catalog
        self._encode = encode
        self._counters = counters
        self._coldest: deque[Victim] = deque()
        self._kept_raw: OrderedDict[bytes, None] = OrderedDict()
        # pages that were used, the most recent ones last
        self._wanted: OrderedDict[bytes, Page] = OrderedDict()
        self._lock = threading.Lock()

    # -- packing ------------------------------------------------------------------------------------------------------

    def coldest(self, view: View, n_bytes: int = STEP_BYTES) -> list[Found]:
        """The coldest raw pages, up to the one that reaches `n_bytes`; empty if none is left that may get smaller.

        The catalog has to be up to date with the view, and its table loaded.
        """
        if not self._coldest:
            self._coldest.extend(self._ask())
        found: list[Found] = []
        size = 0
        while self._coldest and len(found) < STEP_PAGES and size < n_bytes:
            page = self._coldest.popleft()
            one = self._read(view, page.key) if self._may_get_smaller(page) else None
            if one is not None and one.record.codec == RAW and one.record.raw_bytes:
                found.append(one)
                size += len(one.payload)
            elif one is not None:
                # packed by now, or without a state
                self._keep_raw(page.key)
        return found

    def _ask(self) -> list[Victim]:
        """The coldest pages that may get smaller."""
        n = COLDEST
        while True:
            pages = self._catalog.coldest(n, RAW)
            chosen = [page for page in pages if self._may_get_smaller(page)]
            if chosen or len(pages) < n or n >= MOST_COLDEST:
                return chosen
            n *= 4

    def _may_get_smaller(self, page: Victim) -> bool:
        return page.key not in self._kept_raw and self._encode.may_save(page.namespace)

    def pack(self, found: Iterable[Found]) -> list[Replacement]:
        """The packed forms of raw pages, of those that get smaller."""
        packed: list[Replacement] = []
        for one, state in self._decoded(found):
            codec, payload = self._encode.smallest(one.record.namespace, state)
            if codec == RAW or len(payload) > (1 - MIN_SAVING) * len(state):
                self._keep_raw(one.record.key)
                continue
            new = _record(one.record, codec, payload)
            # The checksum of a raw page is that of its state: whatever has gone wrong, in memory or in the codec, no
            # page is replaced by one that unpacks to anything else.
            if checksum(decode(new, payload)) != one.record.checksum:
                log.error("page %s does not unpack to the original bytes; it is left as it is", one.record.key.hex())
                self._keep_raw(one.record.key)
                continue
            packed.append(Replacement(one.record, new, payload))
        return packed

    def _keep_raw(self, key: bytes) -> None:
        self._kept_raw[key] = None
        while len(self._kept_raw) > KEPT_RAW:
            self._kept_raw.popitem(last=False)

    # -- unpacking ----------------------------------------------------------------------------------------------------

    def want(self, namespace: bytes, pages: Sequence[Page]) -> None:
        """Note that these pages were restored: packed ones among them may be unpacked."""
        packed = [page for page in pages if 0 < page.stored_bytes < page.raw_bytes]
        if not packed or not self._encode.may_be_raw(namespace):
            return
        with self._lock:
            for page in packed:
                self._wanted[page.key] = page
                self._wanted.move_to_end(page.key)
            while len(self._wanted) > MAX_WANTED:
                self._wanted.popitem(last=False)

    @property
    def wants_pages(self) -> bool:
        """Whether used pages wait to be unpacked."""
        return bool(self._wanted)

    def forget_wanted(self) -> None:
        """Forget the used pages, since there is no room to unpack them."""
        with self._lock:
            self._wanted.clear()

    def wanted(self, view: View, room: int, n_bytes: int = STEP_BYTES) -> list[Found]:
        """Used pages that are packed, the most recent first: up to `n_bytes`, and as many as `room` bytes take."""
        found: list[Found] = []
        size = grown = 0
        while len(found) < STEP_PAGES and size < n_bytes:
            with self._lock:
                page = self._wanted.popitem()[1] if self._wanted else None
            if page is None:
                break
            if grown + page.raw_bytes - page.stored_bytes > room:
                continue
            one = self._read(view, page.key)
            # a restore has accepted this size; a record that claims another one is not unpacked
            if one is None or one.record.codec == RAW or one.record.raw_bytes != page.raw_bytes:
                continue
            found.append(one)
            size += page.raw_bytes
            grown += page.raw_bytes - page.stored_bytes
        return found

    def unpack(self, found: Iterable[Found]) -> list[Replacement]:
        """The raw forms of packed pages, of those that would be stored raw if they were written now."""
        unpacked: list[Replacement] = []
        for one, state in self._decoded(found):
            if self._encode(one.record.namespace, state)[0] == RAW:
                unpacked.append(Replacement(one.record, _record(one.record, RAW, state), state))
        return unpacked

    # -- replacing ----------------------------------------------------------------------------------------------------

    def replace(self, transaction: Transaction, replacements: Sequence[Replacement], limit: int) -> int:
        """Replace those pages that are still as they were read; how many.

        Parameters
        ----------
        transaction
            Of the catalog.
        replacements
            The new forms.
        limit
            What the location may hold, in bytes: a larger form that does not fit is left out.
        """
        stored = transaction.records([one.old.key for one in replacements])
        packed = unpacked = 0
        for one in replacements:
            key = one.old.key
            record, usage = stored.get(key, (None, None))
            if record != one.old or usage is None:
                continue  # deleted, replaced, or packed by another process meanwhile
            is_raw = one.new.codec == RAW
            if is_raw and transaction.used.bytes + transaction.cost(one.new, len(one.payload)) > limit:
                continue
            packed += not is_raw
            unpacked += is_raw
            transaction.put(key, one.new, usage, one.payload)
        for name, n in (("packed", packed), ("unpacked", unpacked)):
            if n:
                self._catalog.after_commit(partial(self._counters.count, name, n))
        return packed + unpacked

    def _read(self, view: View, key: bytes) -> Found | None:
        """A stored page; None if it is gone or cannot be read. Its bytes are copied, so that the view can be closed."""
        try:
            for record, payload in view.fetch([key]):
                return Found(record, bytes(payload))
        except (CorruptError, IncompatibleError) as error:
            self._refuse(key, error)
        return None

    def _decoded(self, found: Iterable[Found]) -> Iterator[tuple[Found, Buffer]]:
        """Pages with their states, of those that can be decoded."""
        for one in found:
            try:
                state = decode(one.record, one.payload)
            except (CorruptError, IncompatibleError) as error:
                self._refuse(one.record.key, error)
            else:
                yield one, state

    def _refuse(self, key: bytes, error: StorageError) -> None:
        """A page cannot be read; a damaged one is deleted with the next commit."""
        log.warning("a page was not repacked: %s", error)
        self._keep_raw(key)
        if isinstance(error, CorruptError):
            self._catalog.mark_damaged(key)


def _record(record: Record, codec: int, payload: Buffer) -> Record:
    return replace(record, codec=codec, stored_bytes=len(payload), checksum=checksum(payload))
