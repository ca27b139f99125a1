"""One process of a crowd: threads that act at random on one location; the arguments are JSON on the command line."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import random
import sys
import threading
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np

from prefixstore import PrefixStore, StorageError
from prefixstore.engine.pending import PendingPage
from prefixstore.format.export import ExportReader
from prefixstore.format.keys import PAGE, SNAPSHOT, as_tokens, page_key
from prefixstore.format.namespace import Namespace
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import export_store, import_store
from tests.support import PATIENCE, in_fork
from tests.support.engines import compressible
from tests.support.timeouts import disable_timeouts, wait_for

P = 4
# of a thread, in a bounded attack
ACTS = 60
SIZES = (0, 1, 900, 20_000, 90_000)
NOTE = b"crowd"
TENANTS = ("one", "two", None)


def state_of(key: bytes) -> bytes:
    """What the page with this key must hold: its size and its bytes follow from it. Most can be compressed."""
    size = SIZES[key[0] % len(SIZES)]
    return compressible(key, size) if key[1] % 4 else np.random.default_rng(int.from_bytes(key, "little")).bytes(size)


def open_store(location: str, max_bytes: int, salt: str | None, **options) -> PrefixStore:
    return PrefixStore(
        location, namespace="crowd", salt=salt, page_tokens=P, min_tokens=0, max_bytes=max_bytes, **options
    )


def space_of(store: PrefixStore) -> Namespace:
    """The namespace of a store without a Llama: one for each tenant."""
    return Namespace({"label": "crowd", "salt": store.parameters.salt, "page_tokens": P})


class Member:
    """One thread, and what it found."""

    def __init__(self, seed: int, stores: list[PrefixStore], location: str, max_bytes: int) -> None:
        self.chance = random.Random(seed)
        self.stores = stores
        self.location = location
        self.max_bytes = max_bytes
        self.done: Counter[str] = Counter()
        self.n_acts = self.noted = 0
        self.problems: list[str] = []

    def run(self, n_acts: int) -> None:
        acts = [self.capture, self.capture, self.capture, self.fetch, self.fetch, self.fetch]
        acts += [self.pin, self.unpin, self.flush, self.look, self.look, self.note, self.thin]
        seldom = [self.clear, self.purge, self.move, self.check]
        first = [self.capture, self.fetch, self.pin, self.note]
        while self.n_acts < n_acts and not self.problems:
            act = first.pop() if first else self.chance.choice(seldom if self.chance.random() < 0.02 else acts)
            self.n_acts += 1
            try:
                act(self.chance.choice(self.stores))
                self.done[act.__name__] += 1
            except StorageError as error:
                # another process holds the lock for too long, or there is no room: rare, and not a fault
                self.done[f"{act.__name__}: {type(error).__name__}"] += 1
                self.done[str(error)[:200]] += 1
            except BaseException as error:  # noqa: BLE001 - reported
                self.problems.append(f"{act.__name__}: {error!r}\n{traceback.format_exc()}")

    def tokens(self) -> list[int]:
        n = self.chance.choice([3, 4, 8, 9, 16, 17, 24])
        return [self.chance.choice([1, 1, 1, 1, 2, 3]) for _ in range(n)]

    def capture(self, store: PrefixStore) -> None:
        engine, namespace = store.engine, space_of(store)
        raw = as_tokens(self.tokens()).tobytes()
        engine.match(namespace.key, as_tokens(np.frombuffer(raw, "<i4")), P)
        parent = namespace.key
        for start in range(0, len(raw), 4 * P):
            piece = raw[start : start + 4 * P]
            view = len(piece) < 4 * P and self.chance.random() < 0.3
            form = SNAPSHOT if view else PAGE
            key = page_key(parent, piece, form)
            if not engine.lookups.has(key):
                state = state_of(key)
                buffer = engine.write_queue.acquire(len(state))
                if buffer is None:
                    return
                buffer.view[:] = state
                new = PendingPage.of(namespace.key, namespace.canonical, parent, start // 4, piece, buffer, start, form)
                engine.write_queue.submit(new)
            parent = key

    def fetch(self, store: PrefixStore) -> None:
        engine, namespace = store.engine, space_of(store).key
        tokens = as_tokens(self.tokens())
        if self.chance.random() < 0.2:
            path = engine.match_snapshot(namespace, tokens, P, len(tokens))
        else:
            path = engine.match(namespace, tokens, P)
        raw = tokens.tobytes()
        loaded = []
        with engine.fetching(path.pages, streamed=self.chance.random() < 0.5) as states:
            for page, state in zip(path.pages, states, strict=False):
                if bytes(state) != state_of(page.key):
                    raise AssertionError(f"page {page.key.hex()} is not what was captured")
                shared = min(len(page.tokens), len(raw) - 4 * page.start)
                wanted = raw[4 * page.start : 4 * page.start + shared]
                if page is not path.pages[-1] and page.tokens != wanted:
                    raise AssertionError("a page of other tokens was found")
                loaded.append(page)
        engine.touch(namespace, loaded)
        engine.write_queue.nudge()

    def pin(self, store: PrefixStore) -> None:
        store.engine.upkeep.pin(space_of(store).key, as_tokens(self.tokens()[:8]), P, pinned=True)

    def unpin(self, store: PrefixStore) -> None:
        # more often than pages are pinned, or all room would be pinned in the end
        for start in ([1], [2], self.tokens()):
            store.engine.upkeep.pin(space_of(store).key, as_tokens(start * 8), P, pinned=False)

    def thin(self, store: PrefixStore) -> None:
        store.engine.write_queue.thin(space_of(store).key, as_tokens(self.tokens()), P, 1, 8)

    def flush(self, store: PrefixStore) -> None:
        store.flush()

    def look(self, store: PrefixStore) -> None:
        stats = store.stats()
        if stats.bytes_used > self.max_bytes:
            raise AssertionError(f"{stats.bytes_used} bytes of {self.max_bytes}")
        require_bounds(store)

    def note(self, store: PrefixStore) -> None:
        store.engine.upkeep.change_note(NOTE, lambda value: str(int(value or b"0") + 1).encode())
        self.noted += 1

    def clear(self, store: PrefixStore) -> None:
        store.engine.upkeep.clear(space_of(store).key)

    def purge(self, _: PrefixStore) -> None:
        with Archive(self.location, max_bytes=self.max_bytes) as archive:
            archive.purge(tokens=self.tokens()[:5])

    def move(self, _: PrefixStore) -> None:
        with Archive(self.location, max_bytes=self.max_bytes) as archive:
            file = io.BytesIO()
            export_store(archive, file)
            file.seek(0)
            archive.evict(self.max_bytes // 2)
            import_store(ExportReader(file, "memory"), archive)

    def check(self, store: PrefixStore) -> None:
        if problems := store.engine.upkeep.check():
            raise AssertionError(str(problems[:3]))


def require_bounds(store: PrefixStore) -> None:
    """What is kept for pages is bounded: by what waits."""
    catalog = store.engine._catalog
    with catalog.lock:
        pending = len(catalog._pending)
    if pending > 20_000:
        raise AssertionError(f"{pending} pages are pending")


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0


def forked(stores: list[PrefixStore], kind: int) -> None:
    """What a child does that was forked in the middle of the work: nothing; work, and close; or work, and end."""
    if kind == 0:
        return
    # shows where it hangs
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    member = Member(os.getpid(), stores, "", 1 << 62)
    for _ in range(5):
        member.capture(stores[0])
        member.fetch(stores[0])
    if kind == 1:
        for store in stores:
            store.close()


def crowd(location: str, seed: int, threads: int, acts: int, max_bytes: int, forks: int) -> dict:  # noqa: C901
    """Threads act at random, each so many times; what they did, and what was wrong."""
    before_threads = threading.active_count()
    stores = [
        open_store(
            location,
            max_bytes,
            salt,
            quota=max_bytes // 2 if salt == "one" else None,
            ttl=0.5 if salt == "two" else None,
            codec={"one": "auto", "two": "zstd"}.get(salt, "planes"),
            queue_bytes="1MB",
        )
        for salt in TENANTS
    ]
    members = [Member(seed * 1000 + i, stores, location, max_bytes) for i in range(threads)]
    running = [threading.Thread(target=member.run, args=(acts,), daemon=True) for member in members]
    for thread in running:
        thread.start()
    problems = []
    for i in range(forks):
        wait_for(lambda at=i + 1: members[0].n_acts >= acts * at // (forks + 1) or members[0].problems, "the moment")
        try:
            in_fork(lambda kind=i % 3: forked(stores, kind))
        except AssertionError as error:
            problems.append(f"the child of fork {i} (kind {i % 3}): {error}")
    for thread in running:
        thread.join(5 * PATIENCE * max(acts // ACTS, 1))
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            problems.append("a thread does not end: deadlock")
            return {"problems": problems}
    done: Counter[str] = Counter()
    for member in members:
        done += member.done
        problems += member.problems
    for store in stores:
        store.flush()
        if store.engine.queued_bytes:
            problems.append(f"{store.engine.queued_bytes} bytes are leased and not queued")
        catalog = store.engine._catalog
        left = {
            "pending": len(catalog._pending),
            "deferred": catalog.deferred(),
        }
        if any(left.values()):
            problems.append(f"left in the catalog: {left}")
        counters = store.engine.counters
        if counters["corrupt"] or counters.group("unreadable").keys() - {
            "vanished",
            "unavailable",
        }:
            problems.append(f"damage: {counters.group('unreadable')}, {counters['corrupt']}")
        done += Counter({f"dropped {k}": n for k, n in counters.group("dropped").items()})
        done += Counter({name: counters[name] for name in ("evictions", "packed", "expired", "outages")})
        with suppress(StorageError):
            store.close()
    with suppress(AssertionError):
        wait_for(lambda: threading.active_count() <= before_threads, "the end of all threads")
    if threading.active_count() > before_threads:
        problems.append(f"threads left: {[thread.name for thread in threading.enumerate()]}")
    return {"problems": problems, "done": dict(done), "noted": sum(member.noted for member in members)}


if __name__ == "__main__":
    disable_timeouts()
    order = json.loads(sys.argv[1])
    print(json.dumps(crowd(**order)))
