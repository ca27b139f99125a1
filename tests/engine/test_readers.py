"""Raw pages are verified while they are used: a damaged one is reported before the next one is given out."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue

import pytest

from prefixstore.engine import source
from prefixstore.errors import ClosedError
from prefixstore.format.autocodec import encode
from prefixstore.format.record import checksum
from tests.support import PATIENCE, in_thread
from tests.support.fetching import state_of, store_of

RAW = ["raw"] * 8


def take_all(store):
    """The states that were given out, and how many of them were verified."""
    with store.engine.fetching(store.pages, streamed=True) as states:
        return [bytes(state) for state in states], states.verified()


@pytest.mark.parametrize("n", [0, 1, 8])
def test_all_states_are_given_out_in_order_and_verified(n):
    with store_of(["raw"] * n) as store:
        given, verified = take_all(store)
        assert given == [state_of(i) for i in range(n)]
        assert verified == n
        assert store.fetcher.read_rate.seconds_per_byte is None  # these are too small to be measured


def test_a_page_that_was_written_again_as_packed_is_unpacked():
    def packed(i, record, payload):
        if i != 3:
            return record, payload
        number, stored = encode(state_of(3), "planes")
        for name, value in {"codec": number, "stored_bytes": len(stored), "checksum": checksum(stored)}.items():
            object.__setattr__(record, name, value)
        return record, stored

    with store_of(RAW) as store:
        store.backend.change = packed
        given, verified = take_all(store)
        assert given == [state_of(i) for i in range(8)]
        assert verified == 8


def test_a_page_whose_verification_fails_by_any_error_stays_unverified(monkeypatch):
    def fail(record, view):
        raise ZeroDivisionError

    monkeypatch.setattr(source, "verify_checksum", fail)
    with store_of(RAW) as store, store.engine.fetching(store.pages, streamed=True) as states:
        next(states)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                states.verified()
        assert (states.n_given, states.n_verified) == (1, 0)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_record_that_claims_another_size_than_the_index_knows_is_not_unpacked(monkeypatch, streamed, codec):
    monkeypatch.setattr(source, "decode_into", lambda *args: pytest.fail("unpacked"))
    with store_of([codec] * 3) as store:
        store.backend.change = lambda i, record, payload: (replace(record, raw_bytes=1 << 40), payload)
        with store.engine.fetching(store.pages, streamed=streamed) as states:
            assert list(states) == []
        assert store.counters.group("unreadable") == {"shape": 1}


# -- closing -----------------------------------------------------------------------------------------------------------


# a reader of packed pages has up to five threads
@pytest.mark.parametrize(("codec", "n_threads"), [("raw", 50), ("zstd", 12)])
def test_restores_that_have_begun_end_when_the_store_is_closed(codec, n_threads):
    with store_of([codec] * 8) as store:
        store.backend.alone = nullcontext  # each has a view of its own
        begun, closed = threading.Barrier(n_threads + 1, timeout=PATIENCE), threading.Event()
        outcomes = []

        def read(number):
            try:
                with store.engine.fetching(store.pages, streamed=bool(number % 2)) as states:
                    given = [bytes(state) for state in islice(states, number % 8)]
                    begun.wait()
                    assert closed.wait(PATIENCE)
                    given += map(bytes, states)
                    assert given[: states.n_verified] == [state_of(i) for i in range(states.n_verified)]
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
        with pytest.raises(ClosedError, match="open a new PrefixStore"), store.engine.fetching(store.pages):
            pass


def test_a_thread_that_cannot_be_started_is_not_waited_for(monkeypatch):
    def start(*_):
        raise RuntimeError("can't start new thread")

    with store_of(RAW) as store:
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", start)
            store.engine.threads._idle = SimpleQueue()
            with store.engine.fetching(store.pages, streamed=True) as states:
                assert list(states) == []
            assert store.counters.group("unreadable") == {"unavailable": 1}
            with store.engine.fetching(store.pages) as states:
                assert list(states) == []
            assert store.counters.group("unreadable") == {"unavailable": 2}
        read = []
        store.backend.before = read.append
        assert store.fetch() == 8
        assert read == list(range(8))
