"""Pages that are not committed yet, and the other changes that wait for the next commit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.index import Page
from prefixstore.format.autocodec import Encoder
from prefixstore.format.keys import PAGE, page_key
from prefixstore.format.record import Buffer, Record, StoredPage, Usage, checksum, time_of_use

__all__ = ["Damage", "Deferred", "PackedPage", "PendingPage", "Use"]


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


class PackedPage(NamedTuple):
    """A pending page, ready to be written."""

    pending: PendingPage
    record: Record
    usage: Usage | None
    """None: the usage that it has when it is written."""
    payload: Buffer


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
        The state; None if this process has only the stored form.
    stored
        What another location has stored, usage included, and is written as it is; None of a captured page.
    is_wanted
        Whether it is stored even if the policy finds it worth less than what is evicted for it.
    is_writing
        Whether a transaction writes it.
    """

    page: Page
    settings: bytes
    buffer: PooledBuffer | None
    stored: StoredPage | None = field(default=None, kw_only=True)
    is_wanted: bool = field(default=False, kw_only=True)
    is_writing: bool = field(default=False, init=False)

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
        now = time.time_ns()
        usage = replace(stored.usage, last_used=time_of_use(stored.usage.last_used, now) or now)
        stored = stored._replace(usage=usage)
        return cls(Page.stored(stored.key, stored.record, usage), settings, None, stored=stored, is_wanted=True)

    @property
    def n_bytes(self) -> int:
        """Bytes in memory that it holds."""
        if self.stored is not None:
            return len(self.stored.payload)
        return len(self.buffer.view) if self.buffer is not None else 0

    def release(self) -> None:
        """Give the buffer back. A second call does nothing."""
        # a second release of the buffer itself would take it from another holder
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.release()

    def pack(self, encode: Encoder) -> PackedPage:
        """Its stored form."""
        if self.stored is not None:
            return PackedPage(self, self.stored.record, self.stored.usage, self.stored.payload)
        page, state = self.page, self.buffer.view if self.buffer is not None else memoryview(b"")
        # a page that holds tokens only says nothing about how well states compress
        codec, payload = encode(page.namespace, state) if page.raw_bytes else (0, b"")
        record = Record(
            page.namespace,
            page.parent,
            page.start,
            page.tokens,
            codec,
            page.raw_bytes,
            len(payload),
            checksum(payload),
            page.compute_us,
            page.created,
            page.form,
        )
        return PackedPage(self, record, None, payload)


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
