"""Directories and files that other users could have made or can change; and reading without the right to write."""

import os
import shutil
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import LocationError
from tests.support import in_fork, keys_of
from tests.support.places import MIB, fill, opened, refusal, space

pytestmark = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can act as other users")
ME, OTHER, GROUP = 12_345, 12_346, 12_347


def as_user(work, uid=ME, groups=()):
    """Do this in a child that is another user; what it raises fails the test."""

    def act():
        os.setgroups(groups)
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        work()

    in_fork(act)


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory):
    """Import what a child needs: another user may not be able to read the packages."""
    for scheme in ("lmdb", "sqlite"):
        make_store(location_in(tmp_path_factory.mktemp("imported"), scheme))


@pytest.fixture
def folder(tmp_path):
    """A folder that all users can reach, and of which one user is the owner."""
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="pfxs-trust-"))
    path.chmod(0o755)
    os.chown(path, ME, ME)
    yield path
    shutil.rmtree(path)


def location_in(folder, scheme):
    return f"lmdb://{folder}/kv" if scheme == "lmdb" else f"sqlite:///{folder}/kv/kv.db"


def files_of(scheme):
    return ("data.mdb", "lock.mdb") if scheme == "lmdb" else ("kv.db", "kv.db-wal", "kv.db-shm")


def make_store(location):
    with opened(location) as backend:
        fill(backend, space(), [[1, 2, 3, 4]])


BOTH = pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])


@BOTH
@pytest.mark.parametrize("owner", [ME, OTHER])
def test_a_directory_that_everyone_can_write_to_is_refused(folder, scheme, owner):
    (folder / "kv").mkdir()
    os.chown(folder / "kv", owner, owner)
    (folder / "kv").chmod(0o777)

    def use():
        assert "can be written by every user" in refusal(location_in(folder, scheme))
        assert "chmod o-w" in refusal(location_in(folder, scheme))

    as_user(use)
    assert list((folder / "kv").iterdir()) == []


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("planted", ["a file of everyone", "a file of another user", "a link"])
def test_planted_files_are_refused_and_links_are_not_followed(folder, scheme, planted):
    for name in files_of(scheme):
        if name == "kv.db-shm" and planted != "a link":
            continue
        here = folder / name.replace(".", "_")
        here.mkdir(mode=0o755)
        os.chown(here, ME, ME)
        location = location_in(here, scheme)
        as_user(lambda location=location: make_store(location))
        path, target = here / "kv" / name, folder / f"{name}-target"
        if planted == "a link":
            if path.exists():
                path.rename(target)
            path.symlink_to(target)
        else:
            path.touch()
            os.chown(path, *((ME, ME) if planted == "a file of everyone" else (OTHER, OTHER)))
            path.chmod(0o666 if planted == "a file of everyone" else 0o644)
        says = {"a file of everyone": "every user", "a file of another user": "another user", "a link": "symbolic link"}

        def use(location=location, says=says[planted], name=name):
            for read_only in (False, True):
                message = refusal(location, read_only=read_only)
                assert message.startswith("LocationError"), message
                assert says in message, message
                assert name in message, message

        as_user(use)
        if planted == "a link":
            assert target.exists() == (name not in ("kv.db-wal", "kv.db-shm"))


def test_a_store_of_another_user_is_refused_whatever_its_group_may_do(folder):
    location = location_in(folder, "lmdb")
    as_user(lambda: make_store(location))
    for path in (folder / "kv", folder / "kv" / "data.mdb", folder / "kv" / "lock.mdb"):
        os.chown(path, ME, GROUP)
        path.chmod(0o2770 if path.is_dir() else 0o660)

    def refused():
        assert "belongs to another user" in refusal(location, read_only=True)

    as_user(refused, OTHER, [GROUP])


# -- reading without the right to write --------------------------------------------------------------------------------


def test_reading_without_the_right_to_write_says_which_file_must_be_writable(folder):
    for scheme, named in (("lmdb", "lock.mdb"), ("sqlite", "kv.db-shm")):
        here = folder / scheme
        here.mkdir()
        os.chown(here, ME, ME)
        location = location_in(here, scheme)
        as_user(lambda location=location: make_store(location))
        for path in [here / "kv", *(here / "kv").iterdir()]:
            os.chown(path, 0, GROUP)
            path.chmod(0o750 if path.is_dir() else 0o640)

        def use(location=location, named=named):
            message = refusal(location, read_only=True)
            assert message.startswith("LocationError"), message
            assert named in message, message
            assert "choose another location" not in message, message

        as_user(use, OTHER, [GROUP])


@BOTH
def test_a_store_on_a_read_only_file_system_can_be_read(folder, scheme):
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], check=False, capture_output=True).returncode != 0:
        pytest.skip("a read-only file system needs the right to mount one")
    try:
        disk.chmod(0o755)
        os.chown(disk, ME, ME)
        location = location_in(disk, scheme)
        as_user(lambda: make_store(location))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

        def use():
            with closing(open_pages(location, max_bytes=MIB, read_only=True)) as backend:
                assert len(keys_of(backend)) == 1
            with pytest.raises(LocationError):
                open_pages(location, max_bytes=MIB).close()

        as_user(use)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
