"""A disk that is full: pages are refused and all others can be read, until there is space again."""

import subprocess
from contextlib import closing

import pytest

from prefixstore import PrefixStore
from prefixstore.engine.pages import open_pages
from prefixstore.errors import FullError, StorageError
from prefixstore.maintenance.archive import Archive
from tests.support import in_fork, keys_of
from tests.support.places import fill, small_disk, space


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path, 24) as mounted:
        yield mounted


@pytest.mark.parametrize("location", ["lmdb://{}/kv", "sqlite:///{}/kv.db"])
def test_what_others_write_to_the_disk_is_an_error_that_ends_when_it_is_deleted(disk, location):
    location = location.format(disk)
    with closing(open_pages(location, max_bytes=1 << 30)) as backend:
        fill(backend, space("t"), [[1, 1, 2, 3]], size=100_000)
        stored = keys_of(backend)
        other = disk / "other"
        with pytest.raises(OSError, match="No space"):
            other.write_bytes(bytes(32 << 20))
        with pytest.raises(FullError):
            fill(backend, space("t"), [[number, 1, 2, 3] for number in range(2, 100)], size=1_000_000)
        assert keys_of(backend) == stored
        other.unlink()
        fill(backend, space("t"), [[200, 1, 2, 3]], size=1_000_000)
    with Archive(location) as archive:
        assert archive.check() == []
        assert archive.evict(archive.used().bytes // 2).pages
        archive.compact()
        assert archive.check() == []


def test_a_disk_without_a_free_page_on_which_lmdb_is_opened_or_copied_is_an_error(disk):
    Archive(disk / "kv", create=True).close()
    (disk / "copy").mkdir()

    def opened_and_copied():
        with Archive(disk / "kv") as archive:
            subprocess.run(["dd", "if=/dev/zero", f"of={disk}/other", "bs=4096"], check=False, capture_output=True)
            with pytest.raises(StorageError, match="No space"):
                archive.compact()
        (disk / "kv" / "data.mdb").rename(disk / "copy" / "data.mdb")
        for name in ("new", "copy"):
            with pytest.raises(StorageError, match="No space"):
                PrefixStore(disk / name, namespace="n")

    # a signal of the system would end this process, too
    in_fork(opened_and_copied)
