"""The half of an engine that reads: what is stored of a prompt, its states, and what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from queue import Empty
from typing import Concatenate, ParamSpec, TypeVar

from prefixstore.backends.threads import Threads, handed_over
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.delete import Deleter
from prefixstore.engine.eviction_log import Eviction
from prefixstore.engine.fetch import Deadline, States, fetch
from prefixstore.engine.index import Page, Path
from prefixstore.engine.lookup import Located, Prompt
from prefixstore.engine.page_view import Used, View
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import Fits, Suspicion
from prefixstore.engine.readers import Admit, Look
from prefixstore.engine.saved_notes import SavedNotes
from prefixstore.engine.source import Fetcher, Source
from prefixstore.engine.tap import Tap
from prefixstore.engine.trie import Trie
from prefixstore.engine.waiting import Placement
from prefixstore.errors import ClosedError, StorageError, UnavailableError
from prefixstore.format.keys import KEY_BYTES, PAGE, Tokens, page_key
from prefixstore.format.record import Record, checksum
from prefixstore.stats import Counters

__all__ = ["Reading"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound="Reading")


def asked(method: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """A method that reads the location for a completion: if it hangs, the caller gives up. See `Reading.in_time`."""

    @wraps(method)
    def asking(self: R, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.in_time(partial(method, self, *args, **kwargs))

    return asking  # type: ignore[return-value]  # of `wraps`: the same


class Reading:
    """Finds pages by tokens and delivers their states; see `Engine`, which has the parts."""

    counters: Counters
    threads: Threads
    deleter: Deleter
    read_only: bool
    peak_bytes: int
    tap: Tap | None
    _backend: Pages
    _trie: Trie
    _catalog: Catalog
    _breaker: CircuitBreaker
    _fetcher: Fetcher
    _notes: SavedNotes
    _ttl_ns: int | None
    _closed: bool
    # what the location was seen to hold
    _last_used: Used
    _sizes: tuple[int, int]

    @property
    def location(self) -> str:
        """The location as a URL."""
        return self._backend.location

    def in_time(self, work: Callable[[], T]) -> T:
        """What a thread finds in the location.

        Raises
        ------
        UnavailableError
            If a location on this machine does not answer for ten seconds. Others have timeouts of their own.
        """
        try:
            return self.threads.answer(work, seconds=self._breaker.patience() if self._backend.is_local else None)
        except Empty:
            self._breaker.hangs()
            raise UnavailableError(f"{self.location} does not answer") from None

    @asked
    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest stored prefix of `tokens`, among pages that any process has committed or that are pending here.

        Raises
        ------
        StorageError
            If the location cannot be read; immediately while the circuit breaker is open.
        """
        started = time.perf_counter()
        path = self._catalog.longest(self._locate(Prompt(namespace, tokens, page_tokens, self._trie)))
        self.counters.time("lookup", time.perf_counter() - started)
        return self._told(namespace, tokens, page_tokens, path)

    def _told(self, namespace: bytes, tokens: Tokens, page_tokens: int, path: Path) -> Path:
        if self.tap is not None:
            self.tap.asked(namespace, tokens, page_tokens, path.n_tokens)
        return path

    @asked
    def match_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """The pages of `tokens` up to the deepest snapshot among the first `limit`, and that snapshot.

        Parameters
        ----------
        namespace, tokens, page_tokens
            As for `match`.
        limit
            Tokens that may be restored.
        multiple_of
            The snapshot has to be at a multiple of this.
        """
        started = time.perf_counter()
        found = self._locate(Prompt(namespace, tokens[:limit], page_tokens, self._trie), snapshots=True)
        path = self._catalog.deepest_snapshot(found, multiple_of)
        self.counters.time("lookup", time.perf_counter() - started)
        return self._told(namespace, tokens, page_tokens, path)

    def _locate(self, prompt: Prompt, *, snapshots: bool = False) -> Located:
        """What there is of a prompt."""
        waiting = self._catalog.along(prompt)
        with self._breaker.asking() as request, self._backend.view() as view:
            found = self._catalog.locate(view, waiting, prompt, snapshots=snapshots)
            request.n_records = found.n_read
        return found

    def _probe(self, page: Page | None) -> int:
        """Repeat the request that failed or was slow; called by a thread of the breaker."""
        with self._backend.view() as view:
            view.record(page.key if page is not None else bytes(KEY_BYTES))
            for _, payload in view.fetch([page.key] if page is not None else []):
                checksum(payload)
        return 1

    def fetching(
        self,
        pages: Sequence[Page],
        *,
        streamed: bool = False,
        along: bool = True,
        look: Look | None = None,
        admit: Admit | None = None,
        deadline: Deadline | None = None,
    ) -> AbstractContextManager[States]:
        """The verified states of `pages`, in order: see `fetch`."""
        sources = self._sources(pages)
        return fetch(sources, streamed=streamed, along=along, look=look, admit=admit, deadline=deadline)

    def _sources(self, pages: Sequence[Page]) -> list[Source]:
        return [self._fetcher.source(pages)]

    @handed_over
    def touch(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None = None) -> None:
        """Note that a prompt began with these pages, none for a miss; written with the next commit.

        With the length of the prompt, a policy can tell how far from its end a page is.
        """
        self._note_use(namespace, pages, n_tokens)
        self._tell_use(namespace, pages, n_tokens)

    def _note_use(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None) -> None:
        self._catalog.touch(namespace, pages, self._ttl_ns, n_tokens, is_written=not self.read_only)

    def _tell_use(self, namespace: bytes, pages: Sequence[Page], n_tokens: int | None) -> None:
        if self.tap is not None and n_tokens is not None:
            self.tap.used(namespace, pages, n_tokens)

    def view(self) -> AbstractContextManager[View]:
        """A view, for callers that read the location directly."""
        return self.threads.lending(self._backend.view())

    @handed_over
    def evictions(self, keys: Sequence[bytes]) -> dict[bytes, Eviction]:
        """When and why these pages were evicted, as far as it is remembered. Raises `StorageError`."""
        with self._backend.view() as view:
            return self._notes.find(view, keys)

    def was_evicted(self, key: bytes) -> bool:
        """Whether this process has evicted a page lately. The location is not asked."""
        return self._catalog.evictions.find(key) is not None

    @property
    def losses(self) -> int:
        """How often this process has evicted, deleted or dropped pages, but for tails that others continue."""
        return self._catalog.evictions.n_added + self.deleter.n_begun + self.counters.n_dropped

    @handed_over
    def children(self, parent: bytes, at_most: int) -> list[Page]:
        """Children of this page, or of this namespace: some of the stored ones, and those that wait."""
        # before the view: what is committed meanwhile is stored
        waiting = [page for page in self._catalog.pending_after(parent) if page.form == PAGE]
        with self._backend.view() as view:
            found = view.children([parent], PAGE, at_most)
        stored = [Page.stored(key, record, usage) for key, record, usage in found if isinstance(record, Record)]
        return stored + waiting

    @handed_over
    def pages(self) -> list[Page]:
        """All pages, stored and pending, parents before their children."""
        return self._catalog.pages(self._backend)

    @handed_over
    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        with self._backend.view() as view:
            return self._catalog.path(view, page)

    @handed_over
    def used(self) -> tuple[Used, int, int]:
        """The size of the location, and the bytes of all payloads as stored and as states."""
        with self.view() as view:
            self._saw(view.used)
            self._sizes = view.sizes
        return self.last_used()

    def _saw(self, used: Used) -> None:
        """Note how much the location holds."""
        self._last_used = used
        self.peak_bytes = max(self.peak_bytes, used.bytes)

    def last_used(self) -> tuple[Used, int, int]:
        """The last known `used`; does not query the location."""
        return self._last_used, *self._sizes

    @handed_over
    def measure(self) -> bool:
        """Bring `last_used` up to date, for monitoring; whether the location answered.

        While the circuit is open, the location is not asked, so the call does not block. Never raises because of the
        location.
        """
        if self._closed:
            return False
        try:
            with self._breaker.asking(), self._backend.view() as view:
                self._saw(view.used)
                self._sizes = view.sizes
        except (ClosedError, StorageError):
            return False
        return True

    # -- what to capture -----------------------------------------------------------------------------------------------

    @asked
    def wants(self, namespace: bytes, parent: bytes, tokens: bytes) -> bool:
        """Whether the page with these token bytes after `parent` is worth capturing."""
        page = Page(page_key(parent, tokens), parent, namespace, 0, tokens, 0, 0, 0, 0, 0)
        if self._catalog.place_of(page) is not Placement.ADDED:
            return False
        with suppress(StorageError), self._breaker.asking(), self._backend.view() as view:
            return self._catalog.wants(view, parent, tokens)
        # what is stored already is found when it is to be written
        return True

    @asked
    def missing(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> list[int]:
        """Which full pages of a sequence to capture.

        If the location cannot be asked, those that do not wait to be written.

        Raises
        ------
        CorruptError
            If another page has one of the keys: nothing may be stored after it.
        """
        prompt = Prompt(namespace, tokens[: len(tokens) // page_tokens * page_tokens], page_tokens, self._trie)
        waiting = self._catalog.along(prompt)
        try:
            with self._breaker.asking(), self._backend.view() as view:
                found = self._catalog.locate(view, waiting, prompt)
        except StorageError:
            n_here = next((i for i, key in enumerate(prompt.keys) if key not in waiting.pages), len(prompt.keys))
            found = Located(prompt, pages=[waiting.pages[key] for key in prompt.keys[:n_here]])
        return self._catalog.missing(found)

    @asked
    def needs_no_capture(self, key: bytes) -> bool:
        """Whether a page or snapshot need not be captured: it is here."""
        if self._catalog.get(key) is not None:
            return True
        with suppress(StorageError), self._breaker.asking(), self._backend.view() as view:
            record = view.record(key)
            return record is not None and not self._catalog.is_damaged(key, record)
        return False

    @handed_over
    def thin(
        self,
        namespace: bytes,
        tokens: Tokens,
        page_tokens: int,
        keep: int,
        interval: int,
        valued: Collection[int] = (),
    ) -> int:
        """Give up all but `keep` of the snapshots along `tokens`; how many. See `snapshot_policy.thin`.

        Pinned ones stay, and those from which other prompts branch off, or which are `valued`, stay before others.
        """
        prompt = Prompt(namespace, tokens, page_tokens, self._trie)
        waiting = self._catalog.along(prompt)
        with self._breaker.asking(), self._backend.view() as view:
            found = self._catalog.locate(view, waiting, prompt, snapshots=True)
            return self._catalog.thin(view, found, keep, interval, valued)

    @handed_over
    def condemn(self, page: Page, fits: Fits, size: int | None = None) -> None:
        """Have a page and its descendants deleted with the next commit, if its state still does not fit then.

        `fits` must hold for every context of the namespace. Another thread may call it. With `size`, the most bytes
        that the state can have, one that claims more is not unpacked for it.
        """
        self._catalog.mark_damaged(page, Suspicion(fits, size))
