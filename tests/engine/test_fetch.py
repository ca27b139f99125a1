"""States of stored pages: in order, verified, from the nearest source, and without leaks."""

import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue

import numpy as np
import pytest

from prefixstore.engine import source
from prefixstore.errors import ClosedError, CorruptError, IncompatibleError, UnavailableError
from prefixstore.format.autocodec import encode
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import checksum
from tests.support import PATIENCE, in_thread
from tests.support.engines import MemoryPages, P, compressible
from tests.support.engines import store_of as engine_of

SIZE = 30_001
MIXED = ["raw", "planes", "zstd", "planes", "raw", "raw", "zstd", "planes", "planes", "raw"]


class WatchedView:
    """A view that passes everything on, and notices use by two threads at once, or after it was closed."""

    def __init__(self, view, watcher):
        self.view = view
        self.watcher = watcher
        self.in_use = threading.Lock()

    def fetch(self, keys):
        inner = self.view.fetch(keys)
        try:
            for i, _ in enumerate(keys):
                with self.alone():
                    found = next(inner, None)
                    self.watcher.before(i)
                if found is None:
                    return
                yield self.watcher.change(i, *found)
        finally:
            self.watcher.fetches_closed += 1

    @contextmanager
    def alone(self):
        assert self.in_use.acquire(blocking=False), "two threads use one view"
        try:
            assert self.watcher.open, "the view is closed"
            yield
        finally:
            self.in_use.release()

    def __getattr__(self, name):
        return getattr(self.view, name)


class Watcher(MemoryPages):
    """A backend in memory that can be slow, or forge what it returns."""

    open = fetches_closed = 0

    def before(self, i):
        pass

    def change(self, i, record, payload):
        return record, payload

    @contextmanager
    def view(self):
        with super().view() as view:
            self.open += 1
            try:
                yield WatchedView(view, self)
            finally:
                self.open -= 1


@contextmanager
def store_of(codecs):
    """A store with a page for each of these codecs."""
    with engine_of(Watcher(), state_of=compressible) as store:
        left = iter(codecs)
        store.engine.write_queue._committer._encode = lambda namespace, raw: encode(raw, next(left))
        tokens = [i for i in range(len(codecs)) for _ in range(P)]
        assert store.put(tokens, SIZE) == len(codecs)
        store.wanted = store.path(tokens).pages
        store.states = [compressible(page.key, SIZE) for page in store.wanted]
        store.catalog, store.fetcher = store.engine._catalog, store.engine._fetcher
        yield store


def fetch(store, **options):
    """How many states were given out; each is compared with the original."""
    with store.engine.fetching(store.wanted, **options) as states:
        given = [bytes(state) for state in states]
    assert given == store.states[: len(given)]
    assert store.fetcher.buffers.in_use == 0
    return len(given)


def forging(at, **changes):
    """Change the record of one page, and its payload."""

    def change(i, record, payload):
        if i == at:
            payload = changes.get("payload", lambda same: same)(payload)
            record = replace(record, **{name: value for name, value in changes.items() if name != "payload"})
        return record, payload

    return change


@pytest.fixture(params=[1, 4])
def workers(request, monkeypatch):
    """The number of threads that unpack, whatever the number of cores."""
    monkeypatch.setattr(source, "UNPACKERS", request.param)
    return request.param


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("codecs", [MIXED, ["raw"] * 6, ["planes"] * 20, ["zstd"], []], ids=len)
def test_states_are_in_order_for_any_mix_of_codecs(workers, codecs, streamed):
    with store_of(codecs) as store:
        for _ in range(3):
            assert fetch(store, streamed=streamed) == len(codecs)
        assert store.counters.group("unreadable") == {}
        assert store.backend.fetches_closed == (3 if codecs else 0)


# -- what can go wrong -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["along", "ahead with 1", "ahead with 4"])
def way(request, monkeypatch):
    """Codecs of ten pages, and whether raw ones are verified while they are used, or before by so many threads."""
    if request.param == "along":
        return ["raw"] * 10, True
    monkeypatch.setattr(source, "UNPACKERS", int(request.param[-1]))
    return MIXED, False


def take(store, along):
    """How many states were given out and verified, and what was counted; each verified one is compared."""
    with store.engine.fetching(store.wanted, streamed=True, along=along) as states:
        given = [bytes(state) for state in states]
        n_verified = states.verified()
    assert given[:n_verified] == store.states[:n_verified]
    assert store.fetcher.buffers.in_use == store.backend.open == 0
    return len(given), n_verified, store.counters.group("unreadable")


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_damaged_page_ends_the_restore_early_and_is_reported(way, at):
    codecs, along = way
    with store_of(codecs) as store:
        # of several, only the first one
        store.backend.change = lambda i, record, payload: (record, bytes(payload[:-1]) + b"?" if i >= at else payload)
        # before the next one is given out
        assert take(store, along) == (at + along, at, {"corrupt": 1})
        assert store.catalog.deferred().damaged.keys() == {store.wanted[at].key}
        assert store.catalog.is_damaged(store.wanted[at].key, store.wanted[at])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"payload": lambda payload: bytes(payload[:-1])}, "corrupt"),
        ({"tokens": as_tokens([7] * P).tobytes()}, "corrupt"),
        ({"codec": 77}, "incompatible"),
    ],
)
def test_a_page_that_is_not_what_is_wanted_is_not_given_out(way, changes, reason):
    codecs, along = way
    with store_of(codecs) as store:
        store.backend.change = forging(3, **changes)
        assert take(store, along) == (3, 3, {reason: 1})
        # what a newer version may be able to read is not deleted
        assert bool(store.catalog.deferred().damaged) is (reason == "corrupt")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CorruptError("no"), "corrupt"),
        (IncompatibleError("no"), "incompatible"),
        (UnavailableError("no"), "unavailable"),
        (MemoryError(), "unavailable"),
    ],
)
def test_an_error_while_a_page_is_read_does_not_affect_the_one_before(way, error, reason):
    def fail(i):
        if i == 5:
            raise error

    codecs, along = way
    with store_of(codecs) as store:
        store.backend.before = fail
        assert take(store, along) == (5, 5, {reason: 1})
        assert bool(store.catalog.deferred().damaged) is (reason == "corrupt")


