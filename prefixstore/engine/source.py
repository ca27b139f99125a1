"""One source of a fetch: a location, with what this process holds of its pages, and the thread that reads it.

The view belongs to the thread, which reads some pages ahead of the caller and puts each one into its slot::

    caller                             thread
    start                              open the view; read the first states and put them into their slots
    wait for the next slot
    the state can be used: accept      verify it and keep a copy, while the caller uses it; read one more
    wait until it is verified
    end: wait                          close the view; if the caller has given up, keep what has arrived since

Raw pages that are not encrypted are mostly read *along*: one at a time, handed out before the checksum is known, and
verified while the caller copies them, so that they come out of memory once. All others are verified first; packed ones
are unpacked by several threads.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from prefixstore.backends.threads import Answer
from prefixstore.buffers import BufferPool, PooledBuffer
from prefixstore.engine.page import Page, is_same
from prefixstore.engine.page_view import PageView
from prefixstore.engine.part import Part, Shared
from prefixstore.errors import (
    ClosedError,
    CorruptError,
    IncompatibleError,
    PrefixStoreError,
    StorageError,
    UnavailableError,
    UndecryptableError,
)
from prefixstore.format.autocodec import UNPACKERS, ReadRate
from prefixstore.format.codec import RAW, decode_into, inspect, verify_checksum, verify_payload
from prefixstore.format.record import Buffer, Record

log = logging.getLogger("prefixstore")

Look: TypeAlias = Callable[[Page, memoryview], bool]
"""Whether a state can be used for a page."""

Admit: TypeAlias = Callable[[Page], bool]
"""Whether a page may be read: its state has a size that it can have."""

Keep: TypeAlias = Callable[[Page, memoryview], None]
"""Copies a verified state for later, in the thread that reads it, while the caller may read it as well."""

Source: TypeAlias = "tuple[Fetcher, Sequence[Page], Keep | None]"
"""A fetcher, the consecutive pages it reads, and what keeps states that were accepted, or that came too late."""

SLOWER = "the location is slower than computing"


class LateError(UnavailableError):
    """A state did not arrive within the caller's deadline."""


class ShapeError(IncompatibleError):
    """A state is what was written, but the caller cannot use it."""


@dataclass(slots=True, eq=False)
class Given:
    """What the thread puts into the slot of a page."""

    page: Page
    # None if the page is gone, or there is an error
    state: memoryview | None = None
    # raises `CorruptError` if the state is not what was written; None once it is verified
    check: Callable[[], None] | None = None
    # receives the outcome of `check`, once the state is accepted
    checked: SimpleQueue[Exception | None] = field(default_factory=SimpleQueue)
    # whether the thread has found that the state can be used; if not, the caller looks
    is_looked_at: bool = False
    # why there is no state
    error: Exception | None = None
    # the job that unpacks it, and the memory for that
    work: Answer[None] | None = None
    buffer: PooledBuffer | None = None

    def misshapen(self) -> StorageError:
        """The error of a page whose state cannot be used: it may be damaged."""
        try:
            if self.check is not None:
                self.check()
        except StorageError as error:
            return error
        return ShapeError(f"page {self.page.key.hex()} does not have the shape of a page")

    def settle(self) -> None:
        """Wait until no thread works on it. Only one thread may call this."""
        work, self.work = self.work, None
        if work is not None:
            work.get()

    def release(self) -> None:
        """Release its buffer when no thread works on it."""
        self.settle()
        if self.buffer is not None:
            self.buffer.release()


