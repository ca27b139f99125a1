"""Which stored whole states share tokens with a prompt.

A whole state is one page with all its tokens, from position 0. The states of a namespace are siblings, so the next turn
of a conversation supersedes the shorter state that it contains, as a page supersedes a tail. A state that several
prompts began with stays: a longer sequence is stored as its child, keyed by the further tokens, with all of the state.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page
from prefixstore.format.keys import ENDLESS, Tokens

__all__ = ["OWN_HITS", "WholeMatch", "match_whole"]

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
    path = engine.match(namespace, tokens, ENDLESS)
    contained = tuple(page for page in path.pages if page.end <= path.n_tokens)
    return WholeMatch(contained, path.pages[-1] if path.pages else None, path.n_tokens)
