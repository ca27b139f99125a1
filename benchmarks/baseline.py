"""``python -m benchmarks baseline``: the figures that no change may make worse, as one list.

Each is taken from the benchmark that has it. The name of a figure begins with that of the measurement it comes from:
``--only`` takes either, and patterns such as ``'hits-*'``. ``--quick`` takes smaller sizes; a note says which.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    agent,
    comparison,
    conversation,
    eviction,
    generation,
    remote,
    replay,
    restore,
    scale,
    servers,
    synthetic,
)
from benchmarks.common import CACHE, LIGHT, load, machine, model_path, prompt_tokens, write_json
from benchmarks.peers import LMDB_RAW, NOTHING
from benchmarks.tables import table

# of restores when quick
QUICK_TOKENS = 1024
# requests of each trace, and quick; None for all
GIVEN = {
    "conversation": (eviction.TRACES["conversation"], 1000, 150),
    "agentic-coding": (eviction.TRACES["agentic coding"], 250, 40),
    "agent": (agent.TRACE, None, None),
}
SYNTHETIC = (1500, 100)
FEW_PAGES, PAGES = 10_000, (1_000_000, 100_000)
# processes that open the large location, and inserts that evict
OPENED, INSERTS = 5, 20
# seconds that computing a token takes, for a store that is not to give up
NEVER = 1.0


@dataclass(frozen=True)
class Figure:
    """A figure, and what it may become.

    Attributes
    ----------
    better
        "lower" or "higher".
    limit
        What it has to reach, whatever it was before.
    tolerance
        By how much it may be worse than before: as a fraction, and of a share (``unit="share"``) by its difference.
    """

    name: str
    value: float | None
    unit: str = ""
    better: str = "lower"
    limit: float | None = None
    tolerance: float | None = None


# the figures, and what was measured
Found = tuple[list[Figure], str]


class NotHereError(Exception):
    """What a measurement needs is not installed."""


def _need(path: Path) -> None:
    if not path.exists():
        raise NotHereError(f"there is no {path}")


def restored(kind: str, quick: bool) -> Found:
    n_tokens, shape = (QUICK_TOKENS, LIGHT) if quick else (restore.N_TOKENS, {})
    found = restore.between(model_path(**shape), kind == "flash", "auto", n_tokens)
    return [
        Figure(f"restore-{kind}/time", found["seconds"]["prefixstore"]["p50"] * 1e3, "ms", tolerance=0.05),
        Figure(f"restore-{kind}/of-limit", found["of_limit"], "share", "higher", tolerance=0.05),
    ], f"{n_tokens:,} tokens, {found['state_bytes'] / 1e6:.0f} MB"


def saved(quick: bool) -> Found:
    turns, new_tokens = (8, 100) if quick else (conversation.TURNS, conversation.NEW_TOKENS)
    seconds = conversation.ours(turns, new_tokens)["last_5"]
    return [Figure("save-turn", seconds * 1e3, "ms", tolerance=0.05)], f"last 5 of {turns} turns of {new_tokens} tokens"


def used(quick: bool) -> Found:
    model = "trained" if quick else "1B"
    _need(comparison.model_file(model))
    found = comparison.compare(model, "users", [NOTHING, LMDB_RAW])[LMDB_RAW]
    written, warm = sum(found[phase]["written_bytes"] for phase in ("cold", "warm")), found["warm"]
    return [
        Figure("users/bytes-written", written / 1e6, "MB", tolerance=0.02),
        Figure("users/first-token-after-restart", warm["first_token"][0] * 1e3, "ms", tolerance=0.05),
        Figure("users/median-after-restart", warm["seconds"]["p50"] * 1e3, "ms", tolerance=0.05),
    ], f"20 requests of many users, {comparison.MODELS[model].title}"


def generated(quick: bool) -> Found:
    n_prompt, n_answer, rounds = (200, 60, 4) if quick else generation.WORKS["generation"]
    found = generation.run({"generation": (n_prompt, n_answer, rounds)})["generation"]
    return [
        Figure("generation", found["speed_of_without"], "share", "higher", limit=0.98)
    ], f"speed with a store of that without, {rounds} answers of {n_answer} tokens"


def filled(n_pages: int) -> str:
    """A location with so many pages, which is written once."""
    CACHE.mkdir(exist_ok=True)
    url = f"lmdb://{CACHE}/pages-{n_pages}"
    scale.fill(url, n_pages)
    return url


def opened(quick: bool) -> Found:
    url = filled(PAGES[quick])
    found = [scale.child("reading", url, scale.options_of(url, 0, 0)) for _ in range(OPENED)]
    opening, cold, warm = (
        statistics.median(one[key] for one in found) for key in ("open_ms", "cold_long_match_p50_us", "match_p50_us")
    )
    return [
        Figure("pages/open", opening, "ms", limit=30),
        Figure("pages/lookup-cold", cold, "µs", tolerance=0.25),
        Figure("pages/lookup-warm", warm, "µs", limit=500),
    ], f"{PAGES[quick]:,} pages, {OPENED} processes; lookups of {scale.filled.LONG_TOKENS:,} tokens"


def evicted(quick: bool) -> Found:
    urls = [filled(n_pages) for n_pages in (FEW_PAGES, PAGES[quick])]
    few, many = (scale.child("evicting", url, scale.options_of(url, 0, INSERTS)) for url in urls)
    # what a process needs for any number of pages does not count
    memory = (many["evicting_rss_bytes"] - few["evicting_rss_bytes"]) / (PAGES[quick] - FEW_PAGES)
    return [
        Figure("evicting/first", many["first_evicting_insert_ms"], "ms", limit=20),
        Figure("evicting/memory-per-page", memory, "bytes", limit=20),
    ], f"{PAGES[quick]:,} pages; memory beyond that with {FEW_PAGES:,}"


def hits(name: str, quick: bool) -> Found:
    if name in GIVEN:
        path, *sizes = GIVEN[name]
        _need(path)
        prompts = replay.read(path, sizes[quick])
    else:
        prompts = synthetic.prompts(name, SYNTHETIC[quick])
    rates, written = (found["adaptive"] for found in replay.figures(prompts, replay.CAPACITIES, ["adaptive"]))
    least = replay.CAPACITIES[0]
    unique = len({block for prompt in prompts for block in prompt})
    return [
        *(Figure(f"hits-{name}/{at}", rate, "share", "higher", tolerance=0.005) for at, rate in rates.items()),
        Figure(f"hits-{name}/written-{least}", written[least], "share", tolerance=0.02),
    ], f"{len(prompts):,} requests, {unique:,} unique blocks"


def served(quick: bool) -> Found:
    _need(servers.LLAMA_SERVER)
    n_tokens = QUICK_TOKENS if quick else servers.PROMPT_TOKENS
    model = model_path(**LIGHT)
    with tempfile.TemporaryDirectory() as root:
        server = servers.servers(model, Path(root))["prefixstore serve, llama-server"]
        found = servers.conversations(server, Path(root), servers.Words(model), servers.REPEATED, n_tokens)
    again = found["again"]
    if again["computed"] > n_tokens / 10:
        raise RuntimeError(f"{again['computed']:,} tokens were computed instead of restored")
    return [Figure("llama-server", again["p50"] * 1e3, "ms", tolerance=0.05)], f"first text after {n_tokens:,} tokens"


def fetched(kind: str, least: float, quick: bool) -> Found:
    n_tokens = QUICK_TOKENS if quick else restore.N_TOKENS
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        found = remote.places(Path(directory), stack, [kind])
        if len(found) == 1:
            raise NotHereError(f"no {kind} server is installed")
        llm = load(model_path(**LIGHT), flash_attn=True)
        tokens = prompt_tokens(llm, n_tokens + 1)
        n_bytes = remote.put(llm, tokens[:-1], found)
        took, _, _ = remote.over(None, found, llm, tokens, remote.ROUNDS[remote.HERE], NEVER)
    rates = remote.figures(took, NEVER, n_tokens, n_bytes)
    return [
        Figure(name.lower().replace(", ", "/"), each["bytes_per_second"] / 1e9, "GB/s", "higher", least)
        for name, each in rates.items()
        if name.startswith(kind)
    ], f"{n_tokens:,} tokens, {n_bytes / 1e6:.0f} MB"


# each takes whether it is to be quick
MEASUREMENTS: dict[str, Callable[[bool], Found]] = {
    "restore-flash": partial(restored, "flash"),
    "restore-transposed": partial(restored, "transposed"),
    "save-turn": saved,
    "users": used,
    "generation": generated,
    "pages": opened,
    "evicting": evicted,
    "llama-server": served,
    "postgresql": partial(fetched, "PostgreSQL", 1.0),
    "valkey": partial(fetched, "Valkey", 2.5),
    **{f"hits-{name}": partial(hits, name) for name in [*GIVEN, *synthetic.TRACES]},
}


def is_asked(name: str, patterns: Sequence[str]) -> bool:
    """Whether a figure is asked for; or a measurement, of which at least one figure is."""
    measurement, _, figure = name.partition("/")
    return any(fnmatch(each, pattern) for pattern in patterns for each in (name, measurement)) or (
        not figure and any(fnmatch(name, pattern.partition("/")[0]) for pattern in patterns)
    )


def measured(name: str, patterns: Sequence[str], quick: bool) -> list[dict[str, Any]]:
    """The figures of a measurement; a figure without a value says why."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        figures, note = MEASUREMENTS[name](quick)
    except NotHereError as error:
        figures, note = [Figure(name, None)], f"skipped: {error}"
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        traceback.print_exc()
        figures, note = [Figure(name, None)], f"failed: {error!r}"
    return [asdict(one) | {"note": note} for one in figures if is_asked(one.name, patterns)]


def shown(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.3f}" if unit == "share" else f"{value:,.4g} {unit}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks baseline", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures here")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="figures, or patterns like 'hits-*'")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    given = parser.parse_args(arguments)
    names = [name for name in MEASUREMENTS if is_asked(name, given.only)]
    if not names:
        parser.error(f"no figure is named {' or '.join(given.only)}; their names begin with {', '.join(MEASUREMENTS)}")
    result: dict[str, Any] = {"machine": machine(), "quick": given.quick, "figures": []}
    for name in names:
        result["figures"] += measured(name, given.only, given.quick)
        if given.out:
            # after each one: a failure of the next must not lose them
            write_json(result, given.out)
    if not result["figures"]:
        sys.exit(f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no figure {' or '.join(given.only)}")
    rows = [
        [one["name"], shown(one["value"], one["unit"]), shown(one["limit"], one["unit"]), one["note"]]
        for one in result["figures"]
    ]
    print("\n".join(table(["figure", "value", "limit", "measured"], rows)))
    if any(one["note"].startswith("failed") for one in result["figures"]):
        sys.exit(1)
