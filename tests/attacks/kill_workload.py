"""What processes do to a store before they are killed: through engine and archive, with pages made from their keys."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import xxhash

from prefixstore.backends.sql import migrations as migrate
from prefixstore.cli import main
from prefixstore.engine import siblings
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.page_view import View
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import UnavailableError
from prefixstore.format.autocodec import pick
from prefixstore.format.export import ExportReader
from prefixstore.format.keys import PAGE, SNAPSHOT, as_tokens, page_key
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import import_store
from prefixstore.stats import Counters
from tests.support.engines import compressible
from tests.support.places import space
from tests.support.revisions import a_later_version

BUDGET = Budget(700 << 10)
SPACES = [space("one"), space("two")]
P = 4
# methods of a transaction that write
WRITES = {"put", "delete", "touch", "put_namespace", "drop_empty_namespaces", "put_note"}


def state_of(key: bytes) -> bytes:
    """The state of a page, as large as its key says."""
    return compressible(key, key[0] * 60 % 12_000)


def digest(view: View) -> str:
    """All that a store holds, to the last bit."""
    hasher = xxhash.xxh3_128()
    for key, record, usage in sorted(view.scan(), key=lambda page: page[0]):
        payload = view.payload(key)
        for part in (key, record.pack(), usage.pack(), payload if payload is not None else b"none"):
            hasher.update(part)
    for key, settings in sorted(view.namespaces().items()):
        # a commit drops those without pages
        if view.count(key).pages:
            hasher.update(key + settings)
    hasher.update(view.note(b"note") or b"")
    return hasher.hexdigest()


class Report:
    """What a child has done, line by line, in a file that outlives it; and in the journal of the shim, if it runs."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._mark = getattr(ctypes.CDLL(None), "power_mark", None)

    def __call__(self, *words: str) -> None:
        os.write(self._file, " ".join(words).encode() + b"\n")
        if self._mark is not None:
            self._mark(" ".join(words).encode())


class Points:
    """The points at which a child may be killed, and how many of them it has passed."""

    def __init__(self, die_at: int) -> None:
        self._die_at = die_at
        self.n_passed = 0

    def __call__(self) -> None:
        self.n_passed += 1
        if self.n_passed == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)


class _Writing:
    """A transaction in which each call that writes is a point."""

    def __init__(self, transaction: Any, point: Callable[[], None]) -> None:
        self._transaction = transaction
        self._point = point

    def __getattr__(self, name: str) -> Any:
        if name in WRITES:
            self._point()
        return getattr(self._transaction, name)


class Watched:
    """A backend that reports what it does, with a point before and after each write."""

    def __init__(self, backend: Pages, say: Report, point: Callable[[], None], *, durable: bool = True) -> None:
        self._backend = backend
        self._say = say
        self._point = point
        self._durable = durable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    @contextmanager
    def update(self) -> Iterator[Any]:
        self._point()
        with self._backend.update() as transaction:
            self._say("found", digest(transaction))
            yield _Writing(transaction, self._point)
            self._say("about", digest(transaction))
            self._point()
        self._point()
        self._say("committed")

    def sync(self) -> None:
        self._point()
        if self._durable:
            self._backend.sync()
        self._point()
        self._say("durable")

    def reclaim(self) -> None:
        self._point()
        self._backend.reclaim()
        self._point()

    def scrub(self) -> None:
        self._point()
        self._backend.scrub()
        self._point()

    def compact(self) -> int:
        self._point()
        freed = self._backend.compact()
        self._point()
        return freed


def pages_of(
    settings: Any, tokens: list[int], acquire: Callable[[int], Any], form: int = PAGE
) -> Iterator[PendingPage]:
    """The pages of a sequence, or a snapshot at its end, as captured now."""
    raw, parent = as_tokens(tokens).tobytes(), settings.key
    for start in range(0, len(raw), 4 * P):
        piece = raw[start : start + 4 * P]
        is_last = start + 4 * P >= len(raw)
        key = page_key(parent, piece, form if is_last else PAGE)
        state = state_of(key)
        view = acquire(len(state))
        view.view[:] = state
        yield PendingPage.of(
            settings.key, settings.canonical, parent, start // 4, piece, view, form=form if is_last else PAGE
        )
        parent = key


