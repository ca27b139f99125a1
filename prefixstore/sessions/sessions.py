"""`Sessions`: which conversation may use the ``Llama``, and the tokens that it has when admitted."""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from prefixstore.backends.forks import ForkLevel, register_at_fork
from prefixstore.errors import (
    BusyError,
    ContextError,
    InvalidParameterError,
    MisuseError,
    NotAttachedError,
    StaleLeaseError,
)
from prefixstore.sessions.background import in_thread
from prefixstore.sessions.place import Place
from prefixstore.sessions.queue import AsyncTicket, Ticket, queue_of
from prefixstore.sessions.resuming import known_tokens
from prefixstore.sessions.saved import SavedSessions
from prefixstore.sessions.session import Session
from prefixstore.sessions.table import Entry, SessionTable, State
from prefixstore.stats import SessionCounts

if TYPE_CHECKING:
    from prefixstore.engine.engine import Engine
    from prefixstore.format.keys import Tokens
    from prefixstore.llama.hook import Hook
    from prefixstore.store import PrefixStore

__all__ = ["MAX_NAME_BYTES", "Reuse", "Sessions"]

Reuse: TypeAlias = Literal["both", "live", "store", "none"]

MAX_NAME_BYTES = 512


class Sessions:
    """The conversations of one ``Llama``. May be used from many threads and asyncio tasks.

    `PrefixStore.sessions` makes it.

    Parameters
    ----------
    store
        The store.
    hook, engine
        Of the store.
    max_sessions
        How many sessions are kept; above that, the least recently used idle ones are evicted.
    """

    def __init__(self, store: PrefixStore, hook: Hook, engine: Engine, max_sessions: int) -> None:
        if isinstance(max_sessions, bool) or not isinstance(max_sessions, int) or max_sessions < 1:
            raise InvalidParameterError(f"max_sessions={max_sessions!r} must be an integer of at least 1")
        if hook.kind.reason is not None:
            raise ContextError(f"sessions need a context whose states can be stored: {hook.kind.reason}")
        self.max_sessions = max_sessions
        self._store = store
        self._hook = hook
        self._engine = engine
        self._queue = queue_of(hook.llm)
        # of the session that was admitted last
        self._place: Place | None = None
        # held for steps in memory only
        self._lock = threading.Lock()
        self._table = SessionTable(max_sessions)
        # of the sessions that there were before, if they were dropped
        engine.keep_nothing()
        self._saved = SavedSessions(
            engine,
            hook.context.namespace.key,
            hook.page_tokens,
            store.min_tokens,
            has_snapshots=hook.kind.has_snapshots,
        )
        engine.sessions = weakref.WeakMethod(self.stats)
        register_at_fork(self, ForkLevel.ENGINE)

    def before_fork(self) -> None:
        """Nothing to hold: in the child, nothing is left of what another thread has begun."""

    def after_fork_in_parent(self) -> None:
        """Nothing to release."""

    def after_fork_in_child(self) -> None:
        """Start over: those who wait, or have the ``Llama``, are in the parent."""
        held = [entry for entry in self._table if entry.state is State.IDLE]
        if self._place is not None:
            self._place.lose("is the parent's; admit it again in this process, after the parent has left it")
            self._place = None
        self._lock = threading.Lock()
        self._table = SessionTable(self.max_sessions)
        for entry in held:
            self._table.add(entry)

    def __repr__(self) -> str:
        return f"Sessions({len(self._table)} of {self.max_sessions}, {self._store!r})"

    @property
    def is_usable(self) -> bool:
        """Whether the store is still attached to the ``Llama`` whose sessions these are."""
        return self._hook.is_attached

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, name: str, *, reuse: Reuse = "both", timeout: float | None = None) -> Session:
        """Wait for the ``Llama``, and have it for this session until its ``with`` block ends.

        Parameters
        ----------
        name
            Of the session; a new one begins with nothing.
        reuse
            What may be used of earlier work: what is live in the context and what is in the store (``"both"``), one of
            them, or nothing. What the session computes is stored in any case.
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
        self._check(name, reuse, timeout)
        ticket = Ticket()
        try:
            if not self._queue.enter(ticket) and not self._queue.wait(ticket, timeout):
                raise self._busy(name, timeout)
            return self._begin(name, reuse, ticket)
        except BaseException:
            self._give_up(ticket)
            raise

    @asynccontextmanager
    async def aadmit(
        self,
        name: str,
        *,
        reuse: Reuse = "both",
        timeout: float | None = None,
    ) -> AsyncGenerator[Session]:
        """As `admit`, for ``async with``: the event loop keeps running while this waits, restores and stores.

        The calls of the session compute, so run them in a thread: ``await asyncio.to_thread(session.eval, tokens)``.
        If the task is cancelled, the end of the block waits for the call that is under way.
        """
        self._check(name, reuse, timeout)
        ticket = AsyncTicket()
        try:
            if not self._queue.enter(ticket) and not await self._queue.wait_async(ticket, timeout):
                raise self._busy(name, timeout)
            session = await in_thread(
                partial(self._begin, name, reuse, ticket), undo=lambda session: session.leave(discard=False)
            )
        except GeneratorExit:
            # the loop is closed; if a thread prepares the session, that drops it, and with it the place
            raise
        except BaseException:
            self._give_up(ticket)
            raise
        try:
            yield session
        except GeneratorExit:
            # as above, and nothing can be awaited; a call may be under way. At the end of the process no thread starts.
            with suppress(RuntimeError):
                _thread.start_new_thread(session.leave, (), {"discard": True})
            raise
        except BaseException:
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
        if session.is_over:
            session.place.count("session_stale_leases")
            raise StaleLeaseError(f"the lease of session {session.name!r} has ended already")
        session.leave()

    def _busy(self, name: str, timeout: float | None) -> BusyError:
        self._engine.counters.count("session_timeouts")
        return BusyError(f"session {name!r} has waited {timeout or 0:g} s for the Llama, which another session has")

    def _check(self, name: str, reuse: str, timeout: float | None) -> None:
        _check_name(name)
        if reuse not in get_args(Reuse):
            raise InvalidParameterError(f"reuse={reuse!r} is unknown; choose one of 'both', 'live', 'store', 'none'")
        _check_timeout(timeout)
        self._check_usable()

    def _check_usable(self) -> None:
        if not self.is_usable:
            raise NotAttachedError(
                "the store was closed, or detached from the Llama of these sessions; attach it, and call "
                "store.sessions() again"
            )

    def _begin(self, name: str, reuse: str, ticket: Ticket) -> Session:
        """Lease a session, and prepare the context for it. The caller is the first in the queue."""
        if not self._queue.begin(ticket):
            raise MisuseError("the event loop of this admission was closed before its turn")
        with self._queue.in_use:
            self._check_usable()
            place = Place(self._hook, self._engine, self._store, self._queue, ticket)
            try:
                entry = self._lease(name, place)
                session = Session(name, entry.lease, entry.generation, entry.tokens, place, ticket, self._end)
                session.prepare(uses_live=reuse in ("both", "live"), uses_store=reuse in ("both", "store"))
                self._engine.counters.count(f"session:{session.source}")
            except BaseException:
                self._give_up(ticket)
                raise
            return session

    def unless_in_use(self) -> AbstractContextManager[bool]:
        """A ``with`` block during which no other thread uses the ``Llama`` for a session; whether none does now."""
        return self._queue.unless_in_use()

    def _give_up(self, ticket: Ticket) -> None:
        """An admission has failed. If it had its turn already, its session holds what it has held before."""
        try:
            place = self._place
            if place is not None and place.is_of(ticket):
                place.lose("was never entered; admit it again")
                self._settle(place)
        finally:
            self._queue.leave(ticket)

    def _settle(self, place: Place | None) -> None:
        """End an abandoned lease: the session is discarded, unless nothing was evaluated."""
        with self._lock:
            if self._place is not place:
                return
            if place is not None:
                place.give_back()
            entry = self._table.leased_one()
            if entry is None:
                return
            is_kept = place is None or not place.has_evaluated
            self._table.end(entry.name, entry.lease, is_kept=is_kept)
        if not is_kept:
            self._note_discarded(entry)

    def _settle_dropped(self) -> None:
        """As `_settle`, if the session that was admitted last was dropped."""
        self._queue.look()
        place = self._place
        if place is not None and place.is_dropped:
            self._settle(place)

    def _lease(self, name: str, place: Place) -> Entry:
        # one that was dropped
        self._settle(self._place)
        self._look_up(name)
        with self._lock:
            self._place = place
            entry, evicted = self._table.lease(name)
        self._forget(evicted)
        return entry

    def _look_up(self, *names: str) -> None:
        """Have the table know what another process, or an earlier one, has left as the last one of these sessions."""
        with self._lock:
            known = {name: self._table.get(name) for name in names}
            newer_than = {name: entry.set_at if entry is not None else 0 for name, entry in known.items()}
        for entry in self._saved.find(newer_than):
            with self._lock:
                there = self._table.get(entry.name)
                if there is not None and (there.state is State.LEASED or there.set_at >= entry.set_at):
                    # it was set here meanwhile
                    continue
                if there is not None:
                    entry.generation = max(entry.generation, there.generation)
                evicted = self._table.add(entry)
            self._forget(evicted)
            with self._hook.guard():
                self._engine.keep(_owner(entry.name), entry.keys)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _end(self, session: Session, discard: bool) -> None:
        """End a lease: capture what the session has evaluated, and note what it holds."""
        held: Tokens | None = None
        is_kept = False
        try:
            if not discard:
                if session.has_evaluated:
                    held = self._captured(session)
                is_kept = held is not None or not session.has_evaluated
        finally:
            session.place.give_back()
            # none if it was dropped, and settled by an admission meanwhile
            with self._lock:
                entry = self._table.end(session.name, session.lease, is_kept=is_kept)
            if entry is not None and not is_kept:
                self._note_discarded(entry)
        if held is not None and entry is not None:
            with self._hook.guard():
                self._hold(entry, held)
                self._note(entry)

    def _captured(self, session: Session) -> Tokens | None:
        """Have all pages of the context written; the tokens that they hold. None if they are not known."""
        if not self._hook.is_attached:
            return None
        session.place.capture()
        # the Llama may be closed
        with self._hook.guard(), suppress(ContextError):
            tokens = known_tokens(self._hook)
            if tokens is not None and not len(tokens) and session.held_before_shift is not None:
                # a stream has emptied the context
                return session.held_before_shift
            return tokens
        return None

    def _hold(self, entry: Entry, tokens: Tokens) -> None:
        keys, n = self._saved.pages_of(tokens), len(entry.tokens)
        has_tail = n % self._hook.page_tokens and n < len(tokens)
        with self._lock:
            if has_tail and self._table.is_shared(entry) and np.array_equal(entry.tokens, tokens[:n]):
                self._engine.counters.count("session_tails_copied")
            # forks share them, and callers see them
            tokens.setflags(write=False)
            entry.hold(tokens, keys, self._saved.now(entry.set_at))

    def _note(self, entry: Entry) -> None:
        """Have the pages of a session evicted last, and save its name; or not any more."""
        self._engine.keep(_owner(entry.name), entry.keys)
        self._saved.save(entry)

    def _note_discarded(self, entry: Entry) -> None:
        self._engine.counters.count("session_discarded")
        with self._lock:
            # what another process leaves later is newer
            entry.set_at = self._saved.now(entry.set_at)
        with self._hook.guard():
            self._note(entry)

    # -- forks, eviction ----------------------------------------------------------------------------------------------

    def fork(self, name: str, new: str) -> None:
        """Make a second session that holds what an idle one holds. Nothing is copied until one of them continues.

        Raises
        ------
        InvalidParameterError
            If there is no session `name`, or `new` exists already.
        BusyError
            If one of them has the ``Llama``.
        """
        _check_name(name)
        _check_name(new)
        self._check_usable()
        self._settle_dropped()
        # one that only another process, or an earlier one, has saved exists as well
        self._look_up(name, new)
        with self._lock:
            fork, evicted = self._table.fork(name, new)
            fork.set_at = self._saved.now(0)
        self._forget(evicted)
        self._engine.counters.count("session_forks")
        with self._hook.guard():
            self._note(fork)

    def evict(self, name: str) -> bool:
        """Forget an idle session; whether there was one. Its pages stay, as ordinary ones, and so do its live rows.

        Raises `BusyError` if it has the ``Llama``.
        """
        _check_name(name)
        self._check_usable()
        self._settle_dropped()
        with self._lock:
            gone = self._table.evict(name)
        is_saved = bool(self._saved.newer({name: 0}))
        if gone is not None:
            self._forget([gone])
        with self._hook.guard():
            self._saved.forget(name)
        return gone is not None or is_saved

    def evict_all(self) -> int:
        """Forget all sessions but the one that has the ``Llama``, saved ones too; how many there were."""
        self._check_usable()
        self._settle_dropped()
        with self._lock:
            gone = self._table.evict_all()
            leased = {entry.name for entry in self._table}
        self._forget(gone)
        saved = set(self._saved.names()) - leased
        with self._hook.guard():
            for name in saved:
                self._saved.forget(name)
        return len(saved | {entry.name for entry in gone})

    def _forget(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._engine.counters.count("session_evicted")
            with self._hook.guard():
                self._engine.keep(_owner(entry.name), ())
                # not if another process has continued it
                self._saved.forget(entry.name, entry.set_at)

    # -- what there is ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The sessions that can be resumed: those of this process, and those that are saved in the store."""
        self._check_usable()
        self._settle_dropped()
        saved = self._saved.names()
        with self._lock:
            held = {entry.name for entry in self._table if len(entry.tokens) or entry.state is State.LEASED}
            empty = {entry.name: entry.set_at for entry in self._table if entry.name not in held}
        # another process may have left one after it was discarded here
        hidden = empty.keys() - self._saved.newer(empty)
        return sorted(held | (set(saved) - hidden))

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def stats(self) -> SessionCounts:
        """Counts of what was done with sessions."""
        self._settle_dropped()
        count = self._engine.counters
        return SessionCounts(
            cold=count["session:cold"],
            live=count["session:live"],
            store=count["session:store"],
            forks=count["session_forks"],
            tails_copied=count["session_tails_copied"],
            evicted=count["session_evicted"],
            discarded=count["session_discarded"],
            stale_leases=count["session_stale_leases"],
            timeouts=count["session_timeouts"],
            sessions=len(self._table),
            waiting=len(self._queue),
        )


def _owner(name: str) -> str:
    """As whom a session keeps its pages."""
    return f"session:{name}"


def _check_timeout(timeout: float | None) -> None:
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout >= 0):
        raise InvalidParameterError(f"timeout={timeout!r:.80} must be a number of seconds, or None for no limit")
    try:
        float(timeout or 0)
    except OverflowError as error:
        raise InvalidParameterError("timeout is too large; pass None for no limit") from error


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidParameterError(f"the name of a session must be a non-empty string, not {name!r:.80}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidParameterError(f"the name of a session must be valid text: {error}") from error
    if size > MAX_NAME_BYTES:
        raise InvalidParameterError(f"the name of a session has {size} bytes; at most {MAX_NAME_BYTES} are allowed")
