"""The usual causes why a prompt differs needlessly from a stored one, found from the texts around the fork.

A difference is blamed only if it costs something: what follows it has to be the same in both. So two users who ask
about different days have two prompts, but the time at the start of a long system prompt is a likely cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Culprit", "Texts", "find_culprit", "repeated_start"]

# characters that have to be the same in both after a value that differs
WORTH = 80
# of text that is the same in other tokens, or but for white space
SEAM = 12
# characters of a value, or of a name, that are shown
SHOWN = 60

MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"
CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?(?:\s?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
DATE = (
    rf"\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}|\d{{4}}/\d{{2}}/\d{{2}}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?\.? {MONTH},? \d{{4}}|{MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}"
    rf"|{MONTH} \d{{1,2}} \d{{2}}:\d{{2}}:\d{{2}}(?: [A-Z]+)? \d{{4}}|{MONTH} \d{{4}}"
)
TIMESTAMP = re.compile(
    rf"(?:(?:{DAY}),? ?)?(?:(?:{DATE})(?:[T, ]+(?:at )?(?:{CLOCK}))?|{CLOCK})"
    rf"|(?:{DAY})|\b1\d{{9}}(?:\d{{3}}){{0,3}}\b"
)
ID = re.compile(
    r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b"
    r"|\b[A-Za-z]{2,12}[_:#-](?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{4,}"
    r"|\b(?=[A-Za-z0-9]*[A-Za-z])(?=(?:[A-Za-z]*\d){3})[A-Za-z0-9]{10,}\b"
    r"|\b\d{5,}\b"
)
THINKING = [
    (re.compile(r"<(think|thinking|thought|reasoning|seed:think)>"), "</{}>"),
    (re.compile(r"\[(THINK)\]"), "[/{}]"),
    (re.compile(r"<\|(START_THINKING)\|>"), "<|END_THINKING|>"),
    (re.compile(r"<\|channel\|>(analysis)<\|message\|>"), "<|end|>"),
]
# what the harmony format puts between thinking and the answer
HARMONY = "<|start|>assistant"
# where the definition of a tool has its name: JSON, or the types of the harmony format
TOOL = re.compile(r'"name"\s*:\s*"([^"\n]{1,128})"|^type (\w{1,128}) = \(', re.MULTILINE)
DEFINES = re.compile(r'"(?:parameters|input_schema|inputSchema|description)"\s*:|^type \w+ = \(', re.MULTILINE)
CALLS = re.compile(r'"arguments"\s*:')
# tools that are compared, and characters of a definition that are looked at
TOOLS, DEFINITION = 256, 4000


@dataclass(frozen=True)
class Culprit:
    """A usual reason why a prompt is not found.

    Attributes
    ----------
    name
        ``"timestamp"``, ``"id"``, ``"tools"`` (in another order), ``"thinking"`` (blocks dropped from the history),
        ``"seam"`` (the same text in other tokens, as where generated text is read again), ``"white space"`` or
        ``"bos"`` (a token that begins sequences, twice).
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
    """The texts of a prompt and of a stored sequence, both from one place before the fork on.

    Attributes
    ----------
    here, there
        The text of the prompt, and of what is stored. They begin with the same tokens.
    at
        Characters that these tokens have.
    tokens_here, tokens_there
        The tokens after the fork.
    """

    here: str
    there: str
    at: int
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
    """A thinking block that one of the two does not have, with the same text after it."""
    if _has_more_thinking(texts.there, texts.here, texts.same):
        what = "A thinking block is stored that this prompt does not have"
    elif _has_more_thinking(texts.here, texts.there, texts.same):
        what = "This prompt has a thinking block that is not stored"
    else:
        return None
    return Culprit(
        "thinking",
        f"{what}; the text after it is the same.",
        "The chat template, or the client, drops thinking from the history, so the turn is computed again."
        " Keep the thinking in the messages (reasoning_content, if the template takes it), or switch it off.",
    )


