"""Parks idle sessions: their rows stay in the context while another session uses it."""

from __future__ import annotations

from functools import partial

import llama_cpp

from prefixstore.errors import ContextError, InvalidParameterError
from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.llama.hook import Hook
from prefixstore.llama.residents import FIRST

__all__ = ["Parking", "cannot_park"]


def cannot_park(hook: Hook) -> str | None:
    """Why idle sequences cannot be parked in a context; None if they can."""
    kind = hook.kind
    if kind.has_snapshots:
        return "recurrent memory has only one state, and no rows to park"
    if hook.context.memory.window:
        return (
            "the model has a sliding window, and llama.cpp overwrites rows that have left the window of their "
            "sequence, with swa_full=True as well"
        )
    return None


class Parking:
    """Keeps the rows of at most so many idle sessions in the context.

    `park` and `bring` are called by the thread that uses the ``Llama``, the others by any.

    Parameters
    ----------
    hook
        Of the store.
    max_resident
        How many may wait in the context; 0 for none.

    Raises
    ------
    InvalidParameterError
        If `max_resident` is not valid.
    ContextError
        If sequences cannot wait in this context, with the reason.
    """

    def __init__(self, hook: Hook, max_resident: int) -> None:
        # one is leaving while another one comes
        most = llama_cpp.llama_max_parallel_sequences() - FIRST - 1
        if isinstance(max_resident, bool) or not isinstance(max_resident, int) or not 0 <= max_resident <= most:
            raise InvalidParameterError(f"max_resident={max_resident!r} must be an integer from 0 to {most}")
        reason = cannot_park(hook) if max_resident else None
        if reason is not None:
            raise ContextError(
                f"sessions cannot be parked in this context: {reason}; max_resident=0 restores them instead"
            )
        self._hook = hook
        self._most = max_resident
        self._memory = hook.context.memory
        # those of sessions that were dropped
        self.forget_all()

    @property
    def cells(self) -> dict[str, int]:
        """How many cells of the context each parked session has."""
        return self._memory.residents.cells()

    def park(self, name: str, tokens: Tokens, before: str) -> bool:
        """Park the rows of the live session, before another one is brought; false if it is not live."""
        context, residents = self._hook.context, self._memory.residents
        if not self._most or not len(tokens):
            return False
        context.settle()
        if context.bypass_reason() is not None or not context.catch_up():
            return False
        if common_prefix(context.lineage.tokens, tokens) < len(tokens):
            return False
        self.forget(name)
        # the other one leaves its place
        while len(residents) - (before in residents) >= self._most:
            residents.forget_oldest(but=before)
        return self._memory.park(name, tokens)

    def bring(self, name: str, tokens: Tokens) -> int:
        """Make the parked rows of a session live again, if they are more than the live ones; the number of tokens.

        A fork finds the rows of what it was forked from, and leaves them there.
        """
        residents = self._memory.residents
        n = self._bring(name, tokens) if len(residents) else 0
        # it is live now, or not to be used
        self.forget(name)
        self._memory.sweep()
        return n

    def _bring(self, name: str, tokens: Tokens) -> int:
        hook, memory = self._hook, self._memory
        hook.context.settle()
        if hook.context.bypass_reason() is not None:
            return 0
        found, n = memory.longest_resident(tokens, name)
        if n <= hook.continued(tokens):
            return 0
        return n if hook.bring(tokens[:n], partial(memory.bring, found, n, keep=found != name)) else 0

    def forget(self, name: str) -> None:
        """Forget a parked session."""
        self._memory.residents.forget(name)

    def forget_all(self) -> None:
        """Forget all parked sessions."""
        self._memory.residents.forget_all()
