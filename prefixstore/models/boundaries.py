"""Where in a prompt another one is likely to part from it, so that a snapshot there is worth a stop.

Does not need llama.cpp.

Memory that cannot step back is resumed only where a snapshot was taken. What the next prompt will share is not known,
so it is guessed from the tokens: messages end with a token that the vocabulary names, documents with a blank line.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from prefixstore.format.keys import Tokens
from prefixstore.models.vocabulary import Vocabulary

# of the header of a message, or of the coming answer: "<|im_start|>assistant\n<think>\n\n</think>\n\n"
HEADER_TOKENS = 8
# of what ends a message: "\n\n<|im_end|>\n", or "\n\nAnswer:"
ENDING_TOKENS = 3
# how many ends of paragraphs are tried, the last one of a message and one before it
PARAGRAPHS = 2

# what llama.cpp takes for the end of a message, whatever the metadata says; and "<|end|>" of gpt-oss
ENDS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT>
    _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    """.split()  # noqa: SIM905 - to be read at a glance
)


@dataclass(frozen=True)
class TokenKind:
    """What a token does in a prompt.

    Attributes
    ----------
    ends
        It ends a message.
    control
        It is not text.
    blank
        It is white space.
    breaks
        With how many line ends its text ends, spaces not counted; two or more end a paragraph.
    """

    ends: bool = False
    control: bool = False
    blank: bool = False
    breaks: int = 0

    @classmethod
    def of_text(cls, text: str) -> TokenKind:
        """The kind of a token that is text."""
        rest = text.rstrip(" \t\r\n")
        return cls(blank=bool(text) and not rest, breaks=text.count("\n", len(rest)))


def prompt_boundaries(
    tokens: Tokens,
    kind: Callable[[int], TokenKind],
    *,
    start: int = 0,
    min_tokens: int,
    min_gap: int,
    most: int,
    shared: Collection[int] = (),
    explicit: Collection[int] = (),
    interval: int | None = None,
) -> list[int]:
    """The positions after `start` at which to take a snapshot of a prompt, ascending.

    In the order of their value:

    - those that are `explicit`, and one token before the end: if the same prompt comes again, one has to be evaluated;
    - the end of the system prompt; where documents end in the last message of the user, which is its last paragraph
      break; where other stored prompts part from this one;
    - earlier paragraph breaks of that message, since its question may have several paragraphs, and its last line, since
      it may have none;
    - the last paragraph break of the first two messages, and where the last two begin;
    - with an `interval`, further ones that far apart, at the start of a message or a paragraph where there is one.

    None is less than `min_gap` after the start or after another one, which would do nearly as well. Only the last and
    the `explicit` ones may be, and what lies before those.

    Parameters
    ----------
    start
        From where the prompt is evaluated.
    min_tokens
        Shorter prefixes are not stored.
    min_gap
        Fewer tokens than this are not worth a stop.
    most
        The largest number of positions; at least 1.
    shared
        Lengths of prefixes that stored prompts have in common with this one.
    explicit
        Positions that the caller asked for.
    interval
        Tokens between positions that have no other reason.
    """
    last = len(tokens) - 1
    chosen = [n for n in sorted({*explicit}) if max(start, min_tokens - 1) < n < last][: most - 1]
    lowest = max(start + min_gap if start else 1, min_tokens)

    def choose(found: Iterable[int], before: int, after: int) -> None:
        """Take those with no other one less than `before` tokens before them, or `after` tokens after them."""
        for n in found:
            is_free = not any(-before < other - n < after for other in chosen)
            if lowest <= n < last and is_free and len(chosen) < most - 1:
                chosen.append(n)

    kinds = [kind(token) for token in tokens.tolist()]
    starts = message_starts(kinds)
    end = len(tokens)
    if starts and end - starts[-1] <= HEADER_TOKENS:
        end = starts.pop()
    lines = _line_ends(kinds)
    parts = list(itertools.pairwise([0, *starts, end]))
    documents, line = _documents(lines, *parts[-1])
    choose([*starts[:1], *documents[:1], *shared], min_gap, 1)
    choose([*documents[1:], *line], min_gap, 1)
    early = [n for part in parts[:2] for n in _documents(lines, *part)[0][:1]]
    choose([*early, *starts[:-3:-1]], min_gap, min_gap)
    if interval:
        spaced = interval * -(-(last - start) // (interval * max(most - 1 - len(chosen), 1)))
        paragraphs = [n for n, breaks in lines if breaks > 1]
        choose(_at_intervals((starts, paragraphs), start, last, spaced), max(spaced // 2, min_gap), spaced // 2)
    return sorted({*chosen, last} if last > start and last >= min_tokens else chosen)


def kinds_of_vocabulary(path: str | os.PathLike[str]) -> Callable[[int], TokenKind]:
    """The kinds of a model's tokens, from its GGUF file alone; what is not a token counts as text.

    Raises `ContextError` if the file cannot be read, or has no vocabulary.
    """
    vocabulary = Vocabulary(path)

    @cache
    def kind(token: int) -> TokenKind:
        if token in vocabulary.ends or vocabulary.written(token) in ENDS:
            return TokenKind(ends=True, control=True)
        if vocabulary.is_control(token):
            return TokenKind(control=True)
        return TokenKind.of_text(vocabulary.text([token]))

    return kind


def message_starts(kinds: Sequence[TokenKind]) -> list[int]:
    """The positions at which messages begin, ascending, without that of the first message.

    A message begins at the first control token after one that ends a message, with white space in between ignored; if
    text follows instead, directly after the token that ends.
    """
    found: list[int] = []
    for end, one in enumerate(kinds, 1):
        at = end
        while one.ends and at < len(kinds) and kinds[at].blank:
            at += 1
        if one.ends and at < len(kinds) and not kinds[at].ends:
            found.append(at if kinds[at].control else end)
    return found


def _line_ends(kinds: Sequence[TokenKind]) -> list[tuple[int, int]]:
    """The positions after lines, ascending, and how many line ends there are; of blank lines, after the last one."""
    found: list[tuple[int, int]] = []
    for end, one in enumerate(kinds, 1):
        if not one.breaks:
            continue
        before, breaks = found[-1] if found else (0, 0)
        if before and all(between.blank for between in kinds[before:end]):
            found[-1] = end, breaks + one.breaks
        else:
            found.append((end, one.breaks))
    return found


def _documents(lines: list[tuple[int, int]], start: int, end: int) -> tuple[list[int], list[int]]:
    """Where documents may end in a message: ends of paragraphs, the last one first; and the last end of a line."""
    inside = [(n, breaks) for n, breaks in lines if start + HEADER_TOKENS < n < end - ENDING_TOKENS]
    found: list[int] = []
    for n, breaks in reversed(inside):
        # each is half as far again from the end as the one after it: some are near, and long questions are covered
        if breaks > 1 and len(found) < PARAGRAPHS and (not found or 2 * (end - n) >= 3 * (end - found[-1])):
            found.append(n)
    return found, [n for n, breaks in inside[-1:] if breaks == 1]


def _at_intervals(borders: Sequence[Sequence[int]], start: int, end: int, interval: int) -> Iterator[int]:
    """Positions `interval` apart, each at the last border less than half of that before it, of the first kind there."""
    for multiple in range(start - start % interval + interval, end, interval):
        near = (starts[bisect_right(starts, multiple) - 1] for starts in borders if starts)
        yield next((n for n in near if multiple - interval // 2 < n <= multiple), multiple)
