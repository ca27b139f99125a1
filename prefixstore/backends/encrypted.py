"""A location whose rows and payloads are encrypted, whatever backend keeps them.

`encrypted_rows` reads and writes them. The header is the only row in clear text, and there twice: it has the secret of
the location, encrypted under its newest key. What that protects from is in ``docs/security.md``.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from prefixstore.backends.contract import Backend, ConflictError, Range, Row, Update, View
from prefixstore.backends.encrypted_rows import EncryptedUpdate, EncryptedView
from prefixstore.backends.encryption import NO_TENANT, Header, RowCipher
from prefixstore.backends.keys import COPY, HEADER, KeyProvider, Keys, is_header
from prefixstore.backends.sorted_rows import SortedRows
from prefixstore.errors import FullError, IncompatibleError, LocationError, UndecryptableError

__all__ = ["EncryptedBackend"]

V = TypeVar("V", bound=View)
log = logging.getLogger("prefixstore")

FIRST, LAST = b"", b"\xff" * 16
# a view looks at the header again after so many seconds: another process may have replaced the location
CHECKED_SECONDS = 60.0
# so long at least between two attempts to find a key that is missing
AGAIN_SECONDS = 10.0
# and between two lines of the log
LOGGED_SECONDS = 60.0
# how many rows are encrypted anew in one update, and with payloads of how many bytes
REWRITTEN_AT_ONCE, REWRITTEN_BYTES = 256, 64 << 20
LEAST_REWRITTEN_BYTES = 1 << 20
CONFLICTS = 8


class MissingKeyError(LocationError):
    """The location needs a key that is not given."""


class EncryptedBackend(Backend):
    """A backend whose rows and payloads are encrypted.

    Parameters
    ----------
    backend
        Keeps what is encrypted; closed with this.
    provider, keys
        Gives the keys, and has given these.
    parts
        As for `RowCipher`.
    tenant_of
        What stands in rows for the tenant with this name: 16 bytes.
    on_undecryptable
        Called for each row or payload that cannot be decrypted.

    Attributes
    ----------
    keys
        The keys that were read last.

    Raises
    ------
    LocationError
        If a key is missing, or it is not encrypted and has rows.
    IncompatibleError
        If its header is damaged, or of another version.
    """

    def __init__(
        self,
        backend: Backend,
        provider: KeyProvider,
        keys: Keys,
        *,
        parts: Mapping[bytes, Sequence[int]],
        tenant_of: Callable[[str], bytes],
        on_undecryptable: Callable[[], object] = lambda: None,
    ) -> None:
        self._backend = backend
        self._provider = provider
        self._parts = parts
        self._tenant_of = tenant_of
        self._on_undecryptable = on_undecryptable
        self._logged = self._asked_again = -max(LOGGED_SECONDS, AGAIN_SECONDS)
        # what was found last, the rows of the header in which it was, and when
        self._found: tuple[RowCipher, list[bytes | None], float] | None = None
        self.keys = keys
        with self.view():
            pass  # raises if a key is missing

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _cipher_in(self, rows: View) -> RowCipher | None:
        """The cipher of the location, by its header; None if it is empty."""
        stored, found = rows.get([HEADER, COPY]), self._found
        if found is not None and found[1] == stored:
            cipher = found[0]
        elif any(map(is_header, stored)):
            cipher = self._cipher_of(stored)
        elif rows.ranges([Range(FIRST, LAST, 1)])[0]:
            raise LocationError(
                "it is not encrypted: open it without a key (PREFIXSTORE_KEY=none), or prefixstore copy it to a new "
                "location, with --from-key none"
            )
        else:
            return None
        self._found = cipher, stored, time.monotonic()
        return cipher

    def _cipher_of(self, stored: Sequence[bytes | None]) -> RowCipher:
        """The cipher by the first whole row of the header."""
        *others, last = [row for row in stored if row is not None and is_header(row)]
        for row in others:
            with suppress(IncompatibleError, MissingKeyError):
                return self._unlocked(row)
        return self._unlocked(last)

    def _unlocked(self, stored: bytes) -> RowCipher:
        header = Header.unpack(stored, self.location)
        if missing := [name.hex() for name in header.keys if name not in self.keys.masters]:
            raise self._missing(f"the key {', '.join(missing)}")
        cipher = self._made(header, header.secret_in(stored, self.keys.masters, self.location))
        needed = {key for key in header.tenants if key[: len(NO_TENANT)] not in cipher.forgotten}
        if n_missing := len(needed - cipher.tenants):
            raise self._missing(f"the keys of {n_missing} tenants")
        return cipher

    def _missing(self, what: str) -> MissingKeyError:
        return MissingKeyError(
            f"it needs {what}, which {self._provider} does not have, or did not when it was read last; give it by "
            "PREFIXSTORE_KEY or key= (copy: --from-key, --to-key)"
        )

    def _made(self, header: Header, secret: bytes) -> RowCipher:
        tenants = {self._tenant_of(name): key for name, key in self.keys.tenants.items()}
        forgotten = list(map(self._tenant_of, self.keys.forgotten))
        return RowCipher(header, secret, self.keys.masters, tenants, forgotten, self._parts)

    def _cipher_for(self, update: Update) -> RowCipher:
        """The cipher of an update; the header is written if it is not there, or lacks a key."""
        before = self._found
        cipher = self._cipher_in(update)
        if cipher is None and before is not None:
            # it was emptied: others have it open, too
            cipher = before[0]
        if cipher is None:
            cipher = self._made(Header(secrets.token_bytes(16), ()), secrets.token_bytes(32))
        header, newest = cipher.header, next(iter(self.keys.masters))
        if newest not in {*header.keys, *header.retired}:
            header = replace(header, keys=(newest, *header.keys))
        gone = {key for key in header.tenants if key[: len(NO_TENANT)] in cipher.forgotten}
        forgotten = header.forgotten | gone
        header = replace(header, tenants=(header.tenants | cipher.tenants) - forgotten, forgotten=forgotten)
        return self._noted(update, header, cipher)

    def _noted(self, update: Update, header: Header, cipher: RowCipher) -> RowCipher:
        """Write the header, if it is not there; the cipher by it."""
        stored = update.get([HEADER, COPY])
        if header == cipher.header and stored[0] is not None and stored[0] == stored[1]:
            return cipher
        packed = header.pack(cipher.secret, self.keys.masters)
        update.put(HEADER, packed)
        update.put(COPY, packed)
        return self._made(header, cipher.secret)

    def _read_keys_again(self) -> bool:
        """Read the keys again, but not all the time: another process may have been given a new one."""
        if time.monotonic() - self._asked_again < AGAIN_SECONDS:
            return False
        self._asked_again = time.monotonic()
        self._read_keys()
        return True

    def _read_keys(self) -> None:
        self.keys, self._found = Keys.read(self._provider), None

    @contextmanager
    def _opened(
        self, opened: Callable[[], AbstractContextManager[V]], find: Callable[[V], RowCipher | None]
    ) -> Iterator[tuple[V, RowCipher | None]]:
        """A view or update, and its cipher. If a key is missing, the keys are read again while nothing is open."""
        with opened() as rows:
            try:
                found = find(rows)
            except MissingKeyError as error:
                missing = error
            else:
                yield rows, found
                return
        if not self._read_keys_again():
            raise missing
        with opened() as rows:
            yield rows, find(rows)

    def key_ids(self) -> list[str]:
        """The ids of the keys that the location needs, the newest first."""
        with self._opened(self._backend.view, self._cipher_in) as (_, cipher):
            return [] if cipher is None else [name.hex() for name in cipher.header.keys]

    # -- as a backend -------------------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return self._backend.location

    @property
    def is_local(self) -> bool:  # type: ignore[override]  # other backends have an attribute
        return self._backend.is_local

    def _known_cipher(self, rows: View) -> RowCipher | None:
        """As `_cipher_in`, without a look at the header if there was one lately."""
        found = self._found
        return found[0] if found and time.monotonic() - found[2] < CHECKED_SECONDS else self._cipher_in(rows)

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._opened(self._backend.view, self._known_cipher) as (rows, cipher):
            # what is in an empty location now was written by others, who are seen later
            yield SortedRows(lambda _: 0) if cipher is None else EncryptedView(rows, cipher, self._tell, self._renewed)

    def _renewed(self, rows: View) -> RowCipher | None:
        """As `_cipher_in`; if a key is missing, the next view looks for it."""
        try:
            return self._cipher_in(rows)
        except MissingKeyError:
            self._found = None
            raise

    @contextmanager
    def update(self) -> Iterator[Update]:
        with self._opened(self._backend.update, self._cipher_for) as (rows, cipher):
            assert cipher is not None
            yield EncryptedUpdate(rows, cipher, self._tell)

    def _tell(self, error: UndecryptableError) -> None:
        self._on_undecryptable()
        if time.monotonic() - self._logged > LOGGED_SECONDS:
            self._logged = time.monotonic()
            log.warning("%s: something cannot be decrypted, and is not used: %s", self.location, error)

    def sync(self) -> None:
        self._backend.sync()

    def compact(self, *, erase: bool = False) -> int:
        return self._backend.compact(erase=erase)

    def check(self) -> None:
        self._backend.check()

    def reclaim(self) -> None:
        self._backend.reclaim()

    def after_fork(self) -> None:
        # its threads are the parent's
        self._found = None
        self._backend.after_fork()

    def close(self) -> None:
        self._backend.close()

    # -- all rows -----------------------------------------------------------------------------------------------------

    def rotate(self, progress: Callable[[int], object] = lambda _: None) -> tuple[int, int]:
        """Have everything encrypted under the newest key, and that of its tenant, so that older ones are not needed.

        Others may go on using the location if they have the newest key. May be interrupted, and called again.

        Returns
        -------
        int
            How many rows were encrypted anew.
        int
            How many of them could not be decrypted: then the older keys are still needed.

        Raises
        ------
        LocationError
            If the newest key was replaced by another one before.
        FullError
            If there is no space for what is written before the old rows are gone.
        """
        self._read_keys()
        newest = next(iter(self.keys.masters))
        with self._opened(self._backend.update, self._cipher_for) as (_, cipher):
            assert cipher is not None
            header = cipher.header
            if header.keys[0] != newest:
                raise LocationError(
                    f"the key {newest.hex()} was replaced in {self.location}; add a newer one to the file"
                )
        n_done = n_left = 0
        for rows, cipher in self._all():
            n, left = self._rewrite([row.key for row in rows if not cipher.is_current(row.value)])
            n_done, n_left = n_done + n - left, n_left + left
            progress(n_done)
        if not n_left:
            self._retire(header.keys[1:])
        return n_done, n_left

    def _retire(self, names: Sequence[bytes]) -> None:
        """Note that nothing is under these keys any more."""
        with self._opened(self._backend.update, self._cipher_for) as (update, cipher):
            assert cipher is not None
            header = cipher.header
            keys = tuple(name for name in header.keys if name not in names)
            self._noted(update, replace(header, keys=keys, retired=header.retired.union(names)), cipher)
        self._found = None

    def _rewrite(self, stored_keys: Sequence[bytes]) -> tuple[int, int]:
        most, n_done, n_left, n_conflicts = REWRITTEN_BYTES, 0, 0, 0
        while n_done < len(stored_keys):
            try:
                with self.update() as update:
                    assert isinstance(update, EncryptedUpdate)
                    n, left = update.rewrite(stored_keys[n_done:], most)
                n_done, n_left = n_done + n, n_left + left
            except ConflictError:
                n_conflicts += 1
                if n_conflicts == CONFLICTS:
                    raise
            except FullError:
                if most < LEAST_REWRITTEN_BYTES:
                    raise
                most //= 4
                self._backend.reclaim()
        return n_done, n_left

    def undecryptable(self, *, delete: bool = False) -> int:
        """How many rows cannot be decrypted, or are of a forgotten tenant; with `delete` they are deleted."""
        n_found = 0
        for rows, cipher in self._all():
            wrong = [row.key for row in rows if not cipher.can_decrypt(*row)]
            n_found += len(wrong)
            if wrong and delete:
                with self.update() as update:
                    assert isinstance(update, EncryptedUpdate)
                    update.drop_undecryptable(wrong)
        return n_found

    def _all(self) -> Iterator[tuple[list[Row], RowCipher]]:
        """All rows as they are stored, some at a time, but the header; and what decrypts them."""
        start = FIRST
        while True:
            with self._opened(self._backend.view, self._cipher_in) as (view, cipher):
                [rows] = view.ranges([Range(start, LAST, REWRITTEN_AT_ONCE)])
            if not rows or cipher is None:
                return
            yield [row for row in rows if row.key not in (HEADER, COPY)], cipher
            start = rows[-1].key + b"\0"
