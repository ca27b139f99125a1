"""Restores from other machines: each kind of location, over lines of several speeds, beside computing the prompt.

The servers are private ones on this machine, and a line is made slow by the kernel, or by a proxy (`benchmarks.links`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp

if __package__ in (None, ""):
    # run as a file: the directory above is the one to import from
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import connectors
from benchmarks.common import forget, load, model_path, prompt_tokens, ratio, summary
from benchmarks.links import Link, linked
from benchmarks.tables import megabytes, met, milliseconds, paragraph, table
from benchmarks.throttle import Line
from prefixstore import PrefixStore
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import copy_store
from prefixstore.testing.models import DEMO


@dataclass(frozen=True)
class Geometry:
    """A model: what is different from the demo's, and the length of the prompt."""

    overrides: dict[str, int]
    n_tokens: int


GEOMETRIES = {
    "1B": Geometry({}, 4096),
    "8B": Geometry({"n_layer": 32, "n_head_kv": 8, "head_dim": 128}, 2048),
}
HERE = "no line"
LINES = {
    HERE: None,
    "1 Gbit/s": Line(1e9),
    "1 Gbit/s, 50 ms": Line(1e9, 0.05),
    "100 Mbit/s": Line(1e8),
    "100 Mbit/s, 50 ms": Line(1e8, 0.05),
}
# of each line; of the lines with a location in front; and of both for larger models
ROUNDS = {HERE: 7, "1 Gbit/s": 3, "1 Gbit/s, 50 ms": 3, "100 Mbit/s": 1, "100 Mbit/s, 50 ms": 1}
TIERED = {"1 Gbit/s, 50 ms": 2, "100 Mbit/s": 1}
FEWER = {HERE: 3, "1 Gbit/s": 2, "1 Gbit/s, 50 ms": 2}
STATES = EMPTY, WARM, LOST = "near one empty", "near one warm", "far one lost"
# of computing: what a line may cost
MOST = 1.05
# how often the prompt is computed
COMPUTED = {"1B": 3, "8B": 2}
# least GB/s of a restore, and least speed relative to LMDB
RATES = {"PostgreSQL, socket": 1.0, "Valkey, TCP": 1.0}
SHARES = {"Valkey, socket": 0.25}


@dataclass(frozen=True)
class Place:
    """A location, without a line."""

    url: str
    # where a line leads to, as `linked` takes it; None for a location that is not reached through one
    target: str | None = None
    # its URL at another host and port
    through: Callable[[str], str] = str


def places(directory: Path, stack: ExitStack, names: Sequence[str] | None = None) -> dict[str, Place]:
    """Locations by name; LMDB, and of servers those that are installed and asked for by the beginnings of names."""
    found = {"LMDB": Place(f"lmdb://{directory}/kv")}
    for kind, make in {"PostgreSQL": postgresql, "Valkey": _valkey, "S3": _s3}.items():
        if names is None or any(name.startswith(kind) or kind.startswith(name) for name in names):
            found |= make(stack)
    return {name: found[name] for name in found if names is None or name.startswith(("LMDB", *names))}


def postgresql(stack: ExitStack) -> dict[str, Place]:
    from tests.support.postgres import private_server, server_program

    if server_program("initdb") is None:
        return {}
    from prefixstore.backends.sql import migrations

    server = stack.enter_context(private_server())
    migrations.upgrade(server.url)
    socket = f"{server.sockets}/.s.PGSQL.5432"
    place = Place(server.url, socket, lambda host: f"postgresql+psycopg://postgres@{host}/postgres")
    return {"PostgreSQL, socket": place}


def _valkey(stack: ExitStack) -> dict[str, Place]:
    from tests.support.valkey import private_valkey, server_program

    if server_program() is None:
        return {}
    server = stack.enter_context(private_valkey())
    place = Place(server.tcp_url, f"127.0.0.1:{server.port}", lambda host: f"valkey://{host}/0")
    return {"Valkey, socket": Place(server.url), "Valkey, TCP": place}


