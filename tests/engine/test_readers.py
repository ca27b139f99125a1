"""Raw pages are verified while they are used: a damaged one is reported before the next one is given out."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from itertools import islice

import pytest

from prefixstore.engine import readers
from prefixstore.errors import ClosedError
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
        assert store.fetcher._read_rate.seconds_per_byte is None  # these are too small to be measured


def test_a_page_whose_verification_fails_by_any_error_stays_unverified(monkeypatch):
    def fail(record, view):
        raise ZeroDivisionError

    monkeypatch.setattr(readers, "verify_checksum", fail)
    with store_of(RAW) as store, store.engine.fetching(store.pages, streamed=True) as states:
        next(states)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                states.verified()
        assert (states.n_given, states.n_verified) == (1, 0)


# -- closing -----------------------------------------------------------------------------------------------------------


# a reader of packed pages has up to five threads
@pytest.mark.parametrize(("codec", "n_threads"), [("raw", 20), ("zstd", 8)])
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
