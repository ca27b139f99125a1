"""Rows damaged, forged and exchanged at random: no wrong state, no other error than ours, and a repair mends it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing, suppress

import pytest

from prefixstore.backends.contract import Draft, Row
from prefixstore.backends.encryption_keys import HEADER
from prefixstore.engine.child_rows import ChildRow, first_node, node_below
from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError
from prefixstore.format.keys import PAGE
from prefixstore.maintenance.archive import Archive
from tests.support.engines import MIB, NS, P, Store
from tests.support.models import volume
from tests.support.places import SCHEMES, place
from tests.support.rows import EVERYTHING

# they share their first pages
SEQUENCES = [[i // 4] * P + [i // 2] * P + [i] * 3 for i in range(12)]


def flip(draft: Draft, row: Row, rng: random.Random) -> None:
    if row.value:
        at = rng.randrange(len(row.value))
        draft.put(row.key, row.value[:at] + bytes([row.value[at] ^ 1 << rng.randrange(8)]) + row.value[at + 1 :])


def cut(draft: Draft, row: Row, rng: random.Random) -> None:
    draft.put(row.key, row.value[: rng.randrange(len(row.value) + 1)])


def lengthen(draft: Draft, row: Row, rng: random.Random) -> None:
    draft.put(row.key, row.value + rng.randbytes(rng.choice((1, 32, 5000))))


def lose(draft: Draft, row: Row, rng: random.Random) -> None:
    draft.delete(row.key)


def move(draft: Draft, row: Row, rng: random.Random) -> None:
    """Under a key that differs in one byte, or is shorter or longer."""
    key = bytearray(row.key)
    key[rng.randrange(1, len(key)) if len(key) > 1 else 0] ^= 1 << rng.randrange(8)
    key = rng.choice((key, row.key[: rng.randrange(1, len(row.key) + 1)], row.key + b"x"))
    draft.put(bytes(key), row.value)


def chain(draft: Draft, row: Row, rng: random.Random) -> None:
    """Child rows that lead from one node to the next, and to nothing."""
    key = first_node(rng.choice((NS, row.key[1:])), PAGE) + rng.randbytes(8)
    for _ in range(rng.choice((1, 3, 200))):
        draft.put(key, ChildRow(None, has_more=True).pack())
        key = node_below(key) + rng.randbytes(8)


def header(draft: Draft, row: Row, rng: random.Random) -> None:
    """A header that nobody has written, where an encrypted location has one."""
    draft.put(HEADER, rng.randbytes(rng.choice((0, 8, 31))))


ATTACKS: list[Callable[[Draft, Row, random.Random], None]] = [flip, cut, lengthen, lose, move, chain, header]


def damage(store: Store, rng: random.Random) -> None:
    """Attack some rows, and exchange the values of two; or the payloads of two pages."""
    with store.backend.rows.view() as view:
        (rows,) = view.ranges([EVERYTHING])
        values = {row.key: row.value for row in rows}
        found = zip(values, view.payloads(list(values)), strict=True)
        payloads = {key: bytes(one[1]) for key, one in found if one is not None and one[1] is not None}
    kinds = sorted({row.key[:1] for row in rows})
    with store.backend.rows.update() as draft:
        if rng.random() < 0.3 and len(payloads) > 1:
            some, other = rng.sample(sorted(payloads), 2)
            draft.put(some, values[some], payloads[other])
            draft.put(other, values[other], payloads[some])
            return
        for _ in range(rng.randrange(1, 5)):
            kind = rng.choice(kinds)
            row = rng.choice([row for row in rows if row.key[:1] == kind])
            rng.choice(ATTACKS)(draft, row, rng)
        one, two = rng.choices(rows, k=2)
        if rng.random() < 0.3:
            draft.put(one.key, two.value)


def opened(location: str) -> Store:
    return Store(open_pages(location, max_bytes=16 * MIB), max_bytes=16 * MIB)


def use(store: Store, rng: random.Random) -> None:
    """What an engine does with a location. What it restores is compared with what was stored."""
    for _ in range(4):
        with suppress(StorageError):
            store.fetch(rng.choice(SEQUENCES), streamed=rng.random() < 0.5)
        with suppress(StorageError):
            store.put(rng.choice(SEQUENCES))
    with suppress(StorageError):
        store.engine.evictor.evict(MIB // 64)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_are_damaged_at_random_give_no_wrong_state_and_are_mended(scheme, tmp_path, request):
    location = place(scheme, tmp_path, request)
    # a round of object storage is hundreds of requests
    for seed in range(volume(2 if scheme == "s3" else 6)):
        rng = random.Random(f"{seed} of {scheme}")
        with closing(opened(location).engine) as engine:
            engine.upkeep.clear(None)
        store = opened(location)
        for tokens in SEQUENCES:
            store.put(tokens)
        # while it is used, and then for another process
        damage(store, rng)
        use(store, rng)
        store.engine.close()
        store = opened(location)
        damage(store, rng)
        if rng.random() < 0.5:
            use(store, rng)
        store.engine.close()
        with Archive(location) as archive:
            archive.repair()
            assert archive.check() == [], seed
            with archive.backend.view() as view:
                keys = {key for key, _, _ in view.scan()}
        with closing(opened(location)) as store:
            for tokens in SEQUENCES:
                store.put(tokens)
            assert [store.fetch(tokens) for tokens in SEQUENCES] == [3] * len(SEQUENCES), seed
            assert keys <= store.stored_keys()
