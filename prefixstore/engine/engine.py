"""Match, get, put, evict, flush, check over tokens and bytes. Knows no llama.

read:   match -> fetching              catalog (index), fetch (backend, codec)
write:  wants -> announce -> commit    catalog, commit (codec, budget, eviction, backend)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from prefixstore.backends.base import Backend, Used
from prefixstore.engine.breaker import Breaker
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog, Fits, NewPage
from prefixstore.engine.check import Violation, violations
from prefixstore.engine.commit import Committer
from prefixstore.engine.eviction import Policy
from prefixstore.engine.fetch import Fetcher, States
from prefixstore.engine.index import Page, Path
from prefixstore.engine.readers import Look
from prefixstore.engine.snapshots import thin
from prefixstore.errors import CorruptError
from prefixstore.format.autocodec import Encoder
from prefixstore.format.keys import Tokens, page_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import checksum
from prefixstore.stats import Counters

__all__ = ["Engine"]

# that wait to be copied into RAM
HOT_PAGES = 256


class Engine:
    """The store, without a model. May be used from many threads.

    Parameters
    ----------
    backend
        Where bytes are kept; the engine closes it.
    budget
        What the backend may hold.
    policy
        The order of eviction.
    encode
        Makes stored bytes of a state: ``(namespace, state) -> (codec number, stored bytes)``. Hears from here
        how fast the location is.
    counters
        Counts what happens.
    ttl
        Seconds after which a page that is written here expires, unless a prompt begins with it meanwhile.
    priority
        Of the pages that are written here.
    """

    def __init__(
        self,
        backend: Backend,
        budget: Budget,
        policy: Policy,
        encode: Encoder,
        counters: Counters,
        *,
        ttl: float | None = None,
        priority: int = 0,
    ) -> None:
        self._ttl_ns = round(ttl * 1e9) if ttl is not None else None
        self._priority = priority
        self._backend = backend
        self._budget = budget
        self._counters = counters
        self._catalog = Catalog(policy, counters)
        self._breaker = Breaker(self._probe, counters)
        self._fetcher = Fetcher(backend, self._catalog, counters, encode.pace, self._breaker)
        self._committer = Committer(backend, self._catalog, budget, encode, counters)
        # pages that were used, for a backend that keeps states at hand
        self._hot: dict[bytes, Page] = {}
        self._used = Used(0, 0)

    def after_fork(self) -> None:
        """In a forked child, before anything else: new locks, threads and handles."""
        self._backend.after_fork()
        self._hot = {}
        self._counters.after_fork()
        self._catalog.after_fork()
        self._breaker.after_fork()
        self._fetcher.after_fork()

    def close(self) -> None:
        """Release the backend."""
        self._breaker.close()
        self._fetcher.close()
        self._backend.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens, page_tokens: int) -> Path:
        """The longest stored prefix of `tokens`, among what any process has committed and what is pending here."""
        self._look()
        with self._catalog.lock:
            return self._catalog.unexpired(self._catalog.index.match(namespace, tokens, page_tokens))

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
        self._look()
        with self._catalog.lock:
            return self._catalog.deepest(namespace, tokens, page_tokens, limit, multiple_of)

    def _look(self) -> None:
        """Know what is stored. Raises `StorageError`; at once, while the location is left alone."""
        with self._breaker.asking() as question, self._backend.view() as view:
            question.n_records = self._catalog.refresh(view)

    def _probe(self, page: Page | None) -> int:
        """Ask the location what it failed to answer, or took long to; by a thread of the breaker."""
        with self._backend.view() as view:
            n_records = self._catalog.refresh(view)
            for _, payload in view.fetch([page.key] if page is not None else []):
                checksum(payload)
        return n_records

    def fetching(
        self, pages: Sequence[Page], *, streamed: bool = False, look: Look | None = None
    ) -> AbstractContextManager[States]:
        """The verified states of `pages`, in order: see `Fetcher.fetching`."""
        return self._fetcher.fetching(pages, streamed=streamed, look=look)

    def used(self) -> tuple[Used, int, int]:
        """What the location holds, and the bytes of all payloads as stored and raw."""
        with self._backend.view() as view:
            self._catalog.refresh(view)
            self._used = view.used
        return self.last_used()

    def last_used(self) -> tuple[Used, int, int]:
        """As `used`, as far as it is known without asking."""
        return self._used, self._catalog.index.stored_bytes, self._catalog.index.raw_bytes

    def touch(self, namespace: bytes, pages: Sequence[Page]) -> None:
        """Note that a prompt began with these pages, none for a miss; it is written with the next batch."""
        with self._catalog.lock:
            self._catalog.touch(namespace, pages, self._expiry(time.time_ns()))
            if self._backend.keeps_states:
                self._hot |= {page.key: page for page in pages if page.key not in self._catalog.pending}
                # nobody copies them while there is something to write
                while len(self._hot) > HOT_PAGES:
                    del self._hot[next(iter(self._hot))]

    def _expiry(self, now: int) -> int:
        """When a page expires that is used now; 0 for never."""
        return now + self._ttl_ns if self._ttl_ns is not None else 0

    def check(self) -> list[Violation]:
        """Every invariant of the location, every checksum."""
        with self._backend.view() as view:
            return violations(view, self._budget)

    def namespaces(self) -> list[Namespace]:
        """The namespaces that have pages in the location, but those whose settings are damaged."""
        found: list[Namespace] = []
        with self._backend.view() as view:
            for settings in view.namespaces().values():
                with suppress(CorruptError):
                    found.append(Namespace.parse(settings))
        return found

    # -- notes of jobs ------------------------------------------------------------------------------------------------

    def note(self, name: bytes) -> bytes | None:
        """A note that a job has left in the location. Raises `StorageError`."""
        with self._backend.view() as view:
            return view.note(name)

    def change_note(self, name: bytes, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace a note by what `change` makes of it (None for no note), with nobody in between.

        Raises `StorageError`.
        """
        with self._backend.update() as transaction:
            old = transaction.note(name)
            new = change(old)
            if new != old:
                transaction.put_note(name, new)

    # -- writing ------------------------------------------------------------------------------------------------------

    def wants(self, namespace: bytes, parent: bytes, tokens: bytes) -> bool:
        """Whether a page with these token bytes behind `parent` is worth taking."""
        probe = Page(page_key(parent, tokens), parent, namespace, 0, tokens, 0, 0, 0, 0, 0)
        with self._catalog.lock:
            return self._catalog.wants(probe)

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Which pages of a sequence, given by all their keys, are worth taking: up to the first that was refused."""
        catalog = self._catalog
        with catalog.lock:
            missing = [i for i, key in enumerate(keys) if key not in catalog.index]
            return list(itertools.takewhile(lambda i: keys[i] not in catalog.refused, missing))

    def has(self, key: bytes) -> bool:
        """Whether a page or snapshot is here, or was refused: whether it need not be taken."""
        with self._catalog.lock:
            return key in self._catalog.index or key in self._catalog.refused

    def thin(self, namespace: bytes, tokens: Tokens, page_tokens: int, keep: int, interval: int) -> int:
        """Delete all but `keep` of the snapshots along `tokens`, with the next batch; how many. See `snapshots.thin`.

        Pinned ones stay, and those from which other prompts go their own way stay before others.
        """
        catalog = self._catalog
        with catalog.lock:
            paths = catalog.index.standing(namespace, tokens, page_tokens)[::-1]
            if len(paths) <= keep:
                return 0
            positions = [path.n_tokens for path in paths]
            branches = catalog.index.branches(namespace, tokens, page_tokens)
            # the snapshot before a fork is where the others start
            shared = {max((n for n in positions if n <= branch), default=0) for branch in branches}
            doomed = thin(positions, keep, interval, shared)
            for path in paths:
                if path.n_tokens in doomed and not path.pages[-1].pinned:
                    catalog.thin(path.pages[-1])
        return len(doomed)

    def condemn(self, page: Page, fits: Fits) -> None:
        """Have a page deleted with the next batch, and what is behind it, if its state does not fit then either.

        `fits` is what all contexts of the namespace agree in, and may be called by another thread.
        """
        with self._catalog.lock:
            self._catalog.condemn(page.key, fits)

    def announce(self, new: NewPage) -> bool:
        """Put a page into the index, to be found from now on; False, and nothing happens, if it is not wanted."""
        new.page.priority, new.page.expires = self._priority, self._expiry(new.page.created)
        with self._catalog.lock:
            return self._catalog.announce(new)

    def commit(self, batch: Sequence[NewPage]) -> int:
        """Write announced pages; the number of those that are stored now. See `Committer.commit`."""
        return self._committer.commit(batch)

    @property
    def has_notes(self) -> bool:
        """Whether uses, or pages to be deleted, wait to be written with the next batch."""
        catalog = self._catalog
        return bool(catalog.touched or catalog.damaged or catalog.thinned or catalog.overdue)

    @property
    def has_hot_pages(self) -> bool:
        """Whether `keep_states` has something to do."""
        return bool(self._hot)

    def keep_states(self) -> None:
        """Have the states of pages at hand that prompts began with of late. Raises `StorageError`."""
        while self._hot:
            _, page = self._hot.popitem()
            with self._catalog.lock:
                is_there = self._catalog.index.get(page.key) is page
            if is_there and self._backend.state(page.key, page.tokens) is None:
                with self.fetching([page]) as states:
                    for state in states:
                        self._backend.keep(page.key, page.tokens, state)

    def sync(self) -> None:
        """Return when all that was committed is durable."""
        self._backend.sync()

    def pin(self, namespace: bytes, tokens: Tokens, page_tokens: int, *, pinned: bool) -> int:
        """Pin or unpin the committed pages of the longest stored prefix; the number of tokens they cover."""
        catalog = self._catalog
        with catalog.transaction(self._backend) as transaction:
            with catalog.lock:
                standing = catalog.index.standing(namespace, tokens, page_tokens)
                # where there are snapshots, pages alone are of no use
                path = standing[0] if standing else catalog.index.match(namespace, tokens, page_tokens)
            for page in path.pages:
                usage = transaction.usage(page.key)
                if usage is not None:
                    transaction.touch(page.key, replace(usage, pinned=pinned))
            with catalog.lock:
                for page in path.pages:
                    page.pinned = pinned
                    if page.key not in catalog.pending:
                        catalog.candidates.offer(page)
                # what was refused for want of room may find it now
                catalog.refused.clear()
        return path.n_tokens

    def clear(self, namespace: bytes | None) -> int:
        """Delete all pages of a namespace, pinned ones too (None: of the location); how many."""
        catalog = self._catalog
        with catalog.transaction(self._backend) as transaction:
            with catalog.lock:
                doomed = [page.key for page in catalog.index if namespace in (None, page.namespace)]
                # nobody finds them, nor puts anything behind them, while they are deleted
                for key in doomed:
                    catalog.forget(key)
            for key in doomed:
                transaction.delete(key)
        return len(doomed)
