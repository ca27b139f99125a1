"""Moves slots out of a server, and into it, through files in its slot directory; what was done with one.

What the server reads is put together in the memory of the file itself, and the server is told its name once it is
complete. The file is kept for the next restore: a fresh one of 134 MB takes longer than the copy into it.
"""

from __future__ import annotations

import errno
import io
import logging
import mmap
import os
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixstore.errors import (
    CorruptError,
    FullError,
    InvalidParameterError,
    ServerBusyError,
    ServerError,
    ServerRefusedError,
    ServerTooOldError,
    UnavailableError,
)
from prefixstore.format.keys import Tokens
from prefixstore.server.client import LlamaServer
from prefixstore.server.slot_file import SlotFile, parse_slot_file

log = logging.getLogger("prefixstore")

PREFIX = "prefixstore-"
# MADV_POPULATE_WRITE of Linux: maps all pages at once, in half the time of as many faults
POPULATE_WRITE = 23 if sys.platform == "linux" else -1
# younger ones may belong to another process
STALE_SECONDS = 600.0


@dataclass(frozen=True)
class Restored:
    """What was restored into a slot, and the bytes of its file; without tokens, the slot was left as it was.

    `seconds` is all that it took, and `saved_seconds` by how much that was faster than computing the tokens at the
    rate at which they were computed: negative if it was slower, or if the rate is not known. `reason` is why nothing
    could be used: see `miss_reason`; ``"unreadable"``, or why nothing is ever stored.
    """

    n_tokens: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    saved_seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class SavedSlot:
    """What was stored of a slot that holds these tokens: pages that were not stored before, and bytes of their states.

    `seconds` is all that it took; the pages are written after that. `reason` is why nothing was stored, or not all:
    ``"empty"``, ``"short"``, ``"other_tokens"`` (than expected), ``"media"`` (images or sound), ``"incomplete"`` (the
    server has not written all rows, as with ``--swa-full``), ``"queue_full"`` (the location takes nothing),
    ``"read_only"`` (the store), or why nothing is ever stored.
    """

    tokens: Tokens
    n_new_pages: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class SlotCopy:
    """What a slot held when it was copied: its tokens, up to the first image, and the bytes of its file.

    `store` stores what the store lacks of it, as `SlotStore.save`.
    """

    tokens: Tokens
    n_bytes: int
    has_media: bool
    store: Callable[[], SavedSlot]


class SlotBuffer:
    """A file that the server can restore a slot from, as memory that is written.

    Its space is reserved: to write where a full disk has none would end the process. Nobody but this user can make it
    shorter. While the server may still read it (`is_read`), it is not written again.
    """

    def __init__(self, directory: SlotDirectory, path: Path, size: int) -> None:
        self._directory, self.path = directory, path
        # a little more, for the next prompt; what is not reserved takes no space
        self.capacity = size + size // 4
        self._file = _created(path)
        try:
            self._file.truncate(self.capacity)
            self._memory = mmap.mmap(self._file.fileno(), self.capacity)
            self._size, self.is_read = 0, False
            self._file.truncate(0)
            self.fit(size)
        except BaseException:
            self.remove()
            raise

    def fit(self, size: int) -> None:
        """Give the file this size."""
        self._file.truncate(size)
        if size > self._size:
            _reserve(self._file.fileno(), self._size, size)
            with suppress(OSError, ValueError):  # not on an older kernel
                self._memory.madvise(POPULATE_WRITE, 0, size)
        self._size = size
        self.view = memoryview(self._memory)[:size]

    def release(self) -> None:
        """Give it back, for the next restore."""
        self._directory.released(self)

    def remove(self) -> None:
        """Delete the file. The memory stays as long as somebody looks at it."""
        with suppress(OSError):
            self.path.unlink()
        self._file.close()


