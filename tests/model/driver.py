"""The store under test. Nothing else in this package knows the engine: when that is replaced, this is rewritten."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import numpy as np

from prefixstore import FullError, PrefixStore, StorageError, UnavailableError, opening
from prefixstore.engine import commit
from prefixstore.engine.pending import PendingPage
from prefixstore.format.codec import decode
from prefixstore.format.export import ExportReader
from prefixstore.format.keys import PAGE, SNAPSHOT, as_tokens, page_key
from prefixstore.format.namespace import Namespace
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import export_store, import_store
from prefixstore.results import Stats
from tests.model.reference import Facts, P, Page, Space, Used, pages_of
from tests.support.faults import Seam
from tests.support.s3 import forget_turn
from tests.support.valkey import forget_lock

# what asks the location, or changes it
OPERATIONS = {
    *("view", "update", "commit", "committed", "sync", "generation", "record", "records", "usage", "leading"),
    *("neighbors", "beside", "children", "followed", "count", "fetch", "payload", "put", "delete", "touch", "note"),
    *("put_note", "put_namespace", "namespace", "namespaces", "drop_empty_namespaces", "point"),
}


class Clock:
    """The time, which goes on only by what the machine says, and a little with each look."""

    def __init__(self) -> None:
        self.now = 1_700_000_000 * 10**9

    def __call__(self) -> int:
        self.now += 1000
        return self.now


CLOCK = Clock()


@contextmanager
def driven_time() -> Iterator[None]:
    """The time of day is that of `CLOCK`, and nothing pauses."""
    with patch("time.time_ns", CLOCK), patch.object(commit, "PAUSE", 0.0):
        yield


# the fault of which this process dies
_DEADLY: list[_Fault] = []


def point(*_: object) -> None:
    """A moment at which this process may die, also below the operations of a backend."""
    for fault in _DEADLY:
        fault.before("point")


class _Fault:
    """What is wrong with a location: ``"down"``, ``"full"``, ``"hangs"`` (for writers) or ``"dies"`` (the process)."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.left = 0
        self.gate = threading.Event()
        self.gate.set()

    def before(self, operation: str) -> None:
        if operation not in OPERATIONS:
            return
        if operation == "update":
            self.gate.wait()
        if self.kind is None or (self.kind == "full" and operation != "put"):
            return
        self.left -= 1
        if self.left >= 0:
            return
        if self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "full":
            raise FullError("full on purpose")
        raise UnavailableError(f"{operation} fails on purpose")