def _s3(stack: ExitStack) -> dict[str, Place]:
    from tests.support.s3 import KEY_ID, SECRET, SeaweedFS, prefix_on, private_server, weed

    if weed() is None:
        return {}
    stack.enter_context(environment(AWS_ACCESS_KEY_ID=KEY_ID, AWS_SECRET_ACCESS_KEY=SECRET, AWS_REGION="us-east-1"))
    server = stack.enter_context(private_server(SeaweedFS))
    url = prefix_on(server)
    bucket = url.partition("?")[0]
    place = Place(url, f"127.0.0.1:{server.port}", lambda host: f"{bucket}?endpoint=http://{host}")
    return {"S3 (SeaweedFS)": place}


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """These variables, until the block is left."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Took:
    """What one prompt took: seconds until its pages were restored, and until its first token can be chosen."""

    restore: float
    first_token: float
    restored: int


def compute(llm: llama_cpp.Llama, tokens: list[int]) -> Took:
    """The prompt without a store."""
    forget(llm)
    started = time.perf_counter()
    llm.eval(tokens)
    return Took(0.0, time.perf_counter() - started, 0)


def restore(llm: llama_cpp.Llama, tokens: list[int], store: PrefixStore, token_seconds: float) -> Took:
    """The prompt with a store, which knows how long computing a token takes; what it does not restore is computed."""
    store.attach(llm)
    # it would know from the prompts before
    store._current.context.rate.token_seconds = token_seconds
    forget(llm)
    started = time.perf_counter()
    n = store.restore(tokens)
    restored = time.perf_counter() - started
    llm.eval(tokens[n:])
    first_token = time.perf_counter() - started
    store.detach()
    return Took(restored, first_token, n)


def capture(llm: llama_cpp.Llama, tokens: list[int], url: str) -> int:
    """Store the prompt; its stored bytes."""
    forget(llm)
    with PrefixStore(url, llm, codec="raw", queue_bytes="1GiB") as store:
        llm.eval(tokens)
        store.capture()
        store.flush()
        return store.match(tokens).bytes


def copy(source: str, target: str) -> None:
    """Store in a location what is in another one."""
    with Archive(source, read_only=True) as one, Archive(target, create=True) as other:
        copy_store(one, other)


def put(llm: llama_cpp.Llama, tokens: list[int], found: dict[str, Place]) -> int:
    """Store the prompt in all locations; its stored bytes."""
    local, *others = [place.url for place in found.values()]
    n_bytes = capture(llm, tokens, local)
    for url in others:
        copy(local, url)
    return n_bytes


def over(
    line: Line | None,
    found: dict[str, Place],
    llm: llama_cpp.Llama,
    tokens: list[int],
    rounds: int,
    token_seconds: float,
) -> tuple[dict[str, list[Took]], str | None]:
    """Every place that is reached over a line, in turns; and what the line is."""
    took: dict[str, list[Took]] = {}
    kind = None
    with ExitStack() as stack:
        stores: dict[str, PrefixStore] = {}
        for name, place in found.items():
            if line is None:
                url = place.url
            elif place.target is not None:
                link = stack.enter_context(linked(place.target, line))
                url, kind = place.through(link.address), link.kind
            else:
                continue
            stores[name] = stack.enter_context(PrefixStore(url, llm, codec="raw", read_only=True))
            stores[name].detach()
            if line is None:
                # of the first one the caches of the server and its process know nothing
                restore(llm, tokens, stores[name], token_seconds)
        for _ in range(rounds):
            for name, store in stores.items():
                took.setdefault(name, []).append(restore(llm, tokens, store, token_seconds))
    return took, kind


def in_front(
    line: Line,
    place: Place,
    llm: llama_cpp.Llama,
    tokens: list[int],
    rounds: int,
    token_seconds: float,
    directory: Path,
) -> dict[str, list[Took]]:
    """A location of this machine in front of one behind a line: empty, warm, and when the far one does not answer."""
    assert place.target is not None
    took: dict[str, list[Took]] = {EMPTY: [], WARM: [], LOST: []}
    for _ in range(rounds):
        with ExitStack() as stack:
            near = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            link: Link = stack.enter_context(linked(place.target, line))
            urls = [f"lmdb://{near}/kv", place.through(link.address)]
            store = stack.enter_context(PrefixStore(urls, llm, codec="raw", queue_bytes="1GiB"))
            store.detach()
            took[EMPTY].append(restore(llm, tokens, store, token_seconds))
            store.flush()
            took[WARM].append(restore(llm, tokens, store, token_seconds))
            link.stop()
            took[LOST].append(restore(llm, tokens, store, token_seconds))
            link.go_on()
    return took


def beside_lmcache(
    geometry: Geometry,
    found: dict[str, Place],
    tokens: list[int],
    line_names: Sequence[str],
    count: Callable[[str], int],
    directory: Path,
    python: str | None,
) -> dict[str, Any]:
    """LMCache's connectors on the pages of a prompt, in the servers that have them.

    Its values are put without a line, and stay there for the lines.
    """
    shape = replace(DEMO, **geometry.overrides)
    pages, settings = connectors.stored_pages(found["LMDB"].url)
    chunks = connectors.Chunks(directory / "values", tokens, shape.n_layer, shape.n_head_kv, shape.head_dim)
    n = len(tokens) // chunks.page_tokens
    chunks.write(pages[:n])
    results: dict[str, Any] = {}
    if python is None:
        line_names = [HERE]
    for line_name in [HERE, *(name for name in line_names if name != HERE)]:
        line, by_server = LINES[line_name], {}
        for server, place in found.items():
            if server not in connectors.CLIENTS or (
                line is not None and (place.target is None or server == connectors.BUCKETS)
            ):
                continue
            print(f"  {line_name}, LMCache, {server} ...", file=sys.stderr, flush=True)
            with ExitStack() as stack:
                url, address, options = place.url, place.target or place.url.partition("://")[2], None
                if line is not None and place.target is not None:
                    address = stack.enter_context(linked(place.target, line)).address
                    url = place.through(address)
                elif server == connectors.BUCKETS and python is not None:
                    address, options = stack.enter_context(connectors.object_storage())
                ours = connectors.Ours(url, chunks, pages[:n], settings)
                stack.callback(ours.close)
                among = stack.enter_context(connectors.clients(server, python, ours, chunks, address, options))
                by_server[server] = connectors.measured(
                    among, n, count(line_name), connectors.PUTS if line is None else 0
                )
        if line_name in line_names:
            results[line_name] = by_server
    return {"chunks": n, "chunk_bytes": chunks.chunk_bytes, "page_tokens": chunks.page_tokens, "lines": results}


def figures(
    took: dict[str, list[Took]],
    computing: float,
    n_tokens: int,
    n_bytes: int,
) -> dict[str, Any]:
    """What is reported of one line."""
    found: dict[str, Any] = {}
    for name, each in took.items():
        first, restores = [one.first_token for one in each], [one.restore for one in each]
        restored = statistics.median_low(one.restored for one in each)
        found[name] = {
            "first_token": summary(first),
            "restore": summary(restores),
            "of_computing": statistics.median(first) / computing,
            "restored_tokens": restored,
            "bytes_per_second": n_bytes * restored / n_tokens / statistics.median(restores),
        }
        if "LMDB" in took:
            found[name]["of_lmdb"] = ratio([one.restore for one in took["LMDB"]], restores)
    return found


def run_geometry(
    geometry: Geometry,
    name: str,
    rounds: int | None,
    names: Sequence[str] | None,
    lines: Sequence[str] | None,
    n_tokens: int | None,
    lmcache: str | None,
) -> dict[str, Any]:
    """The figures of one model."""
    n_tokens = n_tokens or geometry.n_tokens
    llm = load(model_path(**geometry.overrides), flash_attn=True)
    tokens = prompt_tokens(llm, n_tokens + 1)
    print(f"  {name}, computing ...", file=sys.stderr, flush=True)
    computing = [compute(llm, tokens).first_token for _ in range(COMPUTED[name])]
    token_seconds = statistics.median(computing) / len(tokens)
    results: dict[str, Any] = {"tokens": n_tokens, "computing": summary(computing), "lines": {}}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        found = places(Path(directory), stack, names)
        results["bytes"] = put(llm, tokens[:-1], found)

        def number(line_name: str) -> int:
            return rounds or (ROUNDS if name == "1B" else {**ROUNDS, **FEWER})[line_name]

        for line_name in lines or LINES:
            print(f"  {name}, {line_name} ...", file=sys.stderr, flush=True)
            line = LINES[line_name]
            count = number(line_name)
            took, kind = over(line, found, llm, tokens, count, token_seconds)
            told = results["lines"][line_name] = {
                "rounds": count,
                "places": figures(took, results["computing"]["p50"], n_tokens, results["bytes"]),
            }
            if kind is not None:
                told["line"] = kind
            if line is None or line_name not in TIERED or name != "1B":
                continue
            told["tiers"] = {}
            for far, place in found.items():
                if place.target is not None:
                    print(f"  {name}, {line_name}, LMDB in front of {far} ...", file=sys.stderr, flush=True)
                    each = in_front(
                        line, place, llm, tokens, rounds or TIERED[line_name], token_seconds, Path(directory)
                    )
                    told["tiers"][far] = figures(each, results["computing"]["p50"], n_tokens, results["bytes"])
        print(f"  {name}, LMCache ...", file=sys.stderr, flush=True)
        results["connectors"] = beside_lmcache(
            geometry, found, tokens[:-1], list(lines or LINES), number, Path(directory), connectors.interpreter(lmcache)
        )
    llm.close()
    return results


def run(
    rounds: int | None = None,
    names: Sequence[str] | None = None,
    lines: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    n_tokens: int | None = None,
    lmcache: str | None = None,
) -> dict[str, Any]:
    found = {
        name: run_geometry(GEOMETRIES[name], name, rounds, names, lines, n_tokens, lmcache)
        for name in models or GEOMETRIES
    }
    return {"models": found}


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    # a run before there were several models
    models = result.get("models") or {"1B": result}
    lines = ["## Locations on other machines", "", *_explained(models), *_table(models), *_shares(models)]
    for found in models.values():
        lines += _tiers(found)
        if "connectors" in found:
            lines += connectors.section(found["connectors"])
    return [*lines, *(paragraph(result["remark"]) if "remark" in result else [])]


def _explained(models: dict[str, Any]) -> list[str]:
    kinds = sorted({line.get("line", "proxy") for each in models.values() for name, line in each["lines"].items()
                    if name != HERE})  # fmt: skip
    sizes = (
        f"""{name}: {found["tokens"]:,} tokens, {megabytes(found["bytes"])}, which take
        {milliseconds(found["computing"]["p50"])} to compute"""
        for name, found in models.items()
    )
    return paragraph(
        f"""A prompt, raw pages, flash attention, and one token more, of which the first token of an answer follows
        ({"; ".join(sizes)}). Each cell: the restore with its lookup, by a store that stays open; the time to the first
        token relative to computing the whole prompt; the tokens restored, if not all. A store that gives up has the
        rest computed, and the cost of that is told apart: what the restore has taken beyond what computing the restored
        tokens takes, of the whole (goal: at most {MOST - 1:.2f}). The servers are on this machine, with warm caches.
        Lines: {"; ".join(kinds)}: so many bits per second in each direction, and 50 ms longer round trips where that is
        said."""
    )


def _table(models: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(name for found in models.values() for line in found["lines"].values()
                               for name in line["places"]))  # fmt: skip
    rows = [
        [f"{model}, {line}", *(_cell(measured["places"].get(name), found) for name in names)]
        for model, found in models.items()
        for line, measured in found["lines"].items()
        if line == HERE or model == next(iter(models))
    ]
    return table(["model, line", *names], rows)


def _cell(each: dict[str, Any] | None, found: dict[str, Any]) -> str:
    return "; ".join(filter(None, _taken(each, found))) if each else ""


def _taken(each: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What a restore and the first token have taken, what it has cost, and the tokens restored."""
    n = each["restored_tokens"]
    return [
        milliseconds(each["restore"]["p50"]),
        f"{each['of_computing']:.2f}",
        _cost(each, found),
        "" if n == found["tokens"] else f"{n:,} tokens",
    ]


