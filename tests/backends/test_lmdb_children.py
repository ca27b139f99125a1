"""The index of children in LMDB: what it costs, and that it is a function of the pages that are stored."""

from __future__ import annotations

import os
import random
from contextlib import closing, suppress
from itertools import pairwise

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.lmdb.children import CHUNK, ROW, Siblings
from prefixstore.format.keys import PAGE, SNAPSHOT, as_tokens, page_key
from prefixstore.format.record import Record, Usage, checksum
from prefixstore.maintenance.archive import Archive
from tests.support import outcome

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
            record = Record(PARENT, parent, 0, raw, 0, 0, 0, checksum(b""), 0, 1, form)
            transaction.put_namespace(PARENT, b"{}")
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

            # each thread holds one view or transaction at a time
            assert outcome(change) is None
            assert view.children([PARENT], PAGE) == before
            assert len(before) == 15
        with backend.view() as view:
            assert len(view.children([PARENT], PAGE)) == 20


# -- damage ------------------------------------------------------------------------------------------------------------


def damage(backend, chance):
    """Change, delete and add rows, as no store does."""
    environment = backend._open()
    rows = rows_of(backend)
    names = sorted(rows)
    with environment.begin(write=True) as txn:
        database = environment.databases[b"children"]
        for _ in range(chance.randrange(1, 12)):
            row = chance.choice(names)
            other = rows[chance.choice(names)]
            what = chance.randrange(6)
            if what == 0:
                txn.delete(row, db=database)
            elif what == 1:
                txn.put(row, other, db=database)
            elif what == 2:
                txn.put(row, chance.randbytes(36), db=database)
            elif what == 3:
                txn.put(row, chance.randbytes(chance.choice([0, 5, 35, 80])), db=database)
            elif what == 4:
                txn.put(row[: chance.randrange(1, len(row))] + chance.randbytes(3), other, db=database)
            else:
                # a node deeper or less deep than it is
                txn.put(row, chance.choice([0, 16, 64, 128, 2**31]).to_bytes(4, "little") + other[4:], db=database)