class Store:
    """A `PrefixStore` without a Llama, and what a Llama, a user and an operator do with it.

    Parameters
    ----------
    locations
        One URL, or two.
    options
        Of `PrefixStore`.
    journal
        A directory and a file: what is written below the one is recorded in the other; see `process.Disks`.
    """

    def __init__(
        self, locations: Sequence[str], options: dict[str, Any], journal: tuple[str, str] | None = None
    ) -> None:
        self._locations, self._options, self._journal = list(locations), options, journal
        self._is_hanging = False
        if journal is not None:
            ctypes.CDLL(None).power_start(*map(os.fsencode, journal))
        self._open()

    def _open(self) -> None:
        self._faults: list[_Fault] = []
        self._backends: list[Any] = []
        real = opening.open_pages

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self._faults.append(_Fault())
            self._backends.append(Seam(real(*arguments, **options), self._faults[-1].before))
            return self._backends[-1]

        with patch.object(opening, "open_pages", wrapped):
            self._store = PrefixStore(self._locations, page_tokens=P, min_tokens=0, max_delay=None, **self._options)
        self.engine = self._store.engine

    def close(self) -> None:
        self.heal()
        self._store.close()

    def reopen(self, *jobs: tuple[Space, tuple[int, ...]]) -> list[Page]:
        """Capture sequences, and close the store while they wait to be written; the pages that were taken."""
        if self._options.get("write_behind", True):
            self.fail("hangs", 0, 0)
            threading.Thread(target=self._heal_when_closing).start()
        taken = self.capture(*jobs)
        self._store.close()
        self._open()
        return taken

    def _heal_when_closing(self) -> None:
        while not self.engine.write_queue._closing:
            time.sleep(0.001)
        self._heal()

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _match(self, space: Space, tokens: tuple[int, ...]) -> Any:
        wanted = as_tokens(tokens)
        if space.has_snapshots:
            return self.engine.match_snapshot(_namespace(space).key, wanted, P, len(wanted))
        return self.engine.match(_namespace(space).key, wanted, P)

    def match(self, space: Space, tokens: tuple[int, ...]) -> int | None:
        """How many tokens are stored; None if the location fails."""
        return self._or_none(lambda: self._match(space, tokens).n_tokens)

    def restore(
        self, space: Space, tokens: tuple[int, ...], *, streamed: bool = True
    ) -> tuple[int, list[tuple[Page, bytes]]] | None:
        """How many tokens are stored, and the states that come back; None if the location fails."""

        def work() -> tuple[int, list[tuple[Page, bytes]]]:
            path = self._match(space, tokens)
            before: tuple[int, ...] = ()
            pages = []
            for page in path.pages:
                before += _tokens(page.tokens)
                pages.append(Page(_space(page.namespace), before, page.form == SNAPSHOT))
            # pages of recurrent memory have no state
            first = max(len(pages) - 1, 0) if space.has_snapshots else 0
            with self.engine.fetching(path.pages[first:], streamed=streamed) as states:
                found = [bytes(state) for state in states]
                del found[states.verified() :]
            if len(found) == len(pages) - first:
                self.engine.touch(_namespace(space).key, path.pages, len(tokens))
            return path.n_tokens, list(zip(pages[first:], found, strict=False))

        return self._or_none(work)

    def capture(self, *jobs: tuple[Space, tuple[int, ...]]) -> list[Page]:
        """Capture sequences; the pages that were taken. They are written unless the location hangs."""
        taken: list[Page] = []
        for space, tokens in jobs:
            with suppress(StorageError) if self.is_faulty else nullcontext():
                self._match(space, tokens)
            taken += self.engine.threads.call(self._submit_together, pages_of(space, tokens))
            self.settle()
        return taken

    def _submit_together(self, pages: Sequence[Page]) -> list[Page]:
        """Have all pages of a sequence written together; those that were taken."""
        with self.engine.write_queue._lock:
            return [page for page in pages if self.submit(page)]

    def submit(self, page: Page) -> bool:
        """Capture a page; whether it was taken."""
        namespace, state = _namespace(page.space), page.state
        parent = key_of(page.parent) if page.parent is not None else namespace.key
        piece = as_tokens(page.tokens[page.start :]).tobytes()
        form = SNAPSHOT if page.is_snapshot else PAGE
        buffer = self.engine.write_queue.acquire(len(state))
        if buffer is None:
            return False
        buffer.view[:] = state
        new = PendingPage.of(namespace.key, namespace.canonical, parent, page.start, piece, buffer, 0, form)
        return bool(self.engine.write_queue.submit(new))

    # -- users and operators ------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        return self._store.stats()

    def flush(self) -> bool:
        """Whether the store says that everything is durable."""
        done = self._or_none(self._store.flush, True) is not None
        if done and self._journal is not None:
            ctypes.CDLL(None).power_mark(b"flushed")
        return done

    def pin(self, space: Space, tokens: tuple[int, ...], *, pinned: bool) -> int | None:
        """How many tokens are pinned now, or no longer; None if the location fails."""
        wanted = as_tokens(tokens)
        return self._or_none(lambda: self.engine.upkeep.pin(_namespace(space).key, wanted, P, pinned=pinned))

    def evict(self, n_bytes: int) -> bool:
        """Evict in the nearest location; whether it holds no more than that now."""
        return bool(self._or_none(lambda: self._store.evict(n_bytes).is_enough))

    def clear(self, space: Space | None) -> bool:
        work = lambda: self.engine.upkeep.clear(_namespace(space).key if space is not None else None)  # noqa: E731
        return self._or_none(work) is not None

    def rebuild(self) -> None:
        """Make what is derived from pages again, and overwrite what was deleted."""
        for backend in self._backends:
            backend.inner.reindex()
        with suppress(UnavailableError):  # an LMDB location that another process has open, too
            self._store.engine.upkeep.scrub()

    def purge(self, **choice: Any) -> None:
        for location in self._locations:
            with Archive(location, max_bytes=self._options["max_bytes"]) as archive:
                archive.purge(**choice)

    def export(self) -> bytes:
        """All pages of the last location."""
        file = io.BytesIO()
        with Archive(self._locations[-1], max_bytes=self._options["max_bytes"]) as archive:
            export_store(archive, file)
        return file.getvalue()

    def import_(self, exported: bytes) -> None:
        with Archive(self._locations[-1], max_bytes=self._options["max_bytes"]) as archive:
            import_store(ExportReader(io.BytesIO(exported), "export"), archive)

    # -- accidents ----------------------------------------------------------------------------------------------------

    @property
    def is_faulty(self) -> bool:
        return any(fault.kind is not None for fault in self._faults)

    def fail(self, kind: str, after: int, where: int) -> None:
        """From now on, after so many operations, one of the locations fails."""
        fault = self._faults[where % len(self._faults)]
        fault.kind, fault.left = kind, after
        if kind == "dies":
            _DEADLY.append(fault)
        if kind == "hangs":
            fault.kind, self._is_hanging = None, True
            fault.gate.clear()

    def heal(self) -> None:
        self._heal()
        self.settle()

    def _heal(self) -> None:
        for fault in self._faults:
            fault.kind = None
            fault.gate.set()
        self._is_hanging = False

    def wait_for_the_dead(self) -> None:
        """Return when nothing is under way of a process that was killed; a server would wait for it some seconds."""
        for location, backend in zip(self._locations, self._backends, strict=True):
            if location.startswith(("valkey", "unix")):
                forget_lock(location)
            if location.startswith("s3"):
                forget_turn(backend.inner.rows)
            # transactions take turns
            with backend.inner.update():
                pass

    def damage(self, page: Page) -> None:
        """Change a bit of the stored bytes of a page."""
        for backend in self._backends:
            with backend.inner.update() as transaction:
                record, usage, payload = (
                    getattr(transaction, name)(key_of(page)) for name in ("record", "usage", "payload")
                )
                if record is not None and record.stored_bytes:
                    changed = bytearray(payload)
                    changed[len(changed) // 2] ^= 1
                    transaction.put(key_of(page), record, usage, bytes(changed))

    def settle(self) -> None:
        """Have everything written that can be: captured pages, uses, and what is found to be damaged is deleted."""
        if not self._is_hanging:
            self._or_none(self.engine.drain)
        elif len(self._locations) > 1:
            self._or_none(self.engine.far.drain)

    def _or_none(self, work: Callable[[], Any], value: Any = None) -> Any:
        """What `work` returns, or this value; None if the location fails, which is the only time that it may raise."""
        try:
            found = work()
        except StorageError:
            if not self.is_faulty:
                raise
            return None
        return found if value is None else value

    # -- what is stored -----------------------------------------------------------------------------------------------

    def look(self) -> list[tuple[dict[Page, Facts], Used]]:
        """Everything in each location, read past the engine."""
        return [_contents(backend.inner) for backend in self._backends]

    def problems(self) -> list[str]:
        """What is wrong with the locations, except what `look` shows; and with the store's own figures."""
        found = [str(one) for one in self._store.check() if one.rule not in ("payload", "budget")]
        (seen, _), stats = _contents(self._backends[0].inner), self._store.stats()
        figures = (stats.entries, stats.bytes_stored, stats.bytes_raw)
        counted = len(seen), sum(facts.n_bytes for facts in seen.values()), sum(len(page.state) for page in seen)
        counted = counted[0], counted[1] - sum(4 * (len(page.tokens) - page.start) for page in seen), counted[2]
        return found + ([f"figures {figures}, counted {counted}"] if figures != counted else [])


def _namespace(space: Space) -> Namespace:
    return Namespace({"model": space.model, "salt": space.tenant, "page_tokens": P})


_SPACES = {
    _namespace(space).key: space for space in (Space(m, t) for m in ("a", "b", "recurrent") for t in ("one", "two"))
}


def _space(namespace: bytes) -> Space:
    return _SPACES[namespace]


def key_of(page: Page | Space) -> bytes:
    """The key of a page, or of a namespace."""
    if isinstance(page, Space):
        return _namespace(page).key
    parent = key_of(page.parent if page.parent is not None else page.space)
    piece = as_tokens(page.tokens[page.start :]).tobytes()
    return page_key(parent, piece, SNAPSHOT if page.is_snapshot else PAGE)


def _tokens(raw: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, "<i4").tolist())


