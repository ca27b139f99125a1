"""A store whose file is damaged, in a child: ``python -m`` this. Each case is announced before it runs."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from prefixstore.engine.pages import Pages, open_pages
from prefixstore.errors import StorageError
from prefixstore.format.codec import decode
from tests.support.places import contents, fill, space

MIB = 1 << 20
SETTINGS = space()
PAGE = 4096
SECONDS = 120
# SQLite cannot see each damage to its trees: what it writes into such a tree it may not find again
LOST = "what was written is not there"
ALLOWED = ("used", "CorruptError", "IncompatibleError", "LocationError", "UnavailableError")


def location(scheme: str, directory: Path) -> tuple[str, Path]:
    """A location, and its file."""
    if scheme == "lmdb":
        return f"lmdb://{directory / 'kv'}", directory / "kv" / "data.mdb"
    return f"sqlite:///{directory / 'kv.db'}", directory / "kv.db"


def build(scheme: str, directory: Path) -> None:
    """Pages of several sizes, some of them deleted again."""
    rng = random.Random(1)
    with closing(open_pages(location(scheme, directory)[0], max_bytes=64 * MIB)) as backend:
        for i in range(12):
            sequences = [[i * 100 + j + k for k in range(12)] for j in range(10)]
            fill(backend, SETTINGS, sequences, size=rng.choice([300, 3000, 9000, 20000]))
        for key in rng.sample(sorted(contents(backend)), 60):
            with backend.update() as transaction:
                transaction.delete(key)


def damage(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Damage bytes in one of the ways in which a file goes bad."""
    n = len(data)
    page = rng.randrange(n // PAGE) * PAGE
    # the head of a page is what other code trusts
    at = min(page + rng.choice([rng.randrange(16), rng.randrange(64), rng.randrange(PAGE)]), n - 8)
    how = rng.choice(["bit", "byte", "ones", "sector", "page", "copy", "cut", "cut at a page", "grow"])
    bad = bytearray(data)
    if how == "bit":
        bad[at] ^= 1 << rng.randrange(8)
    elif how == "byte":
        bad[at] = rng.randrange(256)
    elif how == "ones":
        bad[at : at + 8] = b"\xff" * 8
    elif how == "sector":
        bad[at // 512 * 512 : at // 512 * 512 + 512] = bytes(512)
    elif how == "page":
        bad[page : page + PAGE] = rng.choice([bytes(PAGE), b"\xff" * PAGE])
    elif how == "copy":
        other = rng.randrange(n // PAGE) * PAGE
        bad[page : page + PAGE] = data[other : other + PAGE]
    elif how == "cut":
        del bad[rng.randrange(n) :]
    elif how == "cut at a page":
        del bad[page:]
    else:
        bad += rng.randbytes(rng.choice([1, 100, PAGE, 10 * PAGE]))
    return f"{how} at {at}", bytes(bad)


def build_small(scheme: str, directory: Path) -> None:
    """Three small pages, and rows of all kinds."""
    with closing(open_pages(location(scheme, directory)[0], max_bytes=64 * MIB)) as backend:
        fill(backend, SETTINGS, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9]], size=40)
        with backend.update() as transaction:
            transaction.put_note(b"bookmarks:" + SETTINGS.key, b"names", SETTINGS.key)


def flips(data: bytes, step: int) -> Iterator[tuple[str, bytes]]:
    """The data with one byte flipped: each in turn, or one in `step`; of many zeros in a row one in 61."""
    many = {at for found in re.finditer(rb"\0{32,}", data) for at in range(*found.span()) if at % 61}
    for at in sorted(set(range(len(data))) - many)[::step]:
        yield f"byte {at}", data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def states(backend: Pages) -> Iterator[tuple[bytes, bytes]]:
    """All states that can be read."""
    with backend.view() as view:
        for key, _, _ in view.scan():
            try:
                record, payload = view.record(key), view.payload(key)
                if record is not None and payload is not None:
                    yield key, bytes(decode(record, payload))
            except StorageError:
                continue


def use(place: str, good: dict[bytes, bytes]) -> str:
    """Use the store as a process does that does not know of the damage; the outcome."""
    try:
        with closing(open_pages(place, max_bytes=64 * MIB)) as backend:
            for key, state in states(backend):
                if good.get(key) != state:
                    return f"wrong state under {key.hex()}"
            with backend.update() as transaction:
                for key in list(good)[:7]:
                    transaction.delete(key)
            (path,) = fill(backend, SETTINGS, [[900_000 + i for i in range(12)]], size=5000)
            with backend.view() as view:
                _ = view.namespaces(), view.used
            backend.rows.reclaim()
            return "used" if set(path) <= dict(states(backend)).keys() else LOST
    except StorageError as error:
        return type(error).__name__


def main(scheme: str, directory: Path, damaged: Callable[[bytes], Iterator[tuple[str, bytes]]]) -> dict[str, int]:
    """Damage a store that was built in many ways, and use it each time."""
    place, file = location(scheme, directory)
    with closing(open_pages(place, max_bytes=64 * MIB)) as backend:
        good = dict(states(backend))
    outcomes: dict[str, int] = {}
    for n, (name, bad) in enumerate(damaged(file.read_bytes())):
        print(name, flush=True)
        if scheme == "lmdb":
            shutil.rmtree(file.parent)
            file.parent.mkdir()
        for rest in directory.glob("kv.db*"):
            rest.unlink()
        file.write_bytes(bad)
        signal.alarm(SECONDS)
        outcome = use(place, good)
        signal.alarm(0)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if outcome not in (*ALLOWED, LOST) or outcomes.get(LOST, 0) > (1 + n // 50 if scheme == "sqlite" else 0):
            raise SystemExit(f"{name}: {outcome}")
    return outcomes


def at_random(data: bytes, first: int, n: int) -> Iterator[tuple[str, bytes]]:
    """The data damaged in this many ways."""
    for seed in range(first, first + n):
        name, bad = damage(data, random.Random(seed))
        yield f"seed {seed}: {name}", bad


if __name__ == "__main__":
    scheme, directory, numbers = sys.argv[1], Path(sys.argv[2]), list(map(int, sys.argv[3:]))
    is_small = len(numbers) == 1
    (build_small if is_small else build)(scheme, directory)
    damaged = partial(flips, step=numbers[0]) if is_small else partial(at_random, first=numbers[0], n=numbers[1])
    print(json.dumps(main(scheme, directory, damaged)))