def some_pages(chance):
    lengths = [1, 16, 17, 64, 65, 200]
    known = [[chance.randrange(3) for _ in range(200)] for _ in range(4)]
    return [
        [
            *chance.choice(known)[: chance.choice(lengths)],
            *(chance.randrange(3) for _ in range(chance.randrange(1, 20))),
        ]
        for _ in range(60)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_damaged_rows_lose_hits_at_most_and_are_reported_and_built_again(tmp_path, seed):
    chance = random.Random(seed)
    many = [list(page) for page in dict.fromkeys(map(tuple, some_pages(chance)))]
    with closing(LMDBBackend(tmp_path / "one", 64 * MIB)) as backend:
        keys = set(put(backend, many[:40]))
        sound = rows_of(backend)
        damage(backend, chance)
        with backend.view() as view:
            found = list(view.flaws())
            assert {rule for rule, _, _ in found} <= {"index"}
            assert bool(found) == (rows_of(backend) != sound)
            require_true_answers(view, keys, many)
        # who writes meanwhile neither fails nor makes it worse than that
        keys |= set(put(backend, many[30:]))
        gone = set(chance.sample(sorted(keys), 10))
        with backend.update() as transaction:
            assert all(transaction.delete(key) for key in gone)
        keys -= gone
        with backend.view() as view:
            require_true_answers(view, keys, many)
        backend.reindex()
        with backend.view() as view:
            assert list(view.flaws()) == []
            assert {each.key for each in view.children([PARENT], PAGE)} == keys
        with closing(LMDBBackend(tmp_path / "two", 64 * MIB)) as other:
            put(other, [tokens for tokens in many if page_key(PARENT, as_tokens(tokens).tobytes()) in keys])
            assert rows_of(other) == rows_of(backend)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("leads_to", [b"nothing", b"a child"])
def test_forged_rows_that_lead_to_each_node_in_many_ways_are_walked_once(tmp_path, leads_to):
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        (key,) = put(backend, [[9] * 400])
        environment = backend._open()
        nodes = [PARENT, *(bytes([n]) * 32 for n in range(1, 80))]
        with environment.begin(write=True) as txn:
            database = environment.databases[b"children"]
            txn.drop(database, delete=False)
            for depth, (node, after) in enumerate(pairwise(nodes)):
                for first in (b"\1", b"\2", b"\3"):
                    row = node + bytes([PAGE]) + first.ljust(CHUNK, b"\0")
                    txn.put(row, ROW.pack((depth + 1) * 4, after), db=database)
            if leads_to == b"a child":
                txn.put(nodes[-1] + bytes([PAGE]) + b"\1", ROW.pack(0, key), db=database)
        many = [[9] * 400, [1], [2, 0, 0], [0x01] + [0] * 40]
        with backend.view() as view:
            require_true_answers(view, {key}, many)
            assert list(view.flaws())
        put(backend, many[1:])
        with backend.update() as transaction:
            assert transaction.delete(key)
        backend.reindex()
        with backend.view() as view:
            assert list(view.flaws()) == []
            assert len(view.children([PARENT], PAGE)) == 3


def require_true_answers(view, keys, many):
    """Whatever is found is a page that is stored, with the right parent."""
    answers = [view.children([PARENT], PAGE), *(view.neighbors(PARENT, as_tokens(tokens).tobytes()) for tokens in many)]
    for answer in answers:
        for key, record, usage in answer:
            assert key in keys
            assert (record, usage) == (view.record(key), view.usage(key))
            assert (record.parent, record.form) == (PARENT, PAGE)


def test_a_damaged_record_is_not_found_and_its_row_goes_with_it(tmp_path):
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        keys = put(backend, [[1, 2], [1, 3], [1, 4]])
        environment = backend._open()
        with environment.begin(write=True) as txn:
            database = environment.databases[b"records"]
            record = bytearray(txn.get(keys[1], db=database))
            record[20] ^= 1
            txn.put(keys[1], bytes(record), db=database)
        with backend.view() as view:
            assert [each.key for each in view.children([PARENT], PAGE)] == [keys[0], keys[2]]
            assert [each.key for each in view.neighbors(PARENT, as_tokens([1, 3]).tobytes())] == [keys[0], keys[2]]
            assert list(view.flaws()) == []
            assert [row["is_readable"] for row in view.facts(b"", 9)].count(False) == 0  # they are not verified
        with backend.update() as transaction:
            assert transaction.delete(keys[1])
        assert len(rows_of(backend)) == 2
        with backend.view() as view:
            assert list(view.flaws()) == []


def test_check_reports_damaged_rows_and_repair_deletes_no_page_for_them(tmp_path):
    location = f"lmdb://{tmp_path}"
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        put(backend, [[1], [2], [3]])
        environment = backend._open()
        with environment.begin(write=True) as txn:
            txn.drop(environment.databases[b"children"], delete=False)
    with Archive(location) as archive:
        assert [one.rule for one in archive.check()] == ["index"] * 3
        found, removed = archive.repair()
        assert (len(found), removed.pages) == (3, 0)
        assert list(archive.check()) == []
        assert archive.used().entries == 3


def test_an_order_that_was_left_incomplete_is_built_again_by_the_next_process_that_writes(tmp_path, monkeypatch):
    many = siblings(random.Random(2), 3, 20)
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        put(backend, many)
        sound = rows_of(backend)
        add, n_added = Siblings.add, [0]

        def interrupted(*arguments):
            n_added[0] += 1
            if n_added[0] == 9:
                raise KeyboardInterrupt
            add(*arguments)

        monkeypatch.setattr(Siblings, "add", interrupted)
        monkeypatch.setattr("prefixstore.backends.lmdb.backend.RECORDS_AT_ONCE", 4)
        with pytest.raises(KeyboardInterrupt):
            backend.reindex()
        monkeypatch.undo()
        assert len(rows_of(backend)) < len(sound)
    with closing(LMDBBackend(tmp_path, 64 * MIB, read_only=True)) as backend:
        assert rows_of(backend) != sound
    with closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        assert rows_of(backend) == sound
    # and only once
    with monkeypatch.context() as patched, closing(LMDBBackend(tmp_path, 64 * MIB)) as backend:
        patched.setattr(Siblings, "add", None)
        assert rows_of(backend) == sound


@pytest.mark.parametrize("n_siblings", [0, 1, 5])
@pytest.mark.parametrize("shared", [0, 100])
def test_a_page_whose_record_says_nothing_is_deleted_with_its_row(tmp_path, n_siblings, shared):
    chance = random.Random(n_siblings)
    with closing(LMDBBackend(tmp_path / "one", 64 * MIB)) as backend:
        _, key, *kept = put(backend, siblings(chance, shared, 2 + n_siblings))
        environment = backend._open()
        with environment.begin(write=True) as txn:
            database = environment.databases[b"records"]
            txn.put(key, bytes(txn.get(key, db=database)[:120]) + bytes(900), db=database)
        with backend.update() as transaction:
            assert transaction.delete(key)
            assert transaction.delete(bytes(32)) is False
        with backend.view() as view:
            assert list(view.flaws()) == []
            assert {each.key for each in view.children([PARENT], PAGE)} >= set(kept)
        # in one transaction with the page that replaces it
        before = rows_of(backend)
        again = put(backend, siblings(random.Random(n_siblings), shared, 2 + n_siblings))[1]
        with environment.begin(write=True) as txn:
            txn.put(again, b"", db=environment.databases[b"records"])
        with backend.update() as transaction:
            assert transaction.delete(again)
            raw = as_tokens(siblings(random.Random(n_siblings), shared, 2 + n_siblings)[1]).tobytes()
            transaction.put(again, Record(PARENT, PARENT, 0, raw, 0, 0, 0, checksum(b""), 0, 1), Usage(1), b"")
        with backend.view() as view:
            assert list(view.flaws()) == []
        with backend.update() as transaction:
            assert transaction.delete(again)
        assert rows_of(backend) == before


def test_a_store_whose_index_cannot_be_looked_at_is_not_left_open(tmp_path, monkeypatch):
    with closing(LMDBBackend(tmp_path / "kv", MIB)):
        pass

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LMDBBackend, "_end_reindex", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        LMDBBackend(tmp_path / "kv", MIB)
    data = (tmp_path / "kv" / "data.mdb").stat()
    for number in range(256):
        with suppress(OSError):
            assert not os.path.samestat(os.fstat(number), data)
    del caught
