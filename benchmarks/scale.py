"""``python -m benchmarks.scale --pages N --location URL``: what a store costs that holds N pages.

The location is filled with N tiny pages (see `benchmarks.filled`): payloads of 64 bytes, conversations of ten pages of
256 tokens, and four of 32,000 tokens. A location that holds them already is used as it is. Then each of the following
is measured in a process of its own, which has imported all modules, and opens the location as
``PrefixStore(location, namespace="scale", codec="raw")``. The files are in the page
cache of the system.

Reading, without a limit that is reached:

``open_ms``
    The construction of the `PrefixStore`.
``first_match_ms``
    The first lookup: a prompt of 2,560 tokens, all of which is stored.
``cold_match_p50_us``, ``cold_match_p99_us``
    Lookups of 2,560 tokens of conversations that this process has not looked up before. Of every second prompt, half of
    the pages are stored, and half of the tokens of the next one.
``cold_long_match_p50_us``
    The first lookups of four prompts of 32,000 tokens; all of them are stored.
``match_p50_us``, ``match_p99_us``
    The lookup of one of these again.
``rss_bytes``
    Resident memory after all that. Mapped pages of the location's own files do not count: they are the system's to take
    back.

Writing, one page after another by `Engine.submit`; the time is that of the `Engine.commit` in the write thread, in
which it is packed, written and flushed:

``first_insert_ms``, ``insert_p50_ms``
    Without a limit that is reached.
``first_evicting_insert_ms``, ``evicting_insert_p50_ms``
    With the number of pages as the limit, so that each one evicts another. (Not the bytes: LMDB gives back a page of
    its trees when most of what is on it is gone, and of such tiny pages it would take thousands.)
``dropped_inserts``
    How many pages found no space in spite of that.
``evicting_rss_bytes``
    Resident memory after that, as above.

With ``--processes P``, P other processes write, evict and look prompts up meanwhile, as P hosts with one database do:
each some 20 pages a second.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import filled
from benchmarks.tables import megabytes, paragraph, table
from prefixstore import PrefixStore
from prefixstore.backends.location import scheme_of
from prefixstore.engine.pages import open_pages
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import UnavailableError
from prefixstore.format.keys import as_tokens

ROOT = Path(__file__).parent.parent
PHASES = ("reading", "writing", "evicting")
GOALS = {
    "open_ms": 50.0,
    "first_match_ms": 50.0,
    "cold_match_p50_us": 2000.0,
    "match_p50_us": 150.0,
    "rss_bytes": 100e6,
    "evicting_insert_p50_ms": 5.0,
}
NAMES = {
    "lmdb": ("prefixstore.backends.lmdb.lmdb_backend",),
    "sqlite": ("prefixstore.backends.sql.sqlite",),
    "postgresql": ("prefixstore.backends.sql.postgresql",),
}
COLD, WARM, INSERTS = 400, 400, 200
# Each measurement adds and evicts pages. A location is filled from the start if it has so many pages too many, or if a
# smaller share of its conversations is left whole.
SPARE, WHOLE = 2_000, 0.6
# seconds between the pages that another process writes: 20 pages a second are a prefill of 5,000 tokens a second
PAUSE = 0.05
# of `run`, for the report
PAGES = (10_000, 100_000)
# what a location may hold that is not to evict anything; LMDB maps as much
AMPLE = 1 << 36


class Writer:
    """Inserts pages one by one, and takes the time of each commit."""

    def __init__(self, store: PrefixStore, seed: int) -> None:
        self._engine = store.engine
        self._space = filled.namespace()
        self._rng = np.random.default_rng([14, seed, time.time_ns()])
        self.times: list[float] = []
        self.dropped = 0
        commit = self._engine.commit

        def timed(batch: Sequence[PendingPage]) -> int:
            started = time.perf_counter()
            done = commit(batch)
            if batch:
                self.dropped += len(batch) - done
                self.times.append(time.perf_counter() - started)
            return done

        self._engine.write_queue._commit_batch = timed

    def insert(self) -> None:
        """Insert the first page of a new conversation, and wait until it is committed."""
        tokens = self._rng.integers(0, filled.VOCABULARY, filled.PAGE_TOKENS).astype("<i4").tobytes()
        buffer = self._engine.write_queue.acquire(len(filled.PAYLOAD), wait=True)
        assert buffer is not None
        buffer.view[:] = filled.PAYLOAD
        space = self._space
        new = PendingPage.of(space.key, space.canonical, space.key, 0, tokens, buffer, filled.COMPUTE_US)
        assert self._engine.write_queue.submit(new)
        while True:
            try:
                self._engine.drain()
                return
            except UnavailableError as error:  # a slow one: this measures it
                print(error, file=sys.stderr, flush=True)


def opened(location: str, max_entries: int | None = None) -> PrefixStore:
    """A store over the location. It makes no room in advance: each page evicts another in its own transaction."""
    return PrefixStore(
        location,
        namespace="scale",
        codec="raw",
        max_bytes=AMPLE,
        max_entries=max_entries,
    )


# -- the processes that measure ---------------------------------------------------------------------------------------


def reading(location: str, options: dict[str, Any]) -> dict[str, float]:
    chains, space = options["chains"], filled.namespace().key
    prompts = [as_tokens(filled.tokens_of(chain)) for chain in chains]
    prompts[2::2] = [_diverging(prompt) for prompt in prompts[2::2]]
    long = [as_tokens(filled.tokens_of(filled.LONG + i)) for i in range(filled.N_LONG)]
    started = time.perf_counter()
    with opened(location) as store:
        opening = time.perf_counter() - started
        engine = store.engine

        def match(prompt: Any) -> tuple[float, int]:
            started = time.perf_counter()
            n_tokens = -1
            while n_tokens < 0:
                try:
                    n_tokens = engine.match(space, prompt, filled.PAGE_TOKENS).n_tokens
                except UnavailableError:  # the store asks again when the server answers in time
                    time.sleep(0.001)
            return time.perf_counter() - started, n_tokens

        first, n_tokens = match(prompts[0])
        assert n_tokens == filled.PROMPT_TOKENS or options["processes"], "it was evicted"
        cold = [match(prompt)[0] for prompt in prompts[1:]]
        cold_long, found = zip(*map(match, long), strict=True)
        assert set(found) == {filled.LONG_TOKENS}
        warm = [match(long[0])[0] for _ in range(WARM)]
        memory = resident(store.location)
    return {
        "open_ms": opening * 1e3,
        "first_match_ms": first * 1e3,
        "cold_match_p50_us": percentile(cold, 50) * 1e6,
        "cold_match_p99_us": percentile(cold, 99) * 1e6,
        "cold_long_match_p50_us": percentile(cold_long, 50) * 1e6,
        "match_p50_us": percentile(warm, 50) * 1e6,
        "match_p99_us": percentile(warm, 99) * 1e6,
        "rss_bytes": memory,
    }


def writing(location: str, options: dict[str, Any]) -> dict[str, float]:
    with opened(location) as store:
        writer = Writer(store, 0)
        for _ in range(1 + options["inserts"]):
            writer.insert()
    return {"first_insert_ms": writer.times[0] * 1e3, "insert_p50_ms": statistics.median(writer.times[1:]) * 1e3}


def evicting(location: str, options: dict[str, Any]) -> dict[str, float]:
    with opened(location, options["limit"]) as store:
        writer = Writer(store, 1)
        for _ in range(1 + options["inserts"]):
            writer.insert()
        memory = resident(store.location)
    return {
        "dropped_inserts": writer.dropped,
        "first_evicting_insert_ms": writer.times[0] * 1e3,
        "evicting_insert_p50_ms": statistics.median(writer.times[1:]) * 1e3,
        "evicting_rss_bytes": memory,
    }


def host(location: str, options: dict[str, Any]) -> dict[str, float]:
    """Write, evict and look up until the standard input ends; a line says when that has begun."""
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True)
    thread.start()
    space = filled.namespace().key
    prompts = [as_tokens(filled.tokens_of(chain)) for chain in options["chains"]]
    with opened(location, options["limit"]) as store:
        writer = Writer(store, options["number"])
        while not ended.wait(PAUSE):
            writer.insert()
            with suppress(UnavailableError):  # the store asks no more while the server is slow
                store.engine.match(space, prompts[len(writer.times) % len(prompts)], filled.PAGE_TOKENS)
            if len(writer.times) == 1:
                print("begun", flush=True)
    return {}


def _diverging(prompt: Any) -> Any:
    """A prompt that has other tokens from the middle of its middle page on."""
    other = prompt.copy()
    other[filled.CHAIN_PAGES // 2 * filled.PAGE_TOKENS + filled.PAGE_TOKENS // 2 :] += 1
    return other


def percentile(times: Sequence[float], percent: float) -> float:
    return float(np.percentile(times, percent))


def resident(location: str) -> int:
    """Resident memory of this process in bytes, without the mapped pages of the location's files (Linux)."""
    file = location.partition("://")[2].replace("//", "/")
    total, counts = 0, True
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            mapped = line.split(maxsplit=5)[5:]
            counts = not (mapped and file.strip("/") and mapped[0].startswith(file))
        elif name == "Rss:" and counts:
            total += int(rest.split()[0]) * 1024
    return total


