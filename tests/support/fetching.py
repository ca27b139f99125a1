"""A fetcher over a backend in memory that can be slow, or forge what it returns, and notices misuse of its views."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np

from prefixstore.buffers import BufferPool
from prefixstore.counters import Counters
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pending import PendingPage
from prefixstore.format.autocodec import Encoder, encode
from prefixstore.format.keys import as_tokens, page_key
from tests.support.engines import NS, MemoryPages, P

SIZE = 30_001


def state_of(i: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(i).standard_normal(size // 2 + 1).astype("<f2").tobytes()[:size]


class WatchedView:
    """A view that passes everything on, and notices use by two threads at once, or after it was closed."""

    def __init__(self, view, watcher):
        self.view = view
        self.watcher = watcher
        self.in_use = threading.Lock()

    def fetch(self, keys):
        inner = self.view.fetch(keys)
        try:
            for i, _ in enumerate(keys):
                with self.alone():
                    found = next(inner, None)
                    self.watcher.before(i)
                if found is None:
                    return
                yield self.watcher.change(i, *found)
        finally:
            self.watcher.fetches_closed += 1

    @contextmanager
    def alone(self):
        assert self.in_use.acquire(blocking=False), "two threads use one view"
        try:
            assert self.watcher.open, "the view is closed"
            yield
        finally:
            self.in_use.release()

    def __getattr__(self, name):
        return getattr(self.view, name)


class Watcher(MemoryPages):
    """A backend in memory that can be slow, or forge what it returns."""

    def __init__(self):
        super().__init__()
        self.open = 0
        self.fetches_closed = 0
        self.before = lambda i: None
        self.change = lambda i, record, payload: (record, payload)

    @contextmanager
    def view(self):
        with super().view() as view:
            self.open += 1
            try:
                yield WatchedView(view, self)
            finally:
                self.open -= 1


class CodecPerPage(Encoder):
    """Packs each page with the next of some codecs."""

    def __init__(self, codecs):
        super().__init__()
        self._codecs = iter(codecs)

    def __call__(self, namespace, raw):
        return encode(raw, next(self._codecs))


class Store:
    """A catalog with one sequence of pages in a backend, and a fetcher."""

    def __init__(self, backend, codecs, *, pending=0):
        self.backend, self.counters = backend, Counters()
        self.engine = Engine(backend, Budget(1 << 30, None), POLICIES["lru"](), CodecPerPage(codecs), self.counters)
        self.catalog, self.fetcher = self.engine._catalog, self.engine._fetcher
        self.buffers = BufferPool(1 << 30)
        self.news, parent = [], NS
        for i in range(len(codecs) + pending):
            tokens = as_tokens([i] * P).tobytes()
            buffer = self.buffers.acquire(SIZE)
            buffer.view[:] = state_of(i)
            new = PendingPage.of(NS, b"{}", parent, i * P, tokens, buffer)
            parent = page_key(parent, tokens)
            assert self.engine.captures.announce(new)
            self.news.append(new)
        assert self.engine.commit(self.news[: len(codecs)]) == len(codecs)
        for new in self.news[: len(codecs)]:
            new.buffer.release()
        self.pages = [new.page for new in self.news]

    @property
    def bytes_in_use(self):
        return self.fetcher.buffers.in_use

    def fetch(self, pages=None, **options):
        """How many states were given out; each is compared with the original."""
        n = 0
        with self.engine.fetching(self.pages if pages is None else pages, **options) as states:
            for i, state in enumerate(states):
                assert bytes(state) == state_of(i)
                n += 1
        assert self.bytes_in_use == 0
        return n


@contextmanager
def store_of(codecs, backend=None, **options):
    store = Store(Watcher() if backend is None else backend, codecs, **options)
    try:
        yield store
    finally:
        store.fetcher.close()
        store.backend.close()
        store.engine.threads.close()


def forging(at, **changes):
    def change(i, record, payload):
        if i != at:
            return record, payload
        for name, value in changes.items():
            if name == "payload":
                payload = value(payload)
            else:
                object.__setattr__(record, name, value)
        return record, payload

    return change
