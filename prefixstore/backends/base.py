"""What the engine asks of a location: pages, found by their keys and among their siblings.

`prefixstore.engine.pages` answers, over a backend that keeps rows. There are two kinds of access:

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
`IncompatibleError` (not worth one).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import wraps
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from prefixstore.backends.contract import ConflictError
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, TOKEN_BYTES
from prefixstore.format.record import Buffer, Record, Usage

if TYPE_CHECKING:
    from prefixstore.backends.contract import View as RowView
    from prefixstore.engine.keyspace import Count

__all__ = [
    "CHANGES_KEPT",
    "CONFLICTS",
    "FACTS",
    "Backend",
    "Entry",
    "Facts",
    "Transaction",
    "Used",
    "View",
    "facts_of",
    "retried",
    "tokens_of",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# generations for which the backends of prefixstore remember what changed
CHANGES_KEPT = 4096

Facts: TypeAlias = npt.NDArray[np.void]
# What `View.facts` returns of a page: all but its tokens, its checksum and its payload.
FACTS = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("parent", f"V{KEY_BYTES}"),
        ("namespace", f"V{KEY_BYTES}"),
        ("raw_bytes", "<u8"),
        ("stored_bytes", "<u8"),
        ("created", "<u8"),
        ("last_used", "<u8"),
        ("expires", "<u8"),
        ("start", "<u4"),
        ("n_tokens", "<u4"),
        ("compute_us", "<u4"),
        ("hits", "<u4"),
        ("priority", "<i2"),
        ("form", "u1"),
        ("pinned", "?"),
        ("is_readable", "?"),
    ]
)


class Entry(NamedTuple):
    """A stored page without its payload: its key, its record, or why that cannot be read, and its usage."""

    key: bytes
    record: Record | StorageError
    usage: Usage


@dataclass(frozen=True)
class Used:
    """What a location holds, index included."""

    bytes: int
    entries: int


# how often work is done that contradicts what another process has committed meanwhile
CONFLICTS = 8


def retried(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Retry a function that is one transaction if it raises `ConflictError`, a limited number of times."""

    @wraps(work)
    def retrying(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for _ in range(CONFLICTS - 1):
            with suppress(ConflictError):
                return work(*args, **kwargs)
        return work(*args, **kwargs)

    return retrying


class View(ABC):
    """The committed state of a location. May be handed from one thread to another, but not used by two at once.

    Attributes
    ----------
    arrived
        How many bytes of the payload that `fetch` receives have arrived, if the backend knows. Any thread may read it.
    """

    arrived: int = 0

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

    def leading(self, keys: Sequence[bytes]) -> list[Entry]:
        """The first pages of a sequence that are stored, up to the first that is missing.

        No page is stored without its parent, so a bisection finds how many there are.

        Parameters
        ----------
        keys
            Of consecutive pages of one sequence, parents first.
        """
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self.records([keys[middle]]):
                low = middle + 1
            else:
                high = middle
        found = self.records(keys[:low])
        return [Entry(key, *found[key]) for key in takewhile(found.__contains__, keys[:low])]

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        """The children of a page between which a page with these tokens would be, by the bytes of their tokens.

        At most two: the last child whose tokens are not above `tokens`, and the first one whose tokens are. One of them
        has the longest prefix in common with `tokens` of all children. Snapshots do not count.

        Parameters
        ----------
        parent
            Key of the parent, or of the namespace: then first pages are its children.
        tokens
            Little-endian int32 bytes.
        """
        children = [each for each in self.children([parent], PAGE) if isinstance(each.record, Record)]
        ordered = sorted(children, key=tokens_of)
        n_below = sum(tokens_of(each) <= tokens for each in ordered)
        return ordered[max(n_below - 1, 0) : n_below + 1]

    def beside(self, parent: bytes, tokens: bytes, parents: Sequence[bytes]) -> tuple[list[Entry], list[Entry]]:
        """`neighbors` of one page, and the snapshots after some pages: in one request, if the location is a server."""
        return self.neighbors(parent, tokens), self.children(parents, SNAPSHOT)

    @abstractmethod
    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        """The children of these pages that have this form, each parent's in the order of their tokens.

        Parameters
        ----------
        parents
            Keys of pages, or of namespaces, whose children are their first pages.
        form
            `PAGE` or `SNAPSHOT`.
        at_most
            How many of each parent, the first ones.
        """

    @abstractmethod
    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of these pages, or namespaces, that are the parent of a stored page, even of an unreadable one."""

    @abstractmethod
    def facts(self, after: bytes, at_most: int) -> Facts:
        """Facts of the pages whose keys come after this one, in the order of their keys.

        Parameters
        ----------
        after
            A key, or ``b""`` for the first pages.
        at_most
            How many pages.

        Returns
        -------
        numpy.ndarray
            Of type `FACTS`, shape ``(n,)``; n is 0 only after the last page. Records are not verified: what reads one
            finds out. Those that cannot be read at all have nothing but a key.
        """

    @abstractmethod
    def fetch(self, keys: Sequence[bytes]) -> Iterator[tuple[Record, Buffer]]:
        """Record and payload of these pages, in order, up to the first that is missing. They are not verified.

        The two belong together even if the page is put again meanwhile: a backend whose views see later commits has to
        read both at once.

        Raises what `record` raises, when that page's turn comes, and `CorruptError` for a record without a payload.
        """

    @abstractmethod
    def stored(self) -> Iterator[tuple[bytes, Record | StorageError, Buffer | StorageError | None]]:
        """All pages with their payloads, for `check`, in no particular order and in bounded memory.

        Yields the key, the record and the payload of each page, or why one of them cannot be read. Payloads are not
        verified, and are valid until the next page is requested. A page without a payload has None, and so does one
        whose record cannot be read.
        """

    @abstractmethod
    def namespaces(self) -> Mapping[bytes, bytes]:
        """Canonical settings of the namespaces that have pages here, by key."""

    @abstractmethod
    def namespace(self, key: bytes) -> bytes | None:
        """Canonical settings of one namespace."""

    @abstractmethod
    def note(self, name: bytes) -> bytes | None:
        """The note that `Transaction.put_note` wrote under this name."""

    def flaws(self) -> Iterator[tuple[str, bytes, str]]:
        """Faults of what a backend keeps beside the pages, such as an index of children, for `check`.

        Each is a rule of `prefixstore.engine.invariants.Violation` (``"index"`` if `Backend.reindex` mends it,
        ``"orphan"`` if `Transaction.delete` does), the key of the page or ``b""``, and a message. Raises `CorruptError`
        if the location cannot be used at all.
        """
        return iter(())

    @property
    def rows(self) -> RowView:
        """The rows of the location, for what eviction samples."""
        raise NotImplementedError

    def count(self, namespace: bytes | None = None) -> Count:
        """What a namespace holds, or all of them."""
        raise NotImplementedError

    def namespaces_of(self, salt: str) -> set[bytes]:
        """The namespaces with this salt that have pages."""
        raise NotImplementedError

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """The bytes of all payloads as stored, and of the states that they decode to."""

    @property
    @abstractmethod
    def used(self) -> Used:
        """The size of the location, index included; inside a transaction, including what it has written so far."""


def tokens_of(entry: Entry) -> bytes:
    """The tokens of a page that can be read."""
    assert isinstance(entry.record, Record)
    return entry.record.tokens


def facts_of(entry: Entry) -> tuple[object, ...]:
    """The values of `FACTS` for one page."""
    key, record, usage = entry
    if not isinstance(record, Record):
        return key, b"", b"", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, False, False
    return (
        key,
        record.parent,
        record.namespace,
        record.raw_bytes,
        record.stored_bytes,
        record.created,
        usage.last_used,
        usage.expires,
        record.start,
        len(record.tokens) // TOKEN_BYTES,
        min(record.compute_us, 2**32 - 1),
        min(usage.hits, 2**32 - 1),
        usage.priority,
        record.form,
        usage.pinned,
        True,
    )


class Transaction(View):
    """Exclusive and all or nothing."""

    # Set by the update that fills an empty location, if generations begin with the time there: the one before its own,
    # which no other location has had.
    began = 0

    @abstractmethod
    def cost(self, record: Record, n_bytes: int) -> int:
        """The most that `used` can grow by, in bytes, if this record is put with a payload of `n_bytes`."""

    @abstractmethod
    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        """Write a page. The memory of `payload` must stay valid until the transaction ends. May raise `FullError`."""

    @abstractmethod
    def delete(self, key: bytes) -> bool:
        """Delete a page, its usage and payload; returns whether anything of it was stored."""

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        """Read what touching these pages needs, at once."""

    def drop_leaf(self, namespace: bytes, key: bytes) -> None:
        """Have eviction no longer choose a page that is not stored."""

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
        """Whether it is on this machine: then one slow answer says more about the machine than about the location."""
        return False

    @abstractmethod
    def sync(self) -> None:
        """Return when everything committed so far survives a loss of power, as far as the location can promise it."""

    def reclaim(self) -> None:  # noqa: B027 - most backends have nothing to do
        """Make the space freed by deletions usable for the next update."""

    def scrub(self) -> None:
        """Overwrite what deletions have freed, so that nothing of a deleted page can be read from the files.

        Raises `UnavailableError` if that is not possible now, because a reader still sees it. What the location cannot
        promise is described in ``docs/backends.md``.
        """
        self.reclaim()

    def compact(self) -> int:
        """Return space freed by deletions to the disk; returns the number of bytes. Raises `UnavailableError`."""
        return 0

    def reindex(self) -> None:  # noqa: B027 - most backends have nothing to do
        """Rebuild what is derived from pages, such as an index of children. Meanwhile pages may not be found.

        If there is any, `View.changes` since an earlier generation is None from then on: what others have read before
        may have been wrong.
        """

    @abstractmethod
    def after_fork(self) -> None:
        """Called in a forked child before anything else: drop what belongs to the parent. No other thread runs.

        What takes part in forks by itself (`backends.forks`), such as an open handle, has been renewed by then.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the location. A second call does nothing."""
