"""The trie of all prompts.

The prompts are sorted by their tokens. A walk through the list is then a depth-first walk through the trie: all that a
prompt shares with any earlier prompt, it shares with the one just before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prefixstore.format.keys import TOKEN_BYTES, Tokens, common_prefix

__all__ = ["PromptTrie"]


class PromptTrie:
    """The trie of prompts: token arrays and their origins. Each is kept once, four bytes a token.

    `prompts` and `prompt_tokens` count duplicates too, and `short` those of fewer than `min_tokens`, which cannot be
    stored. `shared` says of each prompt how many tokens it shares with the one before it.
    """

    def __init__(self, prompts: Iterable[tuple[Tokens, str]], min_tokens: int) -> None:
        self.prompts = self.prompt_tokens = self.short = 0
        kept: dict[bytes, str] = {}
        for tokens, where in prompts:
            self.prompts += 1
            self.prompt_tokens += len(tokens)
            if len(tokens) < min_tokens:
                self.short += 1
            else:
                # big-endian bytes sort in the order of the tokens
                kept.setdefault(tokens.astype(">i4").tobytes(), where)
        self._keys = sorted(kept)
        self._where = [kept[key] for key in self._keys]
        self.shared = [0] * len(self._keys)
        for i in range(1, len(self._keys)):
            self.shared[i] = common_prefix(self._raw(i - 1), self._raw(i))

    def __len__(self) -> int:
        return len(self._keys)

    def _raw(self, i: int) -> Tokens:
        return np.frombuffer(self._keys[i], ">i4")

    def tokens(self, i: int) -> Tokens:
        """The tokens of prompt `i`."""
        return self._raw(i).astype("<i4")

    def length(self, i: int) -> int:
        """The number of tokens of prompt `i`."""
        return len(self._keys[i]) // TOKEN_BYTES

    def where(self, i: int) -> str:
        """Where prompt `i` comes from."""
        return self._where[i]

    @property
    def unique_tokens(self) -> int:
        """The number of nodes of the trie: what a job evaluates if nothing is stored yet."""
        return sum(self.length(i) - self.shared[i] for i in range(len(self)))

    def stops(self, i: int, start: int) -> tuple[int, ...]:
        """Positions of prompt `i` after `start`, ascending, at which other prompts branch off.

        A job that cannot cut its context must take a snapshot at each of them.
        """
        found: set[int] = set()
        # a prefix shared with a prompt is shared with all prompts between
        for others in (range(i + 1, len(self)), range(i, 0, -1)):
            common = self.length(i)
            for j in others:
                common = min(common, self.shared[j])
                if common <= start:
                    break
                found.add(common)
        return tuple(sorted(found - {self.length(i)}))
