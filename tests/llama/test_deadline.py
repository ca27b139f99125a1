"""How long a restore may take: never much longer than computing, whatever the location does."""

from __future__ import annotations

import itertools
import math

import pytest

from prefixstore import PrefixStore
from prefixstore.engine.compute_rate import MAX_SHARE, RestoreDeadline
from tests.support.engines import MemoryPages
from tests.support.faults import FlakyBackend, Until
from tests.support.models import answer, attached, forget, prompt

PAGE = 256


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def over(seconds: list[float], speed: float, max_delay: float, stalls_at: float = math.inf) -> float:
    """What a prompt takes whose pages come over a link so many times as fast as computing; it may stop at a moment."""
    clock = Clock()
    deadline = RestoreDeadline(seconds, max_delay, clock=clock)
    ends = [end / speed for end in itertools.accumulate(seconds)]
    for n, end in enumerate(ends):
        begin = ends[n - 1] if n else 0.0
        # as a fetch does: at the deadline once more, with what has come
        for is_again in (False, True):
            arrived = max(min(clock.now, stalls_at) - begin, 0.0) / (end - begin) if is_again else 0.0
            until = clock.now + max(deadline.left(n, arrived), 0.0)
            clock.now = min(until, end) if end < stalls_at else until
            if clock.now == end:
                break
        else:
            return clock.now + sum(seconds[n:])
    return clock.now


@pytest.mark.parametrize("n", [1, 4, 16, 100])
def test_a_link_a_little_faster_than_computing_is_used_and_a_slower_one_costs_little(n):
    seconds = [0.77] * n
    total = sum(seconds)
    for speed in [0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0]:
        assert over(seconds, speed, 0.1) <= max(1.05 * total, total + 0.1)
    for speed in [1.13, 1.3, 2.0, 10.0]:
        assert over(seconds, speed, 0.1) == pytest.approx(total / speed)
    # a link that stops in the middle of a page costs that page, too
    for speed in [0.9, 1.1, 2.0]:
        for at in [0.1, 0.5, 1.0, 5.0]:
            assert over(seconds, speed, 0.1, at) <= total + max(MAX_SHARE * total, 0.1) + 1.1 * seconds[0]


@pytest.mark.parametrize("n_in_time", [0, 2])
def test_what_has_come_of_a_late_restore_is_used_and_the_rest_is_computed(llama, monkeypatch, n_in_time):
    backend = FlakyBackend(MemoryPages())
    monkeypatch.setattr("prefixstore.opening.open_pages", lambda *_, **__: backend)
    with PrefixStore("memory:", namespace="x") as store:
        llm, tokens = attached(store, llama()), prompt(5 * PAGE)
        first = answer(llm, tokens, 6)
        store.flush()
        forget(llm)
        gate = backend.let_through(n_in_time)
        monkeypatch.setattr(store._current.context.rate, "deadline", lambda *_, **__: Until(n_in_time))
        assert answer(llm, tokens, 6) == first
        assert store.stats().late == 1
        assert store.stats().tokens_restored == n_in_time * PAGE
        assert store.last.miss == (None if n_in_time else "unreadable")
        gate.release(100)


def test_after_a_snapshot_that_is_late_no_earlier_one_is_waited_for(llama, monkeypatch):
    backend = FlakyBackend(MemoryPages())
    monkeypatch.setattr("prefixstore.opening.open_pages", lambda *_, **__: backend)
    with PrefixStore("memory:", namespace="x", snapshot_interval=PAGE) as store:
        llm, tokens = attached(store, llama("mamba")), prompt(4 * PAGE)
        first = answer(llm, tokens, 6)
        store.flush()
        assert store.stats().snapshots_captured > 3
        forget(llm)
        gate = backend.let_through(0)
        monkeypatch.setattr(store._current.context.rate, "deadline", lambda *_, **__: Until(0))
        assert answer(llm, tokens, 6) == first
        assert (store.stats().late, store.last.miss) == (1, "unreadable")
        gate.release(100)
