"""The trie of all prompts, and its division into parts that warming jobs share among themselves.

The prompts are sorted by their tokens. A walk through the list is then a depth-first walk through the trie: all that a
prompt shares with any earlier prompt, it shares with the one just before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from prefixstore.format.keys import TOKEN_BYTES, Tokens, common_prefix

__all__ = ["Part", "PromptTrie"]

# Each part is about a 64th of the work: two jobs finish at about the same time, and claims cost next to nothing.
SHARE = 64
SMALLEST_PART = 256


class Part(NamedTuple):
    """A piece of work that one job does.

    Attributes
    ----------
    first, end
        The prompts of the part: their indices from `first` up to, not including, `end`.
    name
        A 16-byte hash of their tokens.
    """

    first: int
    end: int
    name: bytes


class PromptTrie:
    """The trie of prompts.

    Parameters
    ----------
    prompts
        Token arrays and their origins. Each is kept once, four bytes a token.
    min_tokens
        Prompts shorter than this cannot be stored.

    Attributes
    ----------
    prompts, prompt_tokens
        Number of prompts, duplicates included, and their tokens.
    short
        How many of them are too short to be stored.
    shared
        For each prompt, how many tokens it shares with the one before it.
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

    def stops(self, i: int, start: int, end: int) -> tuple[int, ...]:
        """Positions of prompt `i` between `start` and `end`, ascending, at which later prompts branch off.

        A job that cannot cut its context must take a snapshot at each of them.
        """
        found, common = set[int](), end
        for shared in self.shared[i + 1 :]:
            # a prefix shared with a prompt is shared with all prompts between
            common = min(common, shared)
            if common <= start:
                break
            found.add(common)
        return tuple(sorted(found - {end}))

    # -- dividing -----------------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Divide the work into runs of prompts; jobs with the same list get the same ones.

        What the first prompt of a run shares with the one before it is work of an earlier run; so no token is in two.
        """
        size = max(SMALLEST_PART, self.unique_tokens // SHARE)
        bounds = [*self._run_starts(size), len(self)]
        return [Part(first, end, _name(self._keys[first:end])) for first, end in itertools.pairwise(bounds)]

    def _run_starts(self, size: int) -> Iterator[int]:
        held = size
        for i in range(len(self)):
            if held >= size:
                yield i
                held = 0
            held += self.length(i) - self.shared[i]


def _name(keys: list[bytes]) -> bytes:
    hasher = blake2b(digest_size=16)
    for key in keys:
        hasher.update(len(key).to_bytes(8, "little") + key)
    return hasher.digest()
