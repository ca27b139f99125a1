"""Delivers the verified states of pages, in order, from one source or several.

A thread of the store reads each source (`engine/source.py`) and owns its view. A caller that stops waiting leaves both
behind: they end when the location answers, or with its timeout. All sources of a fetch start at once; the states of one
are verified before those of the next are handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import Protocol, TypeVar

from prefixstore.backends.threads import Lent
from prefixstore.engine.page import Page
from prefixstore.engine.source import SLOWER, Admit, Given, LateError, Look, ShapeError, Source, SourceReader
from prefixstore.errors import StorageError

T = TypeVar("T")

# How late a location on this machine may be: perhaps the whole machine has paused.
LOCAL_SECONDS = 0.5


class Deadline(Protocol):
    """How long a caller is willing to wait for states."""

    def left(self, n_given: int, arrived: float = 0.0) -> float:
        """Seconds left for the next state, after `n_given` states, if this share of it has arrived; may be negative."""


class States(Lent, Iterator[memoryview]):
    """The verified states of some pages, in order, while the block is open.

    They end early at a page that is gone, damaged or late, and where the location fails; that is counted. If the block
    is interrupted as it is entered or left, the threads end when this object is collected.

    Parameters
    ----------
    sources
        What reads the pages.
    streamed
        Whether a state is valid only until the next one is requested, and its buffer is used again. Otherwise states
        are verified when they are handed out, and valid until the block is left.
    along
        If streamed: whether raw states are handed out before their checksum is known, to a caller that can undo a load.
        The next state, and `verified`, wait for the checksum. Has no effect where states are kept, nor for another
        machine if there is a deadline.
    look
        Whether a state can be used; one that cannot ends the iteration. It is called in the calling thread until the
        first state of a source is accepted, and then in the threads that read.
    admit
        Whether a page may be read, judged by the size of its state; one that may not ends the iteration. It is called
        in the calling thread before anything is read.
    deadline
        How long the caller waits. On another machine it ends the iteration even in the middle of a page, on this one
        only between two pages.

    Raises
    ------
    ClosedError
        If the store was closed.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        streamed: bool = False,
        along: bool = True,
        look: Look | None = None,
        admit: Admit | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        super().__init__()
        self._readers: list[SourceReader] = []
        # the state that was returned last, and its reader
        self._last: tuple[SourceReader, Given] | None = None
        self._look = look
        self._deadline = deadline
        # the page that the caller does not admit, if there is one
        self._refused: Page | None = None
        self._error: Exception | None = None
        for fetcher, pages, keep in sources:
            n = next((i for i, page in enumerate(pages) if admit is not None and not admit(page)), len(pages))
            is_along = streamed and along and keep is None and (deadline is None or fetcher.is_local)
            source = fetcher, pages[:n], keep
            self._readers.append(SourceReader(source, streamed=streamed, along=is_along, look=look))
            if n < len(pages):
                self._refused = pages[n]
                break
        self._ended = not self._readers

    @property
    def n_given(self) -> int:
        """How many states were returned."""
        return sum(one.n_given for one in self._readers)

    @property
    def n_verified(self) -> int:
        """How many of them are verified so far: at least all but the last one. `verified` waits for that one."""
        return self.n_given - (self._last is not None and self._last[1].check is not None)

    @property
    def _next_reader(self) -> SourceReader | None:
        """The reader of the next state; None if there is none."""
        return next((one for one in self._readers if one.n_given < len(one.pages)), None)

    def __enter__(self) -> States:  # noqa: PYI034 - nothing derives from it
        for reader in self._readers:
            if reader.pages:
                reader.fetcher.threads.lend(self)
                reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended, self.is_open = True, False
        is_left = not (kind is None or issubclass(kind, Exception))
        turn = self._next_reader
        for reader in self._readers:
            # a Ctrl-C waits for no location, and nobody waits for another machine whose turn has not come
            is_early = reader is not turn and not reader.n_given and not reader.fetcher.is_local
            reader.end(is_left=is_left or is_early)

    def __del__(self) -> None:
        with suppress(AttributeError):  # `__init__` was interrupted
            for reader in self._readers:
                reader.leave()

    def __next__(self) -> memoryview:
        # a state must be verified before the next one follows
        if self.verified() < self.n_given or self._ended:
            raise StopIteration
        reader = self._next_reader
        if reader is None:
            self._ended = True
            if self._refused is not None:
                claim = f"{self._refused.key.hex()} claims a state of {self._refused.raw_bytes} bytes"
                error = ShapeError(f"page {claim}, more than possible")
                self._readers[-1].fetcher.give_up(self._refused, error)
            raise StopIteration
        page = reader.pages[reader.n_given]
        given = self._next_given(reader, page)
        if given.state is None:
            self._end(reader, page, given.error)
            raise StopIteration
        self._last = reader, given
        reader.accept()
        return given.state

    def verified(self) -> int:
        """Wait until the last state is verified; how many are. If that is fewer than `n_given`, the last one is bad."""
        if self._error is not None:
            raise self._error
        if self._last is not None and self._last[1].check is not None and not self._ended:
            reader, given = self._last
            error = self._wait(reader, given.page, given.checked)
            if error is not None:
                self._end(reader, given.page, error)
        return self.n_verified

    def _next_given(self, reader: SourceReader, page: Page) -> Given:
        """What the reader gives for its next page; without a state if there is none that can be used."""
        if reader.fetcher.is_local and self._left() < -LOCAL_SECONDS:
            return Given(page, error=LateError(SLOWER))
        found = self._wait(reader, page, reader.slots[reader.n_given])
        given = found if isinstance(found, Given) else Given(page, error=found)
        if given.state is None or self._look is None or given.is_looked_at or self._look(page, given.state):
            return given
        return Given(page, error=given.misshapen())

    def _wait(self, reader: SourceReader, page: Page, queue: SimpleQueue[T]) -> T | LateError:
        """What the thread puts into a queue for a page, or an error if that is late."""
        for seconds in self._patience(reader):
            with suppress(Empty):
                # what has arrived is used, however late it is
                return queue.get(timeout=min(max(seconds, 0.001), TIMEOUT_MAX))
        reader.is_left = True
        if reader.fetcher.is_local:
            reader.fetcher.breaker.hangs(page)
        return LateError("the location does not answer" if reader.fetcher.is_local else SLOWER)

    def _patience(self, reader: SourceReader) -> Iterator[float]:
        """How many seconds to wait for a thread, and after that for how many more."""
        if reader.fetcher.is_local:
            # it is given up only if it hangs
            yield reader.patience
            return
        yield self._left()
        if (arrived := reader.arrived) > 0:
            # once, wait longer for a page that will be there soon
            yield self._left(arrived)

    def _end(self, reader: SourceReader, page: Page, error: Exception | None) -> None:
        """End the iteration at this page, which is gone or cannot be used."""
        self._ended = True
        if error is None or isinstance(error, StorageError):
            reader.fetcher.give_up(page, error)
        else:
            self._error = error
            raise error

    def _left(self, arrived: float = 0.0) -> float:
        """Seconds left for the next state, if this share of it has arrived."""
        return self._deadline.left(self.n_given, arrived) if self._deadline is not None else TIMEOUT_MAX
