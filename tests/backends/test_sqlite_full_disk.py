"""SQLite on a disk that is full: pages are refused, and deleting makes space for others."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import FullError
from prefixstore.maintenance.archive import Archive
from tests.support.places import fill, space


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill_the_disk(location, size):
    with closing(open_pages(location, max_bytes=1 << 30)) as backend:
        for number in range(1000):
            try:
                fill(backend, space("t"), [[number, 1, 2, 3]], size=size, last_used=number + 1)
            except FullError:
                return number
    raise AssertionError("the disk is not full")


@pytest.mark.slow
@pytest.mark.parametrize("size", [50_000, 3_000_000])
def test_a_store_on_a_full_disk_evicts_and_goes_on(small_disk, size):
    location = f"sqlite:///{small_disk}/kv.db"
    stored = fill_the_disk(location, size)
    assert stored > 0
    # again, after opening it again
    fill_the_disk(location, size)
    with Archive(location) as archive:
        assert len(archive.pages()) >= stored
        assert archive.evict_to(archive.used().bytes // 2).pages > 0
        left = len(archive.pages())
        fill(archive.backend, space("t"), [[9000, 1, 2, 3]], size=size)
        assert len(archive.pages()) == left + 1
        assert archive.check() == []
        assert archive.purge(salt="t").pages == left + 1
        archive.compact()
    assert shutil.disk_usage(small_disk).free > (8 << 20)