class Work:
    """The engine and the archive of one location in one process; neither may fail."""

    def __init__(
        self,
        location: str,
        say: Report,
        point: Callable[[], None],
        *,
        durable: bool = True,
    ) -> None:
        self._location = location
        self._watch = lambda backend: Watched(backend, say, point, durable=durable)
        backend = open_pages(location, max_bytes=BUDGET.max_bytes)
        with backend.view() as view:
            say("found", digest(view))
        options = {"queue_bytes": 1 << 24, "write_behind": False}
        self.engine = Engine(self._watch(backend), BUDGET, POLICIES["lru"](), pick("raw"), Counters(), **options)

    def capture(self, settings: Any, tokens: list[int], form: int = PAGE) -> None:
        """Store what is missing of a sequence, in one batch."""
        self.engine.match(settings.key, as_tokens(tokens), P)
        news = list(pages_of(settings, tokens, self.engine.acquire, form))
        self.engine.commit([new for new in news if self.engine.announce(new)])
        for new in news:
            new.buffer.release()

    def use(self, settings: Any, tokens: list[int]) -> None:
        path = self.engine.match(settings.key, as_tokens(tokens), P)
        with self.engine.fetching(path.pages) as states:
            for page, state in zip(path.pages, states, strict=False):
                assert bytes(state) == state_of(page.key)
        self.engine.touch(settings.key, path.pages)

    @contextmanager
    def _archive(self) -> Iterator[Archive]:
        def opened(*given: Any, **options: Any) -> Pages:
            return self._watch(open_pages(*given, **options))

        with patch("prefixstore.maintenance.archive.open_pages", opened):
            archive = Archive(self._location, max_bytes=BUDGET.max_bytes, create=True)
        with archive:
            yield archive

    def all(self, seed: int, pack: bytes) -> None:
        """A little of everything that changes a store."""
        one, two, three, four = np.random.default_rng(seed).integers(0, 3, (4, 9)).tolist()
        engine = self.engine
        self.capture(SPACES[0], one)
        engine.flush()
        self.use(SPACES[0], one)
        self.capture(SPACES[1], two)
        engine.pin(SPACES[1].key, as_tokens(two[:4]), P, pinned=True)
        for n in (6, 9):
            self.capture(SPACES[1], three[:n], SNAPSHOT)
        engine.thin(SPACES[1].key, as_tokens(three), P, 1, P)
        engine.flush()
        engine.change_note(b"note", lambda _: str(seed).encode())
        with self._archive() as archive:
            import_store(ExportReader(io.BytesIO(pack), "pack"), archive)
            archive.purge(tokens=one[:4])
            archive.evict_to(archive.used().bytes * 3 // 4)
            if seed % 8 == 0:
                archive.scrub()
            if seed % 8 == 2 and sys.platform == "linux":
                archive.compact()
        if seed % 8 == 4:
            engine.clear(SPACES[seed // 8 % 2].key)
        self.capture(SPACES[0], four)
        engine.flush()

    def close(self) -> None:
        self.engine.close()


def work(location: str, seed: int, pack: str, say: Report, point: Points, *, durable: bool = True) -> None:
    with closing(Work(location, say, point, durable=durable)) as one:
        one.all(seed, bytes.fromhex(pack))


def maintain(location: str, seed: int, pack: str, say: Report, point: Points) -> None:
    """Evict, and build what is derived from pages again."""
    del pack
    sequences = np.random.default_rng(seed).integers(0, 3, (6, 9)).tolist()
    add = siblings.add_child

    def added(*arguments: Any) -> None:
        point()
        add(*arguments)

    with closing(Work(location, say, point)) as one:
        for tokens in sequences:
            one.capture(SPACES[0], tokens)
        with one.engine.view() as view:
            half = view.used.bytes // 2
        one.engine.evict(half)
        # a change that no one else makes: of none, or of all
        with patch.object(siblings, "add_child", added):
            one.engine._backend.reindex()


def work_forever(location: str, seed: int, pack: str, say: Report, point: Points) -> None:
    """Work until killed. While the server is down, pages are dropped and other calls fail; both work again later."""
    one, parent = None, os.getppid()
    while os.getppid() == parent:
        try:
            one = one or Work(location, say, point)
            one.all(seed, bytes.fromhex(pack))
        except UnavailableError:
            time.sleep(0.02)
        seed += 1


def scrub_among_writers(location: str, seed: int, pack: str, say: Report, point: Points) -> None:
    """Pages are deleted in the middle of a scrub, which then finds them free."""
    del pack
    with closing(Work(location, say, point)) as one:
        for tokens in np.random.default_rng(seed).integers(0, 3, (4, 9)).tolist():
            one.capture(SPACES[0], tokens)
        backend = one.engine._backend._backend.rows

        def sync() -> None:
            del backend.sync
            backend.sync()
            say("durable")
            one.engine.clear(SPACES[0].key)

        backend.sync = sync
        backend.compact(erase=True)


def create(location: str, say: Report, point: Points) -> None:
    del point
    Archive(location, max_bytes=BUDGET.max_bytes, create=True).close()
    say("created")


def export(location: str, out: str, say: Report, point: Points) -> None:
    del point
    with closing(Work(location, say, lambda: None)) as one:
        one.capture(SPACES[0], [1] * 9)
    with redirect_stdout(sys.stderr):
        assert main(["export", location, "--out", out]) == 0
    say("exported")


def upgrade(location: str, later: str, say: Report, point: Points) -> None:
    del point  # those of the statements and system calls are all that there are
    with a_later_version(Path(later)):
        migrate.upgrade(location)
    say("upgraded")


TASKS = {task.__name__: task for task in (work, work_forever, scrub_among_writers, maintain, create, export, upgrade)}
