"""`Sessions`: the conversations of a ``Llama`` by name, what each of them holds, and which one has its turn."""

from __future__ import annotations

import _thread
import itertools
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from prefixstore.backends.forks import ForkLevel, register_at_fork
from prefixstore.engine.bookmark import Bookmark, Unset
from prefixstore.engine.miss import Guard
from prefixstore.errors import (
    BusyError,
    ContextError,
    InvalidParameterError,
    MisuseError,
    NotAttachedError,
)
from prefixstore.format.keys import NO_TOKENS, PAGE, SNAPSHOT, Tokens, page_key, page_keys
from prefixstore.sessions.queue import Ticket, in_thread, queue_of
from prefixstore.sessions.session import Entry, Session, Turn
from prefixstore.stats import SessionCounts

if TYPE_CHECKING:
    from prefixstore.engine.engine import Engine
    from prefixstore.llama.hook import Hook
    from prefixstore.store import PrefixStore

__all__ = ["MAX_NAME_BYTES", "Reuse", "Sessions"]

Reuse: TypeAlias = Literal["both", "live", "store", "none"]

MAX_NAME_BYTES = 512


class Sessions:
    """The conversations of one ``Llama``. May be used from many threads and asyncio tasks.

    `PrefixStore.sessions` makes it. What a session holds is a sequence of tokens; its state is in the pages of the
    store. A bookmark in the location names it for other processes, and for later ones.

    Parameters
    ----------
    store
        The store.
    hook, engine
        Of the store.
    max_sessions
        How many sessions are kept; above that, the least recently used idle ones are evicted.

    Attributes
    ----------
    queue
        For the ``Llama``.
    turn
        Of the session that has it.
    """

    def __init__(self, store: PrefixStore, hook: Hook, engine: Engine, max_sessions: int) -> None:
        if isinstance(max_sessions, bool) or not isinstance(max_sessions, int) or max_sessions < 1:
            raise InvalidParameterError(f"max_sessions={max_sessions!r} must be an integer of at least 1")
        if hook.kind.reason is not None:
            raise ContextError(f"sessions need a context whose states can be stored: {hook.kind.reason}")
        self.max_sessions, self.hook = max_sessions, hook
        self._store, self._engine, self._namespace = store, engine, hook.context.namespace.key
        self.queue = queue_of(hook.llm)
        self.turn: Turn | None = None
        self._numbers = itertools.count(1)
        # held for steps in memory only
        self._lock = threading.Lock()
        # by name, the least recently used one first
        self._table: dict[str, Entry] = {}
        # of the sessions that there were before, if they were dropped
        engine.keep_nothing()
        engine.sessions = weakref.WeakMethod(self.stats)
        register_at_fork(self, ForkLevel.ENGINE)

    def before_fork(self) -> None:
        """Nothing to hold: in the child, nothing is left of what another thread has begun."""

    def after_fork_in_parent(self) -> None:
        """Nothing to release."""

    def after_fork_in_child(self) -> None:
        """Start over: those who wait, or have the ``Llama``, are in the parent."""
        self._lock = threading.Lock()
        self.queue.restart()
        if self.turn is not None:
            self.give_back(self.turn)
            self._table.pop(self.turn.entry.name, None)
            self.turn = None

    def __repr__(self) -> str:
        return f"Sessions({len(self._table)} of {self.max_sessions}, {self._store!r})"

    @property
    def is_usable(self) -> bool:
        """Whether the store is still attached to the ``Llama`` whose sessions these are."""
        return self.hook.is_attached

    def unless_in_use(self) -> AbstractContextManager[bool]:
        """A ``with`` block during which no other thread uses the ``Llama`` for a session; whether none does now."""
        return self.queue.unless_in_use()

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
            self.queue.enter(ticket)
            if not self.queue.wait(ticket, timeout):
                raise self._busy(name, timeout)
            return self._begin(name, reuse, ticket)
        except BaseException:
            self.give_up(ticket)
            raise

    @asynccontextmanager
    async def aadmit(
        self, name: str, *, reuse: Reuse = "both", timeout: float | None = None
    ) -> AsyncGenerator[Session]:
        """As `admit`, for ``async with``: the event loop keeps running while this waits, restores and stores.

        The calls of the session compute, so run them in a thread: ``await asyncio.to_thread(session.eval, tokens)``.
        If the task is cancelled, the end of the block waits for the call that is under way.
        """
        self._check(name, reuse, timeout)
        ticket = Ticket(is_async=True)
        try:
            self.queue.enter(ticket)
            if not await self.queue.wait_async(ticket, timeout):
                raise self._busy(name, timeout)
            session = await in_thread(partial(self._begin, name, reuse, ticket), undo=Session.leave)
        except GeneratorExit:
            # the loop is closed; if a thread prepares the session, that drops it, and with it the place
            raise
        except BaseException:
            self.give_up(ticket)
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
        session.check()
        session.leave()

    def _busy(self, name: str, timeout: float | None) -> BusyError:
        self.count("session_timeouts")
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

    # -- a turn at the Llama ------------------------------------------------------------------------------------------

    def _begin(self, name: str, reuse: str, ticket: Ticket) -> Session:
        """Prepare the context for a session. The caller is the first in the queue."""
        if not self.queue.begin(ticket):
            raise MisuseError("the event loop of this admission was closed before its turn")
        with self.queue.in_use:
            try:
                self._check_usable()
                # one that was dropped
                self._settle(self.turn)
                self._look_up(name)
                llm: Any = self.hook.llm
                n, process = self.hook.n_evaluated, os.getpid()
                with self._lock:
                    entry = self._table.get(name) or Entry(name)
                    turn = Turn(entry, next(self._numbers), weakref.ref(ticket), llm.cache, n, process)
                    session = Session(self, turn, ticket)
                    self.turn = turn
                    evicted = self._used(entry)
                self._forget(evicted)
                # completions use the store, which keeps everything that is captured
                self._engine.wants_all, self.hook.reads = True, reuse in ("both", "store")
                llm.cache = self._store
                session.resume(uses_live=reuse in ("both", "live"), uses_store=self.hook.reads)
                self.count(f"session:{session.source}")
            except BaseException:
                self.give_up(ticket)
                raise
            return session

    def give_back(self, turn: Turn) -> None:
        """Undo what a turn has changed. Does nothing the second time."""
        self.hook.reads = self.hook.writes = True
        self._engine.wants_all = False
        llm: Any = self.hook.context.llm_or_none
        # a store that was detached meanwhile is no cache any more
        if llm is not None and llm.cache is self._store:
            llm.cache = turn.cache

    def has_evaluated(self, turn: Turn) -> bool:
        """Whether anything was evaluated since a turn began."""
        return self.hook.n_evaluated != turn.n_evaluated

    def end(self, session: Session) -> None:
        """End a turn: have all pages that its session has evaluated written, and note what it holds."""
        turn, entry = session.turn, session.turn.entry
        held: Tokens | None = None
        is_kept = False
        try:
            if not session.is_discarded:
                held = self._captured(session) if session.has_evaluated else entry.tokens
                is_kept = held is not None
        finally:
            self._close(turn, is_kept=is_kept)
        if held is not None and session.has_evaluated:
            with self.hook.guard():
                self._hold(entry, held)
                self._note(entry)

    def _close(self, turn: Turn, *, is_kept: bool) -> None:
        """Undo what a turn has changed, and discard its session unless it `is_kept`. Does nothing the second time."""
        with self._lock:
            if self.turn is not turn:
                return
            self.give_back(turn)
            if not is_kept:
                entry = turn.entry
                entry.tokens, entry.keys, entry.generation = NO_TOKENS, (), entry.generation + 1
                # what another process leaves later is newer
                entry.set_at = _now(entry.set_at)
            self.turn = None
        if not is_kept:
            self.count("session_discarded")
            with self.hook.guard():
                self._note(turn.entry)

    def _settle(self, turn: Turn | None) -> None:
        """End an abandoned turn: its session is discarded, unless nothing was evaluated."""
        if turn is not None:
            self._close(turn, is_kept=not self.has_evaluated(turn))

    def _settle_dropped(self) -> None:
        """As `_settle`, if the session whose turn it is was dropped."""
        self.queue.look()
        if self.turn is not None and self.turn.ticket() is None:
            self._settle(self.turn)

    def give_up(self, ticket: Ticket) -> None:
        """Let the next one have the ``Llama``. A turn that has not ended, as of a failed admission, is settled."""
        try:
            if self.turn is not None and self.turn.ticket() is ticket:
                self._settle(self.turn)
        finally:
            self.queue.leave(ticket)

    # -- for the calls of a session -----------------------------------------------------------------------------------

    def count(self, name: str) -> None:
        """Raise a count of the store."""
        self._engine.counters.count(name)

    def restore(self, tokens: Tokens) -> int:
        """As the store's `restore`: it records how the prompt is served."""
        return self._store.restore(tokens, self.hook.llm)

    def capture(self) -> None:
        """Have all pages of the context written; what fails costs pages."""
        with self.hook.guard():
            # a location that fails must not keep others waiting
            self.hook.capture(wait=not self._engine.is_failing)

    def _captured(self, session: Session) -> Tokens | None:
        """Have all pages of the context written; the tokens that they hold. None if they are not known."""
        if not self.hook.is_attached:
            return None
        self.capture()
        # the Llama may be closed
        with self.hook.guard(), suppress(ContextError):
            tokens = session.known()
            # a stream has emptied the context
            shifted = tokens is not None and not len(tokens) and session.held_before_shift is not None
            return session.held_before_shift if shifted else tokens
        return None

    # -- what each of them holds --------------------------------------------------------------------------------------

    def _used(self, entry: Entry) -> list[Entry]:
        """Make a session the last used one; those that are evicted for it: first the discarded ones."""
        self._table.pop(entry.name, None)
        self._table[entry.name] = entry
        surplus = len(self._table) - self.max_sessions
        if surplus <= 0:
            return []
        free = [each for each in self._table.values() if each is not entry and not self._is_leased(each)]
        free.sort(key=lambda each: len(each.tokens) > 0)
        for each in free[:surplus]:
            del self._table[each.name]
        return free[:surplus]

    def _is_leased(self, entry: Entry | None) -> bool:
        return entry is not None and self.turn is not None and self.turn.entry is entry

    def _check_idle(self, entry: Entry | None, what: str) -> None:
        if entry is not None and self._is_leased(entry):
            raise BusyError(f"session {entry.name!r} has the Llama; {what} it after its block")

    def _hold(self, entry: Entry, tokens: Tokens) -> None:
        """Note what a session holds from now on."""
        keys, n = self._pages_of(tokens), len(entry.tokens)
        with self._lock:
            is_shared = any(each is not entry and each.tokens is entry.tokens for each in self._table.values())
            has_tail = n % self.hook.page_tokens and n < len(tokens)
            if has_tail and is_shared and np.array_equal(entry.tokens, tokens[:n]):
                self.count("session_tails_copied")
            # forks share them, and callers see them
            tokens.setflags(write=False)
            entry.tokens, entry.keys, entry.set_at = tokens, keys, _now(entry.set_at)

    def _pages_of(self, tokens: Tokens) -> tuple[bytes, ...]:
        """The keys of all pages and snapshots that may hold a sequence: first those of its full pages."""
        full_pages = page_keys(self._namespace, tokens, self.hook.page_tokens)
        parent = full_pages[-1] if full_pages else self._namespace
        rest = tokens[len(full_pages) * self.hook.page_tokens :].tobytes()
        forms = (PAGE, SNAPSHOT) if self.hook.kind.has_snapshots else (PAGE,)
        return (*full_pages, *(page_key(parent, rest, form) for form in forms if rest or form == SNAPSHOT))

    # -- what is saved in the location: one that fails has nothing ----------------------------------------------------

    def _look_up(self, *names: str) -> None:
        """Note what another process, or an earlier one, has left as the last one of these sessions."""
        with self._lock:
            set_at = {name: self._table[name].set_at if name in self._table else 0 for name in names}
        for name, bookmark in self._newer(set_at).items():
            tokens = None
            with self._looking_up():
                tokens = self._engine.bookmarked(self._namespace, bookmark)
            if tokens is None:
                continue
            entry = Entry(name, tokens, self._pages_of(tokens), bookmark.generation, bookmark.set_at)
            with self._lock:
                there = self._table.get(name)
                # not if it was set here meanwhile
                if there is not None and (self._is_leased(there) or there.set_at >= entry.set_at):
                    continue
                entry.generation = max(entry.generation, there.generation if there is not None else 0)
                evicted = self._used(entry)
            self._forget(evicted)
            with self.hook.guard():
                self._engine.keep(_owner(name), entry.keys)

    def _newer(self, set_at: Mapping[str, int]) -> dict[str, Bookmark]:
        """Those of these sessions that were saved after these times."""
        saved: Mapping[str, Bookmark] = {}
        with self._looking_up():
            saved = self._engine.bookmarks(self._namespace) if set_at else {}
        return {name: saved[name] for name, before in set_at.items() if name in saved and saved[name].set_at > before}

    def _looking_up(self) -> Guard:
        return Guard(self._engine.counters, "resume:miss:error", "resume:miss:unavailable")

    def _note(self, entry: Entry) -> None:
        """Have the pages of a session evicted last, and its name saved with the commit after them; or not any more."""
        self._engine.keep(_owner(entry.name), entry.keys)
        tokens, n_full = entry.tokens, len(entry.tokens) // self.hook.page_tokens
        # shorter ones are not stored
        if len(tokens) < max(self._store.min_tokens, 1):
            self._engine.set_bookmark(self._namespace, entry.name, Unset(entry.set_at))
            return
        page, rest = entry.keys[n_full - 1] if n_full else self._namespace, tokens[n_full * self.hook.page_tokens :]
        form = SNAPSHOT if self.hook.kind.has_snapshots else PAGE
        bookmark = Bookmark(page, rest.tobytes(), len(tokens), form, entry.generation, entry.set_at)
        self._engine.set_bookmark(self._namespace, entry.name, bookmark)

    def _forget(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.count("session_evicted")
            with self.hook.guard():
                self._engine.keep(_owner(entry.name), ())
                # not if another process has continued it
                self._engine.set_bookmark(self._namespace, entry.name, Unset(entry.set_at))

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
            entry, there = self._table.get(name), self._table.get(new) or Entry(new)
            self._check_idle(entry, "fork")
            self._check_idle(there, "fork")
            if entry is None or not len(entry.tokens):
                raise InvalidParameterError(f"there is no session {name!r} to fork; names() lists the sessions")
            if len(there.tokens):
                raise InvalidParameterError(f"session {new!r} already exists; evict it first, or choose another name")
            fork = Entry(new, entry.tokens, entry.keys, there.generation, _now(there.set_at))
            evicted = [*self._used(entry), *self._used(fork)]
        self._forget(evicted)
        self.count("session_forks")
        with self.hook.guard():
            self._note(fork)

    def evict(self, name: str) -> bool:
        """Forget an idle session; whether there was one. Its pages stay, as ordinary ones, and so do its live rows.

        Raises `BusyError` if it has the ``Llama``.
        """
        _check_name(name)
        self._check_usable()
        self._settle_dropped()
        with self._lock:
            self._check_idle(self._table.get(name), "evict")
            gone = self._table.pop(name, None)
        is_saved = bool(self._newer({name: 0}))
        self._forget([gone] if gone is not None else [])
        with self.hook.guard():
            self._engine.set_bookmark(self._namespace, name, None)
        return gone is not None or is_saved

    def evict_all(self) -> int:
        """Forget all sessions but the one that has the ``Llama``, saved ones too; how many there were."""
        self._check_usable()
        self._settle_dropped()
        with self._lock:
            gone = {name: entry for name, entry in self._table.items() if not self._is_leased(entry)}
            self._table = {name: entry for name, entry in self._table.items() if name not in gone}
            leased = set(self._table)
        self._forget(list(gone.values()))
        saved = set(self._saved()) - leased
        with self.hook.guard():
            for name in saved:
                self._engine.set_bookmark(self._namespace, name, None)
        return len(saved | gone.keys())

    # -- what there is ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The sessions that can be resumed: those of this process, and those that are saved in the store."""
        self._check_usable()
        self._settle_dropped()
        saved = self._saved()
        with self._lock:
            held = {name for name, entry in self._table.items() if len(entry.tokens) or self._is_leased(entry)}
            empty = {name: entry.set_at for name, entry in self._table.items() if name not in held}
        # another process may have left one after it was discarded here
        hidden = empty.keys() - self._newer(empty).keys()
        return sorted(held | (set(saved) - hidden))

    def _saved(self) -> list[str]:
        """The saved ones that can be resumed: all that they hold is stored."""
        with self._looking_up():
            return self._engine.whole_bookmarks(self._namespace)
        return []

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
            waiting=len(self.queue),
        )


def _now(before: int) -> int:
    """The time, but later than that of everything saved before."""
    return max(time.time_ns(), before + 1)


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
