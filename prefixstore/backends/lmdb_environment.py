"""The LMDB handles of this process: opened once per location, shared, resized, and left alone by forked children."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from prefixstore.codec import FORMAT_VERSION
from prefixstore.errors import (
    CorruptError,
    FullError,
    IncompatibleError,
    LocationError,
    StorageError,
    UnavailableError,
)

__all__ = ["DATABASES", "Environment", "acquire", "release", "translate"]

SMALLEST_MAP = 1 << 20
MAX_READERS = 512
MAGIC = b"prefixstore"
DATABASES = (b"meta", b"namespaces", b"records", b"usage", b"payloads", b"changes")
META_FORMAT = struct.Struct("<I")


def translate(error: lmdb.Error, path: Path) -> StorageError:
    """The error of our tree that says what an LMDB error means for the caller."""
    if isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError, lmdb.DiskError)):
        return FullError(f"{path}: {error}")
    if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.BadTxnError)):
        return CorruptError(f"{path}: {error}")
    if isinstance(error, (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.IncompatibleError)):
        return IncompatibleError(f"{path} is not an LMDB environment that this version can read: {error}")
    return UnavailableError(f"{path}: {error}")


class Environment:
    """One open environment of this process. LMDB allows a process one handle per file, so backends share it."""

    def __init__(self, path: Path, map_size: int, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self.users = 0
        self._active = 0
        self._turnstile = threading.Condition()
        try:
            self.env = lmdb.open(
                str(path),
                map_size=max(map_size, SMALLEST_MAP),
                max_dbs=len(DATABASES),
                max_readers=MAX_READERS,
                mode=0o600,
                # one flush per commit; LMDB keeps its integrity, and `Backend.sync` flushes the rest
                metasync=False,
                readonly=read_only,
                create=not read_only,
            )
        except lmdb.Error as error:
            raise translate(error, path) from error
        try:
            if not read_only:
                self.env.reader_check()
            self.databases = self._open_databases()
        except lmdb.Error as error:
            self.env.close()
            raise translate(error, path) from error
        except StorageError:
            self.env.close()
            raise

    def _open_databases(self) -> dict[bytes, Any]:
        with self.env.begin() as txn:
            names = {bytes(name) for name, _ in txn.cursor()}
        if names and not names >= set(DATABASES):
            raise IncompatibleError(f"{self.path} holds another application's LMDB database; choose another location")
        if not names and self.read_only:
            raise LocationError(f"{self.path} holds no store, and read_only=True creates none")
        databases = {name: self.env.open_db(name, create=not self.read_only) for name in DATABASES}
        with self.env.begin(write=not names) as txn:
            meta = databases[b"meta"]
            if not names:
                txn.put(b"magic", MAGIC, db=meta)
                txn.put(b"format", META_FORMAT.pack(FORMAT_VERSION), db=meta)
            if txn.get(b"magic", db=meta) != MAGIC:
                raise IncompatibleError(
                    f"{self.path} holds another application's LMDB database; choose another location"
                )
            version = META_FORMAT.unpack(txn.get(b"format", b"", db=meta))[0]
        if version > FORMAT_VERSION:
            raise IncompatibleError(
                f"{self.path} has format {version}, this prefixstore reads up to {FORMAT_VERSION}; "
                "upgrade prefixstore, or choose another location"
            )
        return databases

    @contextmanager
    def begin(self, *, write: bool) -> Iterator[lmdb.Transaction]:
        """A transaction. While one is open the map is not resized; one thread opens one at a time."""
        try:
            with self._begun(write) as txn:
                yield txn
        except lmdb.Error as error:
            raise translate(error, self.path) from error

    @contextmanager
    def _begun(self, write: bool) -> Iterator[lmdb.Transaction]:
        while True:
            with self._turnstile:
                self._active += 1
            try:
                with self.env.begin(write=write, buffers=True) as txn:
                    yield txn
                    return
            except lmdb.MapResizedError:
                pass  # raised by begin only: another process has let the file grow
            finally:
                with self._turnstile:
                    self._active -= 1
                    self._turnstile.notify_all()
            self.resize(0)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No transaction of this process is open, and none begins."""
        with self._turnstile:
            while self._active:
                self._turnstile.wait()
            yield

    def resize(self, map_size: int) -> None:
        """Make the map at least this large (0: as large as another process has made it)."""
        with self._alone():
            if map_size == 0 or map_size > self.env.info()["map_size"]:
                self.env.set_mapsize(map_size)

    def close(self) -> None:
        """Close the handle, when no transaction is open any more."""
        with self._alone():
            self.env.close()


_open: dict[Path, Environment] = {}
_open_lock = threading.Lock()


def _reset_after_fork() -> None:
    """A forked child must not touch the parent's handles, not even to close them; it opens its own."""
    global _open_lock
    _inherited.extend(_open.values())
    _open.clear()
    _open_lock = threading.Lock()


# Kept alive on purpose: closing them in the child would take the parent's reader slots away.
_inherited: list[Environment] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def acquire(path: Path, map_size: int, *, read_only: bool) -> Environment:
    """The environment at this path, opened if this process has not done so yet. `release` gives it back."""
    path = path.resolve()
    with _open_lock:
        environment = _open.get(path)
        if environment is not None and environment.read_only and not read_only:
            raise LocationError(f"{path} is open read-only in this process; close that store first")
        if environment is None:
            environment = _open[path] = Environment(path, map_size, read_only)
        elif not environment.read_only:
            environment.resize(map_size)
        environment.users += 1
    return environment


def release(environment: Environment) -> None:
    """Give an environment back; the last one who does so closes it."""
    with _open_lock:
        environment.users -= 1
        if environment.users == 0:
            _open.pop(environment.path, None)
            environment.close()
