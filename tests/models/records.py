"""What the doors report, and what a row of the matrix is."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.models.architectures import Memory
from tests.models.prompts import common

SCENARIOS = ("same", "regenerate", "other", "third", "next", "edit")
# what may be computed beyond what is new in a prompt: pages and boundaries need not end at the token
SLACK = 64
# what memory that cannot step back computes of a prompt that it knows
REPEATED = 8
# candidates so close to each other change places by rounding
TIE = 0.05


@dataclass(frozen=True)
class Settings:
    """Settings that both doors have."""

    # flash attention: ``on`` or ``off``
    fa: str = "on"
    # type of K and V: ``f16`` or ``q8_0``
    kv: str = "f16"
    # whether a `Llama` keeps rows outside of the window; it does by default, and a server does not
    swa_full: bool = True


@dataclass(frozen=True)
class Answer:
    """The tokens of a prompt, and those of its answer."""

    tokens: list[int]
    ids: list[int]
    text: str
    # how far apart the best two candidates were, for each token
    gaps: list[float]
    # how many tokens of the prompt were computed
    computed: int
    # why nothing was restored
    note: str = ""

    def compared(self, right: Answer) -> str:
        """``same``, ``tie`` or ``differs``: beside the answer of a computation without a store."""
        if self.ids == right.ids:
            return "same"
        at = common(self.ids, right.ids)
        gaps = self.gaps[at : at + 1] + right.gaps[at : at + 1]
        return "tie" if gaps and min(gaps) < TIE else "differs"


@dataclass(frozen=True)
class Outcome:
    """A prompt after a restart: tokens that were computed and that were new; the answer, as `Answer.compared` says."""

    computed: int
    ideal: int
    answer: str = "same"
    note: str = ""


def limit(memory: Memory, scenario: str, ideal: int) -> int:
    """How many tokens may be computed."""
    if scenario in ("same", "regenerate"):
        return 1 if memory.steps_back else REPEATED
    return ideal + SLACK


@dataclass
class Row:
    """A model through a door."""

    name: str
    memory: Memory
    # ``python``, ``server``, ``python to server`` or ``server to python``: who computed, and who restored
    door: str
    settings: Settings = field(default_factory=Settings)
    # of the first prompt
    n_tokens: int = 0
    # by scenario
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    # whether state and logits were those of a computation, bit for bit; None: not seen
    exact: bool | None = None
    failed: str = ""

    def is_reached(self, scenario: str) -> bool:
        """Whether no more was computed than may be, and the answer was right."""
        outcome = self.outcomes[scenario]
        return outcome.computed <= limit(self.memory, scenario, outcome.ideal) and outcome.answer != "differs"

    def misses(self) -> list[str]:
        """What is not as it must be."""
        if self.failed:
            return [self.failed]
        found = []
        for scenario, outcome in self.outcomes.items():
            most = limit(self.memory, scenario, outcome.ideal)
            if outcome.computed > most:
                because = f" ({outcome.note})" if outcome.note else ""
                found.append(f"{scenario}: computed {outcome.computed}, at most {most}{because}")
            if outcome.answer == "differs":
                found.append(f"{scenario}: another answer")
        if self.door == "python" and not self.exact:
            wrong = "the restored state or its logits are not those that were computed"
            found.append("a captured state was not restored" if self.exact is None else wrong)
        return found
