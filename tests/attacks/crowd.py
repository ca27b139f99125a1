"""One process of a crowd: threads that act at random on one location; the arguments are JSON on the command line."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import threading
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

from prefixstore import StorageError
from prefixstore.format.keys import as_tokens
from tests.model.driver import Store, key_of
from tests.model.reference import LARGE, P, Page, Space, pages_of
from tests.support import PATIENCE, in_fork
from tests.support.timeouts import disable_timeouts, wait_for

# of a thread, in a bounded attack
ACTS = 60
NOTE = b"crowd"
SPACES = [Space("a", "one"), Space("a", "two"), Space("b", "one"), Space("recurrent", "two")]
# of the stores of a process
OPTIONS = {
    "plain": {"codec": "planes"},
    "with a quota": {"codec": "auto", "quota": True},
    "with a time to live": {"codec": "zstd", "ttl": 0.5},
}


def open_store(location: str, max_bytes: int, kind: str) -> Store:
    options = {"max_bytes": max_bytes, "queue_bytes": "1MB", **OPTIONS[kind]}
    if "quota" in options:
        options["quota"] = max_bytes // 2
    return Store([location], options)


class Member:
    """One thread, and what it found."""

    def __init__(self, seed: int, stores: list[Store], max_bytes: int) -> None:
        self.chance = random.Random(seed)
        self.stores = stores
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

    def prompt(self) -> tuple[Space, tuple[int, ...]]:
        n = self.chance.choice([3, 4, 8, 9, 16, 17, 24])
        return self.chance.choice(SPACES), tuple(self.chance.choice([1, 1, 1, 2, LARGE]) for _ in range(n))

    def capture(self, store: Store) -> None:
        space, tokens = self.prompt()
        store.match(space, tokens)
        for page in pages_of(space, tokens):
            if not store.engine.lookups.has(key_of(page)):
                store.submit(page)

    def fetch(self, store: Store) -> None:
        space, tokens = self.prompt()
        found = store.restore(space, tokens, streamed=self.chance.random() < 0.5)
        assert found is not None
        require_right(space, tokens, found[1])
        store.engine.write_queue.nudge()

    def pin(self, store: Store) -> None:
        space, tokens = self.prompt()
        store.pin(space, tokens[:8], pinned=True)

    def unpin(self, store: Store) -> None:
        # more often than pages are pinned, or all room would be pinned in the end
        for start in ((1,), (2,), self.prompt()[1]):
            for space in SPACES:
                store.pin(space, start * 8, pinned=False)

    def thin(self, store: Store) -> None:
        space, tokens = self.prompt()
        store.engine.write_queue.thin(key_of(space), as_tokens(tokens), P, 1, 8)

    def flush(self, store: Store) -> None:
        store.flush()

    def look(self, store: Store) -> None:
        used = store.stats().bytes_used
        assert used <= self.max_bytes, f"{used} bytes of {self.max_bytes}"
        # what is kept for pages is bounded: by what waits
        with store.engine._catalog.lock:
            assert len(store.engine._catalog._pending) <= 20_000

    def note(self, store: Store) -> None:
        store.engine.upkeep.change_note(NOTE, lambda value: str(int(value or b"0") + 1).encode())
        self.noted += 1

    def clear(self, store: Store) -> None:
        store.clear(self.prompt()[0])

    def purge(self, store: Store) -> None:
        store.purge(tokens=list(self.prompt()[1][:5]))

    def move(self, store: Store) -> None:
        exported = store.export()
        store.evict(self.max_bytes // 2)
        store.import_(exported)

    def check(self, store: Store) -> None:
        assert (problems := store.engine.upkeep.check()) == [], problems[:3]


def require_right(space: Space, tokens: tuple[int, ...], states: list[tuple[Page, bytes]]) -> None:
    """What a restore has given is what was captured, of this space and these tokens."""
    for i, (page, state) in enumerate(states):
        assert page.space == space, "a page of another space was found"
        assert state == page.state, f"{page} is not what was captured"
        assert i == len(states) - 1 or page.tokens == tokens[: len(page.tokens)], "a page of other tokens was found"


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0


def forked(stores: list[Store], kind: int) -> None:
    """What a child does that was forked in the middle of the work: nothing; work, and close; or work, and end."""
    if kind == 0:
        return
    # shows where it hangs
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    member = Member(os.getpid(), stores, 1 << 62)
    for _ in range(5):
        member.capture(stores[0])
        member.fetch(stores[0])
    if kind == 1:
        for store in stores:
            store.close()


def crowd(location: str, seed: int, threads: int, acts: int, max_bytes: int, forks: int) -> dict:  # noqa: C901
    """Threads act at random, each so many times; what they did, and what was wrong."""
    before_threads = threading.active_count()
    stores = [open_store(location, max_bytes, kind) for kind in OPTIONS]
    members = [Member(seed * 1000 + i, stores, max_bytes) for i in range(threads)]
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
        left = {"pending": len(catalog._pending), "deferred": catalog.deferred()}
        if any(left.values()):
            problems.append(f"left in the catalog: {left}")
        counters = store.engine.counters
        if counters["corrupt"] or counters.group("unreadable").keys() - {"vanished", "unavailable"}:
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
