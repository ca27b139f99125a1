"""How long a location may take to answer before its circuit opens."""

import threading
from contextlib import closing, contextmanager
from unittest.mock import Mock

import pytest

from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.counters import Counters
from prefixstore.engine import breaker as module
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.errors import CorruptError, UnavailableError
from tests.support.engines import MIB, MemoryPages, Store
from tests.support.faults import FlakyBackend


@pytest.fixture
def clock():
    """Seconds, moved by hand."""
    return [100.0]


def still_down(page):
    """A probe in vain: a circuit that is open stays open, however long a test takes."""
    raise UnavailableError("still down")


@contextmanager
def breaker_of(clock, **options):
    made = CircuitBreaker(still_down, Counters(), clock=lambda: clock[0], **options)
    yield made
    made.close()
    for thread in threading.enumerate():
        # not one that an interrupt has kept from being started
        if thread.name == "prefixstore-probe" and thread.is_alive():
            thread.join()


@pytest.fixture
def breaker(clock):
    with breaker_of(clock) as made:
        yield made


def ask_in_vain(breaker, clock, error, page=None):
    with pytest.raises(type(error)):
        ask(breaker, clock, error, page)


def ask(breaker, clock, error, page):
    with breaker.asking(page):
        clock[0] += 0.01
        raise error


def test_after_a_fast_failure_the_circuit_is_open_only_briefly(breaker, clock):
    ask_in_vain(breaker, clock, UnavailableError("no"))
    assert breaker.is_open
    with pytest.raises(UnavailableError, match="circuit open"), breaker.asking():
        pytest.fail("nothing is asked")
    clock[0] += 0.011 * module.OPEN_FACTOR
    assert not breaker.is_open


def test_a_probe_for_which_there_was_no_thread_is_started_by_the_next_failure(breaker, clock, monkeypatch):
    started = []
    for error in (RuntimeError("can't start new thread"), None, None):
        monkeypatch.setattr(module, "start_thread", Mock(side_effect=error or (lambda *_, name: started.append(name))))
        breaker.hangs()
    assert len(started) == breaker._counters["outages"] == 1


def test_a_damaged_page_does_not_open_the_circuit(breaker, clock):
    ask_in_vain(breaker, clock, CorruptError("no"), page=object())
    assert not breaker.is_open


# -- a location on this machine ----------------------------------------------------------------------------------------


@pytest.fixture
def local(clock):
    with breaker_of(clock, patience=module.LOCAL_PATIENCE) as made:
        yield made


def answer(breaker, clock, seconds, page=None):
    with breaker.asking(page):
        clock[0] += seconds


def test_a_local_location_is_not_given_up_after_one_slow_answer(local, clock):
    for _ in range(10):
        answer(local, clock, 2.0)
        assert not local.is_open
        answer(local, clock, 0.1)
    assert local._counters["outages"] == 0


def test_the_engine_is_patient_with_local_locations_only(tmp_path, clock):
    for backend, patience in (
        (MemoryPages(), module.LOCAL_PATIENCE),
        (Pages(LMDBBackend(tmp_path / "kv", MIB)), module.LOCAL_PATIENCE),
        (open_pages(f"sqlite:///{tmp_path}/kv.db", max_bytes=MIB, read_only=False), module.LOCAL_PATIENCE),
        (FlakyBackend(MemoryPages()), 1),
    ):
        with closing(Store(backend, options={"clock": lambda: clock[0]})) as store:
            assert store.engine._breaker._patience == patience
