"""Leases: one owner at a time."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from prefixstore import PrefixStore
from prefixstore.errors import UnavailableError
from prefixstore.warming.leases import PREFIX, Leases
from tests.support.timeouts import wait_for


@pytest.fixture
def notes():
    with PrefixStore("memory:") as store:
        yield store.engine


@pytest.fixture
def clock(monkeypatch):
    """The clock of leases, which stands still until a test sets it; renewals come as they do."""
    now = SimpleNamespace(seconds=time.time())
    monkeypatch.setattr("prefixstore.warming.leases.time", SimpleNamespace(time=lambda: now.seconds))
    return now


class Counting:
    """Notes that count their changes, and can be out of reach."""

    def __init__(self, notes):
        self.notes, self.n_changes, self.is_down = notes, 0, False

    def note(self, name):
        return self.notes.note(name)

    def change_note(self, name, change):
        self.n_changes += 1
        if self.is_down:
            raise UnavailableError("down")
        self.notes.change_note(name, change)


def test_a_lease_has_one_owner_until_it_is_released(notes):
    with Leases(notes) as one, Leases(notes) as other:
        assert one.is_free(b"a")
        assert one.acquire(b"a")
        assert one.acquire(b"a")
        assert one.is_free(b"a")
        assert not other.is_free(b"a")
        assert not other.acquire(b"a")
        assert other.acquire(b"b")
        other.release(b"a")
        assert not other.acquire(b"a")
        one.release(b"a")
        assert other.is_free(b"a")
        assert other.acquire(b"a")
    # all are released at the end
    assert [notes.note(PREFIX + name) for name in (b"a", b"b")] == [None, None]


def test_a_lease_expires_if_it_is_not_renewed(notes, clock):
    gone = Leases(notes, seconds=0.3)
    assert gone.acquire(b"a")
    with Leases(notes) as other:
        assert not other.acquire(b"a")
        clock.seconds += 0.35
        assert other.acquire(b"a")


@pytest.mark.slow
def test_a_lease_is_renewed_while_its_block_runs(notes, clock):
    def until():
        return json.loads(notes.note(PREFIX + b"a"))["until"]

    with Leases(notes, seconds=0.3) as one, Leases(notes) as other:
        one.acquire(b"a")
        for _ in range(8):
            clock.seconds += 0.2
            wait_for(lambda: until() == clock.seconds + 0.3, "a renewal")
            assert not other.is_free(b"a")


def test_renewing_or_releasing_does_not_touch_a_lease_that_another_job_took_over(notes, clock):
    counting = Counting(notes)
    late = Leases(counting, seconds=0.2)
    late.acquire(b"a")
    clock.seconds += 0.25
    with Leases(notes) as other:
        assert other.acquire(b"a")
        with late:
            wait_for(lambda: counting.n_changes > 3, "renewals")
        assert json.loads(notes.note(PREFIX + b"a"))["owner"] == other.owner
