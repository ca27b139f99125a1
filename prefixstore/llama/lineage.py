"""The lineage: the tokens known to be in a context, because the store saw them evaluated or restored there."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from prefixstore.format.keys import Tokens, page_key


class Unknown(str, Enum):
    """Why it is not known what a context holds. The value is the reason in ``stats()``."""

    ATTACHED_LATE = "attached_late"
    """The ``Llama`` had evaluated something before the store was attached."""
    LOADED_STATE = "loaded_state"
    """``load_state`` brought in a state whose tokens are not known."""
    CHANGED = "changed"
    """Something other than the store reached the context."""
    INTERRUPTED = "interrupted"
    """An evaluation, a load or a restore did not complete."""
    BYPASSED = "bypassed"
    """Something was evaluated in a block of `PrefixStore.bypass`; nothing of it may be stored."""
    STEPPED_BACK = "stepped_back"
    """The context was rewound to a position from which it cannot continue."""


class Lineage:
    """The known tokens of a context, and the keys of their pages.

    Only tokens that the store saw enter the context are trusted. A state that a user loads, or an image that a chat
    handler evaluates, makes the lineage unknown, and no page is captured after it.

    The lineage is also unknown while the store itself changes the context, so that a change that ends early leaves an
    unknown context, and never a wrong one.

    Attributes
    ----------
    n
        How many tokens are known.
    unscored
        Positions below this one were restored: their rows of ``llm.scores`` were not computed. While the context is
        unknown, this may be more than it holds.
    gone
        Keys of pages that the context no longer holds completely.
    generation
        Changes whenever tokens leave the lineage.
    unknown
        Why the contents are unknown; None if the context holds exactly the known tokens.
    in_flight
        Whether the store itself is changing the context; if that was interrupted, until `settle`.
    is_fresh
        Whether the context became unknown after the last completion: user code may have prepared it for the next one.
    """

    def __init__(self, namespace: bytes, page_tokens: int, capacity: int) -> None:
        self.namespace = namespace
        self.page_tokens = page_tokens
        self.n = 0
        self.unscored = 0
        self.generation = 0
        self.gone: set[bytes] = set()
        self.unknown: Unknown | None = Unknown.ATTACHED_LATE
        self.in_flight = False
        self.is_fresh = False
        self._tokens: Tokens = np.empty(capacity, "<i4")
        self._keys: list[bytes] = []

    @property
    def tokens(self) -> Tokens:
        """The known tokens, a view."""
        return self._tokens[: self.n]

    def rewind(self, n: int) -> None:
        """Keep the first `n` tokens."""
        self.generation += n < self.n
        self.n = min(self.n, n)
        self.unscored = min(self.unscored, n)
        del self._keys[self.n // self.page_tokens :]
        if n == 0:
            self.gone.clear()

    def extend(self, tokens: Sequence[int] | Tokens) -> None:
        """Note that these tokens were evaluated after the others."""
        end = self.n + len(tokens)
        self._tokens[self.n : end] = tokens
        self.n = end

    def replace(self, tokens: Sequence[int] | Tokens, *, unscored: int = 0) -> None:
        """Note that the context holds exactly these tokens, the first `unscored` of them without computed logits."""
        self.rewind(0)
        self.extend(tokens)
        self.unscored = unscored
        self.in_flight = False
        self.unknown = None

    def lose(self, reason: Unknown) -> None:
        """Note that the contents of the context are unknown."""
        self.unknown = reason
        self.is_fresh = True
        unscored = self.unscored
        self.rewind(0)
        # their logits are still not computed
        self.unscored = unscored

    def begin(self) -> Unknown | None:
        """Note that the store itself changes the context, which is unknown until `end`; returns `unknown` as it was."""
        before = self.unknown
        self.unknown = before or Unknown.INTERRUPTED
        self.in_flight = True
        return before

    def end(self, unknown: Unknown | None) -> None:
        """Note that the change is complete, and why the context is unknown now, if it is."""
        if unknown is not None and unknown is not self.unknown:
            self.lose(unknown)
        self.in_flight = False
        self.unknown = unknown

    def settle(self) -> None:
        """Note that a change which is still in flight was interrupted, if there is one."""
        if self.in_flight:
            self.lose(Unknown.INTERRUPTED)
            self.in_flight = False

    def keys(self) -> list[bytes]:
        """The keys of all full pages."""
        for i in range(len(self._keys), self.n // self.page_tokens):
            start = i * self.page_tokens
            parent = self._keys[-1] if self._keys else self.namespace
            self._keys.append(page_key(parent, self._tokens[start : start + self.page_tokens].tobytes()))
        return self._keys

    def parent(self, i: int) -> bytes:
        """The key of the parent of page `i`."""
        return self.keys()[i - 1] if i else self.namespace
