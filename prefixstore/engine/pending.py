"""Pending pages, which are not committed yet, and other changes that the next commit writes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.page import Page
from prefixstore.format.autocodec import Encoder
from prefixstore.format.keys import PAGE, page_key
from prefixstore.format.record import Buffer, Record, StoredPage, Usage, checksum, time_of_use


class Use(NamedTuple):
    """Uses of a page that are not written yet: how many (`n`), and what they make of its usage."""

    n: int
    last_used: int
    expires: int
    uses: int
    page_class: int

    def apply(self, page: Page) -> None:
        """Add them to a page as it is stored."""
        page.hits += self.n
        if self.last_used > page.last_used:
            page.last_used, page.uses, page.page_class = self.last_used, max(self.uses, page.uses), self.page_class
        if page.expires:
            page.expires = max(page.expires, self.expires)


class DropReason(str, Enum):
    """Why a commit does not store a captured page: the name in ``Stats.dropped``."""

    BUDGET = "budget"
    QUOTA = "quota"
    FULL = "full"
    ORPHAN = "orphan"
    UNAVAILABLE = "unavailable"
    ERROR = "error"
    ADMISSION = "admission"


class Outdated(str, Enum):
    """Why a captured page was given up before it was written: the names in ``Stats.outdated``."""

    SUPERSEDED = "superseded"
    THINNED = "thinned"
    DELETED = "deleted"


@dataclass(slots=True, eq=False)
class PendingPage:
    """A captured page and the buffer with its state, or a page that is imported from elsewhere.

    Attributes
    ----------
    settings
        Canonical settings of its namespace.
    buffer
        The state; None of an imported page, or once it was released.
    usage
        The usage that an imported page had elsewhere; None of a captured one.
    is_wanted
        Whether it is stored even if the policy finds it worth less than its victims.
    is_writing
        Whether an update is writing it.
    record, payload
        What is stored; of a captured page, once it is packed.
    """

    page: Page
    settings: bytes
    buffer: PooledBuffer | None
    usage: Usage | None = field(default=None, kw_only=True)
    is_wanted: bool = field(default=False, kw_only=True)
    is_writing: bool = field(default=False, init=False)
    record: Record = field(init=False)
    payload: Buffer = field(default=b"", init=False)

    @classmethod
    def of(
        cls,
        namespace: bytes,
        settings: bytes,
        parent: bytes,
        start: int,
        tokens: bytes,
        buffer: PooledBuffer,
        compute_us: int = 0,
        form: int = PAGE,
    ) -> PendingPage:
        """A captured page with these token bytes after `parent`."""
        now = time.time_ns()
        key = page_key(parent, tokens, form)
        page = Page(key, parent, namespace, start, tokens, len(buffer.view), 0, compute_us, now, now, form=form)
        return cls(page, settings, buffer)

    @classmethod
    def from_stored(cls, stored: StoredPage, settings: bytes) -> PendingPage:
        """A page to import, from a file or another location, whose clock may have been wrong."""
        now, record = time.time_ns(), stored.record
        usage = replace(stored.usage, last_used=time_of_use(stored.usage.last_used, now) or now)
        new = cls(Page.stored(stored.key, record, usage), settings, None, usage=usage, is_wanted=True)
        new.record, new.payload = record, stored.payload
        return new

    @property
    def is_captured(self) -> bool:
        """Whether it was captured, and not imported."""
        return self.usage is None

    @property
    def n_bytes(self) -> int:
        """How many bytes of memory it holds."""
        return self.page.raw_bytes if self.is_captured else len(self.payload)

    def release(self) -> None:
        """Release the memory of a captured page."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self.payload = b""
            buffer.release()

    def pack(self, encode: Encoder) -> None:
        """Make `record` and `payload` of a captured page."""
        if not self.is_captured:
            return
        page, state = self.page, self.buffer.view if self.buffer is not None else memoryview(b"")
        # a page without a state says nothing about how well states compress
        codec, self.payload = encode(page.namespace, state) if page.raw_bytes else (0, b"")
        self.record = Record(
            page.namespace,
            page.parent,
            page.start,
            page.tokens,
            codec,
            page.raw_bytes,
            len(self.payload),
            checksum(self.payload),
            page.compute_us,
            page.created,
            page.form,
        )


class Damage(NamedTuple):
    """When a damaged page was created, 0 if unknown; and whether it is useless: intact, but fits no context."""

    created: int
    is_useless: bool = False


@dataclass
class Deferred:
    """What the next commit changes besides adding pages.

    Attributes
    ----------
    damaged
        Pages to delete if they are really damaged or useless, by key.
    thinned
        Keys of snapshots that are no longer wanted.
    expired
        Whether to look for expired pages: a lookup has found one, or a page that will expire was captured.
    """

    uses: dict[bytes, Use] = field(default_factory=dict)
    damaged: dict[bytes, Damage] = field(default_factory=dict)
    thinned: set[bytes] = field(default_factory=set)
    expired: bool = False

    def __bool__(self) -> bool:
        return bool(self.uses or self.damaged or self.thinned or self.expired)

    def copy(self) -> Deferred:
        """A copy, which does not change when more is deferred."""
        return Deferred(dict(self.uses), dict(self.damaged), set(self.thinned), self.expired)

    def subtract(self, done: Deferred) -> None:
        """Remove what was written; keep what was deferred since."""
        for key, use in done.uses.items():
            now = self.uses.pop(key, None)
            if now is not None and now.n > use.n:
                self.uses[key] = now._replace(n=now.n - use.n)
        for key in done.damaged:
            self.damaged.pop(key, None)
        self.thinned -= done.thinned
        self.expired = self.expired and not done.expired
