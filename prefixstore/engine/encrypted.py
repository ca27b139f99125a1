"""A location whose rows and payloads are encrypted, whatever backend keeps them.

`encrypted_rows` reads and writes them. The header says which keys are needed, and has the secret of the location; it is
sealed under the newest of them. What that protects from is in ``docs/security.md``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from prefixstore.backends.contract import Backend, ConflictError, Range, Row, View
from prefixstore.backends.keys import HEADER, MAGIC, KeyProvider, Keys, key_of
from prefixstore.backends.sealing import Sealer
from prefixstore.engine.encrypted_rows import SECRET_BYTES, EncryptedUpdate, EncryptedView, Header, RowCipher
from prefixstore.engine.keyspace import RECORD
from prefixstore.engine.pages import retried
from prefixstore.errors import FullError, IncompatibleError, LocationError, UndecryptableError

__all__ = ["EncryptedBackend"]

FIRST, LAST = b"", b"\xff" * 16
# a view looks at the header again after so many seconds: another process may have replaced the location
CHECKED_SECONDS = 60.0
# so long at least between two attempts to find a key that is missing
AGAIN_SECONDS = 10.0
# how many rows are read at a time, of all that there are
ROWS_AT_ONCE = 256


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
        self, backend: Backend, provider: KeyProvider, keys: Keys, on_undecryptable: Callable[[], object]
    ) -> None:
        self._backend = backend
        self._provider = provider
        self._on_undecryptable = on_undecryptable
        self.keys = keys
        self._keys_read_at = time.monotonic()
        # the row with the header that was found last, what it says, and when that was
        self._found: tuple[bytes | None, RowCipher, float] | None = None
        with self.view():
            pass  # raises if a key is missing

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _cipher_in(self, rows: View) -> tuple[RowCipher, bytes | None]:
        """The cipher of the location, and the row that says so; of an empty one a new cipher, and None."""
        # another thread may read them again
        keys, found = self.keys, self._found
        [stored] = rows.get([HEADER])
        if stored is None and not rows.ranges([Range(FIRST, LAST, 1)])[0]:
            header = _header_after(Header(secrets.token_bytes(SECRET_BYTES)), keys)
            return RowCipher(header, keys), None
        if found is not None and found[0] == stored and found[1].keys is keys:
            cipher = found[1]
        else:
            cipher = RowCipher(self._header_in(stored, keys), keys)
        self._found = stored, cipher, time.monotonic()
        return cipher, stored

    def _header_in(self, stored: bytes | None, keys: Keys) -> Header:
        """What a row says that is the header of the location."""
        newest = key_of(stored)
        if stored is None or newest is None:
            raise LocationError(
                "it is not encrypted: open it without a key (PREFIXSTORE_KEY=none), or prefixstore copy it to a new "
                "location, with --from-key none"
            )
        if newest not in keys.masters:
            raise self._missing(newest)
        try:
            header = Header.unpack(bytes(_sealer(keys).unseal(MAGIC, stored[len(MAGIC) :])))
        except UndecryptableError:
            raise IncompatibleError("what says how it is encrypted was changed, or is of a newer version") from None
        if missing := [name for name in header.keys if name not in keys.known]:
            raise self._missing(missing[0])
        return header

    def _missing(self, name: bytes) -> MissingKeyError:
        return MissingKeyError(
            f"it needs the key {name.hex()}, which {self._provider} does not have, or did not when it was read last; "
            "give it by PREFIXSTORE_KEY or key= (copy: --from-key, --to-key)"
        )

    @contextmanager
    def _looking_for_keys(self) -> Iterator[None]:
        """If a key is missing, read all again when nothing is open any more: another process was given a new one."""
        try:
            yield
        except MissingKeyError as error:
            if time.monotonic() - self._keys_read_at < AGAIN_SECONDS:
                raise
            self._read_keys()
            raise ConflictError(f"{error}: they were read again") from error

    def _read_keys(self) -> None:
        self._keys_read_at = time.monotonic()
        self.keys, self._found = Keys.read(self._provider), None

    def key_ids(self) -> list[str]:
        """The ids of the keys under which the location is encrypted, the newest first."""
        with self.view() as view:
            return [name.hex() for name in view.cipher.masters]

    # -- as a backend -------------------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return self._backend.location

    @property
    def is_local(self) -> bool:  # type: ignore[override]  # other backends have an attribute
        return self._backend.is_local

    @contextmanager
    def view(self) -> Iterator[EncryptedView]:
        with self._looking_for_keys(), self._backend.view() as rows:
            found = self._found
            is_recent = found is not None and time.monotonic() - found[2] < CHECKED_SECONDS
            cipher = found[1] if found is not None and is_recent else self._cipher_in(rows)[0]
            yield EncryptedView(rows, cipher, self._tell)

    @contextmanager
    def update(self, *, replaced: Collection[bytes] = ()) -> Iterator[EncryptedUpdate]:
        """As `Backend.update`; with `replaced`, nothing is under these keys any more."""
        with self._looking_for_keys(), self._backend.update() as rows:
            cipher, stored = self._cipher_in(rows)
            header = _header_after(cipher.header, cipher.keys, replaced)
            is_new = stored is None or header != cipher.header
            if is_new:
                rows.put(HEADER, MAGIC + _sealer(cipher.keys).seal(header.keys[0], MAGIC, header.pack()))
                cipher = RowCipher(header, cipher.keys)
            yield EncryptedUpdate(rows, cipher, self._tell)
        if is_new:
            self._found = None

    def _tell(self) -> None:
        self._on_undecryptable()
        # it may be under a key that is new
        self._found = None

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

    def rotate(self) -> tuple[int, int]:
        """Have everything encrypted under the newest key, and that of its tenant, so that older ones are not needed.

        Others may go on using the location if they have the newest key. May be interrupted, and called again: rows that
        are encrypted as they would be now are passed over.

        Returns
        -------
        int
            How many rows were encrypted again.
        int
            How many could not be decrypted: then the older keys are still needed.

        Raises
        ------
        FullError
            If there is no space for what is written before the old rows are gone.
        """
        self._read_keys()
        _, *older = self._masters()
        n_done = n_left = 0
        for rows, cipher in self._all():
            found = list(map(cipher.state, rows))
            n_left += found.count(None)
            old = [one[0] for one in found if one is not None and not one[1]]
            # what has a payload one by one, so that little is in memory
            some = [key for key in old if key[:1] != RECORD]
            for keys in [*([key] for key in old if key[:1] == RECORD), some]:
                try:
                    self._put_again(keys)
                    n_done += len(keys)
                except UndecryptableError:
                    n_left += 1
        if not n_left:
            self._masters(replaced=older)
        return n_done, n_left

    @retried
    def _masters(self, replaced: Collection[bytes] = ()) -> list[bytes]:
        """The ids of the keys under which it is encrypted, after an update that notes them."""
        with self.update(replaced=replaced) as update:
            return list(update.cipher.masters)

    def _put_again(self, keys: Sequence[bytes]) -> None:
        """Encrypt rows again. One that has a payload was put with it: both are under the same key."""
        try:
            self._put_once(keys)
        except FullError:
            self.reclaim()
            self._put_once(keys)

    @retried
    def _put_once(self, keys: Sequence[bytes]) -> None:
        with self.update() as update:
            for key, found in zip(keys, update.payloads(keys), strict=True):
                if found is not None:
                    update.put(key, *found)

    def undecryptable(self, *, delete: bool = False) -> int:
        """How many rows cannot be decrypted, or are of a forgotten tenant; with `delete` they are deleted."""
        n_found = 0
        for rows, cipher in self._all():
            wrong = [row for row in rows if cipher.state(row) is None]
            n_found += len(wrong)
            if wrong and delete:
                self._drop(wrong)
        return n_found

    @retried
    def _drop(self, rows: Sequence[Row]) -> None:
        """Delete these stored rows, if nobody has written them since."""
        with self._backend.update() as update:
            for row, value in zip(rows, update.get([row.key for row in rows]), strict=True):
                if value == row.value:
                    update.delete(row.key)

    def _all(self) -> Iterator[tuple[list[Row], RowCipher]]:
        """All rows as they are stored, some at a time, but the header; and what decrypts them."""
        start = FIRST
        while True:
            with self._looking_for_keys(), self._backend.view() as view:
                cipher, _ = self._cipher_in(view)
                [rows] = view.ranges([Range(start, LAST, ROWS_AT_ONCE)])
            if not rows:
                return
            yield [row for row in rows if row.key != HEADER], cipher
            start = rows[-1].key + b"\0"


def _sealer(keys: Keys) -> Sealer:
    """Seals headers."""
    return Sealer(keys.masters, b"", "header")


def _header_after(header: Header, keys: Keys, replaced: Collection[bytes] = ()) -> Header:
    """A header with the keys that are used from now on, and without those that were replaced."""
    known = {*header.keys, *header.replaced}
    return Header(
        header.secret,
        (
            *([keys.newest] if keys.newest not in known else []),
            *(name for name in header.keys if name not in replaced),
            *(name for name in keys.of_tenants if name not in known),
        ),
        (*header.replaced, *(name for name in header.keys if name in replaced)),
    )
