"""A file system that becomes read only under an open store, as Linux makes it after an error of the disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError
from tests.attacks.server_work import lookup
from tests.support.engines import MIB, A, B, C, Store
from tests.support.places import place


def mount(image: Path, where: Path) -> None:
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, where], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small ext4, from a file."""
    image, where = tmp_path / "image", tmp_path / "disk"
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("only root may mount a file system, and it has to be ext4")
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    # with a journal the error would be found again at the next mount
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image], check=True)
    where.mkdir()
    try:
        mount(image, where)
    except subprocess.CalledProcessError:
        pytest.skip("file systems cannot be mounted here")
    yield where
    subprocess.run(["umount", where], check=True)


def break_(disk: Path) -> None:
    """Give the file system an error. `remount,ro` itself is refused while files are open for writing."""
    devices = [line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {disk} " in line]
    # never that of another one
    assert len(devices) == 1, devices
    assert devices[0].startswith("/dev/loop"), devices
    (Path("/sys/fs/ext4") / devices[0].removeprefix("/dev/") / "trigger_fs_error").write_text("1")


def opened(location: str) -> Store:
    return Store(open_pages(location, max_bytes=8 * MIB), max_bytes=8 * MIB)


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_a_disk_that_becomes_read_only_is_read_and_drops_pages(scheme, disk, request):
    location = place(scheme, disk, request)
    store = opened(location)
    store.put(A)
    store.engine.flush()
    break_(disk)
    for tokens in (B, C, B):
        assert lookup(store, A) == 3
        dropped = sum(store.counters.group("dropped").values())
        with suppress(StorageError):
            assert store.put(tokens) == 0
            assert sum(store.counters.group("dropped").values()) == dropped + 3
        assert lookup(store, tokens) == 0
        with suppress(StorageError):
            store.engine.flush()
    assert store.engine.upkeep.check() == []
    with suppress(StorageError):
        store.engine.close()
    # nothing holds the file system; on one that works, the store goes on
    subprocess.run(["umount", disk], check=True)
    subprocess.run(["e2fsck", "-p", disk.with_name("image")], check=False, stdout=subprocess.DEVNULL)
    mount(disk.with_name("image"), disk)
    with closing(opened(location)) as again:
        assert again.fetch(A) == 3
        assert again.put(C) == 3
        assert again.fetch(C) == 3
