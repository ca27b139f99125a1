"""What is saved for each model: the matrix as tests. The table is that of ``python -m tests.models``.

Each attack tries one model of each kind of memory with all prompts, through both doors and across them, each prompt
after a restart of everything; and every third of the other models, and other settings, through `Llama` with a few
prompts. `make torture` does all of both with all of them.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.architectures import Memory
from tests.models.catalogue import DECODERS, MODELS, OF_EACH_KIND
from tests.models.generate import generate
from tests.models.matrix import DOORS, rows
from tests.models.records import Answer, Outcome, Row, Settings
from tests.models.report import document
from tests.support import ROOT
from tests.support.models import TORTURE

USUAL, OTHER_SETTINGS = Settings(), (Settings(fa="off"), Settings(kv="q8_0"))
KINDS = list(OF_EACH_KIND.values())
# through both doors in each run; at length, all of them
THROUGH_BOTH = DECODERS if TORTURE > 1 else KINDS
WITH_SETTINGS = KINDS if TORTURE > 1 else [OF_EACH_KIND[Memory.HYBRID]]
OTHERS = [name for name in DECODERS if name not in KINDS][:: 1 if TORTURE > 1 else 3]
# those of `make test`; the others of each kind are tried through both doors
QUICK = [OF_EACH_KIND[kind] for kind in (Memory.ATTENTION, Memory.WINDOW, Memory.HYBRID, Memory.RECURRENT)]
slow = pytest.mark.slow
CASES = [
    *(pytest.param(name, USUAL, id=name) for name in QUICK),
    *(pytest.param(name, USUAL, id=name, marks=slow) for name in OTHERS),
    *(
        pytest.param(name, settings, id=f"{name}, fa {settings.fa}, {settings.kv}", marks=slow)
        for name in KINDS
        for settings in OTHER_SETTINGS
    ),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_after_a_restart_no_more_is_computed_than_its_memory_requires(name: str, settings: Settings):
    assert misses(name, settings, doors=("python",), shorter=2) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH_BOTH)
def test_everything_that_a_model_allows_is_restored_through_both_doors(name: str):
    """And across them, of one model of each kind."""
    assert misses(name, USUAL, across=name in KINDS) == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHER_SETTINGS, ids=["without flash attention", "q8_0"])
@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_other_settings_change_nothing_about_it(name: str, settings: Settings):
    assert misses(name, settings, across=False) == []


def misses(name: str, settings: Settings, *, doors: tuple[str, ...] = DOORS, **options: Any) -> list[str]:
    """What is not as it must be in the rows of a model. All models and stores together would be gigabytes."""
    with tempfile.TemporaryDirectory() as own:
        model, place = DECODERS[name], Path(own)
        found = list(rows(model, generate(model, place), settings, doors, place, **options))
    is_across = doors == DOORS and options["across"] and model.memory is not Memory.COMPRESSED
    assert len(found) == (4 if is_across else len(doors))
    return [f"{row.door}: {miss}" for row in found for miss in row.misses()]


def test_a_row_says_what_it_misses_and_the_document_shows_it_in_bold():
    outcomes = {"same": Outcome(1, 1), "other": Outcome(265, 200, "differs"), "next": Outcome(176, 112)}
    row = Row("llama", Memory.ATTENTION, "python", outcomes=outcomes, exact=True)
    assert row.misses() == ["other: computed 265, at most 264", "other: another answer"]
    recurrent = Row("mamba", Memory.RECURRENT, "python", outcomes={"same": Outcome(8, 1)}, exact=False)
    assert recurrent.misses() == ["the restored state or its logits are not those that were computed"]
    text = document([row])
    assert "| 1 (1) | **265 (200)** | 176 (112) |" in text
    assert "; 1 wrong" in text


def test_an_answer_that_parts_between_equal_candidates_is_a_tie():
    right = Answer([1], [5, 6, 7], "", [2.0, 0.01, 3.0], 1)
    assert replace(right, gaps=[]).compared(right) == "same"
    assert replace(right, ids=[5, 8, 9]).compared(right) == "tie"
    assert replace(right, ids=[5, 6, 9]).compared(right) == "differs"


def test_each_model_is_in_the_document():
    text = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in MODELS if not re.search(rf"[|;-] {re.escape(name)} \(", text)] == []
