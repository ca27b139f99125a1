"""Damaged files: no wrong state, no crash, no exception in a completion, and a store that works again."""

from __future__ import annotations

import json
import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from prefixstore import CorruptError, IncompatibleError, PrefixStoreError
from prefixstore.engine.pages import open_pages
from tests.attacks import in_child
from tests.attacks.damaged_file import MIB, build, location
from tests.support.models import TORTURE
from tests.support.places import contents, fill, space

CASES = 15 * TORTURE


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
@pytest.mark.parametrize("seed", [0, CASES] if TORTURE > 1 else [0])
def test_a_damaged_file_gives_right_states_or_none_and_never_crashes_the_process(tmp_path, scheme, seed):
    done = in_child("damaged_file", scheme, tmp_path, seed, CASES, seconds=240 * TORTURE)
    outcomes = json.loads(done.splitlines()[-1])
    assert outcomes.keys() >= {"used", "CorruptError"}


@pytest.mark.parametrize("where", [0, 4096, 3 * 4096, 100 * 4096])
def test_a_file_truncated_while_open_is_an_error_and_not_a_crash_and_so_it_is_when_it_is_opened(tmp_path, where):
    build("lmdb", tmp_path)
    place, file = location("lmdb", tmp_path)
    with closing(open_pages(place, max_bytes=64 * MIB)) as backend:
        assert contents(backend)
        os.truncate(file, where)
        for use in (lambda: contents(backend), lambda: fill(backend, space(), [[1, 2, 3]])) * 3:
            with pytest.raises(CorruptError, match="was truncated"):
                use()
    with pytest.raises((CorruptError, IncompatibleError) if where else CorruptError):
        open_pages(place, max_bytes=64 * MIB)


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
@pytest.mark.parametrize("what", ["text", "directory", "loop", "fifo", "zeros", "random", "lock of garbage", "no lock"])
def test_anything_found_at_a_location_is_used_or_refused_cleanly(tmp_path, scheme, what):
    place, file = location(scheme, tmp_path)
    file.parent.mkdir(exist_ok=True)
    if what in ("lock of garbage", "no lock"):
        build(scheme, tmp_path)
        for lock in (file.parent / "lock.mdb", Path(f"{file}-shm"), Path(f"{file}-wal")):
            lock.unlink(missing_ok=True)
            if what == "lock of garbage":
                lock.write_bytes(random.Random(1).randbytes(8192))
    elif what == "directory":
        file.mkdir()
    elif what == "loop":
        file.symlink_to(file)
    elif what == "fifo":
        os.mkfifo(file)
    else:
        file.write_bytes({"text": b"Dear diary,\n" * 999, "zeros": bytes(1 << 16)}.get(what, os.urandom(1 << 16)))
    try:
        with closing(open_pages(place, max_bytes=64 * MIB)) as backend:
            found = str(len(contents(backend)))
    except PrefixStoreError as error:
        found = type(error).__name__
    expected = {"no lock": {"300"}, "lock of garbage": {"300", "LocationError", "IncompatibleError", "CorruptError"}}
    refused = {"LocationError", "IncompatibleError", "CorruptError", "UnavailableError"}
    assert found in expected.get(what, refused)
