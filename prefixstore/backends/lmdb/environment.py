"""The LMDB handles of this process: opened once per location, shared, resized, and never used by a forked child."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakSet

import lmdb

from prefixstore.backends import refusals
from prefixstore.backends.files import publish, sync_path
from prefixstore.backends.forks import HandleLock, abandon, adding, is_quiet, register_at_fork
from prefixstore.backends.lmdb.checked import CheckedFile, damaged, require_sound
from prefixstore.backends.lmdb.lmdb_errors import lmdb_error, not_opened, prepare_directory
from prefixstore.backends.lmdb.walk import MAGIC
from prefixstore.backends.trusted import require_trusted_directory, require_trusted_files
from prefixstore.errors import CorruptError, LocationError, UnavailableError

SMALLEST_MAP = 1 << 20
MAX_READERS = 512
# what the file may have more than its budget needs, so that there is space to delete
FILE_EXTRA = 256 * mmap.PAGESIZE
DATA, LOCK = "data.mdb", "lock.mdb"
# what the keys begin with that are not a row's or a payload's; the key of the version, beside that of `MAGIC`
META = b"m"
FORMAT = META + b"format"
# a file that was replaced, until it is overwritten; new files are in directories that begin with the other name
OLD, NEW = ".old.mdb", ".new."
# bytes that are copied in one transaction
COPIED_AT_ONCE = 64 << 20
ZEROS = bytes(1 << 20)
# of a lock file: two headers, and its readers, of a cache line each
LOCK_BYTES = 64 * (2 + MAX_READERS)
# version of the database; what is in the rows has versions of its own
LMDB_VERSION = 6
META_FORMAT = struct.Struct("<I")


class Environment:
    """One open environment of this process. LMDB allows a process one handle per file, so backends share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = str(path / DATA)
        # it is open while there are some, or opened by the next transaction
        self.users: WeakSet[object] = WeakSet()
        self._map_size, self._read_only = SMALLEST_MAP, True
        # transactions are inside; the handle is opened, replaced and closed while none is open
        self._handle_lock = HandleLock()
        self._is_open = False
        self._checked = CheckedFile(path / DATA)
        self._identity: tuple[int, int] | None = None
        register_at_fork(self, self._handle_lock)

    def open(self, map_size: int, *, read_only: bool) -> None:
        """Open it for a user, and make the map at least this large: who only reads does not decide that.

        Raises `LocationError` if there is no memory for it, or others only read it.
        """
        if self._suits(map_size, read_only):
            return
        with self._handle_lock.exclusive():
            if self._suits(map_size, read_only):
                return
            if self._is_open and self._read_only and len(self.users) > 1:
                raise LocationError(f"{self.path} is open read-only in this process; close that store first")
            former = self._map_size, self._read_only
            try:
                self._map_size, self._read_only = max(map_size, self._map_size), self._read_only and read_only
                self._renew()
            except BaseException:
                self._map_size, self._read_only = former
                raise

    def _suits(self, map_size: int, read_only: bool) -> bool:
        return self._is_open and (read_only or (map_size <= self._map_size and not self._read_only))

    def _open(self, *, is_new: bool = False) -> None:
        """Open the file, and create it if it is not there; one that this process has just written is `is_new`."""
        path, file, read_only = self.path, self.path / DATA, self._read_only
        with ExitStack() as failed:
            failed.callback(self._forget)
            try:
                prepare_directory(path, read_only=read_only)
                require_trusted_directory(path)
                require_trusted_files(file, path / LOCK)
                if not file.exists():
                    if read_only:
                        raise refusals.no_store(path)
                    _create(path)
                    is_new = True
                _add_lock(path)
                found = file.stat()
                # a handle that is replaced was used until now
                if self._identity != (found.st_dev, found.st_ino):
                    self._checked.enter(is_new=is_new)
                self._identity, self._size = (found.st_dev, found.st_ino), found.st_size
                self.env = lmdb.open(
                    str(path),
                    map_size=0,  # that of the last writer
                    max_readers=MAX_READERS,
                    # a cached one would hold a reader slot for as long as the handle is open
                    max_spare_txns=0,
                    mode=0o600,
                    # one flush per commit; LMDB keeps its integrity, and `Backend.sync` flushes the rest
                    metasync=False,
                    readonly=read_only,
                    create=not read_only,
                )
                failed.callback(self.env.close)
                # within the map that it was filled through, transactions have left space to delete
                self._map_size = max(self._map_size, self.env.info()["map_size"])
                if not read_only:
                    self.env.set_mapsize(self._map_size)
            except (lmdb.Error, OSError) as error:
                if isinstance(error, (lmdb.InvalidError, lmdb.InvalidParameterError)) and self._checked.was_closed:
                    raise damaged(file, str(error)) from error
                raise not_opened(error, path, self._map_size, read_only=read_only) from error
            try:
                if not read_only:
                    self.env.reader_check()
                self.database = self.env.open_db(None)
                self._is_open = True
                failed.callback(setattr, self, "_is_open", False)
                with self.begin(write=False) as txn:
                    self._require_format(txn)
            except lmdb.Error as error:
                raise lmdb_error(error, path) from error
            if not read_only:
                self._checked.drop_note()
            failed.pop_all()

    def _forget(self) -> None:
        """The file is not open: when it is opened, it is another one."""
        self._identity = None
        self._checked.drop()

    def _require_format(self, txn: lmdb.Transaction) -> None:
        """Refuse an environment that is not a store of this version. Nothing is written to it."""
        magic, version = (bytes(txn.get(key, b"")) for key in (MAGIC[0], FORMAT))
        if magic != MAGIC[1] or len(version) != META_FORMAT.size:
            raise refusals.foreign(self.path, "LMDB database")
        found = META_FORMAT.unpack(version)[0]
        if found != LMDB_VERSION:
            raise refusals.other_format(self.path, found, LMDB_VERSION)

    @contextmanager
    def begin(self, *, write: bool) -> Iterator[lmdb.Transaction]:
        """A transaction. The map is not resized while one is open; a thread opens one at a time."""
        with self.translated(), self._begun(write) as txn:
            yield txn

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise the prefixstore error for an LMDB error in this block. After damage the file is verified again."""
        try:
            yield
        except lmdb.Error as error:
            translated = lmdb_error(error, self.path)
            if isinstance(translated, CorruptError):
                self._checked.forget()
            raise translated from error
        except CorruptError:
            # of a row, or of the file: there may be more
            self._checked.forget()
            raise

    @contextmanager
    def _begun(self, write: bool) -> Iterator[lmdb.Transaction]:
        begun = has_panicked = False
        while True:
            if not (self._is_open and self._is_current()) and not self._handle_lock.is_held:
                self._renew()
            with self._handle_lock.shared():
                try:
                    with self.env.begin(write=write, buffers=True) as txn:
                        begun = True
                        yield txn
                        return
                except lmdb.MapResizedError:
                    pass  # raised by begin only: another process has let the file grow
                except lmdb.PanicError:
                    # the state on the disk could not be written: every use of this handle fails from now on
                    self._is_open = False
                    if begun or has_panicked:
                        raise
                    has_panicked = True
                except lmdb.ReadersFullError:
                    # slots of processes that have ended can be freed
                    if begun or self.env.reader_check() == 0:
                        raise
                    continue
            self._renew()

    def require_free(self, txn: lmdb.Transaction, n_pages: int) -> None:
        """Raise `lmdb.MapFullError` unless a transaction could allocate this many more pages of the file.

        LMDB does not say how many are free for it, so they are taken, in a transaction inside this one that is undone.
        """
        if n_pages:
            # a value that takes a page of the file of its own
            page = bytes(self.env.stat()["psize"] - 96)
            trial = self.env.begin(write=True, parent=txn)
            try:
                for number in range(n_pages):
                    trial.put(META + b"trial:%d" % number, page)
            finally:
                trial.abort()

    def _is_current(self) -> bool:
        """Whether the open file is the one at the path: if not, no other process would see what is written.

        Raises `CorruptError` if the file, which never shrinks, was truncated: reading beyond its end would end the
        process.
        """
        # before: another thread may see it grow meanwhile
        size = self._size
        try:
            found = os.stat(self.file)  # noqa: PTH116 - with a str: a microsecond for each transaction
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # the open handle still works
        if (found.st_dev, found.st_ino) != self._identity:
            return False
        if found.st_size < size:
            raise CorruptError(
                f"{self.path} was truncated from {size} to {found.st_size} bytes while it was open; stop all "
                "processes using it, and delete data.mdb and lock.mdb there"
            )
        self._size = found.st_size
        return True

    def _renew(self) -> None:
        """Open another handle in place of this one, and create another file if that one is gone."""
        with self._handle_lock.exclusive():
            if not self.users:
                raise refusals.closed(self.path)
            self._close()
            self._open()

    def _close(self) -> None:
        # first: an interrupt may come at any step
        self._is_open = False
        with suppress(AttributeError):  # it was never open
            self.env.close()

    def check(self) -> None:
        """Verify the file. Raises `CorruptError`."""
        is_read = False
        while not is_read:
            # others may write two transactions before it is read which pages this one sees
            with self.begin(write=False) as txn:
                is_read = require_sound(self.path / DATA, txn.id())

    def rewrite(self, *, erase: bool) -> int:
        """Put a copy of all rows in the place of the file; returns by how many bytes it is smaller.

        With `erase` the old file is overwritten, and so is what an attempt has left that was killed.

        Raises `UnavailableError` if another process has the store open, or the file cannot be replaced.
        """
        file, old = self.path / DATA, self.path / OLD
        with self.translated(), self._handle_lock.exclusive():
            if not (self._is_open and self._is_current()):
                self._renew()
            before = file.stat()
            try:
                with self._checked.alone():
                    self._remove_rests(erase=erase)
                    with TemporaryDirectory(dir=self.path, prefix=NEW) as directory:
                        self._copy(directory)
                        self._close()
                        # so that it is found by the next attempt if this one is killed before it is overwritten
                        os.link(file, old)
                        # The other program that may have the old file open keeps its lock file: the numbers of
                        # transactions in that are not those of the new one.
                        for name in (LOCK, DATA):
                            new, former = Path(directory) / name, (self.path / name).stat()
                            new.chmod(stat.S_IMODE(former.st_mode))
                            with suppress(PermissionError):
                                shutil.chown(new, former.st_uid, former.st_gid)
                            new.replace(self.path / name)
                    sync_path(self.path)
                    self._remove_rests(erase=erase)
            except OSError as error:
                raise UnavailableError(f"{file} cannot be replaced by a copy: {error.strerror}") from error
            self._open(is_new=True)
            return max(before.st_size - self._size, 0)

    def _copy(self, directory: str) -> None:
        """Copy all rows, in order, into a new file: no page of it has ever held a row that was deleted."""
        # with a smaller budget than it was filled with, no more than it needs
        map_size = max(self._map_size, (self._size + FILE_EXTRA) // mmap.PAGESIZE * mmap.PAGESIZE)
        _write_lock(directory)
        with self.begin(write=False) as txn, lmdb.open(directory, map_size=map_size, mode=0o600) as new:
            rows = iter(txn.cursor())
            while _put_some(new, rows):
                pass

    def _remove_rests(self, *, erase: bool) -> None:
        """Delete what is left of files that were replaced, or were to replace this one."""
        old, directories = self.path / OLD, list(self.path.glob(f"{NEW}*"))
        if old.exists() and old.samefile(self.path / DATA):
            old.unlink()
        for rest in (old, *(directory / DATA for directory in directories)):
            if erase and rest.exists():
                _overwrite(rest)
            rest.unlink(missing_ok=True)
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)

    def release(self, user: object) -> None:
        """One user less; the last one closes the handle, once no transaction is open. A second call does nothing."""
        with adding():
            if user not in self.users:
                return
            self.users.discard(user)
        if self.users:
            return
        with self._handle_lock.exclusive():
            with adding():
                # another thread may use it by now; one that comes later opens it again
                is_last, is_written = not self.users, self._is_open and not self._read_only
                if is_last:
                    self._is_open, self._identity, self._map_size, self._read_only = False, None, SMALLEST_MAP, True
            if is_last:
                self._close()
                self._checked.leave(was_written=is_written)
        with adding():
            if not self.users and _environments.get(self.path) is self:
                del _environments[self.path]

    def before_fork(self) -> None:
        """Free the reader slots of transactions that have ended.

        py-lmdb frees the slot of a transaction only when nothing refers to it any more, as the variable of a ``with``
        block does for long. A child that closes the handle would free that slot, too, and it may be another view's in
        the parent by then: writers would reuse the pages which that one reads.
        """
        if self._is_open:
            try:
                # this ends them
                self.env.set_mapsize(self.env.info()["map_size"])
            except lmdb.Error:
                self._is_open = False  # it cannot be used any more, and is opened again

    def after_fork(self) -> None:
        """A child must not use its parent's handle; closed without a transaction, it takes nothing from the parent."""
        if is_quiet():
            self._close()
        elif self._is_open:
            # interrupts kept the fork from waiting for the transactions of other threads
            abandon(self.env)
        self._is_open = False
        self._forget()