def test_a_page_that_is_gone_ends_the_restore(way):
    codecs, along = way
    with store_of(codecs) as store:
        with store.backend.update() as transaction:
            for page in store.wanted[6:]:
                transaction.delete(page.key)
        assert take(store, along) == (6, 6, {"vanished": 1})
        assert not store.catalog.deferred().damaged


def test_a_lack_of_memory_is_not_counted_as_damage(monkeypatch):
    with store_of(["planes"] * 3) as store:
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", lambda *args: (_ for _ in ()).throw(MemoryError))
            assert take(store, False) == (0, 0, {"unavailable": 1})
        assert not store.catalog.deferred().damaged


def test_a_page_that_was_written_again_as_packed_is_unpacked():
    with store_of(["raw"] * 8) as store:
        number, stored = encode(store.states[3], "planes")
        changes = {"codec": number, "stored_bytes": len(stored), "checksum": checksum(stored)}
        store.backend.change = forging(3, payload=lambda _: stored, **changes)
        assert take(store, along=True) == (8, 8, {})


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_record_that_claims_another_size_than_the_index_knows_is_not_unpacked(monkeypatch, streamed, codec):
    monkeypatch.setattr(source, "decode_into", lambda *args: pytest.fail("unpacked"))
    with store_of([codec] * 3) as store:
        store.backend.change = lambda i, record, payload: (replace(record, raw_bytes=1 << 40), payload)
        with store.engine.fetching(store.wanted, streamed=streamed) as states:
            assert list(states) == []
        assert store.counters.group("unreadable") == {"shape": 1}


class EnoughError(Exception):
    pass


@pytest.mark.parametrize("taken", [0, 1, 3, 10])
@pytest.mark.parametrize(("streamed", "end"), [(True, EnoughError), (True, None), (False, None)])
def test_leaving_early_leaves_no_thread_and_no_buffer(workers, taken, streamed, end):
    with store_of(MIXED) as store:
        store.backend.before = lambda i: time.sleep(0.01 * (taken < 10))
        expected = pytest.raises(end) if end else nullcontext()
        with expected, store.engine.fetching(store.wanted, streamed=streamed) as states:
            for i in range(taken):
                assert bytes(next(states)) == store.states[i]
            if end:
                raise end
        # the watcher would notice a thread that still reads
        assert store.backend.open == 0
        assert store.fetcher.buffers.in_use == 0
        assert next(states, None) is None
        assert fetch(store) == len(MIXED)


# -- closing, and a lack of threads ------------------------------------------------------------------------------------


# a reader of packed pages has up to five threads
@pytest.mark.parametrize(("codec", "n_threads"), [("raw", 50), ("zstd", 12)])
def test_restores_that_have_begun_end_when_the_store_is_closed(codec, n_threads):
    with store_of([codec] * 8) as store:
        begun, closed = threading.Barrier(n_threads + 1, timeout=PATIENCE), threading.Event()
        outcomes = []

        def read(number):
            try:
                with store.engine.fetching(store.wanted, streamed=bool(number % 2)) as states:
                    given = [bytes(state) for state in islice(states, number % 8)]
                    begun.wait()
                    assert closed.wait(PATIENCE)
                    given += map(bytes, states)
                    assert given[: states.n_verified] == store.states[: states.n_verified]
                outcomes.append(len(given))
            except BaseException as error:  # noqa: BLE001
                outcomes.append(type(error))

        threads = [in_thread(read, number) for number in range(n_threads)]
        begun.wait()
        store.fetcher.close()
        closed.set()
        for thread in threads:
            thread.join()
        assert len(outcomes) == n_threads
        assert set(outcomes) == {8}
        with pytest.raises(ClosedError, match="open a new PrefixStore"), store.engine.fetching(store.wanted):
            pass


def test_a_thread_that_cannot_be_started_is_not_waited_for(monkeypatch):
    def start(*_):
        raise RuntimeError("can't start new thread")

    with store_of(["raw"] * 8) as store:
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", start)
            store.engine.threads._idle = SimpleQueue()
            with store.engine.fetching(store.wanted, streamed=True) as states:
                assert list(states) == []
            assert store.counters.group("unreadable") == {"unavailable": 1}
            with store.engine.fetching(store.wanted) as states:
                assert list(states) == []
            assert store.counters.group("unreadable") == {"unavailable": 2}
        read = []
        store.backend.before = read.append
        assert fetch(store) == 8
        assert read == list(range(8))
