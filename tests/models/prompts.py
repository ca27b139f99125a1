"""A conversation about a document, and what may follow it: the same text for both doors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

# stands for the answer to the first prompt
ANSWER = "[[answer]]"
SYSTEM, USER, ASSISTANT, END = "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"


@dataclass(frozen=True)
class Prompts:
    """Prompts, each by what its user does."""

    # a system prompt, a document and a question
    first: str
    # another question on the same document
    other: str
    # one more, once a second prompt has shown where the document ends
    third: str
    # the next turn; it contains `ANSWER`
    next: str
    # the first message of the user is replaced by another
    edit: str


def prompts(shorter: int = 1) -> Prompts:
    """Those of 1,409 tokens, or of a part of it."""

    def words(topic: str, start: int, n: int) -> str:
        found = re.findall(r"[A-Za-z]{2,}", topics[topic])
        return " ".join(found[start : start + n // shorter])

    shared = f"{SYSTEM}{words('typesseq', 0, 560)}{END}{USER}"
    document = f"{shared}{words('compound', 0, 480)}\n\n"
    tail = f"{END}{ASSISTANT}"
    first = f"{document}{words('specialnames', 0, 150)}{tail}"
    return Prompts(
        first=first,
        other=f"{document}{words('exprlists', 0, 5)} {words('formatstrings', 300, 150)}{tail}",
        third=f"{document}{words('numeric-types', 0, 120)}{tail}",
        next=f"{first}{ANSWER}{END}{USER}{words('debugger', 100, 80)}{tail}",
        edit=f"{shared}{words('bltin-null-object', 0, 5)} {words('context-managers', 0, 100)}{tail}",
    )


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two prompts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
