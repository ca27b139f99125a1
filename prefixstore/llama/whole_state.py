"""States that are stored whole: their bytes, and how they lie in the index.

A whole state is one page with all its tokens, from position 0. The states of a namespace are siblings, so the next turn
of a conversation supersedes the shorter state that it contains, as a page supersedes a tail. A state that several
prompts began with stays: what goes on from it becomes its child, keyed by the further tokens, with all of the state.

::

    magic "pfxw" ‖ u16 version ‖ u16 0 ‖ u32 tokens ‖ u32 n_ctx ‖ u32 n_vocab ‖ u64 bytes of the state ‖ state ‖ scores

The scores are one f32 for each token and each word of the vocabulary; with `n_vocab` 0 there are none.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import Tokens, common_prefix

__all__ = ["Found", "WholeState", "find"]

HEADER = struct.Struct("<4sHHIIIQ")
MAGIC = b"pfxw"
VERSION = 1
# as a length of pages: no sequence is longer
ENDLESS = 2**31 - 1
# the next turn of a conversation hits a state once, before it replaces it
OWN_HITS = 1


@dataclass(frozen=True)
class WholeState:
    """A state with what ``LlamaState`` says about it.

    Attributes
    ----------
    n_tokens
        Tokens that it covers.
    n_ctx
        Length of the context it was saved from.
    state
        As ``llama_state_get_data`` wrote it.
    scores
        The logits behind each token, shape ``(n_tokens, n_vocab)``; None if they were not computed.
    """

    n_tokens: int
    n_ctx: int
    state: memoryview
    scores: npt.NDArray[np.single] | None

    @property
    def size(self) -> int:
        """The bytes of the stored form."""
        return HEADER.size + len(self.state) + (self.scores.nbytes if self.scores is not None else 0)

    def write(self, target: memoryview) -> None:
        """The stored form, into a buffer of exactly its size."""
        n_vocab = self.scores.shape[1] if self.scores is not None else 0
        HEADER.pack_into(target, 0, MAGIC, VERSION, 0, self.n_tokens, self.n_ctx, n_vocab, len(self.state))
        end = HEADER.size + len(self.state)
        target[HEADER.size : end] = self.state
        if self.scores is not None:
            target[end:] = np.ascontiguousarray(self.scores, "<f4").reshape(-1).view(np.uint8).data

    @classmethod
    def read(cls, stored: memoryview) -> WholeState:
        """The state in its stored form, as views.

        Raises
        ------
        CorruptError
            If the lengths do not fit.
        IncompatibleError
            If a newer version wrote it.
        """
        if len(stored) < HEADER.size:
            raise CorruptError(f"a whole state of {len(stored)} bytes is too short")
        magic, version, _, n_tokens, n_ctx, n_vocab, size = HEADER.unpack_from(stored)
        if magic != MAGIC:
            raise CorruptError("these bytes are not a whole state")
        if version > VERSION:
            raise IncompatibleError(f"whole state of version {version}, this prefixstore reads {VERSION}; upgrade it")
        if len(stored) != HEADER.size + size + 4 * n_tokens * n_vocab:
            raise CorruptError(f"a whole state of {len(stored)} bytes claims another length")
        end = HEADER.size + size
        scores = np.frombuffer(stored[end:], "<f4").reshape(n_tokens, n_vocab) if n_vocab else None
        return cls(n_tokens, n_ctx, stored[HEADER.size : end], scores)


@dataclass(frozen=True)
class Found:
    """What whole states hold of a sequence of tokens.

    Attributes
    ----------
    contained
        The states that the sequence begins with, shortest first.
    nearest
        The state that shares most tokens with the sequence.
    n_shared
        How many these are.
    """

    contained: tuple[Page, ...]
    nearest: Page | None
    n_shared: int

    @property
    def parent(self) -> Page | None:
        """The state behind which the sequence is to be stored, because others need it too; None if there is none."""
        for page in reversed(self.contained):
            if page.hits > OWN_HITS or page.pinned or not page.is_leaf:
                return page
        return None


def find(engine: Engine, namespace: bytes, tokens: Tokens) -> Found:
    """Look tokens up among the whole states of a namespace."""
    # no state begins with a sibling, so the one that the tokens begin with shares most with them
    path = engine.match(namespace, tokens, ENDLESS)
    page, shared = (path.pages[0], path.n_tokens) if path.pages else (None, 0)
    contained: list[Page] = []
    nearest, at = None, 0
    while page is not None and shared:
        nearest, at = page, at + shared
        if shared < page.n_tokens:
            break
        contained.append(page)
        page, shared = _nearest_child(page, tokens[at:])
    return Found(tuple(contained), nearest, at)


def _nearest_child(page: Page, tokens: Tokens) -> tuple[Page | None, int]:
    # other threads change the index: the list is copied, and what is found is verified when it is fetched
    children = list(page.children)
    at = bisect_left([child.tokens for child in children], tokens.tobytes())
    shared, nearest = 0, None
    for child in children[max(at - 1, 0) : at + 1]:
        n = common_prefix(np.frombuffer(child.tokens, "<i4"), tokens)
        if n > shared:
            shared, nearest = n, child
    return nearest, shared
