"""Tokens of a chat to the positions at which messages begin, whatever the template."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np

from prefixstore.engine.snapshots import positions, thin
from prefixstore.format.keys import Tokens, as_tokens

__all__ = ["SnapshotPolicy", "TokenKind", "Vocabulary", "borders"]


@dataclass(frozen=True)
class TokenKind:
    """What a token does in a chat template.

    Attributes
    ----------
    ends
        It ends a message: llama.cpp counts it among the tokens that end a generation.
    control
        It is no text.
    blank
        It is white space, as it stands between messages.
    """

    ends: bool = False
    control: bool = False
    blank: bool = False


def borders(tokens: Tokens, kind_of: Callable[[int], TokenKind]) -> list[int]:
    """The positions at which messages begin, ascending, without that of the first message.

    A message begins at the control token that comes first behind one that ends a message, white space in between
    left aside; where text follows instead, directly behind the token that ends.
    """
    kinds = {token: kind_of(token) for token in np.unique(tokens).tolist()}
    ending = [token for token, kind in kinds.items() if kind.ends]
    found = set()
    for end in np.flatnonzero(np.isin(tokens, ending)).tolist():
        at = end + 1
        while at < len(tokens) and kinds[int(tokens[at])].blank:
            at += 1
        if at < len(tokens) and not kinds[int(tokens[at])].ends:
            found.add(at if kinds[int(tokens[at])].control else end + 1)
    return sorted(found)


class Vocabulary:
    """Tells what the tokens of a model do; asked once for each."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = weakref.ref(llm)
        self._kinds: dict[int, TokenKind] = {}

    def kind(self, token: int) -> TokenKind:
        """What a token does; one that is none does nothing."""
        if token not in self._kinds:
            self._kinds[token] = self._look_up(token)
        return self._kinds[token]

    def _look_up(self, token: int) -> TokenKind:
        llm = self._llm()
        if llm is None or not 0 <= token < llm.n_vocab():
            return TokenKind()
        vocab = llm._model.vocab
        ends = bool(llama_cpp.llama_vocab_is_eog(vocab, token))
        control = bool(llama_cpp.llama_vocab_is_control(vocab, token))
        if ends or control:
            return TokenKind(ends, control)
        # llama-cpp-python gives no text for tokens of more than 32 bytes
        text = llm._model.detokenize([token], special=True)
        return TokenKind(blank=bool(text) and not text.strip())


@dataclass(frozen=True)
class SnapshotPolicy:
    """Where to take snapshots, and how many to keep.

    Attributes
    ----------
    interval
        Tokens between snapshots that nothing else asks for.
    keep
        How many are kept along one sequence.
    min_tokens
        Shorter sequences are not stored.
    kind_of
        Tells what a token does in a chat.
    has_attention
        Whether there is attention beside the recurrent part.
    """

    interval: int
    keep: int
    min_tokens: int
    kind_of: Callable[[int], TokenKind]
    has_attention: bool

    def positions(self, known: Tokens, new: Sequence[int]) -> list[int]:
        """Where to stop while `new` is evaluated behind `known`."""
        start, end = len(known), len(known) + len(new)
        if len(new) == 1:
            wanted, begin = positions(start, end, (), self.interval), []
        else:
            begin = borders(np.concatenate([known, as_tokens(new)]), self.kind_of)
            # of a prompt that has room for many more than are kept, most would be given up at once
            interval = self.interval * -(-len(new) // (self.interval * self.keep * 4))
            wanted = [n for n in positions(start, end, begin, interval) if n >= self.min_tokens]
        gone = thin(wanted, self.keep, self.interval, {*begin[:1], *begin[-2:]})
        return [n for n in wanted if n not in gone]
