"""The log of commits of a store in object storage: follows it, appends to it, and merges its segments.

A commit is a segment, written first, and a new head that lists it, which replaces the head that was read: if another
process has committed meanwhile, the server refuses, the new segments are read, and the commit is appended after them,
unless they conflict with it. So of two heads that follow the same one, only one is ever seen.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from prefixstore.backends import refusals
from prefixstore.backends.contract import ConflictError
from prefixstore.backends.objects.client import Client, Version
from prefixstore.backends.objects.manifest import (
    HEAD,
    NONCE_BYTES,
    PROBES,
    RECENT,
    Head,
    Part,
    Segment,
    new_segment_name,
)
from prefixstore.backends.objects.pages import Pages
from prefixstore.backends.threads import Job, Threads
from prefixstore.errors import CorruptError, LocationError, StorageError, UnavailableError

__all__ = ["Log"]

log = logging.getLogger("prefixstore")

# how often a server is tried
TRIALS = 3
# how often news are read again because a segment was merged into another one meanwhile
READS = 8
# how often a commit is tried again after another process has committed first, and the longest pause between, seconds
COMMITS = 40
LONGEST_PAUSE = 0.25
# segments at which the newest are merged, and how many of the newest are left as they are: others follow these
# one by one, and would have to read more if they were a part of something larger
MANY_SEGMENTS = 32
LEFT_SEGMENTS = 8
# segments read at a time
AT_ONCE = 8


class Log:
    """The commits of a location, as far as this process has read them.

    Parameters
    ----------
    client
        Of the location.
    read_only
        Whether nothing is ever written.

    Attributes
    ----------
    pages
        What they add up to. Replaced when it has to be read from the beginning.
    """

    def __init__(self, client: Client, *, read_only: bool) -> None:
        self._client = client
        self._read_only = read_only
        self.pages = Pages()
        self._head = Head("")
        self._version: Version | None = None
        # the highest generation that was shown
        self._shown = -1
        self.renew()

    def renew(self) -> None:
        """Locks of this process."""
        # held while news are entered
        self._entering = threading.RLock()
        self.pages.lock = threading.RLock()

    @property
    def _where(self) -> str:
        return self._client.where

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the log, or create the store. A server is tested once: it has to refuse writes that must fail.

        Raises
        ------
        LocationError
            If there is no store to read, or the server ignores conditional writes.
        """
        if self._client.get(HEAD) is None:
            if self._read_only:
                raise refusals.no_store(self._where)
            self._require_conditional_writes()
            # if another process is faster, its store is used
            self._client.create(HEAD, Head(os.urandom(16).hex(), tried=[self._server()]).pack())
        self.refresh()
        if not self._read_only and self._server() not in self._head.tried:
            self._require_conditional_writes()
            self._change_head(lambda head: replace(head, tried=[*head.tried, self._server()]))

    def _server(self) -> str:
        return hashlib.blake2b(self._client.server.encode(), digest_size=8).hexdigest()

    def _require_conditional_writes(self) -> None:
        # more than once: a reply may be lost, and what is sent again then is refused by a server that does it right
        if not any(self._keeps_conditions() for _ in range(TRIALS)):
            raise LocationError(
                f"{self._where}: the server ignores conditions of writes (If-None-Match, If-Match), so that processes "
                "would overwrite each other's pages; choose a server that supports them"
            )

    def _keeps_conditions(self) -> bool:
        name, client = PROBES + os.urandom(NONCE_BYTES).hex(), self._client
        try:
            first = client.create(name, b"1")
            again = client.create(name, b"2")
            changed = client.replace(name, b"3", first) if first else None
            outdated = client.replace(name, b"4", first) if first else None
            found = client.get(name)
        finally:
            with suppress(StorageError):
                client.delete([name])
        is_refused = again is None and outdated is None
        return is_refused and changed is not None and found is not None and bytes(found[0]) == b"3"

    # -- following ----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what was committed until now: one request if that is nothing.

        Raises
        ------
        UnavailableError
            If the server does not answer.
        CorruptError, IncompatibleError
            If a segment is missing or damaged, or the store is of another version.
        """
        missing = ""
        for _ in range(READS):
            known = self._version
            found = self._client.get_if_changed(HEAD, known if not missing else None)
            if found is None:
                return
            head = Head.unpack(self._where, found[0])
            with self._entering:
                missing = self._follow(head, found[1], is_newest=self._version is known)
            if not missing:
                return
        raise CorruptError(f"{self._where}: the segment {missing} is missing; delete the store")

    def _follow(self, head: Head, version: Version, *, is_newest: bool) -> str:
        """Enter what a head lists; the name of a segment that is gone.

        Without `is_newest`, another thread has read one since this one was asked for.
        """
        pages = self.pages
        if head.last < pages.position and head.store == self._head.store and not is_newest:
            return ""
        if not self._continues(head):
            pages = Pages(self._shown + 1)
        news = [part for part in head.parts if part.last > pages.position]
        if news and news[0].first <= pages.position and news[0] is head.parts[0]:
            # everything, and not a change
            pages, news = Pages(pages.shift), list(head.parts)
        for part, segment in zip(news, self._read(news), strict=True):
            if segment is None:
                return part.name
            self._apply(pages, segment, part)
        self.pages, self._head, self._version = pages, head, version
        self._shown = max(self._shown, pages.shown_generation)
        return ""

    def _apply(self, pages: Pages, segment: Segment, part: Part) -> None:
        try:
            pages.apply(segment, part)
        except BaseException:
            # an interrupt, in the middle: all is read again
            self.pages, self._head, self._version = Pages(self.pages.shift), replace(self._head, parts=()), None
            raise

    def _continues(self, head: Head) -> bool:
        """Whether the commits that are known come before those of a head: not if the store was deleted, or replaced."""
        known = self._head
        if head.store != known.store or head.last < known.last:
            return False
        is_named = head.last - known.last < RECENT and known.recent
        return not is_named or known.recent[-1] in head.recent

    def _read(self, parts: list[Part]) -> list[Segment | None]:
        """Segments; None for one that is gone."""

        def read(part: Part) -> Segment | None:
            found = self._client.get(part.name)
            return Segment.unpack(f"{self._where}: {part.name}", found[0]) if found is not None else None

        if len(parts) < 2:
            return [read(part) for part in parts]
        readers = Threads(AT_ONCE, "prefixstore-objects")
        jobs = [Job(read, part) for part in parts]
        try:
            for job in jobs:
                readers.submit_or_run(job)
            return [job.result() for job in jobs]
        finally:
            for job in jobs:
                job.end()
            readers.close()

    # -- committing ---------------------------------------------------------------------------------------------------

    def commit(self, segment: Segment, require: Callable[[Pages], None]) -> None:
        """Add a segment to the log, after everything that was committed until now.

        Parameters
        ----------
        segment
            What has changed.
        require
            Raises `ConflictError` if what others have committed meanwhile contradicts it. The pages are locked.

        Raises
        ------
        ConflictError
            Nothing was committed.
        UnavailableError
            If the server does not answer: whether it was committed shows at the next refresh.
        """
        packed, name = segment.pack(), new_segment_name()
        # one that is there already is this one: the reply to an earlier attempt was lost
        self._client.create(name, packed)
        for attempt in range(COMMITS):
            with self._entering:
                head, version = self._head, self._version
                with self.pages.lock:
                    try:
                        require(self.pages)
                    except ConflictError:
                        self._discard(name)
                        raise
            assert version is not None
            new = head.with_commit(name, len(packed), len(segment.groups))
            try:
                written = self._client.replace(HEAD, new.pack(), version)
            except UnavailableError:
                # it may have been written all the same
                self.refresh()
                if name in self._head.recent:
                    return
                raise
            if written is not None:
                self._committed(segment, new, written)
                return
            self._pause(attempt)
            self.refresh()
            if name in self._head.recent:
                return  # the reply to an earlier attempt was lost
        self._discard(name)
        raise ConflictError(f"{self._where}: other processes keep committing; try again")

    def _committed(self, segment: Segment, head: Head, version: Version) -> None:
        with self._entering:
            # another thread may have read it by now
            if self.pages.position == head.last - 1 and self._head.store == head.store:
                self._apply(self.pages, segment, head.parts[-1])
                self._head, self._version = head, version
                self._shown = max(self._shown, self.pages.shown_generation)

    def _discard(self, name: str) -> None:
        with suppress(StorageError):
            self._client.delete([name])

    def _replace_head(self, head: Head, version: Version, new: Head) -> bool:
        """Write the head that comes after this one; false if another process has been faster."""
        written = self._client.replace(HEAD, new.pack(), version)
        if written is not None:
            with self._entering:
                if self._head is head:
                    self._head, self._version = new, written
        return written is not None

    def _change_head(self, change: Callable[[Head], Head]) -> bool:
        """Replace the head by what it becomes, unless another process has been faster each time."""
        for attempt in range(COMMITS):
            with self._entering:
                head, version = self._head, self._version
            assert version is not None
            new = change(head)
            if self._replace_head(head, version, new):
                return True
            self._pause(attempt)
            self.refresh()
        return False

    @staticmethod
    def _pause(attempt: int) -> None:
        """Wait before new commits are read, not after: what was read is soon outdated."""
        time.sleep(random.random() * min(0.002 * 2**attempt, LONGEST_PAUSE))

    # -- making it shorter --------------------------------------------------------------------------------------------

    def shorten(self) -> None:
        """Merge small segments if there are many, after a commit. If that fails, the next process does it."""
        head = self._head
        if len(head.parts) <= MANY_SEGMENTS:
            return
        end = len(head.parts) - LEFT_SEGMENTS
        begin, n_bytes = end - 1, head.parts[end - 1].n_bytes
        while begin and head.parts[begin - 1].n_bytes < 2 * n_bytes:
            begin -= 1
            n_bytes += head.parts[begin].n_bytes
        try:
            self._merge(head, begin, end)
        except StorageError as error:
            log.info("%s: segments were not merged: %s", self._where, error)

    def fold(self) -> None:
        """Merge all segments into one, so that none contains deleted data any more.

        Raises
        ------
        UnavailableError
            If others commit all the time.
        """
        for _ in range(READS):
            self.refresh()
            head = self._head
            if not head.parts or self._merge(head, 0, len(head.parts)):
                return
        raise UnavailableError(f"{self._where}: other processes keep committing; try again")

    def _merge(self, head: Head, begin: int, end: int) -> bool:
        """Replace some segments by one; false if another process has changed the head first."""
        parts = list(head.parts[begin:end])
        if len(parts) == 1:
            return True
        merged = Segment(is_whole=begin == 0)
        for segment in self._read(parts):
            if segment is None:
                return False  # another process has merged it
            merged.followed_by(segment)
        if merged.is_whole:
            merged.forget()
        packed, name = merged.pack(), new_segment_name()
        self._client.create(name, packed)
        if not self._publish_merged(parts, begin, name, len(packed)):
            self._discard(name)
            return False
        self._client.delete([part.name for part in parts])
        return True

    def _publish_merged(self, parts: list[Part], begin: int, name: str, n_bytes: int) -> bool:
        """Put one segment in place of these; false if they are not there any more. Without a reply nothing is known."""
        end = begin + len(parts)
        for _ in range(READS):
            with self._entering:
                head, version = self._head, self._version
            if any(part.name == name for part in head.parts):
                return True  # the reply to an earlier attempt was lost
            if list(head.parts[begin:end]) != parts:
                return False
            assert version is not None
            new = head.with_merged(begin, end, name, n_bytes)
            if self._replace_head(head, version, new):
                return True
            self.refresh()
        return False

    def segments(self) -> set[str]:
        """The names of all segments, as of the last refresh."""
        return {part.name for part in self._head.parts}
