"""What an engine reports to a listener, such as a trace recorder: lookups, uses, captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefixstore.engine.index import Page
from prefixstore.format.keys import Tokens

__all__ = ["Tap"]


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
