"""How a context is stored: the protocol, and which of its two implementations a context needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import llama_cpp

from prefixstore.engine.engine import Engine
from prefixstore.format.keys import Tokens
from prefixstore.llama.context import Context
from prefixstore.llama.fingerprint import namespace_of
from prefixstore.llama.kv_memory import ContextMemory, kind_of, page_tokens_for
from prefixstore.llama.paged_memory import PagedMemory
from prefixstore.llama.pages import PageStrategy
from prefixstore.llama.snapshot_memory import SnapshotMemory
from prefixstore.llama.snapshots import SnapshotStrategy
from prefixstore.parameters import Parameters
from prefixstore.stats import Kind

__all__ = ["Strategy", "strategy_for"]


class Strategy(Protocol):
    """Captures a context into the engine, and restores it from there."""

    @property
    def context(self) -> Context[ContextMemory]:
        """The context."""

    @property
    def kind(self) -> Kind:
        """The kind of state stored."""

    def stops(self, tokens: Sequence[int]) -> list[int]:
        """Positions at which to stop while these tokens are evaluated."""

    def is_due(self, before: int, stops: Sequence[int]) -> bool:
        """Whether to capture after a batch that began at position `before`."""

    def capture(self, *, tail: bool, wait: bool = False) -> int:
        """Capture what is not stored; returns the number of pages and snapshots that will be written.

        Parameters
        ----------
        tail
            Whether this is the end of a turn: capture everything that remains.
        wait
            Whether to wait while the write queue is full, instead of skipping something.
        """

    def prompt_evaluated(self) -> None:
        """Called after a prompt was evaluated."""

    def before_leaving(self) -> None:
        """Called before the context moves to other tokens."""

    def restore(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        """Restore the longest stored prefix of a prompt.

        Parameters
        ----------
        tokens
            The prompt.
        limit
            How many tokens may be restored.
        always
            Restore even if computing is faster.
        multiple_of
            The restored position has to be a multiple of this.

        Returns
        -------
        bool
            True if the context now holds at least as much of the prompt as the store can supply.
        """

    def stored(self, tokens: Tokens, limit: int) -> int:
        """How many of the first `limit` tokens of a prompt the store can supply. Raises `StorageError`."""

    def live_prefix(self, tokens: Tokens) -> int:
        """How much of a prompt the context holds and can continue from."""


def strategy_for(llm: llama_cpp.Llama, engine: Engine, parameters: Parameters) -> Strategy:
    """The strategy for a ``Llama``, in the namespace of its context.

    Raises
    ------
    ContextError
        If a file of the model cannot be read, or is not the one that was loaded.
    """
    parameters = replace(parameters, page_tokens=page_tokens_for(llm, parameters.page_tokens))
    namespace = namespace_of(llm, page_tokens=parameters.page_tokens, salt=parameters.salt, label=parameters.label)
    if kind_of(llm).has_snapshots:
        return SnapshotStrategy(Context(llm, engine, namespace, parameters, SnapshotMemory(llm)))
    return PageStrategy(Context(llm, engine, namespace, parameters, PagedMemory(llm)))
