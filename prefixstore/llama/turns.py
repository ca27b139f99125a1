"""Where the messages of a chat begin, whatever the template, and where to stop for snapshots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np

from prefixstore.engine.snapshot_policy import positions, thin
from prefixstore.format.keys import Tokens, as_tokens

__all__ = ["TokenKind", "TokenKinds", "message_starts", "snapshot_stops"]


@dataclass(frozen=True)
class TokenKind:
    """What a token does in a chat template.

    Attributes
    ----------
    ends
        It ends a message: llama.cpp counts it among the tokens that end a generation.
    control
        It is not text.
    blank
        It is white space, as it stands between messages.
    """

    ends: bool = False
    control: bool = False
    blank: bool = False


class TokenKinds:
    """The kinds of a model's tokens; llama.cpp is asked once for each token."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = weakref.ref(llm)
        self._kinds: dict[int, TokenKind] = {}

    def kind(self, token: int) -> TokenKind:
        """The kind of a token; a number that is not a token counts as text."""
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


def message_starts(tokens: Tokens, token_kind: Callable[[int], TokenKind]) -> list[int]:
    """The positions at which messages begin, ascending, without that of the first message.

    A message begins at the first control token after one that ends a message, with white space in between ignored; if
    text follows instead, directly after the token that ends.
    """
    kinds = {token: token_kind(token) for token in np.unique(tokens).tolist()}
    ending = [token for token, kind in kinds.items() if kind.ends]
    found = set()
    for end in np.flatnonzero(np.isin(tokens, ending)).tolist():
        at = end + 1
        while at < len(tokens) and kinds[int(tokens[at])].blank:
            at += 1
        if at < len(tokens) and not kinds[int(tokens[at])].ends:
            found.add(at if kinds[int(tokens[at])].control else end + 1)
    return sorted(found)


def snapshot_stops(
    known: Tokens,
    new: Sequence[int],
    token_kind: Callable[[int], TokenKind],
    *,
    interval: int,
    keep: int,
    min_tokens: int,
) -> list[int]:
    """Where to stop for snapshots while tokens are evaluated.

    Parameters
    ----------
    known
        The tokens of the context.
    new
        The tokens that are evaluated after them.
    token_kind
        Gives the kind of a token.
    interval
        Tokens between snapshots that have no other reason.
    keep
        How many snapshots are kept along one sequence.
    min_tokens
        Shorter sequences are not stored.
    """
    start, end = len(known), len(known) + len(new)
    if len(new) == 1:
        wanted, starts = positions(start, end, (), interval), []
    else:
        starts = message_starts(np.concatenate([known, as_tokens(new)]), token_kind)
        # of a prompt with many more positions than are kept, most would be deleted at once
        spaced = interval * -(-len(new) // (interval * keep * 4))
        wanted = [n for n in positions(start, end, starts, spaced) if n >= min_tokens]
    gone = thin(wanted, keep, interval, {*starts[:1], *starts[-2:]})
    return [n for n in wanted if n not in gone]
