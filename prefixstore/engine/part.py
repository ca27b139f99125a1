"""What the parts of an engine have in common: the location, and what this process knows of it; and who listens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prefixstore.backends.threads import Threads
from prefixstore.counters import Counters
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.page import Page
from prefixstore.engine.pages import Pages
from prefixstore.format.keys import Tokens

__all__ = ["Part", "Shared", "Tap"]


class Shared(NamedTuple):
    """What the parts of an engine share; `threads` do what callers ask for."""

    threads: Threads
    backend: Pages
    catalog: Catalog
    breaker: CircuitBreaker
    budget: Budget
    read_only: bool
    counters: Counters


class Part:
    """A part of an engine. Callers ask it directly."""

    def __init__(self, shared: Shared) -> None:
        self.threads = shared.threads
        self.breaker = shared.breaker
        self._backend = shared.backend
        self._catalog = shared.catalog
        self._budget = shared.budget
        self._read_only = shared.read_only
        self._counters = shared.counters


class Tap(Protocol):
    """Listens to an engine. Its methods return soon, and raise nothing.

    They are called in a thread that works for the one who uses the engine: `prefixstore.backends.threads.caller`.
    """

    def asked(self, namespace: bytes, tokens: Tokens, page_tokens: int, n_matched: int) -> None:
        """A sequence was looked up, of which so many tokens are stored. That alone is no request."""

    def used(self, namespace: bytes, pages: Sequence[Page], n_tokens: int) -> None:
        """A prompt of so many tokens, the one that the same caller has looked up last, began with these pages."""

    def captured(self, page: Page) -> None:
        """A page is on its way to the location."""

    def close(self) -> None:
        """The engine is closed."""
