"""The contract between the engine and the place where bytes are kept.

A backend moves records, usage and payloads, and nothing else: hashing, compression, eviction and budgets are
implemented once, above it. It has two kinds of access:

- a **view** reads. It sees everything that was committed before it opened (later commits may or may not be visible),
  never waits for a writer, and the memory of a payload that it returned stays readable and unchanged until the view
  closes, even if the page is deleted meanwhile. The caller owns nothing and copies nothing.
- an **update** is a transaction that reads and writes, one at a time among all threads and processes that share the
  location. What it wrote becomes visible to others as a whole when it closes, and not at all if it closes with an
  exception or its process dies. A loss of power may lose what was committed since the last `Backend.sync`, the newest
  first, and nothing else.

A thread holds one view or update of a backend at a time, and does not fork while it holds one.

A missing key is ``None``, never an exception. The errors are those of `prefixstore.errors.StorageError`:
`FullError` (evict, `Backend.reclaim`, and try again), `UnavailableError` (worth a retry later), `CorruptError` and
`IncompatibleError` (not worth one). A new backend is one module, one line in ``backends/__init__.py`` (or an entry
point of another package) and one subclass of `prefixstore.testing.BackendContract`. The methods that are not
abstract have working defaults; a backend on a server replaces those that would send one query for each page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.record import Buffer, Record, Usage

__all__ = ["CHANGES_KEPT", "Backend", "Transaction", "Used", "View"]

# generations for which our own backends remember what changed
CHANGES_KEPT = 4096


@dataclass(frozen=True)
class Used:
    """What a location holds, index included."""

    bytes: int
    entries: int


class View(ABC):
    """The committed state of a location. May be handed from one thread to another, but not used by two at once."""

    @property
    @abstractmethod
    def generation(self) -> int:
        """Number of transactions that have changed pages: put, deleted, or announced a usage.

        Equal generations hold equal pages.
        """

    @abstractmethod
    def changes(self, since: int) -> list[bytes] | None:
        """Keys of pages changed after generation `since`, oldest first; None if that is too long ago."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        """All pages: key, record (or why it cannot be read), usage. In no particular order."""

    @abstractmethod
    def record(self, key: bytes) -> Record | None:
        """The record of a page. Raises `CorruptError` or `IncompatibleError` if it cannot be read."""

    @abstractmethod
    def usage(self, key: bytes) -> Usage | None:
        """The usage of a page."""

    @abstractmethod
    def payload(self, key: bytes) -> Buffer | None:
        """The stored bytes of a page, valid until the view closes. They are not verified."""

    def records(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Record | StorageError, Usage]]:
        """Records (or why they cannot be read) and usage of those of these pages that are stored."""
        found: dict[bytes, tuple[Record | StorageError, Usage]] = {}
        for key in keys:
            try:
                record = self.record(key)
                if record is not None:
                    found[key] = record, self.usage(key) or Usage(record.created)
            except (CorruptError, IncompatibleError) as error:
                found[key] = error, Usage(0)
        return found

    def fetch(self, keys: Sequence[bytes]) -> Iterator[tuple[Record, Buffer]]:
        """Record and payload of these pages, in order, up to the first that is missing. They are not verified.

        Raises what `record` raises, when that page's turn comes, and `CorruptError` for a record without a payload.
        """
        for key in keys:
            record = self.record(key)
            if record is None:
                return
            payload = self.payload(key)
            if payload is None:
                raise CorruptError(f"page {key.hex()} has no payload")
            yield record, payload

    @abstractmethod
    def payload_keys(self) -> Iterator[bytes]:
        """Keys of all payloads, for `check`."""

    @abstractmethod
    def namespaces(self) -> Mapping[bytes, bytes]:
        """Canonical settings of the namespaces that have pages here, by key."""

    def namespace(self, key: bytes) -> bytes | None:
        """Canonical settings of one namespace."""
        return self.namespaces().get(key)

    def note(self, name: bytes) -> bytes | None:
        """The note that `Transaction.put_note` wrote under this name."""
        return None

    @property
    @abstractmethod
    def used(self) -> Used:
        """What the location holds, index included; inside a transaction, with what it has written so far."""


class Transaction(View):
    """Exclusive and all or nothing."""

    @abstractmethod
    def cost(self, record: Record, n_bytes: int) -> int:
        """The most that `used` can grow by, in bytes, if this record is put with a payload of `n_bytes`."""

    @abstractmethod
    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        """Write a page. `payload` is copied before the call returns. Raises `FullError` if it does not fit."""

    @abstractmethod
    def delete(self, key: bytes) -> bool:
        """Delete a page, its usage and payload; returns whether anything of it was stored."""

    @abstractmethod
    def touch(self, key: bytes, usage: Usage, *, announce: bool = False) -> None:
        """Replace the usage of a page; nothing happens if the page is gone.

        With `announce` it is a change of the page, which other processes read at their next lookup: so for pins, and
        for expiry. Otherwise it does not change `generation`, as uses are too frequent for that.
        """

    @abstractmethod
    def put_namespace(self, key: bytes, settings: bytes) -> None:
        """Store the canonical settings of a namespace."""

    def put_note(self, name: bytes, value: bytes | None) -> None:
        """Write a short note for other processes; None deletes it. Does not change `generation`.

        Warming jobs divide their work by notes. A backend without notes ignores them: then each job does all the work.
        """

    def drop_namespace(self, key: bytes) -> None:
        """Forget the settings of a namespace that has no pages any more."""


class Backend(ABC):
    """A location that keeps pages. Safe to use from many threads."""

    @property
    @abstractmethod
    def location(self) -> str:
        """The location as a URL."""

    @abstractmethod
    def view(self) -> AbstractContextManager[View]:
        """Read the committed state. Raises `UnavailableError` or `CorruptError`."""

    @abstractmethod
    def update(self) -> AbstractContextManager[Transaction]:
        """Read and write. Waits for other transactions; leaving the block commits."""

    @property
    def is_local(self) -> bool:
        """Whether it answers from this machine: then one slow answer says more about the machine than about it."""
        return False

    @abstractmethod
    def sync(self) -> None:
        """Return when everything committed so far survives a loss of power, as far as the location can promise it."""

    def reclaim(self) -> None:  # noqa: B027 - most backends have nothing to do
        """Make space that deletions freed usable for the next update."""

    def scrub(self) -> None:
        """Overwrite what deletions have freed, so that nothing of a deleted page can be read from the files.

        Raises `UnavailableError` if that is not possible now, because a reader still sees it. What the location cannot
        promise is described in ``docs/backends.md``.
        """
        self.reclaim()

    def compact(self) -> int:
        """Give space that deletions freed back to the disk; returns its bytes. Raises `UnavailableError`."""
        return 0

    @abstractmethod
    def after_fork(self) -> None:
        """Called in a forked child before anything else: drop what belongs to the parent. No other thread runs.

        What takes part in forks by itself (`backends.forks`), such as an open handle, has been renewed by then.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the location. A second call does nothing."""
