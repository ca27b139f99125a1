"""`Sessions`: the conversations of a ``Llama`` by name, what each of them holds, and which one has its turn."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from prefixstore.backends.forks import register_at_fork
from prefixstore.errors import BusyError, ContextError, InvalidParameterError, NotAttachedError
from prefixstore.results import SessionCounts
from prefixstore.sessions.llama_queue import Ticket, in_thread, queue_of
from prefixstore.sessions.session import Session
from prefixstore.sessions.table import SessionState, Table, Turn
from prefixstore.units import shown

if TYPE_CHECKING:
    from prefixstore.format.keys import Tokens
    from prefixstore.llama.attached import AttachedStore
    from prefixstore.llama.hook import Hook

MAX_NAME_BYTES = 512


class Sessions:
    """The conversations of one ``Llama``. May be used from many threads and asyncio tasks.

    `PrefixStore.sessions` makes it. What a session holds is a sequence of tokens; its state is in the pages of the
    store. A bookmark in the location names it for other processes, and for later ones.

    Attributes
    ----------
    max_sessions
        How many sessions are kept; above that, the least recently used idle ones are evicted.
    """

    def __init__(self, store: AttachedStore, hook: Hook, max_sessions: int) -> None:
        if isinstance(max_sessions, bool) or not isinstance(max_sessions, int) or max_sessions < 1:
            raise InvalidParameterError(f"max_sessions={max_sessions!r} must be an integer of at least 1")
        if hook.kind.reason is not None:
            raise ContextError(f"sessions need a context whose states can be stored: {hook.kind.reason}")
        self.max_sessions, self.hook = max_sessions, hook
        self._store, self._engine = store, hook.context.engine
        # the queue for the Llama, and the turn of the session that has it
        self.queue = queue_of(hook.llm)
        self.turn: Turn | None = None
        self._table = Table(hook, max_sessions, self._is_leased)
        self._engine.sessions = weakref.WeakMethod(self.stats)
        register_at_fork(self)

    def after_fork(self) -> None:
        """Start over: whoever waits for the ``Llama``, or has it, is in the parent."""
        self.queue.restart()
        self._table.lock = threading.Lock()
        if (turn := self.turn) is not None:
            self._close(turn, is_kept=True)
            self._table.entries.pop(turn.entry.name, None)

    def __repr__(self) -> str:
        return f"Sessions({len(self._table.entries)} of {self.max_sessions}, {self._store!r})"

    def _is_leased(self, entry: SessionState) -> bool:
        return self.turn is not None and self.turn.entry is entry

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, name: str, *, timeout: float | None = None) -> Session:
        """Wait for the ``Llama``, and have it for this session until its ``with`` block ends.

        Parameters
        ----------
        name
            Of the session; a new one begins with nothing.
        timeout
            Seconds to wait at most; None for no limit. Others that wait come first.

        Returns
        -------
        Session
            For a ``with`` block; without one, `release` ends it. If the block is left with an exception, the session
            is discarded: it holds nothing any more.

        Raises
        ------
        BusyError
            If another session has the ``Llama`` for longer than `timeout`.
        MisuseError
            If this thread has a session already.
        NotAttachedError
            If the store was closed, or detached.
        """
        self._check(name, timeout)
        ticket = Ticket()
        try:
            self.queue.enter(ticket)
            if not self.queue.wait(ticket, timeout):
                raise self._busy(name, timeout)
            return self._begin(name, ticket)
        except BaseException:
            self.give_up(ticket)
            raise

    @asynccontextmanager
    async def aadmit(self, name: str, *, timeout: float | None = None) -> AsyncGenerator[Session]:
        """As `admit`, for ``async with``: the event loop keeps running while this waits, restores and stores.

        The calls of the session compute, so run them in a thread: ``await asyncio.to_thread(session.eval, tokens)``.
        If the task is cancelled, the end of the block waits for the call that is under way.
        """
        self._check(name, timeout)
        ticket, session = Ticket(is_async=True), None
        try:
            self.queue.enter(ticket)
            if not await self.queue.wait_async(ticket, timeout):
                raise self._busy(name, timeout)
            session = await in_thread(partial(self._begin, name, ticket))
            yield session
        except GeneratorExit:
            # the loop is closed, and nothing can be awaited: the session is collected, which frees its place
            raise
        except BaseException:
            if session is None:
                self.give_up(ticket)
            else:
                await in_thread(partial(session.leave, discard=True))
            raise
        await in_thread(session.leave)

    def release(self, session: Session) -> None:
        """End the lease of a session that was admitted without a ``with`` block: it is idle from then on.

        Raises
        ------
        InvalidParameterError
            If this is no session that was admitted.
        StaleLeaseError
            If it has ended already.
        """
        if not isinstance(session, Session):
            raise InvalidParameterError(
                f"release() takes the session that admit() has returned, not {session!r}; for an idle one, see evict()"
            )
        session.check()
        session.leave()

    def _busy(self, name: str, timeout: float | None) -> BusyError:
        self._engine.counters.count("session_timeouts")
        return BusyError(f"session {name!r} has waited {timeout or 0:g} s for the Llama, which another session has")

    def _check(self, name: str, timeout: float | None) -> None:
        _check_name(name)
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        # NaN fails both comparisons
        if timeout is not None and not (is_number and (0 <= timeout <= threading.TIMEOUT_MAX or timeout == math.inf)):
            raise InvalidParameterError(
                f"timeout={shown(timeout)} must be a number of seconds of at most {threading.TIMEOUT_MAX:.0f}, or None "
                "for no limit"
            )
        self._check_usable()

    def _check_usable(self) -> None:
        if not self.hook.is_attached:
            raise NotAttachedError(
                "the store was closed, or detached from the Llama of these sessions; attach it, and call "
                "store.sessions() again"
            )

    # -- a turn at the Llama ------------------------------------------------------------------------------------------

    def _begin(self, name: str, ticket: Ticket) -> Session:
        """Prepare the context for a session. The caller is the first in the queue, and leaves it if this fails."""
        with self.queue.in_use:
            self._check_usable()
            # a turn whose session was collected
            self._settle(self.turn)
            self._table.look_up(name)
            llm: Any = self.hook.llm
            with self._table.lock:
                entry = self._table.entries.get(name) or SessionState(name)
                turn = Turn(entry, weakref.ref(ticket), llm.cache, self.hook.n_evaluated)
                session = Session(self, turn, ticket)
                self.turn = turn
                evicted = self._table.used(entry)
            self._table.forget(evicted)
            # completions use the store, and the policy may not refuse their pages
            self._engine.write_queue.wants_all = True
            llm.cache = self._store
            session.resume()
            self._engine.counters.count(f"session:{session.source}")
            return session

    def end(self, session: Session) -> None:
        """End a turn: capture everything that its session has evaluated, and save the session."""
        # if this is interrupted, the turn is settled when its ticket is given up
        held = self._captured(session) if session.has_evaluated and not session.is_discarded else None
        is_kept = held is not None or not (session.has_evaluated or session.is_discarded)
        self._close(session.turn, is_kept=is_kept)
        if held is not None:
            self._table.hold(session.turn.entry, held)

    def _close(self, turn: Turn, *, is_kept: bool) -> None:
        """Undo what a turn has changed, and discard its session unless it `is_kept`. A second call does nothing."""
        with self._table.lock:
            if self.turn is not turn:
                return
            self._engine.write_queue.wants_all = False
            llm: Any = self.hook.context.llm_or_none
            # unless the store was detached meanwhile
            if llm is not None and llm.cache is self._store:
                llm.cache = turn.cache
            self.turn = None
        if not is_kept:
            self._table.discard(turn.entry)

    def _settle(self, turn: Turn | None) -> None:
        """End an abandoned turn; its session is discarded if anything was evaluated."""
        if turn is not None:
            self._close(turn, is_kept=self.hook.n_evaluated == turn.n_evaluated)

    def settle_dropped(self) -> None:
        """As `_settle`, if the session whose turn it is was collected; tells the next one."""
        if self.turn is not None and self.turn.ticket() is None:
            self._settle(self.turn)
        self.queue.look()

    def give_up(self, ticket: Ticket) -> None:
        """Leave the queue. A turn that has not ended, as after a failed admission, is settled."""
        try:
            if self.turn is not None and self.turn.ticket() is ticket:
                self._settle(self.turn)
        finally:
            self.queue.leave(ticket)

    # -- for the calls of a session -----------------------------------------------------------------------------------

    def restore(self, tokens: Tokens) -> int:
        """As the store's `restore`: it records how the prompt is served."""
        return self._store.restore(tokens, self.hook.llm)

    def _captured(self, session: Session) -> Tokens | None:
        """Capture all pages of the context; returns the tokens that it holds, None if they are unknown."""
        if not self.hook.is_attached:
            return None
        # a failure costs pages
        with self.hook.guard():
            # a location that fails must not keep others waiting
            self.hook.capture(wait=not self._engine.is_failing)
        # the Llama may be closed
        with self.hook.guard(), suppress(ContextError):
            return session.known()
        return None

    # -- what there is ------------------------------------------------------------------------------------------------

    def _check_names(self, *names: str) -> None:
        """Check names, and that the store is attached, and settle a turn that was dropped."""
        for name in names:
            _check_name(name)
        self._check_usable()
        self.settle_dropped()

    def evict(self, name: str) -> bool:
        """Forget an idle session; whether there was one. Its pages stay, as ordinary ones, and so do its live rows.

        Raises `BusyError` if it has the ``Llama``.
        """
        self._check_names(name)
        return self._table.evict(name) > 0

    def evict_all(self) -> int:
        """Forget all sessions but the one that has the ``Llama``, saved ones too; how many there were."""
        self._check_names()
        return self._table.evict()

    def names(self) -> list[str]:
        """The sessions that can be resumed: those of this process, and those that are saved in the store."""
        self._check_names()
        return self._table.names()

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def stats(self) -> SessionCounts:
        """Counts of what was done with sessions."""
        self.settle_dropped()
        count = self._engine.counters
        sources = {name: count[f"session:{name}"] for name in ("cold", "live", "store")}
        names = ("evicted", "discarded", "stale_leases", "timeouts")
        others = {name: count[f"session_{name}"] for name in names}
        return SessionCounts(**sources, **others, sessions=len(self._table.entries), waiting=len(self.queue))


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidParameterError(f"the name of a session must be a non-empty string, not {name!r:.80}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidParameterError(f"the name of a session must be valid text: {error}") from error
    if size > MAX_NAME_BYTES:
        raise InvalidParameterError(f"the name of a session has {size} bytes; at most {MAX_NAME_BYTES} are allowed")