def _contents(backend: Any, attempts: int = 3) -> tuple[dict[Page, Facts], Used]:
    found: dict[Page, Facts] = {}
    with backend.view() as view:
        pages: dict[bytes, Page] = {}
        for key, record, usage in sorted(view.scan(), key=lambda one: (one[1].start, one[1].form)):
            parent = pages.get(record.parent)
            before = parent.tokens if parent is not None else ()
            pages[key] = page = Page(_space(record.namespace), before + _tokens(record.tokens), record.form == SNAPSHOT)
            # of a page whose parent is missing, the tokens are not known
            assert key_of(page) == key, "parents outlive their children"
            payload = view.payload(key)
            if payload is None and attempts > 1:
                # another process has deleted it since: object storage shows that to an open view
                break
            try:
                is_whole = payload is not None and bytes(decode(record, payload)) == page.state
            except StorageError:
                is_whole = False
            size = record.stored_bytes + len(record.tokens)
            found[page] = Facts(size, is_whole, usage.pinned, usage.priority, usage.expires)
        else:
            return found, Used(view.used.bytes, view.used.entries)
    return _contents(backend, attempts - 1)


def contents_of_export(exported: bytes) -> dict[Page, Facts]:
    """What another store holds after the import of a file."""
    with Archive("memory:") as archive:
        import_store(ExportReader(io.BytesIO(exported), "export"), archive)
        return _contents(archive.backend)[0]
