"""The files that a server and the store exchange: cut while they are read, kept for the next, removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixstore.errors import CorruptError, ServerBusyError
from prefixstore.server.client import LlamaServer, SlotAction
from prefixstore.server.slot_files import SlotDirectory
from tests.support import PATIENCE, python

CUT = """
import sys
from prefixstore.server.slot_files import SlotDirectory
directory = SlotDirectory(sys.argv[1])
path = directory.path / "file"
path.write_bytes(b"x" * 100_000)
with path.open("r+b") as another:
    data = directory.read("file", 100_000)
    another.truncate(0)
    assert bytes(data) == b"x" * 100_000
"""


def test_a_file_that_is_cut_after_it_was_read_ends_nothing(tmp_path: Path):
    """As a process of its own, since one that looks at a mapping that was cut gets SIGBUS."""
    with python(CUT, tmp_path) as process:
        assert process.wait(PATIENCE) == 0


def test_a_file_that_is_cut_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory, fromfile = SlotDirectory(tmp_path), np.fromfile
    (tmp_path / "file").write_bytes(b"x" * 1000)

    def cut(*arguments: Any) -> Any:
        os.truncate(tmp_path / "file", 600)
        return fromfile(*arguments)

    monkeypatch.setattr(np, "fromfile", cut)
    with pytest.raises(CorruptError, match="after 600 bytes of 1000"):
        directory.read("file", 1000)


class Server:
    """One that restores what is in a file by then, and says nothing of it but its size; it drafts nothing."""

    is_drafting = False
    url = "http://server"

    def __init__(self, directory: Path, before: Callable[[Path], object]):
        self.directory, self.before = directory, before
        self.size = 1000
        self.erased: list[int] = []

    def restore(self, slot: int, name: str) -> SlotAction:
        self.before(self.directory / name)
        return SlotAction(n_tokens=7, n_bytes=self.size)

    def erase(self, slot: int) -> None:
        self.erased.append(slot)


def load(directory: SlotDirectory, server: Any) -> None:
    buffer = directory.acquire(1000)
    buffer.view[:] = bytes(1000)
    try:
        directory.load(server, 3, 7, buffer)
    finally:
        buffer.release()
        directory.close()


def test_a_file_is_used_again_and_is_gone_when_the_directory_is_closed(tmp_path: Path):
    read: list[bytes] = []
    server: Any = Server(tmp_path, lambda path: read.append(path.read_bytes()))
    directory = SlotDirectory(tmp_path)
    first = directory.acquire(1000)
    first.view[:] = b"a" * 1000
    directory.load(server, 3, 7, first)
    first.release()
    (kept,) = tmp_path.iterdir()
    for size, letter in ((900, b"b"), (1100, b"c")):
        again = directory.acquire(size)
        assert (again is first, again.path) == (True, kept)
        again.view[:] = letter * size
        server.size = size
        directory.load(server, 3, 7, again)
        again.release()
    larger, other = directory.acquire(5000), directory.acquire(10)
    assert not kept.exists()
    for buffer in (larger, other):
        buffer.release()
    assert list(tmp_path.iterdir()) == [larger.path]

    def fail(_: Path) -> None:
        raise ServerBusyError("it may read the file later")

    failing: Any = Server(tmp_path, fail)
    again = directory.acquire(5000)
    assert again is larger
    with pytest.raises(ServerBusyError):
        directory.load(failing, 3, 7, again)
    again.release()
    assert list(tmp_path.iterdir()) == []
    directory.acquire(5000).release()
    directory.close()
    late = directory.acquire(10)
    late.release()
    assert list(tmp_path.iterdir()) == []
    assert read == [b"a" * 1000, b"b" * 900, b"c" * 1100]


def test_before_a_server_has_said_that_it_drafts_nothing_its_slots_are_emptied_first(tmp_path: Path):
    server: Any = Server(tmp_path, Path.read_bytes)
    load(SlotDirectory(tmp_path), server)
    assert server.erased == []
    server.is_drafting = LlamaServer(server.url).is_drafting
    load(SlotDirectory(tmp_path), server)
    assert server.erased == [3]
