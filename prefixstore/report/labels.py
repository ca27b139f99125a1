"""The label of a run: the text, or the token ids, with which it diverges from its siblings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from prefixstore.engine.page_view import PageView
from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.format.record import Facts, Record
from prefixstore.models.vocabulary import Words
from prefixstore.report.runs import Column

# tokens of a label: as text, and as ids
TEXT_TOKENS, ID_TOKENS = 24, 10
# tokens of a word that are looked at before them
WORD_TOKENS = 4
# characters of a label
LENGTH = 80
# records read at a time
SLICE = 1000

_T = TypeVar("_T")

# marks that change the direction of the text around them
BIDI = dict.fromkeys([0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0xFEFF], "·")
SHOWN = {**CONTROLS, **BIDI, ord("\n"): "↵", ord("\t"): "⇥", ord("\r"): None}


def visible(text: str) -> str:
    """A text as one line, without invisible characters."""
    return text.translate(SHOWN).encode("utf-8", "replace").decode()


def labels_of(view: PageView, facts: Facts, runs: Column, words: Sequence[Words | None]) -> tuple[list[str], list[int]]:
    """The label of each run, and how many of its first tokens it shares with a sibling.

    `words` has what turns tokens into text, for each namespace; None: its labels are token ids.
    """
    labels, shared = [""] * len(runs), [0] * len(runs)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for i, (siblings, head) in enumerate(zip(runs["siblings"].tolist(), runs["head"].tolist(), strict=True)):
        if head >= 0:
            # a run whose parent is lost has no siblings
            groups[siblings if siblings >= 0 else -2 - i].append(i)
    for some in _batches(list(groups.values())):
        each = [i for group in some for i in group]
        first = tokens_of_pages(view, [bytes(facts["key"][runs["head"][i]]) for i in each])
        found = dict(zip(each, first, strict=True))
        for group in some:
            known = {i: tokens for i in group if (tokens := found[i]) is not None}
            for i, n in divergence(known).items():
                shared[i] = n
                labels[i] = label_of(known[i], n, words[runs["space"][i]])
    return labels, shared


def _batches(groups: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Some groups at a time: a large one is alone."""
    some: list[list[int]] = []
    n = 0
    for group in groups:
        some.append(group)
        n += len(group)
        if n >= SLICE:
            yield some
            some, n = [], 0
    if some:
        yield some


def tokens_of_pages(view: PageView, keys: Sequence[bytes]) -> list[Tokens | None]:
    """The tokens of these pages; None for one that is gone or damaged."""
    found: list[Tokens | None] = []
    for at in range(0, len(keys), SLICE):
        some = keys[at : at + SLICE]
        records = view.records(some)
        for key in some:
            record = records[key][0] if key in records else None
            found.append(np.frombuffer(record.tokens, "<i4") if isinstance(record, Record) else None)
    return found


def divergence(siblings: Mapping[_T, Tokens]) -> dict[_T, int]:
    """How many tokens each shares with the one that is most like it: a neighbour, in the order of their bytes."""
    ordered = sorted(siblings, key=lambda i: siblings[i].tobytes())
    found = dict.fromkeys(ordered, 0)
    for one, other in pairwise(ordered):
        n = common_prefix(siblings[one], siblings[other])
        found[one], found[other] = max(found[one], n), max(found[other], n)
    return found


def label_of(tokens: Tokens, first: int, words: Words | None) -> str:
    """The tokens from the first one that is not shared; as text from the beginning of its word."""
    rest = tokens[first : first + TEXT_TOKENS].tolist()
    if not rest:
        return ""
    if words is None:
        return " ".join(map(str, rest[:ID_TOKENS])) + (" …" if len(tokens) - first > ID_TOKENS else "")
    # a token may begin in the middle of a character
    text = words(rest).lstrip("�")
    for token in tokens[max(first - WORD_TOKENS, 0) : first][::-1].tolist():
        before = words([token])
        if not before or text[:1].isspace() or before[-1].isspace():
            break
        text = before + text
    text = visible(text).strip()
    if len(text) <= LENGTH:
        return text
    # not in the middle of a word, if there is more than one
    return (text[:LENGTH].rpartition(" ")[0].rstrip() or text[: LENGTH - 1]) + "…"
