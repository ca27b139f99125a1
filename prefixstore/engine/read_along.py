"""Stored pages that need no unpacking, each verified while it is used.

Its checksum and its user read the same bytes at the same time, so they come out of memory once. A page that is verified
before it is used comes out of memory twice, and memory is what a restore waits for. The user must be able to take back
what he did with a page.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from prefixstore.backends.base import Snapshot
from prefixstore.engine.index import Page
from prefixstore.engine.reading import Look, MisfitError, Readers, accept, compare, fetched
from prefixstore.errors import StorageError
from prefixstore.format.autocodec import ReadPace
from prefixstore.format.codec import CODECS, decode, inspect, verify, verify_checksum
from prefixstore.format.record import Record

__all__ = ["ReadAlong"]


class _Found(NamedTuple):
    """A stored page, the bytes of its state, and the seconds that it took to get them."""

    record: Record
    view: memoryview
    seconds: float


class ReadAlong:
    """The states of some pages of a snapshot, one after the other.

    Parameters
    ----------
    readers
        Lends a thread.
    snapshot
        Is used by nobody else until `close` returns.
    pages
        What is wanted, in this order.
    pace
        Is told how fast stored bytes were read.
    look
        Called with each state before it is given out: with the first one where it is asked for, with the others in
        the thread, as what it looks at is not in the cache of a core yet.
    """

    def __init__(
        self, readers: Readers, snapshot: Snapshot, pages: Sequence[Page], pace: ReadPace, look: Look | None
    ) -> None:
        self._threads = readers.threads
        self._pace = pace
        self._look = look
        self._pages = iter(pages)
        self._fetched = fetched(snapshot, [page.key for page in pages])
        # verifies the state that was given out last, then reads the next one: what comes, why it does not, or None
        self._job: Future[_Found | StorageError | None] | None = None
        self._coming: _Found | StorageError | None = None
        self._started = False

    def close(self) -> None:
        """Return when no thread uses the snapshot any more."""
        if self._job is not None:
            wait([self._job])
        self._fetched.close()

    def next(self) -> memoryview | None:
        """The state of the next page, not verified yet: see `settle`; None if the page is gone.

        Raises
        ------
        StorageError
            If the page cannot be had. There is no next page after this, nor after None.
        """
        self.settle()
        coming = self._coming if self._started else self._read()
        self._started = True
        if isinstance(coming, StorageError):
            raise coming
        if coming is None:
            return None
        self._job = self._threads.submit(self._verify_and_read, coming)
        return coming.view

    def settle(self) -> None:
        """Return when the state that `next` returned last is verified.

        Raises
        ------
        CorruptError
            If it is not what was written. There is no next page then.
        """
        job, self._job = self._job, None
        if job is not None:
            self._coming = None
            self._coming = job.result()

    def _verify_and_read(self, given: _Found) -> _Found | StorageError | None:
        started = time.perf_counter()
        if given.record.codec == CODECS["raw"]:
            verify_checksum(given.record, given.view)
            # where the location is mapped into memory, it is the checksum that reads
            self._pace.note(len(given.view), given.seconds + time.perf_counter() - started)
        return self._read()

    def _read(self) -> _Found | StorageError | None:
        started = time.perf_counter()
        try:
            found, page = next(self._fetched, None), next(self._pages, None)
            if found is None or page is None:
                return None
            record, payload = found
            compare(page, record)
            # it may be packed all the same: written anew since it came into the index
            raw = record.codec == CODECS["raw"]
            view = inspect(record, payload) if raw else decode(record, payload)
            try:
                accept(self._look, page, view)
            except MisfitError:
                # unless it is damaged
                verify(record, payload)
                raise
        except StorageError as error:
            return error
        return _Found(record, view, time.perf_counter() - started)
