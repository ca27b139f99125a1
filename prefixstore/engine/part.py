"""What the parts of an engine share, and the interface of a listener."""

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


class Shared(NamedTuple):
    """What the parts of an engine share. The `threads` do the work of callers."""

    threads: Threads
    backend: Pages
    catalog: Catalog
    breaker: CircuitBreaker
    budget: Budget
    read_only: bool
    counters: Counters


class Part:
    """A part of an engine, whose methods callers use directly."""

    def __init__(self, shared: Shared) -> None:
        self.threads = shared.threads
        self.breaker = shared.breaker
        self._backend = shared.backend
        self._catalog = shared.catalog
        self._budget = shared.budget
        self._read_only = shared.read_only
        self._counters = shared.counters


class Tap(Protocol):
    """Listens to an engine. Its methods return soon and raise nothing.

    The thread that calls them works for the thread that uses the engine: see `prefixstore.backends.threads.caller`.
    """

    def asked(self, namespace: bytes, tokens: Tokens, page_tokens: int, n_matched: int) -> None:
        """A sequence was looked up, and this many of its tokens are stored. This need not be a request."""

    def used(self, namespace: bytes, pages: Sequence[Page], n_tokens: int) -> None:
        """The prompt that the caller looked up last, of this many tokens, was served with these pages."""

    def captured(self, page: Page) -> None:
        """A page is on its way to the location."""

    def close(self) -> None:
        """The engine is closed."""
