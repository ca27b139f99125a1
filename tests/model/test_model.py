"""Every backend keeps what a store promises, whatever users and accidents do to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing

import pytest

from tests.model.machine import Place, kill_everywhere, run
from tests.model.process import Disks, Processes
from tests.support.models import TORTURE, volume
from tests.support.places import KEY, SCHEMES, place

# examples, and steps of each: in a run of all tests, and in one of the attacks
FAST = {"memory": (16, 20), "lmdb": (6, 15), "sqlite": (3, 15)}
LONG = {
    "memory": (60, 40),
    "lmdb": (20, 30),
    "sqlite": (15, 30),
    "postgresql": (5, 30),
    "valkey": (8, 30),
    "s3": (3, 30),
    "lmdb, sqlite": (5, 30),
    "lmdb, valkey": (5, 30),
    "lmdb, s3": (3, 30),
}

# between the moments at which a process is killed, where each costs many requests
STEP = {"valkey": 8, "s3": 36}


@pytest.fixture
def place_of(request, tmp_path, processes, shared_memory) -> Callable[[str], Place]:
    """The place for a scheme, or for two: a near one of each store, and a far one that all share."""
    numbers = itertools.count()

    def of(schemes: str) -> Place:
        *near, far = schemes.split(", ")

        def locations() -> Callable[[int], list[str]]:
            number = next(numbers)
            if far == "memory":
                return lambda _: [f"memory://model-{number}"]
            shared = place(far, tmp_path, request, f"far-{number}")
            return lambda which: [*(place(each, tmp_path, request, f"near-{number}-{which}") for each in near), shared]

        return Place(locations, is_shared=not near, process=None if far == "memory" else processes)

    return of


@pytest.mark.parametrize("scheme", FAST)
def test_promises_are_kept(scheme, place_of):
    run(place_of(scheme), *FAST[scheme])


@pytest.mark.attack
@pytest.mark.parametrize("schemes", LONG)
def test_promises_are_kept_at_length(schemes, place_of):
    examples, steps = LONG[schemes]
    run(place_of(schemes), volume(examples), steps)


@pytest.mark.attack
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_process_that_is_killed_anywhere_leaves_what_was_promised(scheme, place_of):
    assert kill_everywhere(place_of(scheme), 1 if TORTURE > 1 else STEP.get(scheme, 3)) > 10


@pytest.mark.attack
def test_an_encrypted_location_keeps_the_same_promises(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFIXSTORE_KEY", "env:MODEL_KEY")
    monkeypatch.setenv("MODEL_KEY", KEY.read())
    numbers = itertools.count()

    def locations() -> Callable[[int], list[str]]:
        url = f"lmdb://{tmp_path}/{next(numbers)}"
        return lambda _: [url]

    with closing(Processes()) as processes:
        encrypted = Place(locations, is_shared=True, process=processes)
        run(encrypted, volume(15), 30)
        assert kill_everywhere(encrypted, 1 if TORTURE > 1 else 3) > 10


@pytest.mark.attack
@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_what_was_flushed_survives_a_loss_of_power(scheme, tmp_path, recorded):
    url = "lmdb://{root}/kv" if scheme == "lmdb" else "sqlite:///{root}/kv.db"
    run(Place(lambda: lambda _: [url], process=recorded, disks=lambda: Disks(tmp_path)), volume(12))
