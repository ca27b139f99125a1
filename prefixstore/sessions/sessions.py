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
from prefixstore.format.keys import page_keys
from prefixstore.llama.guard import Guard
from prefixstore.sessions.background import in_thread
from prefixstore.sessions.place import Place
from prefixstore.sessions.queue import AsyncTicket, Ticket, queue_of
from prefixstore.sessions.saved import SavedSessions
from prefixstore.sessions.session import Session
from prefixstore.sessions.table import Entry, SessionTable, State
from prefixstore.stats import SessionCounts

if TYPE_CHECKING:
    from prefixstore.engine.engine import Engine
    from prefixstore.format.keys import Tokens
    from prefixstore.llama.hook import Hook
    from prefixstore.store import PrefixStore

__all__ = ["MAX_NAME_BYTES", "MAX_SESSIONS", "Reuse", "Sessions"]

Reuse: TypeAlias = Literal["both", "live", "store", "none"]

MAX_SESSIONS = 64
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
    max_resident
        How many idle ones keep their rows in the context.
    """

    def __init__(
        self, store: PrefixStore, hook: Hook, engine: Engine, max_sessions: int, max_resident: int = 0
    ) -> None:
        from prefixstore.llama.parking import Parking  # noqa: PLC0415 - the extra "llama"

        if isinstance(max_sessions, bool) or not isinstance(max_sessions, int) or max_sessions < 1:
            raise InvalidParameterError(f"max_sessions={max_sessions!r} must be an integer of at least 1")
        if hook.kind.reason is not None:
            raise ContextError(f"sessions need a context whose states can be stored: {hook.kind.reason}")
        self.max_sessions, self.max_resident = max_sessions, max_resident
        self._parking = Parking(hook, max_resident)
        # the session that was left last, whose rows are live
        self._left: str | None = None
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
            hook.namespace.key,
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
        self._parking.forget_all()
        self._left = None
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
                uses_live = reuse in ("both", "live")
                with self._guarded():
                    self._park_left(name)
                bring = partial(self._parking.bring, name, entry.tokens if uses_live else entry.tokens[:0])
                session.prepare(bring, uses_live=uses_live, uses_store=reuse in ("both", "store"))
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
            (self._table.leave if is_kept else self._table.discard)(entry.name, entry.lease)
        if not is_kept:
            self._note_discarded(entry)

    def _settle_dropped(self) -> None:
        """As `_settle`, if the session that was admitted last was dropped."""
        self._queue.look()
        place = self._place
        if place is not None and place.is_dropped:
            self._settle(place)

    def _park_left(self, name: str) -> None:
        """Have the session that was left last wait in the context, unless it is admitted again."""
        left, self._left = self._left, None
        if left is None or left == name:
            return
        with self._lock:
            entry = self._table.get(left)
            tokens = entry.tokens if entry is not None else None
        if tokens is None or not self._parking.park(left, tokens, before=name):
            return
        with self._lock:
            is_gone = self._table.get(left) is not entry
        if is_gone:
            # evicted meanwhile
            self._parking.forget(left)

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
        for name, found in self._saved.find(newer_than).items():
            self._add(Entry(name, found.tokens, found.generation, set_at=found.set_at))

    def _add(self, entry: Entry) -> None:
        """Add a session that was saved, unless it was set here meanwhile."""
        entry.keys = self._saved.pages_of(entry.tokens)
        with self._lock:
            known = self._table.get(entry.name)
            if known is not None and (known.state is State.LEASED or known.set_at >= entry.set_at):
                return
            if known is not None:
                entry.generation = max(entry.generation, known.generation)
            evicted = self._table.add(entry)
        self._forget(evicted)
        with self._guarded():
            self._engine.keep(_owner(entry.name), entry.keys)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _end(self, session: Session, discard: bool) -> None:
        """End a lease: capture what the session has evaluated, and note what it holds."""
        held: tuple[Tokens, list[bytes]] | None = None
        is_kept = False
        try:
            if not discard:
                if session.has_evaluated:
                    held = self._captured(session)
                is_kept = held is not None or not session.has_evaluated
        finally:
            session.place.give_back()
            entry = None
            # it may have been dropped, and settled by an admission meanwhile
            with self._lock, suppress(StaleLeaseError):
                leave = self._table.leave if is_kept else self._table.discard
                entry = leave(session.name, session.lease)
            if entry is not None:
                self._left = session.name if is_kept else None
                if not is_kept:
                    self._note_discarded(entry)
        if held is not None and entry is not None:
            with self._guarded():
                self._hold(entry, *held)
                self._note(entry)

    def _captured(self, session: Session) -> tuple[Tokens, list[bytes]] | None:
        """Have all pages of the context written; its tokens, and the keys of its full pages. None if not known."""
        hook = self._hook
        if not hook.is_attached:
            return None
        session.place.capture()
        # the Llama may be closed
        with self._guarded(), suppress(ContextError):
            tokens = hook.known_tokens()
            if tokens is not None and not len(tokens) and session.held_before_shift is not None:
                # a stream has emptied the context
                tokens = session.held_before_shift
                return tokens, page_keys(hook.namespace.key, tokens, hook.page_tokens)
            return (tokens, hook.keys()) if tokens is not None else None
        return None

    def _hold(self, entry: Entry, tokens: Tokens, full_pages: list[bytes]) -> None:
        keys, n = self._saved.pages(tokens, full_pages), len(entry.tokens)
        with self._lock:
            is_shared = self._table.is_shared(entry)
            if (
                is_shared
                and n % self._hook.page_tokens
                and n < len(tokens)
                and np.array_equal(entry.tokens, tokens[:n])
            ):
                self._engine.counters.count("session_tails_copied")
            # forks share them, and callers see them
            tokens.setflags(write=False)
            entry.hold(tokens, keys, self._saved.now(entry.set_at))

    def _note(self, entry: Entry) -> None:
        """Have the pages of a session evicted last, and save its name; or not any more."""
        self._engine.keep(_owner(entry.name), entry.keys)
        if entry.state is State.DISCARDED or not len(entry.tokens):
            self._saved.forget(entry.name, entry.set_at)
        else:
            n_full = len(entry.tokens) // self._hook.page_tokens
            self._saved.save(entry.name, entry.tokens, entry.keys[:n_full], entry.generation, entry.set_at)

    def _note_discarded(self, entry: Entry) -> None:
        self._engine.counters.count("session_discarded")
        with self._lock:
            # what another process leaves later is newer
            entry.set_at = self._saved.now(entry.set_at)
        with self._guarded():
            self._note(entry)

    def _guarded(self) -> Guard:
        return Guard(self._engine.counters, "dropped:error", namespace=self._hook.namespace.key)

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
        with self._guarded():
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
        with self._guarded():
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
        with self._guarded():
            for name in saved:
                self._saved.forget(name)
        return len(saved | {entry.name for entry in gone})

    def _forget(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._engine.counters.count("session_evicted")
            self._parking.forget(entry.name)
            with self._guarded():
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
        parked = self._parking.cells
        with self._lock:
            n_sessions = len(self._table)
            leased = self._table.leased_one()
        name = leased.name if leased is not None else self._left
        live = {name: self._hook.n_live} if name is not None else {}
        return SessionCounts(
            cold=count["session:cold"],
            live=count["session:live"],
            parked=count["session:parked"],
            store=count["session:store"],
            forks=count["session_forks"],
            tails_copied=count["session_tails_copied"],
            evicted=count["session_evicted"],
            discarded=count["session_discarded"],
            stale_leases=count["session_stale_leases"],
            timeouts=count["session_timeouts"],
            sessions=n_sessions,
            residents=len(parked),
            live_cells=parked | live,
            parked_cells=sum(parked.values()),
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
