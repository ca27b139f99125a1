"""A location of pages, kept in the rows of a backend (`engine.keyspace`).

A caller holds one view or update of a location at a time, and does not fork while it holds one. The errors are those of
`prefixstore.errors.StorageError`: `FullError` (evict, `Backend.reclaim`, and try again), `UnavailableError` (worth a
retry later), `CorruptError` and `IncompatibleError` (not worth one).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from prefixstore.backends import contract, is_persistent, open_backend
from prefixstore.backends.contract import ConflictError, Range, Row
from prefixstore.backends.encryption_keys import Key, KeyProvider, Keys, provider_of
from prefixstore.engine import child_rows, keyspace
from prefixstore.engine.invariants import HOLLOW, LOST, MISPLACED, STRAY_LEAVES, WRONG_LEAVES, Check
from prefixstore.engine.page_update import PageUpdate
from prefixstore.engine.page_view import PageView
from prefixstore.engine.trie import Trie
from prefixstore.errors import (
    ClosedError,
    FullError,
    IncompatibleError,
    LocationError,
    MissingExtraError,
    PrefixStoreError,
    StorageError,
    UnavailableError,
)

if TYPE_CHECKING:
    from prefixstore.engine.encrypted import Encrypted

log = logging.getLogger("prefixstore")

_P = ParamSpec("_P")
_T = TypeVar("_T")

# what `Pages.reindex` mends, in this order, and how
MENDED: Sequence[tuple[Check, Callable[[PageUpdate, Row], None]]] = (
    (LOST, PageUpdate.enter),
    (MISPLACED, lambda transaction, row: child_rows.take_out(transaction.rows, row.key)),
    (HOLLOW, lambda transaction, row: child_rows.mend_child(transaction.rows, row.key)),
    (WRONG_LEAVES, lambda transaction, row: transaction.mend_leaf(row.key[1:])),
    (STRAY_LEAVES, lambda transaction, row: transaction.rows.delete(row.key)),
)
# how many rows a rebuild of the index looks at in one update, if there is space for it
REINDEXED_AT_ONCE = 512
# up to this many pages the index is mended at once, which takes some seconds
MENDED_AT_ONCE = 20_000
# Each pass removes the last rows of chains of child rows that lead to no page. A longer chain was forged, and takes
# more than one repair.
PASSES = 256
# how often an update is tried that conflicts with what another process has committed meanwhile
CONFLICTS = 8


def retried(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that is one update, retried a limited number of times if it raises `ConflictError`."""

    @wraps(work)
    def retrying(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for _ in range(CONFLICTS - 1):
            with suppress(ConflictError):
                return work(*args, **kwargs)
        return work(*args, **kwargs)

    return retrying


def fewer(pages: Pages, at_once: int, error: FullError) -> int:
    """How many pages or rows to change in one update, after a location had no space to change `at_once`.

    Deleting needs space as well, until the update is committed. Raises `error` if it was a single one.
    """
    if at_once == 1:
        raise error
    with suppress(FullError):
        pages.rows.reclaim()
    return max(at_once // 4, 1)


class Pages:
    """A location of pages. Safe to use from many threads.

    Parameters
    ----------
    rows
        The backend, which is closed with this; None if the location could not be reached.
    location, open_it
        The URL of such a location, and the function that opens it. A later request calls that, and if it fails, the
        next one; the circuit breaker makes pauses in between.
    """

    encrypted: Encrypted | None = None

    def __init__(
        self,
        rows: contract.Backend | None,
        location: str = "",
        open_it: Callable[[], Pages] | None = None,
    ) -> None:
        self._backend = rows
        self._location = location
        self._open_it = open_it
        self._opening = threading.Lock()
        self._is_closed = False
        self.trie = Trie()
        self._is_torn = False

    def encrypt(self, provider: KeyProvider, keys: Keys, on_undecryptable: Callable[[], object]) -> None:
        """Encrypt everything from now on. Raises what `Encrypted` raises."""
        try:
            from prefixstore.engine.encrypted import Encrypted  # noqa: PLC0415 - the extra "encryption"
        except ImportError as error:
            raise MissingExtraError('a key needs cryptography; pip install "prefixstore[encryption]"') from error
        self.encrypted = Encrypted(self.rows, provider, keys, on_undecryptable)

    @property
    def rows(self) -> contract.Backend:
        """The backend.

        Raises
        ------
        UnavailableError
            If it could not be reached before, and cannot be now, or another thread is trying.
        """
        return self._backend if self._backend is not None else self._opened()

    def _opened(self) -> contract.Backend:
        if not self._opening.acquire(blocking=False):
            raise UnavailableError(f"{self._location} is being opened")
        try:
            if self._is_closed:
                raise ClosedError("the store is closed; open a new PrefixStore")
            if self._backend is None:
                assert self._open_it is not None
                try:
                    opened = self._open_it()
                except StorageError:
                    raise
                except PrefixStoreError as error:
                    raise UnavailableError(f"{self._location} cannot be opened: {error}") from error
                self.encrypted, self._backend = opened.encrypted, opened.rows
                log.warning("%s is reachable now", self._location)
            return self._backend
        finally:
            self._opening.release()

    @property
    def location(self) -> str:
        """The location as a URL."""
        return self._backend.location if self._backend is not None else self._location

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine: see `Backend.is_local`."""
        return self._backend is not None and self._backend.is_local

    @contextmanager
    def view(self) -> Iterator[PageView]:
        """Read the committed state. Raises `UnavailableError` or `CorruptError`."""
        rows = self.rows
        with (self.encrypted or rows).view() as view:
            yield PageView(view, rows, self.trie)

    @contextmanager
    def update(self) -> Iterator[PageUpdate]:
        """Read and write. Waits for other updates; leaving the block commits.

        After that, call `mend` if damaged pages may have been deleted.
        """
        rows = self.rows
        with (self.encrypted or rows).update() as update:
            transaction = PageUpdate(update, rows)
            yield transaction
            transaction.finish()
        self._is_torn = self._is_torn or transaction.is_torn

    def sync(self) -> None:
        """Return when everything committed so far survives a loss of power, as far as the location can promise it."""
        self.rows.sync()

    def mend(self) -> None:
        """Mend the index if a page was deleted whose damaged record left index rows behind.

        In a large location, where others would wait too long, only a repair does that.
        """
        if not self._is_torn:
            return
        # if it fails, the next deletion tries again
        with suppress(StorageError):
            with self.view() as view:
                n_pages = view.used.entries
            if n_pages <= MENDED_AT_ONCE:
                self.reindex()
            else:
                log.warning("%s: a damaged page was deleted; run: prefixstore check --repair", self.location)
            self._is_torn = False

    def reindex(self) -> None:
        """Mend all index rows, some pages at a time, and count everything again."""
        for check, mend in MENDED:
            for _ in range(PASSES if check.kind == keyspace.CHILD else 1):
                if not self._mend_all(check, mend):
                    break
        self._correct_counts()

    def _mend_all(self, check: Check, mend: Callable[[PageUpdate, Row], None]) -> bool:
        """Mend all rows that a check finds wrong, some at a time; returns whether there were any."""
        was_wrong, start, at_once = False, check.kind, REINDEXED_AT_ONCE
        while start:
            try:
                start, is_wrong = self._mend_some(check, mend, start, at_once)
            except FullError as error:
                at_once = fewer(self, at_once, error)
                continue
            was_wrong = was_wrong or is_wrong
        return was_wrong

    @retried
    def _mend_some(
        self, check: Check, mend: Callable[[PageUpdate, Row], None], start: bytes, at_once: int
    ) -> tuple[bytes, bool]:
        """Mend the wrong ones of the next rows, in one update.

        Returns where the rows after them begin (``b""`` after the last one), and whether any was wrong.
        """
        with self.update() as transaction:
            rows = transaction.rows.ranges([Range(start, keyspace.everything(check.kind).stop, at_once)])[0]
            wrong = list(check.find(transaction, rows))
            for one in wrong:
                mend(transaction, one.row)
        return rows[-1].key + b"\0" if rows else b"", bool(wrong)

    @retried
    def _correct_counts(self) -> None:
        with self.update() as transaction:
            transaction.replace_counts(transaction.recount())

    def undecryptable(self, *, delete: bool = False) -> int:
        """How many rows of an encrypted location cannot be decrypted; with `delete` they are deleted."""
        return self.encrypted.undecryptable(delete=delete) if self.encrypted is not None else 0

    def after_fork(self) -> None:
        """Called in a forked child before anything else: drop what belongs to the parent. No other thread runs.

        What takes part in forks by itself (`backends.forks`), such as an open handle, has been renewed by then.
        """
        self._opening = threading.Lock()
        if self._backend is not None:
            self._backend.after_fork()

    def close(self) -> None:
        """Release the location. A second call does nothing."""
        self._is_closed = True
        # waits if the location is being opened
        with self._opening:
            if self._backend is not None:
                self._backend.close()


def open_pages(
    location: str | os.PathLike[str] | None,
    *,
    max_bytes: int,
    read_only: bool = False,
    key: Key | None = None,
    count: Callable[[str], object] = lambda _: None,
) -> Pages:
    """Open the location that a path or a URL names; see `prefixstore.backends.open_backend`.

    Parameters
    ----------
    location, max_bytes, read_only
        As there.
    key
        Where the keys of an encrypted location are, or ``"none"`` for one that is not encrypted; by default as the
        variable `prefixstore.backends.encryption_keys.ENVIRONMENT` says. What is in memory is not encrypted.
    count
        Called for each row or payload that cannot be decrypted, with the name under which it is counted.

    Raises
    ------
    LocationError
        Also if it is encrypted and no key is given, or the reverse.
    """
    provider = provider_of(key) if is_persistent(location) else None
    # first: a location that cannot be encrypted is not created
    keys = Keys.read(provider) if provider is not None else None
    rows = open_backend(location, max_bytes=max_bytes, read_only=read_only)
    try:
        pages = Pages(rows)
        if provider is not None and keys is not None:
            pages.encrypt(provider, keys, partial(count, "unreadable:undecryptable"))
        else:
            with pages.view() as view:
                view.require_plain()
                if rows.is_local:
                    # elsewhere that would be requests of their own
                    view.require_header()
    except (LocationError, IncompatibleError) as error:
        rows.close()
        raise type(error)(f"{rows.location}: {error}") from None
    except BaseException:
        rows.close()
        raise
    return pages