def _cost(each: dict[str, Any], found: dict[str, Any]) -> str:
    """What a restore has taken beyond what computing the restored tokens takes, of computing the whole prompt."""
    cost = each["restore"]["p50"] / found["computing"]["p50"] - each["restored_tokens"] / found["tokens"]
    if cost <= 0:
        return ""
    return f"cost {cost:.3f}" if cost <= MOST - 1 else "cost " + met(cost, MOST - 1, at_most=True)


def _shares(models: dict[str, Any]) -> list[str]:
    """The goals of restores from servers without a line: GB/s, and the speed relative to LMDB's."""
    lines = []
    for model, found in models.items():
        told = []
        for name, each in found["lines"].get(HERE, {"places": {}})["places"].items():
            rate = each["bytes_per_second"] / 1e9
            shown = met(rate, RATES[name]) if name in RATES else f"{rate:.2f}"
            if name != "LMDB" and "of_lmdb" in each:
                of = each["of_lmdb"]
                shown += f" and {met(of, SHARES[name]) if name in SHARES else f'{of:.2f}'}"
            told.append(f"{name} {shown}")
        if told:
            lines += paragraph(f"{model}, no line, GB/s and speed relative to LMDB's: {'; '.join(told)}.")
    return lines


def _tiers(found: dict[str, Any]) -> list[str]:
    rows = [
        [line, f"LMDB, {far}", *(_cell(states[state], found) for state in STATES)]
        for line, measured in found["lines"].items()
        for far, states in measured.get("tiers", {}).items()
    ]
    if not rows:
        return []
    return [
        *paragraph(
            """A location of this machine in front: while it is empty, when it has kept what came, and when the far one
            stops answering without a word, for the first prompt after that."""
        ),
        *table(["line", "locations", *STATES], rows),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="remote", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, help="of the prompt; as many for all models")
    parser.add_argument("--models", nargs="+", choices=list(GEOMETRIES))
    parser.add_argument("--rounds", type=int, help="of each line")
    parser.add_argument("--only", nargs="+", help="beginnings of names, beside LMDB: PostgreSQL, Valkey, S3")
    parser.add_argument("--lines", nargs="+", choices=list(LINES))
    parser.add_argument(
        "--lmcache",
        metavar="PYTHON",
        help=f"the interpreter of an environment with LMCache, which is measured beside ours; or {connectors.VARIABLE}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    found = run(given.rounds, given.only, given.lines, given.models, given.tokens, given.lmcache)
    print(json.dumps(found) if given.json else "\n".join(section(found)))


if __name__ == "__main__":
    main()
