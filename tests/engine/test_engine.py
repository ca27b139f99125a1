"""The engine: what is matched, fetched, captured and evicted, and what happens when the backend fails."""

from __future__ import annotations

import pytest

from prefixstore.errors import UnavailableError
from prefixstore.format.keys import as_tokens
from tests.support.engines import NS, A, MemoryPages, P, state_of, store_of
from tests.support.faults import FaultyBackend


def test_a_restore_that_began_before_the_commit_keeps_its_buffers():
    with store_of() as store:
        batch = store.announce(A)
        path = store.engine.match(NS, as_tokens(A), P)
        with store.engine.fetching(path.pages) as states:
            first = next(states)
            assert store.engine.commit(batch) == 3
            for new in batch:
                new.buffer.release()
            assert store.buffers.in_use == 0
            # no one gets this memory yet
            other = store.buffers.acquire(1000)
            other.view[:] = bytes(1000)
            assert bytes(first) == state_of(path.pages[0].key)
            assert [bytes(state) for state in states] == [state_of(page.key) for page in path.pages[1:]]


def test_a_backend_that_cannot_be_read_raises_and_loses_nothing():
    backend = FaultyBackend(MemoryPages(), "view", at=10**9)
    with store_of(backend) as store:
        store.put(A)
        store.match(A)
        backend._failing = range(backend.calls["view"] + 1, backend.calls["view"] + 2)
        with pytest.raises(UnavailableError):
            store.match(A)
        assert store.match(A) == 12


@pytest.mark.parametrize("operation", ["record", "payload"])
def test_a_page_that_is_temporarily_unreadable_ends_the_restore_and_stays_stored(operation):
    backend = FaultyBackend(MemoryPages(), operation, at=10**9)
    with store_of(backend) as store:
        store.put(A)
        store.match(A)
        calls = backend.calls.get(operation, 0)
        # a lookup reads records as well
        at = calls + 2 + (operation == "record")
        backend._failing = range(at, at + 1)
        assert store.fetch(A) == 1
        assert store.counters.group("unreadable") == {"unavailable": 1}
        assert store.fetch(A) == 3
