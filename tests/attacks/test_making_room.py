"""Room that is made while pages are restored, deleted and replaced, and when the process ends."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import StoredPage
from tests.attacks.killed_process import KillableProcess
from tests.attacks.test_crash import LEVELS, Life
from tests.support.ctrl_c import interrupted, places_in, sample
from tests.support.engines import MIB, NS, P, Store, compressible, rest
from tests.support.models import TORTURE, TORTURE_OF_LONG
from tests.support.places import SCHEMES, place

SIZE = 24_000
MAX_BYTES = 2 * MIB
# each shares its first page with others
SEQUENCES = [[i // 3] * P + [i] * P + [9] for i in range(12)]


def engine_of(location: str, **options) -> Store:
    """A process, as far as the location can tell; its room is made by whoever asks for it."""
    backend = open_pages(location, max_bytes=MAX_BYTES)
    options = {"max_bytes": MAX_BYTES, "high_water": 0.3, "low_water": 0.2, **options}
    return Store(backend, codec="auto", state_of=compressible, **options)


# -- while others work -------------------------------------------------------------------------------------------------


class Crowd:
    """Threads that each do one thing again and again with an engine of their own, until all have done enough."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.stores: list[Store] = []
        self.failures: list[BaseException] = []
        self.deadline = time.monotonic() + 400 * TORTURE_OF_LONG
        self.is_done: Callable[[], bool] = lambda: False

    def open(self, **options) -> Store:
        self.stores.append(engine_of(self.location, **options))
        return self.stores[-1]

    def count(self, name: str) -> int:
        return sum(store.counters[name] for store in self.stores)

    def goes_on(self) -> bool:
        return not self.failures and not self.is_done() and time.monotonic() < self.deadline

    def run(self, *works: Callable[[random.Random], None]) -> None:
        def repeat(work: Callable[[random.Random], None], seed: int) -> None:
            chance = random.Random(seed)
            while self.goes_on():
                try:
                    work(chance)
                except BaseException as error:  # noqa: BLE001 - raised below
                    self.failures.append(error)

        threads = [threading.Thread(target=repeat, args=(work, seed), daemon=True) for seed, work in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(500 * TORTURE_OF_LONG)
            assert not thread.is_alive(), "a thread waits forever"
        if self.failures:
            raise self.failures[0]
        assert self.is_done(), {name: self.count(name) for name in ("packed", "evictions")}


def make_room(store: Store, chance: random.Random) -> None:
    store.engine.commit([])
    store.match(chance.choice(SEQUENCES))
    rest(store.engine, 10_000)


def disturb(store: Store, chance: random.Random) -> None:
    what = chance.randrange(6)
    tokens = as_tokens(chance.choice(SEQUENCES))
    if what < 2:
        store.engine.pin(NS, tokens, P, pinned=what == 0)
    elif what == 2:
        store.engine.evict_to(MAX_BYTES // 10)
    elif what == 3 and chance.random() < 0.2:
        store.engine.clear(NS)
    elif what == 4:
        move(store)
    else:
        assert store.engine.check() == []


def move(store: Store) -> None:
    """Delete all pages, and import them as they were."""
    found: list[StoredPage] = []
    with store.engine.view() as view:
        for page in store.engine.pages():
            usage = view.usage(page.key)
            for record, payload in view.fetch([page.key]):
                if usage is not None and record.key == page.key:
                    found.append(StoredPage(page.key, record, usage, bytes(payload)))
    store.engine.clear(NS)
    store.engine.import_pages(found, {NS: store.settings})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_room_is_made_among_pages_that_others_restore_delete_and_replace(scheme, tmp_path, request, monkeypatch):
    # they do not wait for each other
    monkeypatch.setattr("prefixstore.engine.lease.SECONDS", 0.0)
    location = place(scheme, tmp_path, request)
    crowd = Crowd(location)
    writer, maker, reader = crowd.open(), crowd.open(), crowd.open()
    hits = [0]

    def read(chance: random.Random) -> None:
        streamed = chance.random() < 0.7
        hits[0] += reader.fetch(chance.choice(SEQUENCES), streamed=streamed, along=chance.random() < 0.7)

    enough = 30 * TORTURE
    crowd.is_done = lambda: min(crowd.count("packed"), crowd.count("evictions"), hits[0]) >= enough
    with ExitStack() as opened:
        for store in crowd.stores:
            opened.callback(store.close)
        crowd.run(
            lambda chance: writer.put(chance.choice(SEQUENCES), SIZE),
            lambda chance: make_room(maker, chance),
            read,
            lambda chance: disturb(reader, chance),
        )
        for store in crowd.stores:
            # no page was taken for damaged, and none was given up that could be read
            assert store.counters.group("unreadable").keys() <= {"vanished"}
            assert store.counters["corrupt"] == 0


# -- when the process ends ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killable(tmp_path_factory) -> Iterator[KillableProcess]:
    """Children that are killed at operations, or at statements."""
    with closing(KillableProcess(tmp_path_factory.mktemp("killable"))) as started:
        yield started


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_is_sound_after_a_kill_at_each_write_while_room_is_made(killable, tmp_path, request, scheme):
    life = Life(killable, place(scheme, tmp_path, request), tmp_path)
    level = LEVELS.get(scheme, "statements")
    step = 1 if TORTURE > 1 else {"lmdb": 8, "sqlite": 20, "postgresql": 9, "valkey": 40, "s3": 40}[scheme]
    for seed, die_at in enumerate(itertools.count(1, step)):
        if not life.goes_on("make_room", seed=seed, die_at=die_at, level=level):
            break
    assert life.deaths > 5


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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_that_goes_away_while_room_is_made_loses_nothing_else(scheme, tmp_path, request):
    """Each operation fails once, at each place."""
    location = place(scheme, tmp_path, request)
    with closing(engine_of(location, high_water=0.1, low_water=0.05)) as store:
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
