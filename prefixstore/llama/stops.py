"""Where an evaluation stops for snapshots: the policy, applied to the tokens of a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixstore.engine.snapshots import positions, thin
from prefixstore.format.keys import Tokens, as_tokens
from prefixstore.llama.turns import TokenKind, borders

__all__ = ["SnapshotPolicy"]


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
