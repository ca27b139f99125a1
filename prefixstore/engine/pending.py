"""Pages that are not committed yet, and the other changes that wait for the next commit."""

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

__all__ = ["Damage", "Deferred", "DropReason", "Outdated", "PendingPage", "Use"]


class Use(NamedTuple):
    """Uses of a page that are still to be written.

    Attributes
    ----------
    n
        How many.
    last_used, expires, uses, page_class
        Of the page, after them.
    """

    n: int
    last_used: int
    expires: int
    uses: int
    page_class: int

    def apply(self, page: Page) -> None:
        """Have a page that was read from the location count them."""
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
    """A page that was captured, and the buffer with its state; or one that was stored elsewhere, and is imported.

    Attributes
    ----------
    page
        The page. It can be matched as soon as the catalog has it.
    settings
        Canonical settings of its namespace.
    buffer
        The state; None if this process has only the stored form, or has it no longer.
    usage
        The usage that an imported page has had elsewhere; None of a captured one.
    is_wanted
        Whether it is stored even if the policy finds it worth less than what is evicted for it.
    is_writing
        Whether a transaction writes it.
    record, payload
        What is to be stored: of a captured page, once it is packed.
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
        """The page with these token bytes after `parent`."""
        now = time.time_ns()
        key = page_key(parent, tokens, form)
        page = Page(key, parent, namespace, start, tokens, len(buffer.view), 0, compute_us, now, now, form=form)
        return cls(page, settings, buffer)

    @classmethod
    def from_stored(cls, stored: StoredPage, settings: bytes) -> PendingPage:
        """The page of a file or of another location, whose clock may have been wrong."""
        now, record = time.time_ns(), stored.record
        usage = replace(stored.usage, last_used=time_of_use(stored.usage.last_used, now) or now)
        new = cls(Page.stored(stored.key, record, usage), settings, None, usage=usage, is_wanted=True)
        new.record, new.payload = record, stored.payload
        return new

    @property
    def is_captured(self) -> bool:
        """Whether it was captured here, and not imported."""
        return self.usage is None

    @property
    def n_bytes(self) -> int:
        """Bytes in memory that it holds."""
        return self.page.raw_bytes if self.is_captured else len(self.payload)

    def release(self) -> None:
        """Give the memory of a captured page back, once a commit has ended."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self.payload = b""
            buffer.release()

    def pack(self, encode: Encoder) -> None:
        """Have its stored form in `record` and `payload`."""
        if not self.is_captured:
            return
        page, state = self.page, self.buffer.view if self.buffer is not None else memoryview(b"")
        # a page that holds tokens only says nothing about how well states compress
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
    """When a page that is to be deleted was created, 0 if that is not known.

    One that `is_useless` was read, and cannot be used though its checksum is right.
    """

    created: int
    is_useless: bool = False


@dataclass
class Deferred:
    """What the next commit writes besides new pages.

    Attributes
    ----------
    uses
        Uses of pages, by key.
    damaged
        Pages to be deleted if they are indeed damaged, or useless, by key.
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
        """A copy; more may be added to the original meanwhile."""
        return Deferred(dict(self.uses), dict(self.damaged), set(self.thinned), self.expired)

    def subtract(self, done: Deferred) -> None:
        """Remove what was written; keep what was added since."""
        for key, use in done.uses.items():
            now = self.uses.pop(key, None)
            if now is not None and now.n > use.n:
                self.uses[key] = now._replace(n=now.n - use.n)
        for key in done.damaged:
            self.damaged.pop(key, None)
        self.thinned -= done.thinned
        self.expired = self.expired and not done.expired
