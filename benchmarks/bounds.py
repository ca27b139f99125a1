"""What must not grow with the size of a store: failures, pins, tenants, expired pages.

``python -m benchmarks.bounds`` prints it; it stores no result.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from statistics import median
from typing import Any

from prefixstore.buffers import BufferPool
from prefixstore.engine.budget import Budget, Quota
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pages import open_pages
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import UnavailableError
from prefixstore.format.autocodec import pick
from prefixstore.format.keys import as_tokens, page_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, Usage, checksum
from prefixstore.stats import Counters

PAGES, PINS, TENANTS, CHAIN = 100_000, 15_000, 1_500, 20_000
PAGE_TOKENS = 4
ROUNDS = 15
GIB = 1 << 30
ONE = Namespace({"salt": "tenant 0"})


def fill(backend: Any, namespaces: list[Namespace], *, pinned: bool = False, depth: int = 1, expires: int = 0) -> None:
    """One page for each namespace in the list, or chains of `depth` pages."""
    payload, now = b"p" * 100, time.time_ns() - 10**12
    with backend.update() as transaction:
        for number, namespace in enumerate(namespaces):
            transaction.put_namespace(namespace.key, namespace.canonical)
            parent = namespace.key
            for i in range(depth):
                tokens = as_tokens([number, i, 2, 3]).tobytes()
                start, size = i * PAGE_TOKENS, len(payload)
                record = Record(namespace.key, parent, start, tokens, 0, size, size, checksum(payload), 0, now + number)
                parent = page_key(parent, tokens)
                transaction.put(parent, record, Usage(now + number, 0, pinned, 0, expires), payload)


class Failing:
    """A backend whose next commit fails when it is told so."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextmanager
    def update(self) -> Any:
        with self._inner.update() as transaction:
            yield transaction
            if self.fails:
                self.fails = False
                raise UnavailableError("fails on purpose")


class Caller:
    """Puts pages, one after another."""

    def __init__(self, backend: Any, budget: Budget) -> None:
        self.engine = Engine(backend, budget, POLICIES["lru"](), pick("raw"), Counters())
        self._buffers = BufferPool(GIB)
        self._number = 10**6

    def match(self, tokens: list[int]) -> int:
        return self.engine.match(ONE.key, as_tokens(tokens), PAGE_TOKENS).n_tokens

    def put(self) -> int:
        """One new page; how many were written."""
        self._number += 1
        buffer = self._buffers.acquire(100)
        assert buffer is not None
        tokens = as_tokens([self._number, 1, 2, 3]).tobytes()
        new = PendingPage.of(ONE.key, ONE.canonical, ONE.key, 0, tokens, buffer)
        self.match([self._number])
        self.engine.captures.announce(new)
        written = self.engine.commit([new])
        buffer.release()
        return written


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def figure(name: str, value: float) -> None:
    print(f"{name:<72} {value * 1e3:>10.2f} ms", flush=True)


def after_a_failure(kind: str, n_pages: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        location = {"memory": "memory:", "lmdb": f"lmdb://{directory}/kv", "sqlite": f"sqlite:///{directory}/kv.db"}[
            kind
        ]
        backend = Failing(open_pages(location, max_bytes=GIB, read_only=False))
        fill(backend, [ONE] * n_pages)
        caller = Caller(backend, Budget(GIB, max_entries=n_pages))
        with closing(caller.engine):
            figure(f"{kind}, {n_pages:,} pages: first lookup, which reads all", seconds(lambda: caller.match([1])))
            puts = [seconds(caller.put) for _ in range(ROUNDS)]
            figure(f"{kind}, {n_pages:,} pages: a put", median(puts))
            backend.fails = True
            caller.put()
            figure(f"{kind}, {n_pages:,} pages: the lookup after a failed put", seconds(lambda: caller.match([1])))


def figure_of_puts(name: str, caller: Caller) -> None:
    """The median time of a put into a store that is full."""
    with closing(caller.engine):
        for _ in range(105):
            caller.put()
        figure(name, median(seconds(caller.put) for _ in range(ROUNDS)))


def with_pins(n_pins: int) -> None:
    backend = open_pages("memory:", max_bytes=GIB, read_only=False)
    fill(backend, [ONE] * n_pins, pinned=True)
    caller = Caller(backend, Budget(GIB, max_entries=n_pins + 100))
    figure_of_puts(f"{n_pins:,} pins: a put that evicts", caller)


def with_tenants(n_tenants: int) -> None:
    backend = open_pages("memory:", max_bytes=GIB, read_only=False)
    fill(backend, [Namespace({"salt": f"tenant {number}"}) for number in range(n_tenants)])
    caller = Caller(backend, Budget(GIB, None, Quota(10_000, 10_000)))
    figure_of_puts(f"{n_tenants:,} tenants with a quota: a put", caller)


def with_expired(n_pages: int) -> None:
    backend = open_pages("memory:", max_bytes=GIB, read_only=False)
    fill(backend, [ONE], depth=n_pages, expires=1)
    caller = Caller(backend, Budget(GIB))
    tokens = [token for i in range(n_pages) for token in (0, i, 2, 3)]
    with closing(caller.engine):
        caller.match([9])
        figure(
            f"{n_pages:,} expired pages in a chain: a lookup",
            median(seconds(lambda: caller.match(tokens)) for _ in range(5)),
        )


def main() -> None:
    for kind in ("memory", "lmdb", "sqlite"):
        for n_pages in (PAGES // 100, PAGES):
            after_a_failure(kind, n_pages)
    for n_pins in (0, PINS):
        with_pins(n_pins)
    for n_tenants in (10, TENANTS):
        with_tenants(n_tenants)
    with_expired(CHAIN)


if __name__ == "__main__":
    main()
