"""The index of children in LMDB: what it costs, and that it is a function of the pages that are stored."""

from __future__ import annotations

import random
import threading
from contextlib import closing

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.lmdb.children import CHUNK
from prefixstore.format.keys import PAGE, SNAPSHOT, as_tokens
from prefixstore.format.record import Record, Usage

MIB = 1 << 20
PARENT = bytes(range(32))


def rows_of(backend):
    """The rows of the index."""
    environment = backend._open()
    with environment.begin(write=False) as txn:
        return {bytes(key): bytes(value) for key, value in txn.cursor(environment.databases[b"children"])}


def put(backend, many, parent=PARENT, form=PAGE):
    keys = []
    with backend.update() as transaction:
        for tokens in many:
            raw = as_tokens(tokens).tobytes()
            record = Record(PARENT, parent, 0, raw, 0, 0, 0, bytes(16), 0, 1, form)
            transaction.put(record.key, record, Usage(1), b"")
            keys.append(record.key)
    return keys


def siblings(chance, shared, count):
    """Pages of 256 tokens that have the first ones in common."""
    first = [chance.randrange(1 << 17) for _ in range(shared)]
    return [first + [chance.randrange(1 << 17) for _ in range(256 - shared)] for _ in range(count)]


class Counting:
    """An LMDB transaction that counts what it is asked for."""

    def __init__(self, txn):
        self.txn, self.n_seeks = txn, 0

    def get(self, *arguments, **options):
        self.n_seeks += 1
        return self.txn.get(*arguments, **options)

    def cursor(self, *arguments):
        self.n_seeks += 1
        return self.txn.cursor(*arguments)

    def __getattr__(self, name):
        return getattr(self.txn, name)


@pytest.mark.parametrize("shared", [0, 200])
def test_a_lookup_among_a_thousand_siblings_takes_a_few_seeks_and_a_child_one_row(tmp_path, shared):
    chance = random.Random(shared)
    many = siblings(chance, shared, 1000)
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        put(backend, many)
        assert len(rows_of(backend)) <= 1001
        with backend.view() as view:
            view._txn = counting = Counting(view._txn)
            for tokens in many[:50]:
                wanted = as_tokens([*tokens[: shared + 1], 1 << 20]).tobytes()
                before = counting.n_seeks
                found = view.neighbors(PARENT, wanted)
                # with record and usage of three pages
                assert counting.n_seeks - before <= 14
                assert any(entry.record.tokens == as_tokens(tokens).tobytes() for entry in found)


def test_the_rows_depend_on_the_pages_and_not_on_their_history(tmp_path):
    """What a deletion leaves is what would be there without the deleted page."""
    chance = random.Random(1)
    few = [[chance.randrange(2) for _ in range(chance.choice([1, 15, 16, 17, 31, 32, 33, 48]))] for _ in range(120)]
    many = [[*page[:n], chance.randrange(2)] for page in few for n in (14, 16, 30)]
    many = [list(page) for page in dict.fromkeys(map(tuple, [*few, *many, *siblings(chance, 100, 20)]))]
    kept = chance.sample(many, len(many) // 2)
    with (
        closing(LMDBBackend(tmp_path / "one", 64 * MIB)) as one,
        closing(LMDBBackend(tmp_path / "two", 64 * MIB)) as two,
    ):
        chance.shuffle(many)
        keys = put(one, many)
        with one.update() as transaction:
            for key, tokens in zip(keys, many, strict=True):
                if tokens not in kept:
                    assert transaction.delete(key)
        put(two, kept)
        assert rows_of(one) == rows_of(two)
        with one.update() as transaction:
            for key in keys:
                transaction.delete(key)
        assert rows_of(one) == {}


def test_tokens_of_any_length_and_tails_that_begin_with_each_other_have_short_keys(tmp_path):
    tails = [list(range(n)) for n in (1, 2, 16, 17, 32, 500, 2047, 2048)]
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        keys = put(backend, tails)
        put(backend, [[], [1]], parent=keys[-1], form=SNAPSHOT)
        assert max(map(len, rows_of(backend))) <= 32 + 1 + CHUNK
        with backend.view() as view:
            for tokens in tails:
                below, *above = view.neighbors(PARENT, as_tokens(tokens).tobytes())
                assert below.record.tokens == as_tokens(tokens).tobytes()
                assert len(above) == (tokens is not tails[-1])
            assert [len(each.record.tokens) for each in view.children([keys[-1]], SNAPSHOT)] == [0, 4]


def test_an_open_view_sees_the_children_of_one_moment(tmp_path):
    chance = random.Random(5)
    many = siblings(chance, 64, 30)
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        keys = put(backend, many[:15])
        with backend.view() as view:
            before = view.children([PARENT], PAGE)

            def change():
                put(backend, many[15:])
                with backend.update() as transaction:
                    for key in keys[:10]:
                        transaction.delete(key)

            in_thread(change)
            assert view.children([PARENT], PAGE) == before
            assert len(before) == 15
        with backend.view() as view:
            assert len(view.children([PARENT], PAGE)) == 20


def in_thread(work):
    """Run in another thread: each holds one view or transaction at a time."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
