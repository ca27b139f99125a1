"""The bytes of all payloads: counted, not summed at each question; what a damaged count leads to, and what mends it."""

from __future__ import annotations

from contextlib import closing

import pytest
from sqlalchemy import update

from prefixstore.backends import open_backend
from prefixstore.backends.base import View
from prefixstore.backends.lmdb import backend as lmdb_backend
from prefixstore.backends.lmdb.sizes import ROW
from prefixstore.backends.sql.schema import META, PAGES
from prefixstore.maintenance.archive import Archive
from tests.support.places import MIB, SCHEMES, fill, opened, place, space

SEQUENCES = [[number, 1, 2, 3, 4, 5, 6, 7] for number in range(10)]
SIZES = (20 * 1000, 20 * 1000)


def sizes_of(backend):
    with backend.view() as view:
        return view.sizes


def put_row(backend, value):
    """Write what LMDB has counted; None deletes it."""
    environment = backend._open()
    with environment.begin(write=True) as txn:
        meta = environment.databases[b"meta"]
        if value is None:
            txn.delete(ROW, db=meta)
        else:
            txn.put(ROW, value, db=meta)


def row(backend):
    environment = backend._open()
    with environment.begin(write=False) as txn:
        return bytes(txn.get(ROW, default=b"", db=environment.databases[b"meta"]))


def change(backend, statement):
    with backend.database.writing() as connection:
        connection.execute(statement)


@pytest.fixture
def no_sums(monkeypatch):
    """Adding sizes up is an error."""

    def fail(view):
        raise AssertionError("the sizes were added up")

    monkeypatch.setattr(View, "sizes", property(fail))


@pytest.mark.parametrize("scheme", ["memory", *SCHEMES])
@pytest.mark.usefixtures("no_sums")
def test_sizes_are_counted(scheme, tmp_path, request):
    url = "memory:" if scheme == "memory" else place(scheme, tmp_path, request)
    with closing(open_backend(url, max_bytes=64 * MIB)) as backend:
        assert sizes_of(backend) == (0, 0)
        keys = fill(backend, space(), SEQUENCES)
        assert sizes_of(backend) == SIZES
        with backend.update() as transaction:
            transaction.delete(keys[0][1])
        assert sizes_of(backend) == (19_000, 19_000)


# -- LMDB --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "short", "another", "old", "flipped"])
def test_without_a_sound_count_sizes_are_added_up_until_the_next_change_counts_them(tmp_path, damage):
    with opened(f"lmdb://{tmp_path}/kv") as backend:
        fill(backend, space(), SEQUENCES[:1])
        old = row(backend)
        fill(backend, space(), SEQUENCES[1:])
        right = row(backend)
        flipped = bytes([right[0], right[1] ^ 1, *right[2:]])
        wrong = {"missing": None, "short": b"x", "another": bytes(len(right)), "old": old, "flipped": flipped}
        put_row(backend, wrong[damage])
        assert sizes_of(backend) == SIZES
        with Archive(backend.location) as archive:
            assert archive.check() == []
        # sizes do not change with this, but they are written down
        fill(backend, space("other"), SEQUENCES[:1])
        with backend.update() as transaction:
            for key, record, _ in list(transaction.scan()):
                if record.namespace == space("other").key:
                    transaction.delete(key)
        assert row(backend) == right


def test_so_many_pages_that_adding_up_takes_long_are_counted_by_reindex_only(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_backend, "SUMMED_AT_ONCE", 10)
    with opened(f"lmdb://{tmp_path}/kv") as backend:
        fill(backend, space(), SEQUENCES)
        right = row(backend)
        put_row(backend, None)
        key = fill(backend, space(), [[99, 1, 2, 3]])[0][0]
        assert row(backend) == b""
        assert sizes_of(backend) == (21_000, 21_000)
        with backend.update() as transaction:
            transaction.delete(key)
        backend.reindex()
        assert row(backend) == right


def test_reindex_counts_what_others_write_meanwhile(tmp_path, monkeypatch):
    with opened(f"lmdb://{tmp_path}/kv") as backend:
        fill(backend, space(), SEQUENCES)
        summed = lmdb_backend._View.summed
        n_written = []

        def slowly(view):
            found = summed(view)
            if not view._txn.id() or not isinstance(view, lmdb_backend._Change):
                # another thread commits before the sums are written down
                n_written.append(1)
                fill(other, space("more"), [[len(n_written), 1, 2, 3]])
            return found

        with opened(backend.location) as other:
            monkeypatch.setattr(lmdb_backend._View, "summed", slowly)
            put_row(backend, None)
            backend.reindex()
            monkeypatch.undo()
        assert len(n_written) == lmdb_backend.SUMS + 1
        expected = 20_000 + 1000 * len(n_written)
        assert row(backend)
        assert sizes_of(backend) == (expected, expected)
        with Archive(backend.location) as archive:
            assert archive.check() == []


