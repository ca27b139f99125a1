"""Lookups: what is stored or pending of a prompt, after a page, and in the whole location.

The location is the only truth: the next lookup sees what another process stores or deletes. What this process has not
written yet is in `engine.catalog`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from queue import Empty
from typing import Concatenate, ParamSpec, TypeVar

from prefixstore.backends.threads import handed_over
from prefixstore.engine.located import Located, PagedPrompt, Waiting
from prefixstore.engine.page import Page, Path, in_order
from prefixstore.engine.page_view import PageView
from prefixstore.engine.part import Part, Shared
from prefixstore.engine.trie import Entry
from prefixstore.errors import CorruptError, StorageError, UnavailableError
from prefixstore.format.keys import PAGE, SNAPSHOT, Tokens
from prefixstore.format.record import Record, Usage, time_of_use

P = ParamSpec("P")
T = TypeVar("T")


def in_time(method: Callable[Concatenate[Lookups, P], T]) -> Callable[Concatenate[Lookups, P], T]:
    """A method that reads the location for a completion: a thread does it, and the caller waits for ten seconds.

    After that it raises `UnavailableError`. That is for a location on this machine; others have their own timeouts.
    """

    @wraps(method)
    def waiting(self: Lookups, *args: P.args, **kwargs: P.kwargs) -> T:
        seconds = self.breaker.patience() if self._backend.is_local else None
        try:
            return self.threads.answer(partial(method, self, *args, **kwargs), seconds=seconds)
        except Empty:
            self.breaker.hangs()
            raise UnavailableError(f"{self._backend.location} does not answer") from None

    return waiting  # type: ignore[return-value]  # of `wraps`: the same


class Lookups(Part):
    """Finds pages, stored or pending."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._started = time.time_ns()

    # -- of a prompt --------------------------------------------------------------------------------------------------

    @in_time
    def longest(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """As `Engine.match`, in this location."""
        started = time.perf_counter()
        with self.locating(self.prompt(namespace, tokens, page_tokens)) as (_, found):
            path = found.path()
        n_unexpired = _n_unexpired(path.pages)
        if n_unexpired < len(path.pages):
            self._catalog.expired()
            pages = path.pages[:n_unexpired]
            path = Path(pages, pages[-1].end if pages else 0)
        self._counters.time("lookup", time.perf_counter() - started)
        return path

    @in_time
    def deepest_snapshot(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, limit: int, multiple_of: int = 1
    ) -> Path:
        """As `Engine.match_snapshot`, in this location."""
        started = time.perf_counter()
        with self.locating(self.prompt(namespace, tokens[:limit], page_tokens), snapshots=True) as (_, found):
            path = self._deepest(found, multiple_of)
        self._counters.time("lookup", time.perf_counter() - started)
        return path

    def _deepest(self, found: Located, multiple_of: int) -> Path:
        for path in found.to_snapshots():
            if _n_unexpired(path.pages) < len(path.pages):
                self._catalog.expired()
            elif path.n_tokens % multiple_of == 0:
                return path
        return Path((), 0)

    @in_time
    def missing(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, *, tail: bool = False
    ) -> list[tuple[int, int]]:
        """First position and boundary of each page of a sequence that is to be captured.

        With `tail`, the tokens after the last full page count as one. If the location cannot be read, all pages that
        are not pending are returned.

        Raises
        ------
        CorruptError
            If another page is stored under one of the keys: no page may follow it.
        """
        n_full = len(tokens) // page_tokens * page_tokens
        prompt = self.prompt(namespace, tokens if tail else tokens[:n_full], page_tokens)
        try:
            with self.locating(prompt) as (_, located):
                found = located
        except StorageError:
            found = self.locate(None, prompt, self._catalog.along(prompt))
        if found.collision is not None:
            raise CorruptError(f"page {found.collision.hex()} has tokens that do not match its key")
        # an expired page is captured again, which renews it
        n_unexpired = _n_unexpired(found.pages)
        ranges = [(start, start + page_tokens) for start in range(n_unexpired * page_tokens, n_full, page_tokens)]
        end = prompt.pieces[-1]
        # a page that is captured now has no children yet, so no longer page can cover the tail
        if end and (ranges or not any(page.tokens.startswith(end) and _n_unexpired([page]) for page in found.beside)):
            ranges.append((n_full, len(tokens)))
        return ranges

    @in_time
    def has(self, key: bytes) -> bool:
        """Whether a page or snapshot is stored or pending, and not expired."""
        if self._catalog.get(key) is not None:
            return True
        with suppress(StorageError), self.breaker.asking(), self._backend.view() as view:
            record, usage = view.records([key]).get(key, (None, Usage(0)))
            if isinstance(record, Record) and not self._catalog.is_damaged(key, record):
                return not Page.stored(key, record, usage).has_expired(time.time_ns())
        return False

    def prompt(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> PagedPrompt:
        """A sequence cut into pages, for `locate`."""
        return PagedPrompt(namespace, tokens, page_tokens, self._backend.trie)

    @contextmanager
    def locating(self, prompt: PagedPrompt, *, snapshots: bool = False) -> Iterator[tuple[PageView, Located]]:
        """A view, and what it has of a prompt; guarded by the breaker."""
        waiting = self._catalog.along(prompt)
        with self.breaker.asking(), self._backend.view() as view:
            yield view, self.locate(view, prompt, waiting, snapshots=snapshots)

    def locate(
        self, view: PageView | None, prompt: PagedPrompt, waiting: Waiting, *, snapshots: bool = False
    ) -> Located:
        """What is stored or pending of a prompt, to the token; with `snapshots` also the snapshots along it.

        A server is mostly asked three times: for the records of all full pages, whose keys follow from the tokens, for
        the child rows after the last of them, and for the records of these. `waiting` was read before the view was
        opened; without a view, in a location that cannot be read, only pending pages are found.
        """
        found, with_uses = Located(prompt), self._catalog.with_uses
        entries = view.leading(prompt.keys, waiting.damaged) if view is not None and prompt.keys else []
        good = prompt.good(entries, waiting)
        found.n_stored = len(good)
        for entry in entries[len(good) : len(good) + 1]:
            if not isinstance(entry.record, Record) or _starts_elsewhere(entry.record, prompt, len(good)):
                self._catalog.unreadable(entry)
            elif not prompt.has(len(good), entry.record):
                found.collision = entry.key
        pages = found.pages = with_uses(good)
        for number in range(len(pages), len(prompt.keys)):
            page = waiting.pages.get(prompt.keys[number])
            if page is None or not prompt.has(number, page):
                break
            pages.append(page)
        at = len(pages)
        wanted, parent = prompt.pieces[at], prompt.parents[at]
        parents = prompt.parents[: found.n_stored + 1] if snapshots else []
        near: list[Entry] = []
        after: list[Entry] = []
        if view is not None and wanted and at == found.n_stored:  # nothing is stored after a pending page
            near, after = view.beside(parent, wanted, parents)
        elif view is not None and parents:
            after = view.children(parents, SNAPSHOT)
        found.beside = self._following(near, waiting, prompt, at, PAGE)
        if snapshots:
            found.snapshots = [self._following(after, waiting, prompt, n, SNAPSHOT) for n in range(at + 1)]
        return found

    def _following(
        self, stored: Sequence[Entry], waiting: Waiting, prompt: PagedPrompt, number: int, form: int
    ) -> list[Page]:
        """Pages of a form after the first `number` pages of a prompt: pending, or stored and among these entries."""
        place = prompt.namespace, prompt.parents[number], number * prompt.page_tokens, form
        pages = self._catalog.with_uses([one for one in stored if _is_at(one, place, waiting)])
        known = {page.key for page in pages}
        more = waiting.after.get(prompt.parents[number], ())
        return pages + [page for page in more if page.form == form and page.key not in known]

    # -- of pages -----------------------------------------------------------------------------------------------------

    @handed_over
    def children(self, parent: bytes, at_most: int) -> list[Page]:
        """Children of this page or namespace: `at_most` of the stored ones, and all pending ones."""
        # before the view: so what is committed meanwhile is not missed
        waiting = [page for page in self._catalog.pending_after(parent) if page.form == PAGE]
        with self._backend.view() as view:
            found = view.children([parent], PAGE, at_most)
        stored = [Page.stored(key, record, usage) for key, record, usage in found if isinstance(record, Record)]
        return stored + waiting

    @handed_over
    def path(self, page: Page) -> list[Page]:
        """The pages from the start of the sequence up to this one."""
        path = [page]
        with self._backend.view() as view:
            while path[-1].parent != path[-1].namespace:
                key = path[-1].parent
                above = self._catalog.get(key)
                if above is None:
                    record, usage = view.records([key]).get(key, (None, Usage(0)))
                    if not isinstance(record, Record):
                        break
                    above = Page.stored(key, record, usage)
                    above.is_far = self._catalog.is_far
                path.append(above)
        return path[::-1]

    @handed_over
    def pages(self) -> list[Page]:
        """All pages, stored and pending, as trees, parents before their children; for maintenance."""
        # before the view: so what is committed meanwhile is not missed
        waiting, uses = self._catalog.all_waiting()
        now, stored = time.time_ns(), []
        with self._backend.view() as view:
            for key, record, usage in view.scan():
                if isinstance(record, Record):
                    page = Page.stored(key, record, usage)
                    used = uses[key].last_used if key in uses else 0
                    page.last_used = max(time_of_use(page.last_used, now) or self._started, used)
                    stored.append(page)
        return in_order(stored + waiting)


def _n_unexpired(pages: Sequence[Page]) -> int:
    """How many pages come before the first one that has expired."""
    now = time.time_ns()
    return next((i for i, page in enumerate(pages) if page.has_expired(now)), len(pages))


def _starts_elsewhere(record: Record, prompt: PagedPrompt, number: int) -> bool:
    return (record.parent, record.tokens) == (prompt.parents[number], prompt.pieces[number]) and (
        record.start != number * prompt.page_tokens or record.namespace != prompt.namespace
    )


def _is_at(entry: Entry, place: tuple[bytes, bytes, int, int], waiting: Waiting) -> bool:
    """Whether a stored page may be used, and has this namespace, parent, start and form."""
    record = entry.record
    if not isinstance(record, Record) or not waiting.allows(entry.key, record):
        return False
    return (record.namespace, record.parent, record.start, record.form) == place
