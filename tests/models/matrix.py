"""Rows of the matrix: a model through both doors, and across them, each prompt after a restart of everything.

Each scenario starts from a copy of what the first process has stored, so that none finds what another one has left.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models.architectures import Memory, Model
from tests.models.prompts import ANSWER, Prompts, common, prompts
from tests.models.python_door import answers, is_restored_exactly, opened, served
from tests.models.records import Answer, Outcome, Row, Settings
from tests.models.server_door import alone, proxied
from tests.support.models import forget

DOORS = ("python", "server")
CUT = 1000
# what one door has computed, and the other one restores
ACROSS = ("same", "other")


@dataclass
class Case:
    """A model with settings, and what is known of it so far."""

    model: Model
    path: Path
    settings: Settings
    directory: Path
    # by what factor prompts are shorter; then there are fewer
    shorter: int = 1
    # the right answers of the door that is tried, by scenario
    cold: dict[str, Answer] = field(default_factory=dict)
    # what the first process of a door has stored
    stores: dict[str, Path] = field(default_factory=dict)

    def row(self, door: str) -> Row:
        return Row(self.model.name, self.model.memory, door, self.settings)

    @property
    def text(self) -> Prompts:
        return prompts(self.shorter)

    @property
    def scenarios(self) -> tuple[str, ...]:
        """The prompts after a restart. A second prompt tells nothing new if each prefix can be used."""
        if self.shorter > 1:
            return ("same", "other", "next")
        return ("same", "other", "next", "edit", *(() if self.model.memory.steps_back else ("third",)))

    def prompt(self, scenario: str) -> str:
        return self.text.first if scenario == "same" else str(getattr(self.text, scenario))

    @property
    def as_the_server(self) -> Settings:
        """Those of a `Llama` whose states are the server's: it keeps rows of the window only."""
        return replace(self.settings, swa_full=False) if "window" in self.model.memory.value else self.settings

    def copy(self, store: Path, name: str) -> Path:
        """A store as the first process has left it."""
        return Path(shutil.copytree(store, self.directory / f"{store.name}-{name}"))

    def outcome(self, scenario: str, found: Answer) -> Outcome:
        """Beside what is right."""
        cold, first = self.cold[scenario], self.cold["same"]
        known = first.tokens + first.ids[:-1]
        if scenario == "third":
            n = max(common(known, cold.tokens), common(self.cold["other"].tokens, cold.tokens))
        else:
            n = 0 if scenario == "same" else common(known, cold.tokens)
        ideal = len(cold.tokens) - n if n else 1
        answer = found.compared(cold)
        if answer == "differs" and self.model.is_unsteady:
            answer = "tie"
        return Outcome(found.computed, ideal, answer, found.note)


def rows(
    model: Model,
    path: Path,
    settings: Settings,
    doors: tuple[str, ...],
    directory: Path,
    *,
    across: bool = True,
    shorter: int = 1,
) -> Iterator[Row]:
    """The rows of a model; those across the doors only if both are tried."""
    case = Case(model, path, settings, directory, shorter)
    # a whole state is that of a context with as many sequences
    across = across and doors == DOORS and model.memory is not Memory.COMPRESSED
    for door in doors:
        yield _row(_through_python if door == "python" else _through_server, case, door)
    if across and "server" in case.stores:
        yield _row(_server_to_python, case, "server to python")
    if across and "python" in case.stores:
        yield _row(_python_to_server, case, "python to server")


def _row(work: Any, case: Case, door: str) -> Row:
    """A row, whatever happens."""
    row = case.row(door)
    try:
        work(case, row)
    except (RuntimeError, ValueError, OSError, AssertionError, httpx.HTTPError, pytest.fail.Exception) as error:
        row.failed = f"{type(error).__name__}: {error}"
    return row


def _through_python(case: Case, row: Row) -> None:
    store, answer = case.directory / "python", ""
    with closing(opened(case.path, case.settings)) as llm:
        for scenario in case.scenarios:
            forget(llm)
            [case.cold[scenario]] = answers(llm, None, [case.prompt(scenario).replace(ANSWER, answer)])
            answer = case.cold["same"].text
    served(case.path, case.settings, store, [case.text.first])
    case.stores["python"] = store
    row.n_tokens = len(case.cold["same"].tokens)
    for scenario in case.scenarios:
        # the third on the store in which "other" was answered
        place = case.directory / "python-other" if scenario == "third" else case.copy(store, scenario)
        text = case.prompt(scenario).replace(ANSWER, answer)
        found = served(case.path, case.settings, place, [text] * (2 if scenario == "same" else 1))
        row.outcomes[scenario] = case.outcome(scenario, found[0])
        if scenario == "same":
            row.outcomes["regenerate"] = case.outcome("same", found[1])
    exact, cut = case.directory / "python-exact", CUT // case.shorter
    row.exact = is_restored_exactly(case.path, case.settings, exact, case.text.first, cut)


def _through_server(case: Case, row: Row) -> None:
    store = case.directory / "server"
    case.cold = {}
    with alone(case.path, case.settings, case.directory / "alone") as server:
        answer = ""
        for scenario in case.scenarios:
            text = case.prompt(scenario).replace(ANSWER, answer)
            found = server.complete(text, cache_prompt=False)
            case.cold[scenario] = _with_tokens(found, server.tokens_of(text))
            answer = answer or found.text
    row.n_tokens = len(case.cold["same"].tokens)
    with proxied(case.path, case.settings, store) as server:
        server.complete(case.text.first)
    case.stores["server"] = store
    # what is edited is a prompt that was just sent, so that needs no restart of its own
    for scenario in case.scenarios:
        if scenario != "edit":
            place = case.directory / "server-other" if scenario == "third" else case.copy(store, scenario)
            _ask(case, row, place, ("same", "regenerate", "edit") if scenario == "same" else (scenario,))


def _with_tokens(found: Answer, tokens: list[int]) -> Answer:
    return Answer(tokens, found.ids, found.text, found.gaps, found.computed, found.note)


def _ask(case: Case, row: Row, place: Path, scenarios: tuple[str, ...]) -> None:
    """Prompts in one life of the proxy."""
    with proxied(case.path, case.settings, place) as server:
        for scenario in scenarios:
            prompt = "same" if scenario == "regenerate" else scenario
            text = case.prompt(prompt).replace(ANSWER, case.cold["same"].text)
            row.outcomes[scenario] = case.outcome(prompt, server.complete(text))


def _server_to_python(case: Case, row: Row) -> None:
    """What the server has stored, in a `Llama`; the answers of the server are right."""
    row.n_tokens = len(case.cold["same"].tokens)
    for scenario in ACROSS:
        place = case.copy(case.stores["server"], f"python-{scenario}")
        text = case.prompt(scenario).replace(ANSWER, case.cold["same"].text)
        [found] = served(case.path, case.as_the_server, place, [text])
        row.outcomes[scenario] = case.outcome(scenario, found)


def _python_to_server(case: Case, row: Row) -> None:
    """What a `Llama` has stored, in the server."""
    row.n_tokens = len(case.cold["same"].tokens)
    store = case.stores["python"]
    if case.as_the_server != case.settings:
        store = case.directory / "python-as-the-server"
        served(case.path, case.as_the_server, store, [case.text.first])
    for scenario in ACROSS:
        _ask(case, row, case.copy(store, f"server-{scenario}"), (scenario,))
