"""Import of a file of raw pages, and check of what was imported, beside `cp` and `cat` of the same file, in turns."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    # run as a file: the directory above is the one to import from
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ratio, summary
from benchmarks.tables import met, milliseconds, paragraph, table
from prefixstore.format.export import ExportWriter
from prefixstore.format.keys import page_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, StoredPage, Usage, checksum
from prefixstore.maintenance.archive import Archive

ROOT = Path(__file__).parent.parent
PAGE_BYTES = 8 << 20
PAGE_TOKENS = 256
CHAIN_PAGES = 16
FILE_BYTES = 2 << 30
ROUNDS = 7
GOALS = {"LMDB": 0.6}


def write_file(path: Path, n_bytes: int) -> None:
    """A ``.pstore`` file of raw pages, in conversations."""
    space = Namespace({"label": "transfer", "salt": None, "page_tokens": PAGE_TOKENS})
    rng = np.random.default_rng(15)
    with path.open("wb") as file:
        writer = ExportWriter(file, {space.key: space.canonical})
        parent = space.key
        for number in range(n_bytes // PAGE_BYTES):
            position = number % CHAIN_PAGES
            parent = space.key if position == 0 else parent
            tokens = rng.integers(0, 32_000, PAGE_TOKENS).astype("<i4").tobytes()
            payload = rng.bytes(PAGE_BYTES)
            proof, now = checksum(payload), time.time_ns()
            record = Record(space.key, parent, position * PAGE_TOKENS, tokens, 0, PAGE_BYTES, PAGE_BYTES, proof, 0, now)
            parent = page_key(parent, tokens)
            writer.write(StoredPage(parent, record, Usage(now), payload))
        writer.finish()
        os.fsync(file.fileno())


def copied(source: Path, target: Path) -> float:
    """Seconds of `cp`, and of the flush."""
    started = time.perf_counter()
    subprocess.run(["cp", "--", str(source), str(target)], check=True)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def imported(source: Path, location: str, n_bytes: int) -> tuple[float, float]:
    """Seconds of the command into an empty location, until all is durable; and of a check of what is there then."""
    command = [sys.executable, "-m", "prefixstore", "import", location, str(source), "--json"]
    done = subprocess.run([*command, "--max-bytes", f"{2 * n_bytes}B"], check=True, cwd=ROOT, stdout=subprocess.PIPE)
    moved = json.loads(done.stdout)
    assert moved["pages"] == n_bytes // PAGE_BYTES
    with Archive(location) as archive:
        started = time.perf_counter()
        assert archive.check() == []
        return moved["seconds"], time.perf_counter() - started


def read(source: Path) -> float:
    """Seconds of `cat`."""
    started = time.perf_counter()
    # into a pipe: cat does not read what it writes to /dev/null
    subprocess.run(f"cat -- '{source}' | cat > /dev/null", check=True, shell=True)
    return time.perf_counter() - started


def alternating(
    source: Path, places: dict[str, Callable[[], tuple[str, Callable[[], None]]]], n_bytes: int, rounds: int
) -> dict[str, Any]:
    """Import and check of each place, in turns with cp and cat.

    A place is a function that returns a new location, and one that removes it.
    """
    times: dict[str, list[float]] = {"cp": [], "cat": []}
    for _ in range(rounds):
        times["cp"].append(copied(source, source.with_suffix(".copy")))
        times["cat"].append(read(source))
        for name, make in places.items():
            location, remove = make()
            importing, checking = imported(source, location, n_bytes)
            remove()
            times.setdefault(f"import {name}", []).append(importing)
            times.setdefault(f"check {name}", []).append(checking)
            os.sync()
    return {
        "bytes": n_bytes,
        "cp": summary(times["cp"]),
        "cat": summary(times["cat"]),
        "places": {
            name: {
                "import": summary(times[f"import {name}"]),
                "import_of_cp": ratio(times["cp"], times[f"import {name}"]),
                "check": summary(times[f"check {name}"]),
                "check_of_cat": ratio(times["cat"], times[f"check {name}"]),
            }
            for name in places
        },
    }


def run(n_bytes: int = FILE_BYTES, rounds: int = ROUNDS, names: Sequence[str] | None = None) -> dict[str, Any]:
    from tests.support.postgres import database, private_server, server_program

    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        directory = Path(root)
        source = directory / "pages.pstore"
        write_file(source, n_bytes)

        def place(url: str) -> tuple[str, Callable[[], None]]:
            one = tempfile.mkdtemp(dir=directory)
            return url.format(one), lambda: shutil.rmtree(one)

        places: dict[str, Callable[[], tuple[str, Callable[[], None]]]] = {
            "LMDB": lambda: place("lmdb://{}"),
            "SQLite": lambda: place("sqlite:///{}/kv.db"),
        }
        if (names is None or "PostgreSQL" in names) and server_program("initdb") is not None:
            from prefixstore.backends.sql import migrations

            server = stack.enter_context(private_server()).url

            def postgresql() -> tuple[str, Callable[[], None]]:
                one = ExitStack()
                url = one.enter_context(database(server, None))
                migrations.upgrade(url)
                return url, one.close

            places["PostgreSQL"] = postgresql
        chosen = {name: make for name, make in places.items() if names is None or name in names}
        return alternating(source, chosen, n_bytes, rounds)


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    rows = [["`cp` and flush, `cat`", milliseconds(result["cp"]["p50"]), "1", milliseconds(result["cat"]["p50"]), "1"]]
    for name, figures in result["places"].items():
        of_cp = figures["import_of_cp"]
        rows.append(
            [
                name,
                milliseconds(figures["import"]["p50"]),
                met(of_cp, GOALS[name]) if name in GOALS else f"{of_cp:.2f}",
                milliseconds(figures["check"]["p50"]),
                f"{figures['check_of_cat']:.2f}",
            ]
        )
    return [
        "## Import and check",
        "",
        *paragraph(
            f"""{result["bytes"] / 2**30:g} GiB of raw pages of 8 MiB, from a file in the page cache. Import: every
            payload is verified before it is stored, until all is durable; the time that the command reports. Check:
            every invariant and every checksum.
            Speeds are relative to `cp` with a flush, and to `cat` into a pipe, in the same round; medians."""
        ),
        *table(["", "import", "speed relative to cp", "check", "speed relative to cat"], rows),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="transfer", description=__doc__)
    parser.add_argument("--bytes", type=int, default=FILE_BYTES, help="size of the file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", help="LMDB, SQLite, PostgreSQL")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = run(given.bytes, given.rounds, given.only)
    print(json.dumps(found) if given.json else "\n".join(section(found)))


if __name__ == "__main__":
    main()
