"""The machine finds faults: each of `mutations` by the steps that show it, and in `make torture` by itself, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import Phase

from prefixstore import StorageError
from tests.model.machine import Machine, Place, play, run
from tests.model.mutations import MUTATIONS, Mutation
from tests.model.process import Disks
from tests.support.models import TORTURE

EXAMPLES = 300


@pytest.fixture
def place_of(tmp_path, monkeypatch, request, shared_memory) -> Callable[[Mutation, str], Place]:
    """What it takes to show a mutation; it is put in, if its name is given."""

    def of(mutation: Mutation, name: str = "") -> Place:
        numbers = itertools.count()
        urls = {"power": "lmdb://{root}/kv", "process": f"lmdb://{tmp_path}/{name}%d"}
        url = urls.get(mutation.where, "memory://mutations")
        near = ["memory:"] if mutation.where == "two" else []

        def locations() -> Callable[[int], list[str]]:
            all_ = [*near, url.replace("%d", str(next(numbers)))]
            return lambda _: all_

        place = Place(locations, is_shared=not near, **mutation.options)
        if mutation.where in ("memory", "two"):
            if name:
                mutation.put_in(monkeypatch)
            return place
        processes = request.getfixturevalue("recorded" if mutation.where == "power" else "processes")
        processes.mutate(name)
        disks = (lambda: Disks(tmp_path)) if mutation.where == "power" else None
        return place._replace(process=processes, disks=disks)

    return of


# those that take other processes take seconds
KNOWN = [
    pytest.param(name, marks=[pytest.mark.slow] * (mutation.where in ("process", "power")))
    for name, mutation in MUTATIONS.items()
]


@pytest.mark.parametrize("name", KNOWN)
def test_known_steps_show_a_fault(name, place_of):
    mutation = MUTATIONS[name]
    play(place_of(mutation), mutation.steps)
    with pytest.raises((AssertionError, StorageError), match=mutation.message):
        play(place_of(mutation, name), mutation.steps)


@pytest.mark.attack
@pytest.mark.parametrize("name", MUTATIONS if TORTURE > 1 else ["match ignores the salt"])
def test_a_fault_is_found(name, place_of, record_property):
    place, began = place_of(MUTATIONS[name], name), Machine.n_examples
    with pytest.raises((AssertionError, StorageError)):
        run(place, EXAMPLES, 40, phases=[Phase.generate], report_multiple_bugs=False)
    record_property("examples", Machine.n_examples - began)