# -- the process that asks for it -------------------------------------------------------------------------------------


def command(phase: str, location: str, options: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.scale", "--phase", phase, "--location", location, json.dumps(options)]


def child(phase: str, location: str, options: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(command(phase, location, options), check=True, cwd=ROOT, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@contextmanager
def hosts(count: int, location: str, options: dict[str, Any]) -> Iterator[None]:
    """Other processes that use the location meanwhile."""
    started = [
        subprocess.Popen(
            command("host", location, {**options, "number": 100 + number}),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            if process.stdout.readline() != b"begun\n":
                raise RuntimeError("a process that should write has failed; see its error above")
        yield
    finally:
        for process in started:
            process.communicate()


def fill(location: str, n_pages: int) -> tuple[int, float]:
    """Fill a location; how many pages it holds, and the seconds that it took."""
    if scheme_of(location).startswith("postgres"):
        from prefixstore.backends.sql import migrations

        migrations.upgrade(location)
    with closing(open_pages(location, max_bytes=AMPLE)) as backend, backend.view() as view:
        _, whole = filled.stored_chains(view, filled.namespace().key, COLD, time.time_ns())
        is_used_up = whole < WHOLE or view.used.entries > n_pages + max(SPARE, n_pages // 20)
    if is_used_up:
        with opened(location) as store:
            store.clear(everything=True)
        with closing(open_pages(location, max_bytes=AMPLE)) as backend, backend.update() as transaction:
            transaction.put_note(filled.NOTE, None)
    with closing(open_pages(location, max_bytes=AMPLE)) as backend:
        started = time.perf_counter()
        put = filled.fill(backend, filled.namespace(), n_pages)
        seconds = time.perf_counter() - started
        with backend.view() as view:
            return view.used.entries, seconds if put else 0.0


def options_of(location: str, processes: int, inserts: int) -> dict[str, Any]:
    """What the processes are told: conversations that are stored, and the limit that makes them evict."""
    with closing(open_pages(location, max_bytes=AMPLE)) as backend, backend.view() as view:
        chains, _ = filled.stored_chains(view, filled.namespace().key, COLD, time.time_ns())
        limit = view.used.entries
    if not chains:
        sys.exit(f"{location} has no whole conversation left to look up; take more pages, or fewer processes")
    return {"chains": chains, "limit": limit, "processes": processes, "inserts": inserts}


def measure(location: str, n_pages: int, processes: int = 0, inserts: int = INSERTS) -> dict[str, Any]:
    """All figures of one location."""
    entries, fill_seconds = fill(location, n_pages)
    options = options_of(location, processes, inserts)
    found: dict[str, Any] = {"pages": entries, "processes": processes, "fill_s": fill_seconds}
    with hosts(processes, location, options):
        for phase in PHASES:
            print(f"{phase} ...", file=sys.stderr, flush=True)
            found |= child(phase, location, options_of(location, processes, inserts))
    return found


def run() -> dict[str, Any]:
    from benchmarks.backends import locations

    results: dict[str, Any] = {}
    for n_pages in PAGES:
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            for name, (location, _) in locations(Path(directory), stack).items():
                if name in ("LMDB", "SQLite", "PostgreSQL"):
                    processes = 3 if name == "PostgreSQL" else 0
                    results.setdefault(name, {})[str(n_pages)] = measure(location, n_pages, processes)
    return results


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = [
        [_beside(name, figures), f"{figures['pages']:,}", *(_shown(key, figures[key]) for key in GOALS)]
        for name, sizes in result.items()
        for figures in sizes.values()
    ]
    return [
        "## Scale: what a store costs that holds many pages",
        "",
        *paragraph(
            """Pages with payloads of 64 bytes, in conversations of ten pages; each figure is from a process of its own.
            Lookups: 2,560 tokens that this process has not looked up before, and 32,000 that it has. Memory: all of the
            process before the first eviction."""
        ),
        *table(
            ["backend", "pages", "open", "first lookup", "lookup, new", "lookup, known", "memory", "evicting insert"],
            rows,
        ),
    ]


def _beside(name: str, figures: dict[str, Any]) -> str:
    others = figures["processes"]
    return f"{name}, {others} other processes write and evict" if others else name


def _shown(key: str, value: float) -> str:
    if key.endswith("_bytes"):
        return megabytes(value)
    unit = "ms" if key.endswith("_ms") else "µs"
    return f"{value:,.1f} {unit}" if unit == "ms" else f"{value:,.0f} {unit}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", type=int, default=PAGES[0], metavar="N", help="how many pages the location holds")
    parser.add_argument("--location", required=True, metavar="URL", help="kept, and used again by the next run")
    parser.add_argument("--processes", type=int, default=0, metavar="P", help="that write and evict meanwhile")
    parser.add_argument("--inserts", type=int, default=INSERTS, metavar="K", help="of which the median is taken")
    parser.add_argument("--fill", action="store_true", help="fill the location, and measure nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--phase", choices=[*PHASES, "host"], help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="?", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.phase is not None:
        for name in NAMES.get(scheme_of(given.location), ()):
            importlib.import_module(name)
        work: Callable[[str, dict[str, Any]], dict[str, float]] = globals()[given.phase]
        print(json.dumps(work(given.location, given.options)))
        return
    if given.fill:
        fill(given.location, given.pages)
        return
    found = {
        key: _rounded(value)
        for key, value in measure(given.location, given.pages, given.processes, given.inserts).items()
    }
    if given.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{key:<32}{value:>16,}{_goal(key)}" for key, value in found.items()))


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else round(value, 3)


def _goal(key: str) -> str:
    return f"   (goal: at most {GOALS[key]:,g})" if key in GOALS else ""


if __name__ == "__main__":
    main()