def _create(path: Path) -> None:
    """Create the file under a temporary name; it gets its own when it is complete and on disk, unless another has it.

    LMDB does not flush the first pages of a new file before a commit: after a loss of power it may refuse the file.
    """
    with TemporaryDirectory(dir=path, prefix=NEW) as directory:
        _write_lock(directory)
        with lmdb.open(directory, map_size=SMALLEST_MAP, mode=0o600) as new, new.begin(write=True) as txn:
            txn.put(*MAGIC)
            txn.put(FORMAT, META_FORMAT.pack(LMDB_VERSION))
        publish(Path(directory) / DATA, path / DATA)


def _add_lock(path: Path) -> None:
    if not (path / LOCK).exists() and os.access(path, os.W_OK):
        with TemporaryDirectory(dir=path, prefix=NEW) as directory:
            publish(_write_lock(directory), path / LOCK)


def _write_lock(directory: str) -> Path:
    """Write all of a lock file, which LMDB maps: a hole in it ends the process (SIGBUS) if the disk is full."""
    file = Path(directory) / LOCK
    file.touch(0o600)
    file.write_bytes(ZEROS[:LOCK_BYTES])
    return file


def _put_some(env: lmdb.Environment, rows: Iterator[tuple[Any, Any]]) -> bool:
    """Write some more rows in one transaction; whether there may be others."""
    n_bytes = 0
    with env.begin(write=True) as txn:
        for key, value in rows:
            txn.put(key, value, append=True)
            n_bytes += len(value)
            if n_bytes >= COPIED_AT_ONCE:
                return True
    return False


def _overwrite(path: Path) -> None:
    """Overwrite a file with zeros."""
    with path.open("r+b") as file:
        left = path.stat().st_size
        while left > 0:
            left -= file.write(ZEROS[:left])
        file.flush()
        os.fsync(file.fileno())


# the environments of this process, by path
_environments: dict[Path, Environment] = {}


def acquire(path: Path, map_size: int, *, read_only: bool, user: object) -> Environment:
    """The environment at this path, opened if this process has not opened it yet; to be released by this user."""
    path = Path(os.path.realpath(path))  # that of pathlib raises for a link to itself
    with adding():
        if path not in _environments:
            _environments[path] = Environment(path)
        environment = _environments[path]
        environment.users.add(user)
    try:
        environment.open(map_size, read_only=read_only)
    except BaseException:
        environment.release(user)
        raise
    return environment
