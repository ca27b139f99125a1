"""The tokens that are known to be in a context, because they were evaluated or restored there."""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp
import numpy as np

from prefixstore.format.keys import Tokens, page_key
from prefixstore.llama.kv_memory import ContextMemory

__all__ = ["Lineage"]


class Lineage:
    """The tokens of a context and the keys of their pages.

    Only tokens that were seen to enter are trusted: a state that a user loaded, or an image that a chat handler
    evaluated, is in the context without being in the lineage, and no page is taken after it.

    Parameters
    ----------
    namespace
        Key of the namespace.
    page_tokens
        Length of a page.
    capacity
        Length of the context.

    Attributes
    ----------
    n
        How many tokens are known.
    unscored
        Positions below this one were restored: their rows of ``llm.scores`` were not computed.
    gone
        Keys of pages that the context no longer holds completely.
    generation
        Changes whenever tokens leave the lineage.
    """

    def __init__(self, namespace: bytes, page_tokens: int, capacity: int) -> None:
        self.namespace = namespace
        self.page_tokens = page_tokens
        self.n = 0
        self.unscored = 0
        self.generation = 0
        self.gone: set[bytes] = set()
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

    def replace(self, tokens: Tokens) -> None:
        """Note that the context holds exactly these tokens."""
        self.rewind(0)
        self.extend(tokens)

    def restored(self, tokens: Tokens) -> None:
        """Note that the context holds exactly these tokens, and that their logits were never computed."""
        self.replace(tokens)
        self.unscored = len(tokens)

    def catch_up(self, llm: llama_cpp.Llama, memory: ContextMemory) -> bool:
        """Follow a context that was rewound; whether everything that it holds is known."""
        n = llm.n_tokens
        if n == self.n:
            return True
        if n > self.n or not np.array_equal(self._tokens[:n], llm.input_ids[:n]) or not memory.holds(n):
            self.rewind(0)
            return n == 0
        self.rewind(n)
        return True

    def page_bytes(self, start: int, end: int) -> bytes:
        """The token bytes of a page."""
        return self._tokens[start:end].tobytes()

    def keys(self) -> list[bytes]:
        """The keys of all full pages."""
        for i in range(len(self._keys), self.n // self.page_tokens):
            start = i * self.page_tokens
            parent = self._keys[-1] if self._keys else self.namespace
            self._keys.append(page_key(parent, self.page_bytes(start, start + self.page_tokens)))
        return self._keys

    def parent(self, i: int) -> bytes:
        """The key of the parent of page `i`."""
        return self.keys()[i - 1] if i else self.namespace