class SlotDirectory:
    """The ``--slot-save-path`` of a llama-server, which this process can write to.

    Parameters
    ----------
    path
        The directory; best on tmpfs. Stale files that a process like this one has left there are deleted.

    Raises
    ------
    InvalidParameterError
        If it is not a directory, or cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._prefix = f"{PREFIX}{secrets.token_hex(6)}-"
        self._lock = threading.Lock()
        # kept for the next restore
        self._spare: SlotBuffer | None = None
        self._is_closed = False
        if not self.path.is_dir():
            raise InvalidParameterError(
                f"slots_dir={str(path)!r} is not a directory; create it, and start the server with it"
            )
        try:
            name = self._new_name()
            _created(self.path / name).close()
            self.remove(name)
        except OSError as error:
            raise InvalidParameterError(f"slots_dir={str(path)!r} cannot be written to: {error.strerror}") from None
        found = self.path.stat().st_mode
        if found & stat.S_IWOTH and not found & stat.S_ISVTX:
            place = self.path
            log.warning("%s can be written by every user, who could forge what is stored: chmod o-w '%s'", place, place)
        self._sweep()

    def read(self, name: str, size: int) -> memoryview:
        """A file of the server, in memory.

        Raises
        ------
        InvalidParameterError
            If it is not there: the server uses another directory.
        CorruptError
            If it has another size.
        UnavailableError
            If it cannot be read.
        """
        try:
            # what is not a file must neither be followed nor waited for
            with io.FileIO(
                self.path / name, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
            ) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_size != size or not size:
                    raise CorruptError(f"a slot file has {found.st_size} bytes, and the server has written {size}")
                # copied, not mapped: a file that somebody cuts while it is mapped ends the process that looks at it
                data: npt.NDArray[np.uint8] = np.fromfile(file, np.uint8, size)
            if len(data) < size:
                raise CorruptError(f"a slot file was cut while it was read, after {len(data)} bytes of {size}")
            return data.data.toreadonly()
        except FileNotFoundError:
            raise wrong_directory(self.path, f"; {name} is left in that one") from None
        except OSError as error:
            raise UnavailableError(f"a slot file cannot be read: {error.strerror}; run as the server's user") from error

    def acquire(self, size: int) -> SlotBuffer:
        """Memory for a file of this size.

        Raises
        ------
        FullError
            If there is no space.
        UnavailableError
            If it cannot be written.
        """
        with self._lock:
            spare, self._spare = self._spare, None
        try:
            if spare is not None and spare.capacity >= size and spare.path.exists():
                spare.fit(size)
                return spare
            if spare is not None:
                spare.remove()
            return SlotBuffer(self, self.path / self._new_name(), size)
        except OSError as error:
            if spare is not None:
                spare.remove()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FullError(f"no space for a slot file of {size} bytes in {self.path}") from error
            raise UnavailableError(f"a slot file cannot be written: {error.strerror}") from error

    def released(self, buffer: SlotBuffer) -> None:
        """Keep a buffer that is not used any more, unless there is a larger one."""
        with self._lock:
            other = self._spare
            is_kept = not (buffer.is_read or self._is_closed)
            if not is_kept or (other is not None and other.capacity >= buffer.capacity):
                other = buffer
            else:
                self._spare = buffer
        if other is not None:
            other.remove()

    def close(self) -> None:
        """Delete what was kept, and what the server has written late, when nobody waited for it any longer."""
        self._is_closed = True
        self._drop_spare()
        for path in self.path.glob(f"{self._prefix}*"):
            self.remove(path.name)

    def _drop_spare(self) -> None:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.remove()

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(OSError):
            (self.path / name).unlink()

    def _sweep(self) -> None:
        """Delete old files of this kind, which processes that have ended have left."""
        before = time.time() - STALE_SECONDS
        for path in self.path.glob(f"{PREFIX}*"):
            with suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and found.st_mtime < before:
                    path.unlink()

    # -- slots ---------------------------------------------------------------------------------------------------------

    def any(self, server: LlamaServer) -> SlotFile:
        """The file of any slot that holds something. If none does, a free one evaluates two tokens, and is erased.

        Raises
        ------
        UnknownVersionError
            If its version is not known.
        ServerError
            If the server cannot be asked.
        """
        try:
            slots = [slot for slot in server.slots() if not slot.is_processing]
            # those that hold little first, and last those that hold nothing, or do not say what
            order = [slot.id for slot in sorted(slots, key=lambda slot: slot.n_tokens or 1 << 30)]
        except ServerRefusedError:
            order = list(range(server.props().n_slots))
        for slot in order:
            with suppress(CorruptError):
                file = self.saved(server, slot)
                if file.layout is not None:
                    return file
        for slot in order[-1:]:
            # two: a recurrent state of one token cannot be told from empty attention
            server.evaluate(slot, (0, 0))
            try:
                # what is not understood even then is stored whole
                for whole in (False, True):
                    with suppress(CorruptError):
                        file = self.saved(server, slot, whole=whole)
                        if file.layout is not None:
                            return file
            finally:
                # the two tokens evaluated for it are of no prompt
                with suppress(ServerError):
                    server.erase(slot)
        raise ServerBusyError(f"no slot of {server.url} is idle")

    def load(self, server: LlamaServer, slot: int, n: int, buffer: SlotBuffer) -> None:
        """Have the server load a slot's file, which is complete."""
        if server.is_drafting:
            # it restores the rows of the model only: those of the draft would be of another prompt, and end at another
            # position, at which no batch of the draft continues
            server.erase(slot)
        buffer.is_read = True
        action = server.restore(slot, buffer.path.name)
        buffer.is_read = False
        if (action.n_tokens, action.n_bytes) != (n, len(buffer.view)):
            server.erase(slot)
            raise ServerTooOldError(
                f"{server.url} has restored {action.n_tokens} tokens of a slot's file of {n}: the slot was erased"
            )

    def saved(self, server: LlamaServer, slot: int, *, whole: bool = False) -> SlotFile:
        """What a slot holds, parsed; the file is deleted whatever happens. With `whole`, its state is left as it is."""
        spare, name = self._spare, self._new_name()
        if spare is not None and shutil.disk_usage(self.path).free < spare.capacity:
            self._drop_spare()
        try:
            action = server.save(slot, name)
            data = self.read(name, action.n_bytes)
        finally:
            self.remove(name)
        file = parse_slot_file(data, slot, whole=whole)
        if len(file.tokens) != action.n_tokens and not file.has_media:
            raise CorruptError(f"a slot's file has {len(file.tokens)} tokens, the server says {action.n_tokens}")
        return file

    def _new_name(self) -> str:
        return self._prefix + secrets.token_hex(6)


def _created(path: Path) -> io.FileIO:
    # the group, since the server may be another user's; others have no business with prompts
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640), "r+")


def _reserve(handle: int, start: int, end: int) -> None:
    """Have the file system reserve the bytes of a file. Raises `OSError`."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, start, end - start)
        return
    while start < end:
        start += os.pwrite(handle, bytes(min(end - start, 1 << 20)), start)


def wrong_directory(path: Path, more: str = "") -> InvalidParameterError:
    """The error for a directory that the server does not use."""
    return InvalidParameterError(
        f"slots_dir={str(path)!r} is not the directory that the server writes slots to; pass the one it was started "
        f"with as --slot-save-path{more}"
    )
