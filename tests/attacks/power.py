"""What a disk holds after the power has failed, from the journal that ``power.c`` has written.

The rules: what was written to a file before its last sync is there. Of what was written later nothing is there, or all,
or any part of it, in sectors of 512 bytes if it is torn. A new name is there once its directory was synced; of names
that were made, changed or deleted later a first part is, because file systems keep their order. Files that are mapped
for writing (LMDB's locks, SQLite's index of its log) hold zeros, or anything.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HEAD = struct.Struct("<cBHQQQ")
CREATE, MKDIR, WRITE, TRUNCATE, SYNC, LINK, UNLINK, RENAME, MARK = (bytes([n]) for n in b"cdwtslurm")
SECTOR = 512
# how much of what was not synced is on the disk
MODES = ("none", "all", "some", "torn")


def shim(directory: Path) -> Path:
    """``power.c``, compiled."""
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD and /proc/self/fd are Linux's")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler: no cc on PATH")
    library = directory / "power.so"
    source = Path(__file__).with_name("power.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def is_mapped(path: Path) -> bool:
    """Whether a file is written to through memory, of which the journal has nothing."""
    return path.name == "lock.mdb" or path.name.endswith("-shm")


@dataclass(frozen=True)
class Entry:
    """Something that changed a file, its name, or nothing: a mark, whose text is `data`."""

    kind: bytes
    is_synced: bool
    inode: int
    offset: int
    name: str
    data: bytes


def read_journal(path: Path) -> list[Entry]:
    data, at, entries = path.read_bytes(), 0, []
    while at < len(data):
        kind, flags, n_name, inode, offset, n_data = HEAD.unpack_from(data, at)
        at += HEAD.size
        name, content = data[at : at + n_name].decode(), data[at + n_name : at + n_name + n_data]
        at += n_name + n_data
        entries.append(Entry(kind, bool(flags), inode, offset, name, content))
    return entries


@dataclass
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Entry] = field(default_factory=list)

    def sync(self) -> None:
        for entry in self.pending:
            _write(self.durable, entry.offset, entry.data, entry.kind)
        self.pending.clear()

    def after(self, mode: str, rng: random.Random) -> bytes:
        content = bytearray(self.durable)
        for entry in self.pending:
            if entry.is_synced or mode == "all" or (mode == "some" and rng.random() < 0.5):
                _write(content, entry.offset, entry.data, entry.kind)
            elif mode == "torn" and entry.kind == TRUNCATE:
                if rng.random() < 0.5:
                    _write(content, entry.offset, b"", TRUNCATE)
            elif mode == "torn":
                for start, end in _sectors(entry.offset, entry.offset + len(entry.data)):
                    if rng.random() < 0.5:
                        _write(content, start, entry.data[start - entry.offset : end - entry.offset], WRITE)
        return bytes(content)


def _write(content: bytearray, offset: int, data: bytes, kind: bytes) -> None:
    end = offset + len(data)
    if end > len(content):
        content.extend(bytes(end - len(content)))
    if kind == TRUNCATE:
        del content[offset:]
    else:
        content[offset:end] = data


def _sectors(start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        stop = min(end, start // SECTOR * SECTOR + SECTOR)
        yield start, stop
        start = stop


class Disk:
    """The files below a directory, as the journal tells it up to some entry.

    Parameters
    ----------
    root, inode
        The directory, which is durable at the start: empty, unless `hold` is called.
    """

    def __init__(self, root: Path, inode: int) -> None:
        self._root = str(root)
        # an inode that was freed is used again: files and directories have numbers of our own
        self._numbers = {inode: 0}
        self._directories = {0: str(root)}
        self._files: dict[int, _File] = {}
        # each with the directory in which it happened, and the number of what it is about
        self._names: list[tuple[Entry, str, int]] = []
        self._durable: set[int] = set()

    def hold(self) -> None:
        """Take what is below the directory now for durable: nothing was written since it was recorded."""
        for path in sorted(Path(self._root).rglob("*")):
            inode, is_file = path.stat().st_ino, path.is_file()
            kind = CREATE if is_file else MKDIR
            self.apply(Entry(kind, is_synced=False, inode=inode, offset=0, name=str(path), data=b""))
            if is_file:
                self._files[self._numbers[inode]].durable[:] = path.read_bytes()
        self._durable = set(range(len(self._names)))

    def apply(self, entry: Entry) -> None:
        if entry.kind in (CREATE, MKDIR):
            number = self._numbers[entry.inode] = len(self._files) + len(self._directories)
            if entry.kind == CREATE:
                self._files[number] = _File()
            else:
                self._directories[number] = entry.name
        number = self._numbers.get(entry.inode, 0)
        if entry.kind in (WRITE, TRUNCATE):
            file = self._files[number]
            file.pending.append(entry)
            if entry.is_synced and len(file.pending) == 1:
                file.sync()
        elif entry.kind == SYNC and number in self._directories:
            here = self._directories[number]
            self._durable |= {i for i, (_, directory, _) in enumerate(self._names) if directory == here}
        elif entry.kind == SYNC:
            self._files[number].sync()
        elif entry.kind != MARK:
            # of a link or a new name the directory that it gets it in
            self._names.append((entry, str(Path(entry.data.decode() or entry.name).parent), number))

    def names(self, mode: str, rng: random.Random) -> dict[str, int]:
        """Paths, and the numbers of what they name."""
        first = {"none": 0, "all": len(self._names)}.get(mode, rng.randint(0, len(self._names)))
        names: dict[str, int] = {self._root: 0}
        for i, (entry, directory, number) in enumerate(self._names):
            if (i >= first and i not in self._durable) or directory not in names:
                continue
            if entry.kind in (UNLINK, RENAME):
                names.pop(entry.name, None)
            if entry.kind != UNLINK:
                names[entry.data.decode() or entry.name] = number
        return names

    def after_power_loss(self, target: Path, mode: str, rng: random.Random) -> None:
        """Make the directory `target` what is left."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        names = self.names(mode, rng)
        for path, number in names.items():
            if path != self._root and str(Path(path).parent) not in names:
                continue  # a directory that is gone has nothing in it
            place = target / os.path.relpath(path, self._root)
            if number in self._files:
                content = self._files[number].after(mode, rng)
                if mode == "torn" and is_mapped(place):
                    content = rng.randbytes(len(content))
                place.write_bytes(content)
                place.chmod(0o600)
            else:
                place.mkdir(mode=0o700, exist_ok=True)
