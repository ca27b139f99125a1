"""Room that is made while it is interrupted, and while the location fails.

Among others who write, see test_crowd; by a process that is killed, test_crash.
"""

from __future__ import annotations

import itertools
from contextlib import closing

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError
from tests.support.ctrl_c import interrupted, places_in, sample
from tests.support.engines import MIB, P, Store, compressible, rest
from tests.support.models import TORTURE_OF_LONG
from tests.support.places import place

SIZE = 24_000
MAX_BYTES = 2 * MIB
# each shares its first page with others
SEQUENCES = [[i // 3] * P + [i] * P + [9] for i in range(12)]


def engine_of(location: str, **options) -> Store:
    """A process, as far as the location can tell; its room is made by whoever asks for it."""
    backend = open_pages(location, max_bytes=MAX_BYTES)
    options = {"max_bytes": MAX_BYTES, "high_water": 0.3, "low_water": 0.2, **options}
    return Store(backend, codec="auto", state_of=compressible, **options)


@pytest.mark.parametrize("scheme", ["memory", "lmdb", "sqlite"])
def test_a_ctrl_c_at_any_place_while_room_is_made_leaves_a_store_that_works(scheme, tmp_path, request):
    def full(number: int) -> Store:
        """A store that has more than it should have."""
        location = "memory:" if scheme == "memory" else place(scheme, tmp_path, request, f"kv{number}")
        store = engine_of(location, high_water=0.2, low_water=0.15)
        for tokens in SEQUENCES:
            store.put(tokens, SIZE)
        store.engine.commit([])
        return store

    store = full(0)
    n_places = places_in(lambda: rest(store.engine))
    assert store.counters["evictions"] > 0
    store.close()
    for k in sample(n_places, (12 if scheme == "memory" else 4) * TORTURE_OF_LONG):
        store = full(k)
        interrupted(lambda store=store: rest(store.engine), k)
        rest(store.engine)
        for tokens in SEQUENCES:
            store.fetch(tokens)
        assert store.counters.group("unreadable").keys() <= {"vanished"}
        for tokens in SEQUENCES[:3]:
            store.put(tokens, SIZE)
            assert store.fetch(tokens) == 3
        store.engine.flush()
        store.close()


def test_a_server_that_goes_away_while_room_is_made_loses_nothing_else(tmp_path):
    """Each operation fails once, at each place."""
    with closing(engine_of(f"lmdb://{tmp_path}/kv", high_water=0.1, low_water=0.05)) as store:
        for tokens in SEQUENCES[:6]:
            store.put(tokens, SIZE)
        room, inner = store.engine._room, store.engine._backend
        for at in itertools.count(1):
            for tokens in SEQUENCES[:6]:
                store.put(tokens, SIZE)
            assert room.has_work
            room._backend = failing = _FailsAt(inner, at)
            for _ in range(4):
                room.step()
            room._backend = inner
            assert store.engine.check() == []
            for tokens in SEQUENCES[:6]:
                store.fetch(tokens)
            assert store.counters.group("unreadable") == {}
            if not failing.has_failed:
                break
        assert at > 4
        assert store.counters["evictions"] > 0


class _FailsAt:
    """A backend, view or transaction of which one call fails."""

    def __init__(self, inner, at: int, counter: list[int] | None = None) -> None:
        self._inner = inner
        self._at = at
        self._counter = [0] if counter is None else counter

    @property
    def has_failed(self) -> bool:
        return self._counter[0] >= self._at

    def _called(self) -> None:
        self._counter[0] += 1
        if self._counter[0] == self._at:
            raise StorageError("on purpose")

    def __enter__(self):
        return _FailsAt(self._inner.__enter__(), self._at, self._counter)

    def __exit__(self, kind, error, trace):
        if kind is None:
            try:
                self._called()
            except StorageError as failure:
                self._inner.__exit__(StorageError, failure, None)
                raise
        return self._inner.__exit__(kind, error, trace)

    def __getattr__(self, name: str):
        value = getattr(self._inner, name)
        if name in ("view", "update"):
            self._called()
            return lambda: _FailsAt(value(), self._at, self._counter)
        if callable(value) or name in ("generation", "used"):
            self._called()
        return value
