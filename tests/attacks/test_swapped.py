"""Rows and payloads swapped or changed in place: never a wrong state, and all of them are found."""

from __future__ import annotations

from contextlib import closing, suppress

import pytest
from sqlalchemy import create_engine, text

from prefixstore.engine.keyspace import record_row, usage_row
from prefixstore.engine.pages import open_pages
from prefixstore.errors import StorageError
from prefixstore.format.codec import decode
from prefixstore.format.record import Record
from prefixstore.maintenance.archive import Archive
from tests.support.models import TORTURE
from tests.support.places import SCHEMES, contents, fill, place, space

MIB = 1 << 20


def states(location: str) -> dict[bytes, bytes]:
    """All states that can be had, by every way to read them."""
    found: dict[bytes, bytes] = {}
    with closing(open_pages(location, max_bytes=64 * MIB)) as backend, backend.view() as view:
        for key, record, _ in view.scan():
            if isinstance(record, Record):
                with suppress(StorageError):
                    found[key] = bytes(decode(record, view.payload(key) or b""))
                with suppress(StorageError):
                    for one, payload in view.fetch([key]):
                        assert found.get(key) in (None, bytes(decode(one, payload)))
                        found[key] = bytes(decode(one, payload))
    return found


def mend(location: str, good: dict[bytes, bytes], lost: set[bytes]) -> None:
    """What is damaged gives no state, is reported and deleted; the rest stays."""
    assert states(location).items() <= good.items()
    assert not states(location).keys() & lost
    with Archive(location) as archive:
        archive.pages()
        found, _ = archive.repair()
        assert found
        assert archive.check() == []
    assert states(location).items() <= good.items()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [1000, 2_200_000] if TORTURE > 1 else [1000])
def test_payloads_swapped_between_keys_are_not_restored(tmp_path, request, scheme, size):
    location = place(scheme, tmp_path, request)
    with closing(open_pages(location, max_bytes=64 * MIB)) as backend:
        paths = fill(backend, space(), [list(range(8)), [9] * 8], size=size)
        good = {key: payload for key, (_, _, payload) in contents(backend).items()}
        (_, one), (_, other) = paths
        with backend.view() as view:
            records = {key: (view.record(key), view.usage(key)) for key in (one, other)}
        with backend.update() as transaction:
            transaction.put(one, *records[one], good[other])
            transaction.put(other, *records[other], good[one])
    mend(location, good, {one, other})
    assert len(states(location)) == 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_record_under_the_key_of_another_page_is_refused(tmp_path, request, scheme):
    location = place(scheme, tmp_path, request)
    with closing(open_pages(location, max_bytes=64 * MIB)) as backend:
        (path, other) = fill(backend, space(), [list(range(8)), [9] * 4])
        good = {key: payload for key, (_, _, payload) in contents(backend).items()}
        with backend.view() as view:
            record, usage = view.record(path[0]), view.usage(path[0])
        with backend.update() as transaction:
            transaction.put(other[0], record, usage, good[path[0]])
    mend(location, good, {other[0]})
    assert len(states(location)) == 2


CHANGES = {
    "value": "UPDATE prefixstore_rows SET value = :blob WHERE key = :key",
    "empty value": "UPDATE prefixstore_rows SET value = :empty WHERE key = :key",
    "longer value": "UPDATE prefixstore_rows SET value = value || :blob WHERE key = :key",
    "other value": "UPDATE prefixstore_rows SET value = (SELECT r.value FROM prefixstore_rows r WHERE r.key = :other)"
    " WHERE key = :key",
    "usage": "UPDATE prefixstore_rows SET value = :blob WHERE key = :usage",
    "no payload": "UPDATE prefixstore_rows SET payload_bytes = NULL WHERE key = :key",
    "no pieces": "DELETE FROM prefixstore_payloads WHERE key = :key",
    "empty pieces": "UPDATE prefixstore_payloads SET data = :empty WHERE key = :key",
    "longer": "UPDATE prefixstore_payloads SET data = data || :blob WHERE key = :key",
    "number": "UPDATE prefixstore_payloads SET piece = piece + 7 WHERE key = :key AND piece = 0",
    "other bytes": "UPDATE prefixstore_payloads SET data = (SELECT p.data FROM prefixstore_payloads p"
    " WHERE p.key = :other AND p.piece = 0) WHERE key = :key AND piece = 0",
}


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql"])
@pytest.mark.parametrize("what", CHANGES)
def test_rows_that_are_changed_through_sql_are_found(tmp_path, request, scheme, what):
    location = place(scheme, tmp_path, request)
    with closing(open_pages(location, max_bytes=64 * MIB)) as backend:
        (path, other) = fill(backend, space(), [list(range(12)), [9] * 4], size=3 << 19)
        good = {key: payload for key, (_, _, payload) in contents(backend).items()}
    given = {
        "key": record_row(path[1]), "usage": usage_row(path[1]), "other": record_row(other[0]),
        "blob": b"\1\2\3\4" * 4, "empty": b"",
    }  # fmt: skip
    names = {name: given[name] for name in given if f":{name}" in CHANGES[what]}
    engine = create_engine(location)
    with engine.begin() as connection:
        assert connection.execute(text(CHANGES[what]), names).rowcount > 0
    engine.dispose()
    mend(location, good, {path[1]} if what not in ("usage", "number") else set())
    assert {path[0], other[0]} <= states(location).keys()


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql"])
@pytest.mark.parametrize("size", [7, -1, 1 << 40])
def test_sizes_of_payloads_that_are_changed_through_sql_are_not_believed(tmp_path, request, scheme, size):
    location = place(scheme, tmp_path, request)
    with closing(open_pages(location, max_bytes=64 * MIB)) as backend:
        (path,) = fill(backend, space(), [list(range(12))], size=3 << 19)
        good = {key: payload for key, (_, _, payload) in contents(backend).items()}
    engine = create_engine(location)
    with engine.begin() as connection:
        changed = {"size": size, "key": record_row(path[1])}
        connection.execute(text("UPDATE prefixstore_rows SET payload_bytes = :size WHERE key = :key"), changed)
    engine.dispose()
    assert states(location) == good
    with Archive(location) as archive:
        assert archive.check() == []
