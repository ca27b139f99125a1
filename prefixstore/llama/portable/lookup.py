"""Which stored whole states share tokens with a prompt.

A whole state is one page with all its tokens, from position 0. The states of a namespace are siblings, so the next turn
of a conversation supersedes the shorter state that it contains, as a page supersedes a tail. A state that several
prompts began with stays: a longer sequence is stored as its child, keyed by the further tokens, with all of the state.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page
from prefixstore.format.keys import Tokens, common_prefix

__all__ = ["ENDLESS", "OWN_HITS", "WholeMatch", "match_whole"]

# as a length of pages: no sequence is longer
ENDLESS = 2**31 - 1
# the next turn of a conversation hits a state once, before it replaces it
OWN_HITS = 1


@dataclass(frozen=True)
class WholeMatch:
    """The whole states that share tokens with a sequence.

    Attributes
    ----------
    contained
        The states that the sequence begins with, shortest first.
    nearest
        The state that shares most tokens with the sequence.
    n_shared
        How many tokens it shares.
    """

    contained: tuple[Page, ...]
    nearest: Page | None
    n_shared: int

    @property
    def parent(self) -> Page | None:
        """The state whose child the sequence becomes, because other prompts need that state too; None without one."""
        for page in reversed(self.contained):
            if page.hits > OWN_HITS or page.pinned or not page.is_leaf:
                return page
        return None


def match_whole(engine: Engine, namespace: bytes, tokens: Tokens) -> WholeMatch:
    """Look tokens up among the whole states of a namespace. Raises `StorageError`."""
    # no stored state is a prefix of a sibling, so a state the tokens start with is the longest match
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
    return WholeMatch(tuple(contained), nearest, at)


def _nearest_child(page: Page, tokens: Tokens) -> tuple[Page | None, int]:
    # other threads change the index: the list is copied, and a state is verified when it is fetched
    children = list(page.children)
    at = bisect_left([child.tokens for child in children], tokens.tobytes())
    shared, nearest = 0, None
    for child in children[max(at - 1, 0) : at + 1]:
        n = common_prefix(np.frombuffer(child.tokens, "<i4"), tokens)
        if n > shared:
            shared, nearest = n, child
    return nearest, shared