def test_deleting_or_replacing_a_damaged_record_leaves_the_right_sizes(tmp_path):
    with opened(f"lmdb://{tmp_path}/kv") as backend:
        paths = fill(backend, space(), SEQUENCES)
        environment = backend._open()
        for key, offset in ((paths[0][1], 17), (paths[1][1], 60), (paths[2][1], -1)):
            with environment.begin(write=True) as txn:
                records = environment.databases[b"records"]
                stored = bytearray(txn.get(key, db=records))
                stored[offset] ^= 0x7F
                txn.put(key, bytes(stored), db=records)
        with backend.update() as transaction:
            transaction.delete(paths[0][1])
            transaction.delete(paths[1][1])
        with Archive(backend.location) as archive:
            assert archive.repair()[1].pages == 1
            assert archive.check() == []
        assert sizes_of(backend) == (17_000, 17_000)


def test_a_wrong_count_in_lmdb_is_found_and_mended(tmp_path):
    with opened(f"lmdb://{tmp_path}/kv") as backend:
        fill(backend, space(), SEQUENCES)
        with backend.update() as transaction:
            transaction.put_sizes((1, 2))
        with Archive(backend.location) as archive:
            found = archive.check()
            assert [violation.rule for violation in found] == ["index"]
            assert "20000" in found[0].message
            archive.repair()
            assert archive.check() == []
        assert sizes_of(backend) == SIZES


# -- SQL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql"])
@pytest.mark.parametrize("column", ["entries", "bytes", "stored_bytes", "raw_bytes"])
def test_a_wrong_count_in_a_database_is_found_and_mended(scheme, column, tmp_path, request):
    with opened(place(scheme, tmp_path, request)) as backend:
        fill(backend, space(), SEQUENCES)
        change(backend, update(META).values({column: META.c[column] + 1}))
        with Archive(backend.location) as archive:
            found = archive.check()
            assert [violation.rule for violation in found] == ["index"]
            assert "counted as" in found[0].message
            archive.repair()
            assert archive.check() == []
        assert sizes_of(backend) == SIZES


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql"])
def test_a_negative_count_is_none(scheme, tmp_path, request):
    with opened(place(scheme, tmp_path, request)) as backend:
        fill(backend, space(), SEQUENCES)
        change(backend, update(META).values(raw_bytes=-1))
        assert sizes_of(backend) == SIZES
        # the next change adds them up
        fill(backend, space(), [[99, 1, 2, 3]])
        with Archive(backend.location) as archive:
            assert archive.check() == []
        assert sizes_of(backend) == (21_000, 21_000)


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql"])
@pytest.mark.parametrize("size", [2**62, -5, 3])
def test_a_page_whose_size_was_damaged_is_deleted_and_the_sizes_are_mended(scheme, size, tmp_path, request):
    with opened(place(scheme, tmp_path, request)) as backend:
        fill(backend, space(), SEQUENCES)
        key = fill(backend, space("damaged"), [[1, 1, 2, 3]])[0][0]
        change(backend, update(PAGES).where(PAGES.c.key == key).values(raw_bytes=size, stored_bytes=size))
        with Archive(backend.location) as archive:
            found = archive.check()
            assert {violation.rule for violation in found} >= {"index", "record"}
            archive.repair()
            assert archive.check() == []
        assert sizes_of(backend) == SIZES


def test_what_is_no_number_does_not_keep_sqlite_from_deleting_a_page(tmp_path):
    with opened(f"sqlite:///{tmp_path}/kv.db") as backend:
        keys = fill(backend, space(), SEQUENCES)
        with backend.database.writing() as connection:
            connection.exec_driver_sql(
                "UPDATE prefixstore_pages SET raw_bytes = 'x', stored_bytes = x'00' WHERE key = ?", (keys[0][1],)
            )
        with Archive(backend.location) as archive:
            assert archive.repair()[1].pages == 1
            assert archive.check() == []
        assert sizes_of(backend) == (19_000, 19_000)
