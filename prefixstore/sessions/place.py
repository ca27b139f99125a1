"""A session's turn at the ``Llama``, and the changes to the ``Llama`` while it lasts."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from prefixstore.format.keys import Tokens
from prefixstore.sessions.queue import Queue, Ticket

if TYPE_CHECKING:
    from prefixstore.engine.engine import Engine
    from prefixstore.llama.hook import Hook
    from prefixstore.store import PrefixStore

__all__ = ["Place"]


class Place:
    """A place at the head of the queue, and what is changed at the ``Llama`` for as long as it is taken.

    Parameters
    ----------
    hook
        Of the store.
    engine
        Of the store.
    store
        The cache that completions use meanwhile.
    queue, ticket
        The place in the queue. The ticket is not kept.

    Attributes
    ----------
    why_lost
        Why the session has lost the ``Llama`` without an end of its own; None if it has not.
    """

    def __init__(self, hook: Hook, engine: Engine, store: PrefixStore, queue: Queue, ticket: Ticket) -> None:
        self.hook = hook
        self._engine = engine
        self._store = store
        self._queue = queue
        self._ticket = weakref.ref(ticket)
        self._cache: object = None
        self._is_taken = False
        # before; None until the Llama is taken
        self._n_computed: int | None = None
        self.why_lost: str | None = None

    def is_of(self, ticket: Ticket) -> bool:
        """Whether this is the place of a ticket."""
        return self._ticket() is ticket

    @property
    def is_dropped(self) -> bool:
        """Whether the session of this place was garbage-collected."""
        ticket = self._ticket()
        return ticket is None or ticket.is_abandoned

    @property
    def in_use(self) -> threading.RLock:
        """A lock held by the thread that is using the ``Llama``."""
        return self._queue.in_use

    @property
    def is_lost(self) -> bool:
        """Whether the session has lost the ``Llama`` without an end of its own."""
        return self.why_lost is not None

    def take(self, *, reads: bool) -> None:
        """Have completions use the store, and the store keep everything that is captured."""
        llm: Any = self.hook.llm
        self._cache = llm.cache
        self._n_computed = self._engine.counters["tokens_computed"]
        self._is_taken = True
        self._engine.wants_all = True
        self.hook.reads = reads
        llm.cache = self._store

    def count(self, name: str) -> None:
        """Raise a count of the store."""
        self._engine.counters.count(name)

    def restore(self, tokens: Tokens) -> int:
        """As the store's `restore`, for ``generate``: it records how the prompt is served."""
        return self._store.restore(tokens, self.hook.llm)

    def capture(self) -> None:
        """Have all pages of the context written; what fails costs pages."""
        with self.hook.guard():
            # a location that fails must not keep others waiting
            self.hook.capture(wait=not self._engine.is_failing)

    @property
    def has_evaluated(self) -> bool:
        """Whether anything was evaluated since."""
        return self._n_computed is not None and self._engine.counters["tokens_computed"] != self._n_computed

    def give_back(self) -> None:
        """Undo `take`. Does nothing the second time."""
        if not self._is_taken:
            return
        self.hook.reads = self.hook.writes = True
        self._engine.wants_all = False
        llm: Any = self.hook.context.llm_or_none
        # a store that was detached meanwhile is no cache any more
        if llm is not None and llm.cache is self._store:
            llm.cache = self._cache
        self._is_taken = False

    def lose(self, why: str) -> None:
        """Note that the session has lost the ``Llama``, for this reason, and undo what `take` has changed."""
        self.why_lost = why
        self.give_back()

    def leave(self) -> None:
        """Undo all changes, and let the next session have the ``Llama``. Does nothing the second time."""
        try:
            self.give_back()
        except BaseException:  # interrupted
            self.give_back()
            raise
        finally:
            ticket = self._ticket()
            if ticket is not None:
                self._queue.leave(ticket)
            else:
                self._queue.look()
