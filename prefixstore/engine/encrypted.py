"""An encrypted location: its rows are decrypted when they are read and encrypted when they are put.

A row is stored under a keyed hash of its key, part by part, so that rows whose keys have some first parts in common are
beside each other; the key itself is encrypted with the value, and so is whose row it is. One row, the header, has the
secret of these hashes, and says which keys are needed. The format is in ``docs/format.md``; what all that protects from
is in ``docs/security.md``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

from prefixstore.backends.contract import Backend, Costs, Range, Row, Update, View, after_all
from prefixstore.backends.encryption_keys import (
    HEADER,
    ID_BYTES,
    MAGIC,
    SECRET_BYTES,
    KeyProvider,
    Keys,
    key_of,
    name_of_provider,
)
from prefixstore.backends.sealing import Sealer, sealed_size
from prefixstore.engine.keyspace import CHILD, PARTS, RECORD, TENANT_BYTES, tenant_of
from prefixstore.engine.pages import retried
from prefixstore.errors import IncompatibleError, LocationError, StorageError, UndecryptableError
from prefixstore.format.keys import TOKEN_BYTES
from prefixstore.format.record import Buffer

log = logging.getLogger("prefixstore")

# bytes of the hash that stands for a part of a key; for a short part, such as a token, fewer are enough
HASH_BYTES = 16
# what is encrypted of a row: the tenant that owns it, the length of its key, that key, and the value
OWNER = struct.Struct(f"<{TENANT_BYTES}sH")
NOBODY = bytes(TENANT_BYTES)
# By how much a row is longer, with a key of 32 tokens; hardly any has a longer one. A payload of 10 MiB grows by about
# as much.
LONGER_BYTES = sealed_size(OWNER.size) + PARTS[CHILD][33]
# the first bytes of what a row, or a payload, is bound to
ROW, PAYLOAD = b"row", b"payload"
# a view looks at the header again after this many seconds: another process may have replaced the location
CHECKED_SECONDS = 60.0
# The least seconds between two attempts to find a missing key; the first is made at once. They are doubled after each
# that is in vain, this many times at most.
AGAIN_SECONDS, MOST_DOUBLINGS = 1.0, 6
# how long to wait for a provider of keys while others wait; keys that come later are used from then on
PROVIDER_SECONDS = 0.2
# forged rows may name any number of keys
MOST_SAID = 20
# how often a rotation looks for rows that others have written meanwhile
MOST_PASSES = 5
# how many rows are read at a time, of all that there are
ROWS_AT_ONCE = 256
# all keys of rows are before this
LAST = b"\xff"


class RowCipher:
    """How the rows and payloads of a location are named and sealed.

    The names follow from a secret of the location, whatever the keys are. `needed` are the ids of the keys that it
    needs, those of tenants included, the newest first; `keys` has these, and may have others.
    """

    def __init__(self, secret: bytes, needed: Sequence[bytes], keys: Keys) -> None:
        self.secret, self.needed, self.keys = secret, tuple(needed), keys
        tenants = {tenant_of(name, b""): ids for name, ids in keys.ids.items() if name is not None}
        self._names = {owner: ids[-1] for owner, ids in tenants.items()}
        self._owners = {id_: owner for owner, ids in tenants.items() for id_ in ids}
        self.sealer = Sealer(keys.secrets, secret)

    @classmethod
    def of(cls, header: bytes, keys: Keys) -> RowCipher:
        """Of the location with this header. Raises `UndecryptableError`."""
        text = bytes(Sealer(keys.masters).unseal(MAGIC, header[len(MAGIC) :]))
        ids = [text[at : at + ID_BYTES] for at in range(SECRET_BYTES, len(text), ID_BYTES)]
        return cls(text[:SECRET_BYTES], ids, keys)

    def header(self) -> bytes:
        """The header of the location."""
        text = self.secret + b"".join(self.needed)
        return MAGIC + Sealer(self.keys.masters).seal(self.needed[0], MAGIC, text)

    def stored_key(self, key: bytes) -> bytes:
        """The stored key of a row.

        For the first parts of a key only, it is what all stored keys with these parts begin with; for a key that ends
        within a part, the least key after those.
        """
        found, at = key[:1], 1
        hashed = hashlib.blake2b(found, key=self.secret, person=b"prefixstore rows", digest_size=HASH_BYTES)
        for end in PARTS.get(found, (len(key),)):
            if end > len(key):
                break
            hashed.update(key[at:end])
            found += hashed.digest()[: HASH_BYTES if end - at > TOKEN_BYTES else TOKEN_BYTES]
            at = end
        return found if at == len(key) else found + b"\0"

    def stored_range(self, wanted: Range) -> Range:
        """Where the rows of a range are."""
        shared = wanted.start[: len(wanted.stop)]
        # it ends after all rows that begin with something, or before a row
        is_whole = after_all(shared) == wanted.stop
        stop = after_all(self.stored_key(shared)) if is_whole else self.stored_key(wanted.stop)
        return wanted._replace(start=self.stored_key(wanted.start), stop=stop)

    def name_for(self, owner: bytes) -> bytes:
        """The id of the key under which the rows of a tenant are put."""
        return self._names.get(owner, self.keys.newest)

    def require_owner(self, owner: bytes, stored: Buffer) -> None:
        """Raise `UndecryptableError` if this is sealed under the key of a tenant, and is not of that tenant."""
        if self._owners.get(bytes(memoryview(stored)[:ID_BYTES]), owner) != owner:
            raise UndecryptableError("it is of one tenant, and under the key of another")


class EncryptedView(View):
    """The rows of a view, decrypted; `told` is called for each row or payload for which that is not possible."""

    is_encrypted = True

    def __init__(self, view: View, cipher: RowCipher, told: Callable[[UndecryptableError], object]) -> None:
        self._view = view
        self.cipher = cipher
        self._told = told
        self.at_once = view.at_once

    @property
    def arrived(self) -> int:  # type: ignore[override]  # other views have an attribute
        return self._view.arrived

    @property
    def used(self) -> int:
        return self._view.used

    def opened(self, stored: Row) -> tuple[bytes, Row] | None:
        """Whose a stored row is, and what it says; None if it cannot be decrypted."""
        try:
            text = bytes(self.cipher.sealer.unseal(ROW + stored.key, stored.value))
            owner, size = OWNER.unpack_from(text)
            self.cipher.require_owner(owner, stored.value)
        except UndecryptableError as error:
            self._told(error)
            return None
        end = OWNER.size + size
        return owner, Row(text[OWNER.size : end], text[end:])

    def _owned(self, key: bytes, stored: Row) -> tuple[bytes, bytes]:
        """Whose a row is, and its value: an empty one, as if it was damaged, if it cannot be decrypted."""
        found = self.opened(stored)
        return (found[0], found[1].value) if found is not None and found[1].key == key else (NOBODY, b"")

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        names = list(map(self.cipher.stored_key, keys))
        found = zip(keys, names, self._view.get(names), strict=True)
        return [None if value is None else self._owned(key, Row(name, value))[1] for key, name, value in found]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        stored = list(map(self.cipher.stored_range, wanted))
        return list(map(self._readable, stored, self._view.ranges(stored)))

    def _readable(self, wanted: Range, rows: Sequence[Row]) -> list[Row]:
        """The rows of a range that can be decrypted, given the first ones: as many as are wanted."""
        found: list[Row] = []
        while rows:
            found += [one[1] for one in map(self.opened, rows) if one is not None]
            if wanted.limit is None or len(rows) < wanted.limit or len(found) >= wanted.limit:
                break
            last = rows[-1].key
            rest = wanted._replace(stop=last) if wanted.reverse else wanted._replace(start=last + b"\0")
            (rows,) = self._view.ranges([rest])
        return found[: wanted.limit]

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        names = list(map(self.cipher.stored_key, keys))
        # the location is asked now, not when the first one is taken
        return map(self._both, keys, names, self._view.payloads(names))

    def _both(
        self, key: bytes, name: bytes, stored: tuple[bytes, Buffer | None] | None
    ) -> tuple[bytes, Buffer | None] | None:
        if stored is None:
            return None
        (owner, value), payload = self._owned(key, Row(name, stored[0])), stored[1]
        if payload is None:
            return value, None
        try:
            self.cipher.require_owner(owner, payload)
            return value, self.cipher.sealer.unseal(PAYLOAD + name, payload)
        except UndecryptableError as error:
            self._told(error)
            raise


class EncryptedUpdate(EncryptedView, Update):
    """An update whose rows are encrypted when they are put."""

    _view: Update

    @property
    def costs(self) -> Costs:
        costs = self._view.costs
        return replace(costs, row=costs.row + LONGER_BYTES, payload=costs.payload + LONGER_BYTES)

    def put(
        self,
        key: bytes,
        value: bytes,
        payload: Buffer | None = None,
        *,
        replaced: int | None = None,
        owner: bytes | None = None,
    ) -> None:
        stored_key = self.cipher.stored_key(key)
        owner = self._owner(stored_key) if owner is None else owner
        name, seal = self.cipher.name_for(owner), self.cipher.sealer.seal
        row = seal(name, ROW + stored_key, OWNER.pack(owner, len(key)) + key + value)
        hidden = None if payload is None else seal(name, PAYLOAD + stored_key, payload)
        self._view.put(stored_key, bytes(row), hidden, replaced=replaced)

    def _owner(self, stored_key: bytes) -> bytes:
        """Whose a row is that is written again: mostly it was read before, and is in memory."""
        [value] = self._view.get([stored_key])
        found = None if value is None else self.opened(Row(stored_key, value))
        return NOBODY if found is None else found[0]

    def delete(self, key: bytes, *, replaced: int | None = None) -> None:
        self._view.delete(self.cipher.stored_key(key), replaced=replaced)


class Encrypted:
    """Opens views and updates of a location that is encrypted, over those of its backend.

    `keys` are what the provider has given last. `count` is called for each row or payload that cannot be decrypted.

    Raises
    ------
    LocationError
        If a key is missing, or the location is not encrypted and has rows.
    IncompatibleError
        If its header is damaged, or of another version.
    """

    def __init__(self, backend: Backend, provider: KeyProvider, keys: Keys, count: Callable[[], object]) -> None:
        self._backend, self._provider, self._count = backend, provider, count
        self.keys = keys
        self._reader: Thread | None = None
        self._read_at, self._n_in_vain = float("-inf"), 0
        # the header that was found last, and what it says; and the time from which a view reads it again
        self._found: tuple[bytes | None, RowCipher] | None = None
        self._looks_at = 0.0
        # the messages that were logged
        self._said: set[str] = set()
        with self.view():
            pass  # raises if a key is missing

    @contextmanager
    def view(self) -> Iterator[EncryptedView]:
        """As `Backend.view`."""
        with self._backend.view() as rows:
            found = self._found if time.monotonic() < self._looks_at else None
            yield EncryptedView(rows, self._cipher_in(rows) if found is None else found[1], self._tell)

    @contextmanager
    def update(self) -> Iterator[EncryptedUpdate]:
        """As `Backend.update`; what is written is under the newest keys, and the header says so."""
        with self._backend.update() as rows:
            yield EncryptedUpdate(rows, self._entered(rows), self._tell)

    def _tell(self, error: UndecryptableError) -> None:
        self._count()
        # it may be under a key that is new
        self._looks_at = 0.0
        if str(error) not in self._said and len(self._said) < MOST_SAID:
            self._said.add(str(error))
            log.warning("%s: something cannot be decrypted, and is a miss: %s", self._backend.location, error)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _cipher_in(self, rows: View) -> RowCipher:
        """How a location is encrypted, by its header; for an empty one, how it will be."""
        found = self._found
        [header] = rows.get([HEADER])
        if header is None and not rows.ranges([Range(b"", LAST, 1)])[0]:
            return RowCipher(os.urandom(SECRET_BYTES), (), self.keys)
        if found is None or found[0] != header:
            found = header, self._cipher_of(header)
        self._found, self._looks_at = found, time.monotonic() + CHECKED_SECONDS
        return found[1]

    def _cipher_of(self, header: bytes | None) -> RowCipher:
        name = key_of(header)
        if header is None or name is None:
            raise LocationError(
                "it is not encrypted. If it was, it has been tampered with: restore a backup. If it never was, open it "
                "without a key (PREFIXSTORE_KEY=none), or prefixstore copy it to a new location, with --from-key none"
            )
        self._require([name])
        try:
            found = RowCipher.of(header, self.keys)
        except UndecryptableError:
            raise IncompatibleError("what says how it is encrypted was changed, or is of a newer version") from None
        self._require(found.needed)
        return RowCipher(found.secret, found.needed, self.keys)

    def _require(self, needed: Sequence[bytes]) -> None:
        """Raise if one of these keys is missing. They are read again: another process may have been given a new one."""
        missing = self.keys.missing(needed)
        pause = AGAIN_SECONDS * 2**self._n_in_vain
        is_reading = self._reader is not None and self._reader.is_alive()
        if missing and not is_reading and time.monotonic() - self._read_at > pause:
            self._read_at = time.monotonic()
            self._reader = Thread(target=self._read_keys, name="prefixstore-keys", daemon=True)
            self._reader.start()
            self._reader.join(PROVIDER_SECONDS)
            missing = self.keys.missing(needed)
            if missing:
                self._n_in_vain = min(self._n_in_vain + 1, MOST_DOUBLINGS)
        if missing:
            raise LocationError(
                f"it needs the key {missing[0].hex()}, which {name_of_provider(self._provider)} does not have, "
                "or did not when it was read last; give it by PREFIXSTORE_KEY or key= (copy: --from-key, --to-key)"
            )

    def _read_keys(self) -> None:
        try:
            found = Keys.read(self._provider)
            if found != self.keys:
                # perhaps later than was waited for
                self.keys, self._n_in_vain = found, 0
        except StorageError as error:
            log.warning("%s: %s", self._backend.location, error)

    def _entered(self, rows: Update, older: Collection[bytes] = ()) -> RowCipher:
        """How a location is encrypted; from now on its header names the newest keys, and none of the older ones."""
        cipher = self._cipher_in(rows)
        needed = tuple(name for name in dict.fromkeys((*cipher.keys.current, *cipher.needed)) if name not in older)
        if needed != cipher.needed:
            cipher = RowCipher(cipher.secret, needed, cipher.keys)
            rows.put(HEADER, cipher.header())
        return cipher

    def key_ids(self) -> list[str]:
        """The ids of the keys of the store under which the location is encrypted, the newest first."""
        with self._backend.view() as rows:
            needed = self._cipher_in(rows).needed or self.keys.current
        return [name.hex() for name in needed if name in self.keys.ids[None]]

    # -- all rows -----------------------------------------------------------------------------------------------------

    def rotate(self) -> tuple[int, int]:
        """Have everything encrypted under the newest key, and that of its tenant, so that older ones are not needed.

        Others may go on using the location if they have the newest key. May be interrupted, and called again: rows that
        are encrypted as they would be now are passed over. Raises `FullError` if there is no space for what is written
        before the old rows are gone.

        Returns how many rows were encrypted again, and how many are left, since they cannot be decrypted, or others
        still write under older keys: then these are still needed.
        """
        # first: from then on a process that lacks the newest key writes nothing
        self._name_keys()
        with self.view() as first:
            older = set(first.cipher.needed) - set(self.keys.current)
        n_done = 0
        for _ in range(MOST_PASSES):
            # who lacked the newest key until it was in the header may have written under an older one since
            n_again, n_left = self._rotate_once()
            n_done += n_again
            if not n_again:
                break
        else:
            # another process writes under other keys: its file has others, or other ones last
            n_left += n_again
        if older and not n_left:
            self._name_keys(older)
        return n_done, n_left

    def _rotate_once(self) -> tuple[int, int]:
        n_done = n_left = 0
        for view, rows in self._all():
            n_left += sum(found is None for _, found in rows)
            old = [
                found[1].key
                for row, found in rows
                if found is not None and not row.value.startswith(view.cipher.name_for(found[0]))
            ]
            # what has a payload one by one, so that little is in memory
            records = [[key] for key in old if key[:1] == RECORD]
            for keys in filter(None, [*records, [key for key in old if key[:1] != RECORD]]):
                try:
                    self._put_again(keys)
                    n_done += len(keys)
                except UndecryptableError:
                    n_left += 1
        return n_done, n_left

    @retried
    def _put_again(self, keys: Sequence[bytes]) -> None:
        """Encrypt rows again. One that has a payload was put with it: both are under the same key."""
        with self.update() as update:
            for key, found in zip(keys, update.payloads(keys), strict=True):
                if found is not None:
                    update.put(key, *found)

    @retried
    def _name_keys(self, older: Collection[bytes] = ()) -> None:
        """Have the header name the newest keys, and none of the older ones."""
        with self._backend.update() as rows:
            self._entered(rows, older)

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
        with self._backend.update() as rows:
            for row, value in zip(lost, rows.get([row.key for row in lost]), strict=True):
                if value == row.value:
                    rows.delete(row.key)

    def _all(self) -> Iterator[tuple[EncryptedView, list[tuple[Row, tuple[bytes, Row] | None]]]]:
        """All stored rows but the header, some at a time, each with what `EncryptedView.opened` returns."""
        start = b""
        while start < LAST:
            with self._backend.view() as rows:
                view = EncryptedView(rows, self._cipher_in(rows), self._tell)
                [found] = rows.ranges([Range(start, LAST, ROWS_AT_ONCE)])
            yield view, [(row, view.opened(row)) for row in found if row.key != HEADER]
            start = found[-1].key + b"\0" if found else LAST
