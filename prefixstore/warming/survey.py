"""What a store already has of the prompts of a job."""

from __future__ import annotations

from collections.abc import Callable

from prefixstore.engine.index import Page, Path
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import Tokens
from prefixstore.store import PrefixStore
from prefixstore.warming.trie import PromptTrie

__all__ = ["Survey", "matcher", "page_tokens_of"]


class Survey:
    """What a store has of the prompts in a trie.

    Attributes
    ----------
    pages
        The stored pages of the prompts, by key.
    missing
        For each prompt, how many of its tokens are neither stored nor shared with the prompt before it.
    """

    def __init__(self, store: PrefixStore, trie: PromptTrie) -> None:
        self.pages: dict[bytes, Page] = {}
        self.missing: list[int] = []
        match = matcher(store)
        for i in range(len(trie)):
            path = match(trie.tokens(i))
            self.pages |= {page.key: page for page in path.pages}
            self.missing.append(max(0, trie.length(i) - max(trie.shared[i], path.n_tokens)))

    @property
    def missing_tokens(self) -> int:
        """How many tokens a job has to evaluate."""
        return sum(self.missing)


def matcher(store: PrefixStore) -> Callable[[Tokens], Path]:
    """A function that finds the stored pages of a prompt."""
    key, engine, page_tokens = store.namespace.key, store.engine, page_tokens_of(store)
    if store.kind.has_snapshots:
        return lambda tokens: engine.match_snapshot(key, tokens, page_tokens, len(tokens))
    return lambda tokens: engine.match(key, tokens, page_tokens)


def page_tokens_of(store: PrefixStore) -> int:
    """Tokens in a page of this store."""
    page_tokens = store.namespace.settings["page_tokens"]
    if not isinstance(page_tokens, int):
        raise InvalidParameterError("the namespace of the store has no page_tokens")
    return page_tokens
