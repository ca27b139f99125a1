"""The usual causes why a prompt differs needlessly from a stored one, found from the texts around the fork.

A difference is blamed only if it costs something: what follows it has to be the same in both. So two users who ask
about different days have two prompts, but the time at the start of a long system prompt is a likely cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Culprit", "Texts", "find_culprit", "repeated_start"]

# characters that have to be the same in both after a value that differs, and how long that is at most
WORTH, LONGEST = 80, 48
# of text that is the same in other tokens, or but for white space or thinking
SEAM = 12
# characters of a value, or of a name, that are shown
SHOWN = 60

# clocks, dates in numbers, seconds since the epoch (or parts of them), names of months and days
TIMESTAMP = re.compile(
    r"\d:\d\d|\d{1,4}[-/.]\d{1,2}[-/.]\d{2,4}|\b1\d{9}(?:\d{3}){0,3}\b"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b"
)
ID = re.compile(r"(?=[\w-]*\d)[\w-]{5,}")
# what the harmony format puts between thinking and the answer belongs to the block
THINKING = re.compile(
    r"<(think|thinking|thought|reasoning|seed:think)>.*?</\1>\s*|\[THINK\].*?\[/THINK\]\s*"
    r"|<\|START_THINKING\|>.*?<\|END_THINKING\|>\s*"
    r"|<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?",
    re.DOTALL,
)
# where the definition of a tool has its name: JSON, or the types of the harmony format. A call has arguments instead
TOOL = re.compile(
    r'"name"\s*:\s*"([^"\n]{1,128})"\s*,\s*"(?:description|parameters|input_schema|inputSchema)"'
    r"|^type (\w{1,128}) = \(",
    re.MULTILINE,
)
# tools that are compared
TOOLS = 256


@dataclass(frozen=True)
class Culprit:
    """A usual reason why a prompt is not found.

    Attributes
    ----------
    name
        ``"timestamp"``, ``"id"`` or another ``"value"``, ``"tools"`` (in another order), ``"thinking"`` (blocks dropped
        from the history), ``"seam"`` (the same text in other tokens, as where generated text is read again),
        ``"white space"`` or ``"bos"`` (a token that begins sequences, twice).
    what
        What was found, as a sentence.
    advice
        What to do about it.
    """

    name: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what} {self.advice}"


@dataclass(frozen=True)
class Texts:
    """The texts of a prompt (here) and of a stored sequence (there), both from one place before the fork on."""

    here: str
    there: str
    # characters of the tokens that both begin with
    at: int
    # after the fork
    tokens_here: Sequence[int]
    tokens_there: Sequence[int]

    @property
    def same(self) -> int:
        """How many characters both begin with; more than `at` if the same text is in other tokens."""
        return _common(self.here, self.there)


def find_culprit(texts: Texts) -> Culprit | None:
    """The usual reason for a fork; None if the two are simply different."""
    found: Iterator[Culprit | None] = (find(texts) for find in FINDERS)
    return next((culprit for culprit in found if culprit is not None), None)


def repeated_start(here: Sequence[int], there: Sequence[int], bos: int) -> Culprit | None:
    """A beginning-of-sequence token that stands twice in one of two sequences, and once in the other."""
    twice, once = [bos, bos], [bos]
    where, longer, shorter = "this prompt", here, there
    if list(there[:2]) == twice:
        where, longer, shorter = "what is stored", there, here
    if bos < 0 or list(longer[:2]) != twice or list(shorter[:1]) != once or list(shorter[:2]) == twice:
        return None
    rest, other = list(longer[2:34]), list(shorter[1:33])
    n = min(len(rest), len(other))
    if n == 0 or rest[:n] != other[:n]:
        return None
    return Culprit(
        "bos",
        f"The token that begins a sequence (BOS) appears twice at the start of {where}, and once in the other.",
        "Leave it out of the text: the tokenizer adds it to a prompt, and many chat templates contain it too.",
    )


# -- one after the other ----------------------------------------------------------------------------------------------


def _seam(texts: Texts) -> Culprit | None:
    """The same text in other tokens."""
    n = texts.same - texts.at
    if n < SEAM or min(len(texts.tokens_here), len(texts.tokens_there)) == 0:
        return None
    return Culprit(
        "seam",
        f"The text is the same in both for {n:,} more characters, but tokenized differently: "
        f"{_short(texts.here[texts.at :])}.",
        "Generated text was passed back as text, and tokenizes differently. Continue with the tokens that "
        "were generated"
        " (keep their ids, or use a session), or accept that this turn is computed again.",
    )


def _thinking(texts: Texts) -> Culprit | None:
    """A thinking block at the fork that one of the two does not have, or has empty, with the same text after it."""
    both = texts.here, texts.there
    blocks = [_spanning(THINKING, text, texts.same) for text in both]
    start = min((block.start() for block in blocks if block is not None), default=None)
    if start is None:
        return None
    rests = [text[block.end() if block else start :].lstrip() for text, block in zip(both, blocks, strict=True)]
    if _common(*rests) < SEAM:
        return None
    return Culprit(
        "thinking",
        "Thinking differs, or is missing in one of the two; the text after it is the same.",
        "The chat template, or the client, drops thinking from the history, so the turn is computed again."
        " Keep the thinking in the messages (reasoning_content, if the template takes it), or switch it off.",
    )


def _spanning(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """The match that this place is in, or at the end of which it is."""
    for found in pattern.finditer(text, max(at - SHOWN, 0)):
        if found.start() > at:
            return None
        if at <= found.end():
            return found
    return None


def _tools(texts: Texts) -> Culprit | None:
    """The same tools in another order."""
    here, there = ([*TOOL.finditer(text)] for text in (texts.here, texts.there))
    names = [[one[1] or one[2] for one in some] for some in (here, there)]
    i = next((i for i, (mine, other) in enumerate(zip(*names, strict=False)) if mine != other), None)
    # the first one that differs is the one at the fork
    if i is None or not (here[i - 1].end() if i else 0) <= texts.same <= max(here[i].end(), there[i].end()):
        return None
    mine, theirs = (some[i : i + TOOLS] for some in names)
    for n in range(2, min(len(mine), len(theirs)) + 1):
        if sorted(mine[:n]) == sorted(theirs[:n]):
            return Culprit(
                "tools",
                f"The tools are the same but in a different order: {_listed(mine[:n])} here, "
                f"{_listed(theirs[:n])} stored.",
                "Always pass them in the same order, for example sorted by name.",
            )
    return None


def _value(texts: Texts) -> Culprit | None:
    """A short piece that differs, while what follows is the same."""
    here, there = texts.here[texts.same :], texts.there[texts.same :]
    for i in range(LONGEST):
        same = here[i : i + WORTH]
        j = there.find(same, 0, LONGEST + WORTH) if len(same) == WORTH else -1
        if j >= 0:
            break
    else:
        return None
    pieces = _word(texts.here, texts.same, texts.same + i), _word(texts.there, texts.same, texts.same + j)
    kinds = {"timestamp": (TIMESTAMP, "A date or time"), "id": (ID, "An id or number")}
    name = next((name for name, (pattern, _) in kinds.items() if all(map(pattern.search, pieces))), "value")
    what = kinds[name][1] if name in kinds else "A value"
    return Culprit(
        name,
        f"{what} differs: {_short(pieces[0])} here, {_short(pieces[1])} stored. What follows is the same in both, for"
        f" at least {_common(here[i:], there[j:]):,} characters.",
        "Leave it out, round it, or put it at the end of the prompt, into the last message: everything after it is"
        " computed again.",
    )


def _word(text: str, start: int, end: int) -> str:
    """A part of a text, from the beginning of its first word to the end of its last one."""
    before = re.search(r"\S*\Z", text[max(start - SHOWN, 0) : start])
    after = re.match(r"[\w./:-]*", text[end : end + SHOWN])
    assert before is not None, "nothing is found, too"
    assert after is not None, "as above"
    return before[0] + text[start:end] + after[0].rstrip(".:")


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _white_space(texts: Texts) -> Culprit | None:
    """The same text but for white space at the fork."""
    here, there = texts.here[texts.same :], texts.there[texts.same :]
    if not (here[:1].isspace() or there[:1].isspace()):
        return None
    n = _common(here.lstrip(), there.lstrip())
    if n < SEAM:
        return None
    return Culprit(
        "white space",
        f"Only white space differs: {_short(here[:20])} here, {_short(there[:20])} stored; what follows is the same.",
        "Often an answer was stripped before it was put into the history. Keep it as it was generated.",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


# in the order of how certain they are
FINDERS: list[Callable[[Texts], Culprit | None]] = [_seam, _thinking, _tools, _white_space, _value]
