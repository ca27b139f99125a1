"""The machine finds faults: each of `mutations` by the steps that show it, and in `make torture` by itself, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hypothesis import Phase

from prefixstore import StorageError
from tests.attacks.power import shim
from tests.model.machine import Machine, Place, play, run
from tests.model.mutations import MUTATIONS, Mutation
from tests.model.process import Disks, Processes
from tests.support.models import TORTURE

EXAMPLES = 300


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(Processes()) as started:
        yield started


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[Processes]:
    """As `processes`, and what they write to files is recorded."""
    with closing(Processes(shim(tmp_path_factory.mktemp("shim")))) as started:
        yield started


@pytest.fixture
def place_of(tmp_path, monkeypatch, request) -> Callable[[Mutation, str], Place]:
    """What it takes to show a mutation; it is put in, if its name is given."""

    def of(mutation: Mutation, name: str = "") -> Place:
        if mutation.where in ("memory", "two"):
            if name:
                mutation.put_in(monkeypatch)
            near = ["memory:"] if mutation.where == "two" else []
            return Place(lambda: lambda _: [*near, "memory://mutations"], is_shared=not near)
        processes = request.getfixturevalue("recorded" if mutation.where == "power" else "processes")
        processes.mutate(name)
        if mutation.where == "power":
            return Place(lambda: lambda _: ["lmdb://{root}/kv"], process=processes, disks=lambda: Disks(tmp_path))
        return Place(lambda: lambda _: [f"lmdb://{tmp_path}/{name or 'sound'}"], process=processes)

    return of


# those that take other processes take seconds
KNOWN = [
    pytest.param(name, marks=[pytest.mark.slow] * (mutation.where in ("process", "power")))
    for name, mutation in MUTATIONS.items()
]


@pytest.mark.parametrize("name", KNOWN)
def test_known_steps_show_a_fault(name, place_of):
    mutation = MUTATIONS[name]
    play(place_of(mutation), mutation.steps, **mutation.options)
    with pytest.raises((AssertionError, StorageError), match=mutation.message):
        play(place_of(mutation, name), mutation.steps, **mutation.options)


@pytest.mark.attack
@pytest.mark.parametrize("name", MUTATIONS if TORTURE > 1 else ["match ignores the salt"])
def test_a_fault_is_found(name, place_of, record_property):
    place, began = place_of(MUTATIONS[name], name), Machine.n_examples
    with pytest.raises((AssertionError, StorageError)):
        run(place, EXAMPLES, 40, phases=[Phase.generate], report_multiple_bugs=False)
    record_property("examples", Machine.n_examples - began)
