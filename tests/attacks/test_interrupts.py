"""Ctrl-C at each step of each method: others go on, nothing that was flushed is lost, and the store closes."""

from __future__ import annotations

import io
from contextlib import closing, suppress

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import PrefixStoreError
from prefixstore.format.export import ExportReader
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import copy_store, export_store, import_store
from tests.support import outcome
from tests.support.ctrl_c import interrupted, places_in, sample
from tests.support.engines import MIB, NS, A, B, C, Store, wait_for
from tests.support.models import TORTURE_OF_LONG, volume
from tests.support.places import LOCKING, fill, place, space
from tests.support.valkey import forget_lock

# what happens when a generator or a callback is interrupted that the garbage collector ends
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

D, E = [4] * 12, [5] * 10


def stored(store, tokens):
    """Whether a sequence that is captured can be restored."""
    store.submit(tokens)
    store.engine.flush()
    return store.fetch(tokens) == 3


def captured(store):
    store.submit(B)
    store.engine.drain()


# name -> what is done; whether flushed pages may be gone afterwards. All methods wait in one way for the thread that
# does their work, so a few stand for the others.
WORK = {
    "match": (lambda store: store.match(A), False),
    "fetch": (lambda store: store.fetch(A), False),
    "fetch streamed": (lambda store: store.fetch(A, streamed=True), False),
    "submit": (lambda store: store.submit(B), False),
    "submit and drain": (captured, False),
    "submit longer": (lambda store: store.submit(A + B), False),
    "flush": (lambda store: store.engine.flush(), False),
    "acquire": (lambda store: store.engine.write_queue.acquire(1000).release(), False),
    "pin": (lambda store: store.pin(A), False),
    "clear": (lambda store: store.engine.upkeep.clear(NS), True),
    "scrub": (lambda store: store.engine.upkeep.scrub(), False),
    "close": (lambda store: store.engine.close(), False),
}


def in_time(what, work):
    """What `work` returns in another thread; it must end, and without an error."""
    found = outcome(work, what)
    if isinstance(found, BaseException):
        raise found
    return found


def new_store(location, **options):
    """An engine that has stored two sequences, and one whose pages wait to be written."""
    store = Store(open_pages(location, max_bytes=8 * MIB), max_bytes=8 * MIB, options={"queue_bytes": MIB, **options})
    for tokens in (A, C):
        if store.match(tokens) < 12:
            store.put(tokens)
    store.engine.flush()
    return store


def others_go_on(store, *, lossy):
    """Another thread works with the engine, and all is as it should be."""
    engine = store.engine

    def work():
        for tokens in (A, C):
            # a lookup may find that the index was left unfinished: it is read again when no transaction is open
            if not lossy and store.fetch(tokens) < 3:
                store.engine.drain()
                store.fetch(tokens)
                assert store.fetch(tokens) == 3
        for tokens in (D, E):
            # an eviction or a purge that nobody waits for goes on by itself, and may take these, too
            if lossy:
                wait_for(lambda tokens=tokens: stored(store, tokens))
            else:
                assert stored(store, tokens)
        store.pin(D)
        store.pin(D, pinned=False)
        assert engine.upkeep.check() == []
        assert engine.queued_bytes == 0

    in_time("another thread", work)


def attack(location, name, k, **options):
    work, lossy = WORK[name]
    store = new_store(location, **options)
    try:
        where = interrupted(lambda: work(store), k)
        if name != "close":
            others_go_on(store, lossy=lossy)
    finally:
        with suppress(PrefixStoreError):
            in_time("close", store.engine.close)
    with_another(location, lossy=lossy)
    return where


def with_another(location, *, lossy):
    """A new engine finds the location sound."""
    if location == "memory:":
        return
    store = Store(open_pages(location, max_bytes=8 * MIB), max_bytes=8 * MIB)
    assert store.engine.upkeep.check() == []
    if not lossy:
        assert [store.fetch(tokens) for tokens in (A, C)] == [3, 3]
    store.engine.upkeep.clear(None)
    store.engine.close()


# How many places are tried of each piece of work: opening a file takes longer. What a backend does, threads of the
# store do, where no Ctrl-C arrives: one with a file stands for all.
PLACES = {"memory": 12, "lmdb": 5}


@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize(("scheme", "behind"), [(scheme, True) for scheme in PLACES] + [("memory", False)])
def test_a_ctrl_c_at_any_place_leaves_a_store_that_works(scheme, behind, name, tmp_path):
    location = {"memory": "memory:", "lmdb": f"{tmp_path}/kv"}[scheme]
    store = new_store(location, write_behind=behind)
    n_places = places_in(lambda: WORK[name][0](store))
    store.engine.close()
    assert n_places
    # of a transaction all, since one may be a single step wide
    is_every = name in ("pin", "clear") and not behind
    n_tried = n_places if is_every else volume(PLACES[scheme], TORTURE_OF_LONG)
    for k in sample(n_places, n_tried):
        attack(location, name, k, write_behind=behind)


def moved(source, target, file):
    """Everything that an archive does with another location."""
    copy_store(source, target)
    target.purge(everything=True)
    export_store(source, file)
    file.seek(0)
    import_store(ExportReader(file, "file"), target)


@pytest.mark.parametrize("scheme", LOCKING)
def test_a_ctrl_c_while_pages_are_moved_leaves_both_locations_sound(scheme, tmp_path, request):
    here, there = (place(scheme, tmp_path, request, name) for name in ("here", "there"))
    with closing(open_pages(here, max_bytes=MIB)) as backend:
        fill(backend, space(), [A, C])
    with Archive(here) as source, Archive(there, create=True) as target:
        n_places = places_in(lambda: moved(source, target, io.BytesIO()))
    for k in sample(n_places, volume(12, TORTURE_OF_LONG)):
        with Archive(here) as source, Archive(there) as target:
            interrupted(lambda source=source, target=target: moved(source, target, io.BytesIO()), k)
            if scheme == "valkey":
                # an interrupt may keep a transaction from giving its lock back
                forget_lock(here)
                forget_lock(there)
            for archive in (source, target):
                in_time("another thread", lambda archive=archive: archive.check() == [])
            in_time("another thread", lambda source=source, target=target: moved(source, target, io.BytesIO()))
            assert len(target.pages()) == 6
