"""A lease in a location: one engine at a time does the work, and a dead one does not keep others from it for long."""

from __future__ import annotations

import time

import pytest

from prefixstore.engine.lease import SECONDS, VALUE, Lease
from tests.support.engines import MemoryPages


def take(backend, lease) -> bool:
    with backend.update() as transaction:
        return lease.take(transaction)


def is_free(backend, lease) -> bool:
    with backend.view() as view:
        return lease.is_free(view)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; its offset in seconds can be changed."""
    offset = [0.0]
    start = time.time_ns()
    monkeypatch.setattr("time.time_ns", lambda: start + int(offset[0] * 1e9))
    return offset


def test_one_engine_at_a_time_holds_a_lease(clock):
    backend, mine, other = MemoryPages(), Lease(b"room"), Lease(b"room")
    assert is_free(backend, mine)
    assert take(backend, mine)
    assert (is_free(backend, mine), take(backend, mine)) == (True, True)
    assert (is_free(backend, other), take(backend, other)) == (False, False)
    # leases of other work are others
    assert take(backend, Lease(b"other"))


def test_a_lease_that_is_not_renewed_expires(clock):
    backend, mine, other = MemoryPages(), Lease(b"room"), Lease(b"room")
    assert take(backend, mine)
    clock[0] = SECONDS - 1
    assert not is_free(backend, other)
    clock[0] = SECONDS
    assert is_free(backend, other)
    assert take(backend, other)
    assert not take(backend, mine)


def test_a_lease_is_renewed_by_the_work_when_half_of_its_time_has_passed(clock):
    backend, mine, other = MemoryPages(), Lease(b"room"), Lease(b"room")
    for part in range(6):
        clock[0] = part * SECONDS * 0.4
        assert take(backend, mine)
        assert not is_free(backend, other)


@pytest.mark.parametrize("value", [b"", b"x" * 24 + b"y", VALUE.pack(b"o" * 16, 2**63), VALUE.pack(b"o" * 16, 0)])
def test_a_note_that_cannot_be_right_holds_nothing(value, clock):
    backend = MemoryPages()
    with backend.update() as transaction:
        transaction.put_note(b"room", value)
    assert is_free(backend, Lease(b"room"))
    assert take(backend, Lease(b"room"))
