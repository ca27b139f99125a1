"""A disk that is full: pages are refused and all others can be read, until there is space again."""

from contextlib import closing

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import FullError
from prefixstore.maintenance.archive import Archive
from tests.support import keys_of
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