def _has_more_thinking(has: str, lacks: str, same: int) -> bool:
    for opening, closing_form in THINKING:
        # the fork may be inside the block: after an opening tag that both have, if one of them is empty
        for found in opening.finditer(has, max(same - SHOWN, 0)):
            closing = closing_form.format(found[1])
            end = has.find(closing, found.end())
            if found.start() > same:
                break
            if end < same or not has[found.end() : end].strip():
                continue
            rest = has[end + len(closing) :].removeprefix(HARMONY).lstrip()
            other = _without_block(lacks, found.start(), closing).lstrip()
            n = _common(rest, other)
            if n and n >= min(SEAM, len(rest), len(other)):
                return True
    return False


def _without_block(text: str, at: int, closing: str) -> str:
    """The text from here on, without a thinking block that is empty."""
    for opening, _ in THINKING:
        found = opening.match(text, at)
        if found is not None:
            end = text.find(closing, found.end())
            if end >= 0 and not text[found.end() : end].strip():
                return text[end + len(closing) :]
    return text[at:]


def _tools(texts: Texts) -> Culprit | None:
    """The same tools in another order."""
    here, there = _definitions(texts.here), _definitions(texts.there)
    i = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a[0] != b[0]), None)
    if i is None:
        return None
    # the first one that differs is the one at the fork
    after = here[i - 1][1] if i else 0
    if not after <= texts.same <= max(here[i][1], there[i][1]):
        return None
    mine, theirs = ([name for name, _ in some[i : i + TOOLS]] for some in (here, there))
    for n in range(2, min(len(mine), len(theirs)) + 1):
        if sorted(mine[:n]) == sorted(theirs[:n]):
            return Culprit(
                "tools",
                f"The tools are the same but in a different order: {_listed(mine[:n])} here, "
                f"{_listed(theirs[:n])} stored.",
                "Always pass them in the same order, for example sorted by name.",
            )
    return None


def _definitions(text: str) -> list[tuple[str, int]]:
    """The names of the tools that a text defines, and where each of them ends."""
    found = list(TOOL.finditer(text))
    ends = [one.start() for one in found[1:]] + [len(text)]
    defined = []
    for one, end in zip(found, ends, strict=False):
        # some write the name after the description
        about = text[max(one.start() - 2, 0) : min(end, one.end() + DEFINITION)]
        if DEFINES.search(about) and not CALLS.search(about):
            defined.append((one[1] or one[2], one.end()))
    return defined


def _value(name: str, pattern: re.Pattern[str], what: str, advice: str) -> Callable[[Texts], Culprit | None]:
    """Finds a value of one kind that differs, while what follows is the same."""

    def find(texts: Texts) -> Culprit | None:
        here, there = (_spanning(pattern, text, texts.same) for text in (texts.here, texts.there))
        if here is None or there is None or here[0] == there[0]:
            return None
        # other values of these kinds may differ as well
        rest = [_masked(one.string[one.end() :]) for one in (here, there)]
        n = _common(*rest)
        if n < WORTH:
            return None
        return Culprit(
            name,
            f"{what}: {_short(here[0])} here, {_short(there[0])} stored. What follows is the same in both, for at"
            f" least {n:,} characters.",
            advice,
        )

    return find


def _spanning(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """The value that this place is in, or at the end of which it is."""
    for found in pattern.finditer(text, max(at - SHOWN, 0)):
        if found.start() > at:
            return None
        if at <= found.end():
            return found
    return None


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _masked(text: str) -> str:
    return ID.sub("…", TIMESTAMP.sub("…", text))


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
FINDERS: list[Callable[[Texts], Culprit | None]] = [
    _seam,
    _thinking,
    _tools,
    _value(
        "timestamp",
        TIMESTAMP,
        "A date or time differs",
        "Put it at the end of the prompt, into the last message, or round it: everything after it is computed again.",
    ),
    _value(
        "id",
        ID,
        "An id or number differs",
        "Leave it out, or put it at the end of the prompt: everything after it is computed again.",
    ),
    _white_space,
]
