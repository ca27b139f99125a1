"""Many threads of many processes act at random on one location."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing

import pytest

from prefixstore.maintenance.archive import Archive
from tests.attacks.crowd import ACTS, NOTE, Member, handles, open_store
from tests.support import PATIENCE, ROOT
from tests.support.engines import note_of
from tests.support.models import TORTURE
from tests.support.places import SCHEMES, place
from tests.support.timeouts import wait_for

MAX_BYTES = 2 << 20
PROCESSES, THREADS, TIMES = (8, 4, 50) if TORTURE > 1 else (3, 4, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_crowd_leaves_a_sound_store(scheme, tmp_path, request):
    location = place(scheme, tmp_path, request)
    # with a server, each act takes longer
    share = 1 if scheme in ("lmdb", "sqlite") else 3
    max_bytes = MAX_BYTES // share
    arguments = {
        "location": location,
        "threads": THREADS,
        "acts": ACTS * TIMES // share,
        "max_bytes": max_bytes,
        # obstore does not work in a forked child
        "forks": 3 if hasattr(os, "fork") and scheme != "s3" else 0,
    }
    script = [sys.executable, "-m", "tests.attacks.crowd"]
    crowd = [
        subprocess.Popen(
            [*script, json.dumps(arguments | {"seed": seed})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for seed in range(PROCESSES)
    ]
    done: Counter[str] = Counter()
    noted = 0
    ended = [(*process.communicate(timeout=5 * PATIENCE * TIMES), process.returncode) for process in crowd]
    for out, errors, status in ended:
        assert status == 0, errors
        result = json.loads(out.splitlines()[-1])
        assert result["problems"] == [], errors
        noted += result["noted"]
        done += Counter(result["done"])
    for what in ("capture", "fetch", "pin", "note", "evictions", "packed"):
        assert done[what] > 0, what
    with closing(open_store(location, max_bytes, "plain")) as store:
        assert store.engine.upkeep.check() == []
        assert store.stats().bytes_used <= max_bytes
        # each change of the note was atomic
        assert int(note_of(store, NOTE)) == noted
        member = Member(1, [store], max_bytes)
        for _ in range(100):
            member.fetch(store)
    with Archive(location) as archive:
        assert archive.check(max_bytes) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_opening_and_closing_a_store_leaks_nothing(scheme, tmp_path, request):
    if sys.platform != "linux":
        pytest.skip("open files are counted in /proc, which only Linux has")
    location = "memory:" if scheme == "memory" else place(scheme, tmp_path, request)

    def once(i):
        with closing(open_store(location, MAX_BYTES, "plain")) as store:
            member = Member(i, [store], MAX_BYTES)
            for _ in range(5):
                member.capture(store)
                member.fetch(store)
            if i % 3 == 0:
                store.flush()
        if i % 4 == 1:
            # one that is never closed
            member.capture(open_store(location, MAX_BYTES, "with a quota"))
            gc.collect()

    for i in range(4):
        once(i)
    gc.collect()
    wait_for(lambda: "prefixstore-write" not in {t.name for t in threading.enumerate()}, "the end of the writers")
    before = handles(), threading.active_count()
    for i in range(12 * TORTURE):
        once(i)
    gc.collect()
    wait_for(lambda: threading.active_count() <= before[1], "the end of all threads")
    # some connections are closed by threads that are not ours
    wait_for(lambda: gc.collect() >= 0 and handles() <= before[0], "the end of all open files")