class SourceReader:
    """One source of a fetch, and the thread that reads it. The parameters are those of `States`.

    Attributes
    ----------
    patience
        Seconds after which the location counts as hung.
    slots
        One for each page, and one for an error after the last of them.
    n_given
        How many states the caller has accepted.
    is_left
        Whether the caller has stopped waiting.
    """

    def __init__(self, source: Source, *, streamed: bool, along: bool, look: Look | None) -> None:
        self.fetcher, self.pages, self._keep = source
        if self.fetcher.is_closed:
            raise ClosedError("the store was closed while it was read; open a new PrefixStore")
        self._streamed = streamed
        self._along = along
        self._look = look
        self.patience = self.fetcher.breaker.patience(max(self.pages, key=lambda page: page.raw_bytes, default=None))
        self.slots: list[SimpleQueue[Given]] = [SimpleQueue() for _ in range(len(self.pages) + 1)]
        self.n_given = 0
        self.is_left = False
        self._done: Answer[None] | None = None
        # True for each accepted state; False ends the thread
        self._accepted: SimpleQueue[bool] = SimpleQueue()
        # to see how much of a page has arrived
        self._view: PageView | None = None
        # whether to read on
        self._goes_on = True
        # used by the threads
        self._n_read = 0
        self._in_memory: Mapping[bytes, memoryview] = {}

    # -- the caller ---------------------------------------------------------------------------------------------------

    @property
    def arrived(self) -> float:
        """The share of the next page that has arrived; 0 if it is not known."""
        size = self.pages[self.n_given].stored_bytes
        return min(self._view.arrived / size, 1.0) if self._view is not None and size else 0.0

    def start(self) -> None:
        """Start the thread."""
        try:
            self._done = self.fetcher.threads.start(self._run)
        except RuntimeError as error:
            failed = UnavailableError(f"no thread can be started to read pages: {error}")
            self.slots[0].put(Given(self.pages[0], error=failed))

    def accept(self) -> None:
        """Note that the caller uses the next state."""
        self.n_given += 1
        self._accepted.put(True)

    def leave(self) -> None:
        """Tell the thread to end."""
        self._goes_on = False
        self._accepted.put(False)

    def end(self, *, is_left: bool) -> None:
        """End the thread, and wait for it unless the caller has left."""
        self.is_left = self.is_left or is_left
        self.leave()
        if self._done is not None and self.is_left:
            self._done.leave()
        elif self._done is not None:
            self._done.get()
        self.fetcher.count_given(self.pages[: self.n_given])

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Read until the caller has left."""
        try:
            self._in_memory = self.fetcher.in_memory(self.pages)
            with self.fetcher.view() as self._view:
                stored = [page for page in self.pages if page.key not in self._in_memory]
                is_packed = any(page.stored_bytes != page.raw_bytes for page in stored)
                self._along = self._along and not is_packed and not self._view.rows.is_encrypted
                with closing(self._view.fetch([page.key for page in stored])) as fetched:
                    self._serve(fetched, 1 if self._along else UNPACKERS if is_packed else 2)
        except BaseException as raised:  # noqa: BLE001 - raised where the caller waits
            error = _for_caller(raised)
            if isinstance(error, StorageError):
                # errors of a page are put into its slot: this one is of the location
                error = UnavailableError(str(error))
            self.slots[self._n_read].put(Given(self.pages[-1], error=error))

    def _serve(self, fetched: Iterator[tuple[Record, Buffer]], n_ahead: int) -> None:
        """Hand out the states, up to `n_ahead` of them before the first one is accepted."""
        given: deque[Given] = deque()
        # accepted: the caller may be using these
        used: deque[Given] = deque()
        try:
            while True:
                while self._goes_on and self._n_read < len(self.pages) and len(given) < n_ahead:
                    given.append(self._read(fetched))
                if not self._accepted.get():
                    break
                used.append(given.popleft())
                self._finish(used[-1])
                if self._streamed and len(used) > 1:
                    used.popleft().release()
            if self.is_left:
                for one in given:
                    # the caller will not look at it any more
                    if self._look is None or one.is_looked_at:
                        self._finish(one)
        finally:
            self._goes_on = False
            for one in (*used, *given):
                one.release()

    def _read(self, fetched: Iterator[tuple[Record, Buffer]]) -> Given:
        """Read the next page and hand it out; a packed one when another thread has unpacked it."""
        number, page = self._n_read, self.pages[self._n_read]
        one = Given(page, self._in_memory.get(page.key))
        found: tuple[Record, Buffer] | None = None
        started = time.perf_counter()
        try:
            if one.state is None:
                with self.fetcher.breaker.asking(page):
                    found = next(fetched, None)
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            one.error = _for_caller(error)
        give = partial(self._give, number, one, found, time.perf_counter() - started)
        if found is None or found[0].codec == RAW or self._along:
            give()
        else:
            one.work = self.fetcher.threads.start_or_run(give)
        self._n_read += 1
        return one

    def _give(self, number: int, one: Given, found: tuple[Record, Buffer] | None, seconds: float) -> None:
        """Verify and unpack what was read in this many seconds, if anything was, and put it into its slot."""
        try:
            if found is not None:
                self._unpack(one, *found, seconds)
            # The caller looks at the first ones, from which it may learn. The bytes to be compared are not in any
            # processor's cache, so the others are looked at here, while the caller uses the one before.
            if one.state is not None and self._look is not None and self.n_given:
                if not self._look(one.page, one.state):
                    raise one.misshapen()
                one.is_looked_at = True
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            one.state, one.error = None, _for_caller(error)
        if one.state is None:
            self._goes_on = False
        self.slots[number].put(one)

    def _unpack(self, one: Given, record: Record, payload: Buffer, seconds: float) -> None:
        page = one.page
        if not is_same(page, record) or record.start != page.start:
            raise CorruptError(f"page {page.key.hex()} has tokens that do not match its key")
        if (record.created, record.stored_bytes) != (page.created, page.stored_bytes):
            # it was stored again, perhaps packed; if it turns out to be damaged, it is this version that is
            page.created, page.stored_bytes = record.created, record.stored_bytes
            self.fetcher.forget(page)
        if record.raw_bytes != page.raw_bytes:
            # the caller has admitted another size: nothing is allocated
            raise ShapeError(f"page {page.key.hex()} holds {record.raw_bytes} bytes of state, not {page.raw_bytes}")
        if self._along and record.codec == RAW:
            one.state = inspect(record, payload)
            one.check = partial(self.fetcher.verify, record, one.state, seconds)
            return
        started = time.perf_counter()
        stored = verify_payload(record, payload)
        self.fetcher.read_rate.observe(len(stored), seconds + time.perf_counter() - started)
        if record.codec == RAW:
            one.state = stored
            return
        try:
            one.buffer = self.fetcher.buffers.acquire(record.raw_bytes)
        except (MemoryError, ValueError) as error:
            raise UnavailableError(f"page {page.key.hex()}: no memory for {record.raw_bytes} bytes") from error
        assert one.buffer is not None, "this pool is unbounded"
        decode_into(record, stored, one.buffer.view, self.fetcher.buffers)
        one.state = one.buffer.view

    def _finish(self, one: Given) -> None:
        """Verify an accepted state, unless that is done, and keep a copy of it."""
        one.settle()
        if one.state is None:
            return
        if one.check is not None:
            try:
                one.check()
            except BaseException as error:  # noqa: BLE001 - raised where the caller waits
                self._goes_on = False
                one.checked.put(_for_caller(error))
                return
            one.check = None
            one.checked.put(None)
        if self._keep is not None and one.page.key not in self._in_memory:
            try:
                self._keep(one.page, one.state)
            except Exception as error:  # a copy for later must not end a restore
                unexpected = None if isinstance(error, PrefixStoreError) else error
                log.warning("a fetched page was not kept: %s", error, exc_info=unexpected)


# what is logged and counted if a page cannot be used, by the first of these types that its error has
UNREADABLE = (
    (CorruptError, "a damaged page will be deleted", "unreadable:corrupt"),
    (ShapeError, "a page was not used", "unreadable:shape"),
    (IncompatibleError, "a page that needs a newer version was not used", "unreadable:incompatible"),
    (StorageError, "a page cannot be read", "unreadable:unavailable"),
)


class Fetcher(Part):
    """What the readers of one location share.

    `read_rate` learns how fast the location delivers bytes. The pool of `buffers` for unpacked states has no limit:
    each reader bounds what it uses.
    """

    def __init__(self, shared: Shared, read_rate: ReadRate) -> None:
        super().__init__(shared)
        self.read_rate = read_rate
        self.is_local = shared.backend.is_local
        self.buffers = BufferPool(limit=None)
        self.is_closed = False

    def close(self) -> None:
        """Start no more readers."""
        self.is_closed = True

    def in_memory(self, pages: Sequence[Page]) -> Mapping[bytes, memoryview]:
        """The states of pending pages; called before the view opens, so that a commit in between hides none."""
        return self._catalog.states(pages)

    @contextmanager
    def view(self) -> Iterator[PageView]:
        """A view, guarded by the breaker while it opens."""
        with ExitStack() as stack:
            with self.breaker.asking():
                view = stack.enter_context(self._backend.view())
            yield view

    def verify(self, record: Record, state: memoryview, seconds: float) -> None:
        """Verify a raw state that took this many seconds to read."""
        started = time.perf_counter()
        verify_checksum(record, state)
        # in a location that is mapped into memory, it is the checksum that reads the bytes
        self.read_rate.observe(len(state), seconds + time.perf_counter() - started)

    def count_given(self, pages: Sequence[Page]) -> None:
        """Count pages whose states a caller has accepted."""
        self._counters.add({"given_pages": len(pages), "given_bytes": sum(page.raw_bytes for page in pages)})

    def forget(self, page: Page) -> None:
        """Make the next lookup read the record of this page again."""
        self._backend.trie.forget(page.key)

    def give_up(self, page: Page, error: StorageError | None) -> None:
        """Log and count why a page ended a fetch; the next commit deletes it if it is damaged."""
        self.forget(page)
        if error is None:
            self._counters.count("unreadable:vanished")
        elif isinstance(error, LateError):
            log.info("a restore continues without the pages that have not arrived: %s", error)
            self._counters.count("late")
        else:
            what, counted = next(said for kind, *said in UNREADABLE if isinstance(error, kind))
            log.warning("%s: %s", what, error)
            if not isinstance(error, UndecryptableError):  # that is counted where it is found
                self._counters.count(counted)
            if isinstance(error, CorruptError):
                self._catalog.mark_damaged(page)


def _for_caller(error: BaseException) -> Exception:
    """The error to raise in the caller: the same one, unless it concerns only the thread."""
    if isinstance(error, MemoryError):
        translated: Exception = UnavailableError("no memory to read a page")
    elif isinstance(error, Exception):
        return error
    else:
        translated = UnavailableError(f"a thread that reads pages was ended by {error!r}")
    translated.__cause__ = error
    return translated
