"""An engine without a model, and what tests do with it: put sequences of tokens, match, fetch, fail, fork."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.backends.memory import COSTS, MemoryBackend
from prefixstore.counters import Counters
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.page import Path
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.policy import Policy
from prefixstore.format.autocodec import Encoder
from prefixstore.format.keys import SNAPSHOT, as_tokens, page_keys
from prefixstore.format.record import RECORD, RECORD_SEAL, USAGE
from tests.support import keys_of
from tests.support.timeouts import wait_for  # noqa: F401 - imported from here

MIB = 1 << 20
P = 4  # tokens per page
NS, OTHER = b"n" * 32, b"o" * 32
# three sequences of three pages, which share nothing
A, B, C = [1] * 12, [2] * 12, [3] * 12


class MemoryPages(Pages):
    """Pages in the memory of this process. A closed one can be used again, as a location that is opened again."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())

    def close(self) -> None:
        """Keep what is in it."""


def state_of(key: bytes, size: int = 1000) -> bytes:
    """The state of a page, which cannot be compressed."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(size)


def compressible(key: bytes, size: int = 1000) -> bytes:
    """The state of a page as models make them: 16-bit floats, of which the upper bytes can be compressed."""
    values = np.random.default_rng(int.from_bytes(key, "little")).standard_normal(-(-size // 2))
    return values.astype(np.float16).tobytes()[:size]


@dataclass
class Store:
    """An engine, and what a test does with it, in one namespace if it names no other."""

    backend: Any
    max_bytes: int = 64 * MIB
    max_entries: int | None = None
    state_of: Callable[[bytes, int], bytes] = state_of
    codec: str = "raw"
    quota: int | None = None
    policy: str | Policy = "lru"
    namespace: bytes = NS
    settings: bytes = b'{"n":1}'
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.open(**self.options)

    def open(self, **options):
        """A new engine on the backend."""
        self.counters = Counters()
        budget = Budget(self.max_bytes, self.max_entries, self.quota)
        policy = POLICIES[self.policy]() if isinstance(self.policy, str) else self.policy
        self.engine = Engine(self.backend, budget, policy, Encoder(self.codec), self.counters, **options)

    def pages(self, tokens, size=1000, *, namespace=None) -> list[PendingPage]:
        """The pages of a sequence that are worth capturing, the tail included."""
        tokens, news, namespace = as_tokens(tokens), [], namespace or self.namespace
        parents = [namespace, *page_keys(namespace, tokens, P)]
        for start, end in self.engine.lookups.missing(namespace, tokens, P, tail=True):
            buffer = self.engine.write_queue.acquire(size, wait=True)
            piece = tokens[start:end].tobytes()
            news.append(PendingPage.of(namespace, self.settings, parents[start // P], start, piece, buffer))
            buffer.view[:] = self.state_of(news[-1].page.key, size)
        return news

    def announce(self, tokens, size=1000, **options) -> list[PendingPage]:
        return [new for new in self.pages(tokens, size, **options) if self.engine.write_queue.announce(new)]

    def submit(self, tokens, size=1000) -> int:
        """Capture a sequence, whose pages are written in the background; how many were taken."""
        return sum(len(self.engine.write_queue.submit(new)) for new in self.pages(tokens, size))

    def put(self, tokens, size=1000, **options) -> int:
        """Store what is missing of a sequence; how many pages of it were written."""
        self.match(tokens, **options)
        batch = self.announce(tokens, size, **options)
        stored = self.engine.commit(batch)
        for new in batch:
            new.buffer.release()
        return stored

    def path(self, tokens, *, namespace=None) -> Path:
        return self.engine.match(namespace or self.namespace, as_tokens(tokens), P)

    def match(self, tokens, **options) -> int:
        return self.path(tokens, **options).n_tokens

    def match_snapshot(self, tokens, limit=None, multiple_of=1) -> int:
        limit = len(tokens) if limit is None else limit
        return self.engine.match_snapshot(self.namespace, as_tokens(tokens), P, limit, multiple_of).n_tokens

    def fetch(self, tokens, **options) -> int:
        """Restore a prompt, compare what was verified, record the use; how many pages were restored."""
        path = self.path(tokens)
        with self.engine.fetching(path.pages, **options) as states:
            found = [bytes(state) for state in states]
            del found[states.verified() :]
        loaded = path.pages[: len(found)]
        assert found == [self.state_of(page.key, len(state)) for page, state in zip(loaded, found, strict=True)]
        self.engine.touch(self.namespace, loaded)
        return len(loaded)

    def pin(self, tokens, *, pinned=True) -> int:
        return self.engine.upkeep.pin(self.namespace, as_tokens(tokens), P, pinned=pinned)

    def stored_keys(self) -> set[bytes]:
        return keys_of(self.backend)

    def close(self):
        assert (found := self.engine.upkeep.check()) == [], found
        self.engine.close()


@contextmanager
def store_of(backend=None, **options):
    """A store that is checked at the end."""
    store = Store(MemoryPages() if backend is None else backend, **options)
    with closing(store):
        yield store


def note_of(store, name):
    """A note of a location."""
    with store.engine.view() as view:
        return view.note(name)


@contextmanager
def two_stores(path, **options):
    """Two stores on one location, as two processes have them."""
    with (
        store_of(Pages(LMDBBackend(path, MIB)), **options) as one,
        store_of(Pages(LMDBBackend(path, MIB)), **options) as two,
    ):
        yield one, two


def snapshot_of(store, tokens, size=100) -> PendingPage:
    """A snapshot after these tokens, as captured just now."""
    keys = [NS, *page_keys(NS, as_tokens(tokens), P)]
    start = (len(keys) - 1) * P
    buffer = store.engine.write_queue.acquire(size)
    raw = as_tokens(tokens[start:]).tobytes()
    new = PendingPage.of(NS, store.settings, keys[-1], start, raw, buffer, 0, SNAPSHOT)
    buffer.view[:] = state_of(new.page.key, size)
    return new


def put_snapshots(store, tokens, positions) -> int:
    """Store the pages of a sequence, which hold tokens only, and snapshots at these positions."""
    store.put(tokens[: len(tokens) - len(tokens) % P], 0)
    news = [snapshot_of(store, tokens[:n]) for n in positions]
    return store.engine.commit([new for new in news if store.engine.write_queue.announce(new)])


def entry(n_tokens=P, size=1000):
    """What a page costs in memory at most: its record with its payload, its usage, and two rows among its siblings."""
    return (
        taken(n_tokens, size)
        + COSTS.of(bytes(33), bytes(USAGE.size))
        + 2 * COSTS.of(bytes(17 + 4 * n_tokens), bytes(33))
    )


def taken(n_tokens=P, size=1000):
    """What a page takes in memory."""
    return COSTS.of(bytes(33), bytes(RECORD.size + RECORD_SEAL.size + 4 * n_tokens), size)
