"""The machine finds faults: each of `mutations` within so many examples."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import Phase

from tests.attacks.power import shim
from tests.model.machine import Machine, Place, run
from tests.model.mutations import MUTATIONS
from tests.model.process import Disks, Processes
from tests.support.models import TORTURE

EXAMPLES = 300


def broken(place: Place, message: str) -> int:
    """How many examples it takes until the machine says this."""
    began = Machine.n_examples
    with pytest.raises(AssertionError, match=message):
        run(place, EXAMPLES, 40, phases=[Phase.generate], report_multiple_bugs=False)
    return Machine.n_examples - began


@pytest.mark.attack
@pytest.mark.parametrize("name", MUTATIONS if TORTURE > 1 else ["match ignores the salt"])
def test_a_fault_is_found(name, tmp_path, monkeypatch, record_property):
    mutation = MUTATIONS[name]
    if mutation.needs_power_loss:
        with closing(Processes(shim(tmp_path), name)) as processes:
            place = Place(lambda: lambda _: ["lmdb://{root}/kv"], process=processes, disks=lambda: Disks(tmp_path))
            record_property("examples", broken(place, mutation.message))
    else:
        mutation.put_in(monkeypatch)
        record_property("examples", broken(Place(lambda: lambda _: ["memory://mutations"]), mutation.message))
