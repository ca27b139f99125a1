"""A file system that becomes read only: ``unshare -m python -m tests.attacks.remounts lmdb DIRECTORY``.

It runs in a mount namespace of its own, so that nothing is left of what it mounts.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError
from tests.support.engines import MIB, A, B, C, Store
from tests.support.timeouts import disable_timeouts


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def opened(location: str, **options: bool) -> Store:
    return Store(open_pages(location, max_bytes=8 * MIB, **options), max_bytes=8 * MIB, options=options)


def misses_or_finds(store: Store, tokens: list[int]) -> int:
    try:
        return store.fetch(tokens)
    except StorageError:
        return 0


def drops(store: Store, tokens: list[int]) -> None:
    before = sum(store.counters.group("dropped").values())
    with suppress(StorageError):
        assert store.put(tokens) == 0
        assert sum(store.counters.group("dropped").values()) == before + 3


def mounted(directory: Path) -> Path:
    """Mount a small ext4 from a file; it becomes read only when it has an error. Where it can be given one."""
    where = directory / "disk"
    where.mkdir(exist_ok=True)
    mount("-o", "loop,errors=remount-ro", directory / "image", where)
    devices = [line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {where} " in line]
    # never that of another file system
    assert len(devices) == 1, devices
    assert devices[0].startswith("/dev/loop"), devices
    return Path("/sys/fs/ext4") / devices[0].removeprefix("/dev/") / "trigger_fs_error"


def make_image(directory: Path) -> None:
    with (directory / "image").open("wb") as image:
        image.truncate(64 * MIB)
    # with a journal the error would be found again at the next mount
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", directory / "image"], check=True)


def main(scheme: str, directory: Path) -> None:
    disable_timeouts()
    make_image(directory)
    error = mounted(directory)
    location = f"{directory}/disk/kv" if scheme == "lmdb" else f"sqlite:///{directory}/disk/kv.db"
    print("mounted", flush=True)
    store = opened(location)
    store.put(A)
    store.engine.flush()
    assert store.fetch(A) == 3
    error.write_text("1")
    for tokens in (B, C, B):
        assert misses_or_finds(store, A) == 3
        drops(store, tokens)
        assert misses_or_finds(store, tokens) == 0
        with suppress(StorageError):
            store.engine.flush()
    assert store.engine.upkeep.check() == []
    for options in ({}, {"read_only": True}):
        with (
            suppress(StorageError),
            closing(open_pages(location, max_bytes=8 * MIB, **options)) as other,
            other.view() as view,
        ):
            assert view.used.entries == 3
    with suppress(StorageError):
        store.engine.close()
    # not open any more, so it can be opened again; what that says is for the operator
    for options in ({}, {"read_only": True}):
        try:
            open_pages(location, max_bytes=8 * MIB, **options).close()
            print("opened", options, flush=True)
        except StorageError as refused:
            print(type(refused).__name__, options, refused, flush=True)
    # nothing holds the file system
    subprocess.run(["umount", directory / "disk"], check=True)
    subprocess.run(["e2fsck", "-p", directory / "image"], check=False, stdout=subprocess.DEVNULL)
    mounted(directory)
    with closing(opened(location)) as store:
        assert store.fetch(A) == 3
        assert store.put(C) == 3
        assert store.fetch(C) == 3
        assert store.engine.upkeep.check() == []
    subprocess.run(["umount", directory / "disk"], check=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
