"""How a location is encrypted, whatever backend keeps it: its header, its keys, and new ones for all of it.

`encrypted_rows` reads and writes the rows. The header says which keys are needed, and has the secret of the location;
it is sealed under the newest of them. What that protects from is in ``docs/security.md``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from prefixstore.backends.contract import Backend, Range, Row, View
from prefixstore.backends.keys import HEADER, KeyProvider, Keys, key_of
from prefixstore.engine.encrypted_rows import SECRET_BYTES, EncryptedUpdate, EncryptedView, RowCipher, keys_for
from prefixstore.engine.keyspace import RECORD
from prefixstore.engine.pages import retried
from prefixstore.errors import FullError, IncompatibleError, LocationError, UndecryptableError

__all__ = ["Encrypted"]

# a view looks at the header again after so many seconds: another process may have replaced the location
CHECKED_SECONDS = 60.0
# so long at least between two attempts to find a key that is missing
AGAIN_SECONDS = 10.0
# how many rows are read at a time, of all that there are
ROWS_AT_ONCE = 256
# all keys of rows are before this
LAST = b"\xff"


class Encrypted:
    """Opens the rows of a location that is encrypted.

    Parameters
    ----------
    backend
        Keeps what is encrypted.
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
        # the header that was found last, and what it says; when a view looks again
        self._found: tuple[bytes, RowCipher] | None = None
        self._looks_at = 0.0
        with self.view():
            pass  # raises if a key is missing

    @contextmanager
    def view(self) -> Iterator[EncryptedView]:
        """As `Backend.view`."""
        with self._backend.view() as rows:
            found = self._found
            is_known = found is not None and time.monotonic() < self._looks_at
            yield EncryptedView(rows, found[1] if found is not None and is_known else self._cipher_in(rows), self._tell)

    @contextmanager
    def update(self) -> Iterator[EncryptedUpdate]:
        """As `Backend.update`; what is written is under the newest keys, and the header says so."""
        with self._backend.update() as rows:
            cipher = self._cipher_in(rows)
            needed = tuple(dict.fromkeys((*cipher.keys.current, *cipher.needed)))
            if needed != cipher.needed:
                cipher = RowCipher(cipher.secret, needed, cipher.keys)
                rows.put(HEADER, cipher.header())
            yield EncryptedUpdate(rows, cipher, self._tell)

    def _tell(self) -> None:
        self._on_undecryptable()
        # it may be under a key that is new
        self._looks_at = 0.0

    def after_fork(self) -> None:
        """As `Backend.after_fork`."""
        # its threads are the parent's
        self._found = None

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _cipher_in(self, rows: View) -> RowCipher:
        """How a location is encrypted, by its header; one that is empty will be as this says."""
        found = self._found
        [header] = rows.get([HEADER])
        if header is None and not rows.ranges([Range(b"", LAST, 1)])[0]:
            return RowCipher(secrets.token_bytes(SECRET_BYTES), (), self.keys)
        if header is None or key_of(header) is None:
            raise LocationError(
                "it is not encrypted: open it without a key (PREFIXSTORE_KEY=none), or prefixstore copy it to a new "
                "location, with --from-key none"
            )
        if found is None or found[0] != header:
            try:
                found = header, RowCipher.of(header, self._keys_with(keys_for(header)))
            except UndecryptableError:
                raise IncompatibleError("what says how it is encrypted was changed, or is of a newer version") from None
        self._found, self._looks_at = found, time.monotonic() + CHECKED_SECONDS
        return found[1]

    def _keys_with(self, needed: Sequence[bytes]) -> Keys:
        """The keys; read again if these are not among them: another process may have been given a new one."""
        missing = self.keys.missing(needed)
        if missing and time.monotonic() - self._keys_read_at > AGAIN_SECONDS:
            self._keys_read_at = time.monotonic()
            self.keys = Keys.read(self._provider)
            missing = self.keys.missing(needed)
        if missing:
            raise LocationError(
                f"it needs the key {missing[0].hex()}, which {self._provider} does not have, or did not when it was "
                "read last; give it by PREFIXSTORE_KEY or key= (copy: --from-key, --to-key)"
            )
        return self.keys

    def key_ids(self) -> list[str]:
        """The ids of the keys under which the location is encrypted, the newest first."""
        return [name.hex() for name in self._needed() if name in self.keys.ids[None]]

    def _needed(self) -> Sequence[bytes]:
        """The ids of the keys that the location needs now, those of tenants included."""
        with self._backend.view() as rows:
            return self._cipher_in(rows).needed or self.keys.current

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
        older = set(self._needed()) - set(self.keys.current)
        n_done = n_left = 0
        for cipher, rows in self._all():
            n_left += sum(found is None for _, found in rows)
            old = [
                found[1].key
                for row, found in rows
                if found is not None and not row.value.startswith(cipher.name_for(found[0]))
            ]
            # what has a payload one by one, so that little is in memory
            some = [key for key in old if key[:1] != RECORD]
            for keys in filter(None, [*([key] for key in old if key[:1] == RECORD), some]):
                try:
                    self._put_again(keys)
                    n_done += len(keys)
                except UndecryptableError:
                    n_left += 1
        if older and not n_left:
            self._replace(older)
        return n_done, n_left

    def _put_again(self, keys: Sequence[bytes]) -> None:
        """Encrypt rows again. One that has a payload was put with it: both are under the same key."""
        try:
            self._put_once(keys)
        except FullError:
            self._backend.reclaim()
            self._put_once(keys)

    @retried
    def _put_once(self, keys: Sequence[bytes]) -> None:
        with self.update() as update:
            for key, found in zip(keys, update.payloads(keys), strict=True):
                if found is not None:
                    update.put(key, *found)

    @retried
    def _replace(self, older: Collection[bytes]) -> None:
        """Have the header no longer name these keys."""
        with self._backend.update() as rows:
            cipher = self._cipher_in(rows)
            # without a row, nothing has named the newest one yet
            needed = [name for name in cipher.needed if name not in older] or [cipher.keys.newest]
            rows.put(HEADER, RowCipher(cipher.secret, needed, cipher.keys).header())

    def undecryptable(self, *, delete: bool = False) -> int:
        """How many rows cannot be decrypted, or are of a forgotten tenant; with `delete` they are deleted."""
        n_found = 0
        for _, rows in self._all():
            lost = [row for row, found in rows if found is None]
            n_found += len(lost)
            if lost and delete:
                self._drop(lost)
        return n_found

    @retried
    def _drop(self, lost: Sequence[Row]) -> None:
        """Delete these stored rows, if nobody has written them since."""
        with self._backend.update() as update:
            for row, value in zip(lost, update.get([row.key for row in lost]), strict=True):
                if value == row.value:
                    update.delete(row.key)

    def _all(self) -> Iterator[tuple[RowCipher, list[tuple[Row, tuple[bytes, Row] | None]]]]:
        """All stored rows but the header, some at a time, each with what `RowCipher.opened` returns."""
        start = b""
        while True:
            with self._backend.view() as view:
                cipher = self._cipher_in(view)
                [rows] = view.ranges([Range(start, LAST, ROWS_AT_ONCE)])
            if not rows:
                return
            yield cipher, [(row, cipher.opened(row)) for row in rows if row.key != HEADER]
            start = rows[-1].key + b"\0"
