"""What is already stored of a job's prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixstore.engine.index import Page
from prefixstore.store import PrefixStore
from prefixstore.warming.prompt_trie import PromptTrie

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Survey"]


class Survey:
    """What a store has of the prompts in a trie.

    Attributes
    ----------
    pages
        The stored pages of the prompts, by key.
    missing
        For each prompt, how many of its tokens are neither stored nor shared with the prompt before it.
    """

    def __init__(self, store: PrefixStore, trie: PromptTrie, llm: Llama | None = None) -> None:
        self.pages: dict[bytes, Page] = {}
        self.missing: list[int] = []
        for i in range(len(trie)):
            path = store.path(trie.tokens(i), llm)
            self.pages |= {page.key: page for page in path.pages}
            self.missing.append(max(0, trie.length(i) - max(trie.shared[i], path.n_tokens)))

    @property
    def missing_tokens(self) -> int:
        """How many tokens a job has to evaluate."""
        return sum(self.missing)
