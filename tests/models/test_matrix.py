"""What is saved for each model: the matrix as tests. The table is that of ``python -m tests.models``."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from prefixstore import PrefixStore
from tests.models.architectures import Memory
from tests.models.catalogue import DECODERS, MODELS, OF_EACH_KIND
from tests.models.generate import generate
from tests.models.matrix import DOORS, Case, rows
from tests.models.prompts import ANSWER
from tests.models.python_door import answers, exactly, is_exact, opened, tokens_of
from tests.models.records import Answer, Outcome, Row, Settings
from tests.models.report import document
from tests.support import ROOT
from tests.support.models import TORTURE, forget

OTHER_SETTINGS = (Settings(fa="off"), Settings(kv="q8_0"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are generated."""
    return tmp_path_factory.mktemp("generated")


@pytest.mark.parametrize("memory", OF_EACH_KIND, ids=lambda memory: memory.value)
def test_after_a_restart_no_more_is_computed_than_its_memory_requires(memory: Memory, directory: Path, tmp_path: Path):
    model = DECODERS[OF_EACH_KIND[memory]]
    case = Case(model, generate(model, directory), Settings(), tmp_path, shorter=2)
    row, store = case.row("python"), tmp_path / "python"
    scenarios = ("same", "other", "next")
    llm = opened(case.path, case.settings)
    answer = ""
    for scenario in scenarios:
        forget(llm)
        [case.cold[scenario]] = answers(llm, None, [case.prompt(scenario).replace(ANSWER, answer)])
        answer = case.cold["same"].text
    forget(llm)
    with PrefixStore(str(store), llm) as kept:
        llm.set_cache(kept)
        answers(llm, kept, [case.text.first])
    llm.close()

    llm = opened(case.path, case.settings)
    for scenario in scenarios:
        forget(llm)
        with PrefixStore(str(case.copy(store, scenario)), llm) as kept:
            llm.set_cache(kept)
            [found] = answers(llm, kept, [case.prompt(scenario).replace(ANSWER, answer)])
        row.outcomes[scenario] = case.outcome(scenario, found)
    llm.close()
    row.exact = True  # that is what the next test is about
    assert row.misses() == []


@pytest.mark.parametrize("memory", OF_EACH_KIND, ids=lambda memory: memory.value)
def test_a_restored_state_and_its_logits_are_those_that_were_computed(memory: Memory, directory: Path, tmp_path: Path):
    model, cut = DECODERS[OF_EACH_KIND[memory]], 500
    case = Case(model, generate(model, directory), Settings(), tmp_path, shorter=2)
    found = []
    for _ in range(2):
        llm, beside = opened(case.path, case.settings), opened(case.path, case.settings)
        with PrefixStore(str(tmp_path / "store"), llm) as kept:
            llm.set_cache(kept)
            found.append(exactly(llm, kept, tokens_of(llm, case.text.first), cut, beside))
        llm.close()
        beside.close()
    assert is_exact(found[0], found[1], cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_everything_that_a_model_allows_is_restored_through_both_doors(name: str):
    """And across them, of one model of each kind. The other models of plain attention: both doors in `make torture`."""
    is_one_of_many = DECODERS[name].memory is Memory.ATTENTION and name not in OF_EACH_KIND.values() and TORTURE == 1
    doors = ("python",) if is_one_of_many else DOORS
    assert misses(name, Settings(), across=name in OF_EACH_KIND.values(), doors=doors) == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHER_SETTINGS, ids=["without flash attention", "q8_0"])
@pytest.mark.parametrize("memory", OF_EACH_KIND, ids=lambda memory: memory.value)
def test_other_settings_change_nothing_about_it(memory: Memory, settings: Settings):
    assert misses(OF_EACH_KIND[memory], settings, across=False) == []


def misses(name: str, settings: Settings, *, across: bool, doors: tuple[str, ...] = DOORS) -> list[str]:
    """What is not as it must be in the rows of a model. All models and stores together would be gigabytes."""
    with tempfile.TemporaryDirectory() as own:
        model, place = DECODERS[name], Path(own)
        found = list(rows(model, generate(model, place), settings, doors, place, across=across))
    assert len(found) == (4 if across and model.memory is not Memory.COMPRESSED else len(doors))
    return [f"{row.door}: {miss}" for row in found for miss in row.misses()]


def test_a_row_says_what_it_misses_and_the_document_shows_it_in_bold():
    outcomes = {"same": Outcome(1, 1), "other": Outcome(265, 200, "differs"), "next": Outcome(176, 112)}
    row = Row("llama", Memory.ATTENTION, "python", outcomes=outcomes, exact=True)
    assert row.misses() == ["other: computed 265, at most 264", "other: another answer"]
    recurrent = Row("mamba", Memory.RECURRENT, "python", outcomes={"same": Outcome(8, 1)}, exact=False)
    assert recurrent.misses() == ["the restored state or its logits are not those that were computed"]
    assert [Row.of_json(found.as_json()) for found in (row, recurrent)] == [row, recurrent]
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
