"""What reads bytes of others, fuzzed; and what the fuzzers have found, once for all."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import CorruptError
from prefixstore.format.export import ExportReader
from prefixstore.format.keys import namespace_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, Usage, head_of
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import import_store
from tests.attacks import in_child
from tests.attacks.exporting import export_of, with_key
from tests.support.models import TORTURE
from tests.support.pages import make_page
from tests.support.places import place, space

TARGETS = ("export", "state")
# a minute for each, at length
BOUND = "-max_total_time=60" if TORTURE > 1 else "-atheris_runs=500"
SPACE = space()


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed: it is for Linux on x86-64 only")
@pytest.mark.parametrize("target", TARGETS)
def test_any_input_is_valid_or_raises_a_prefixstore_error(tmp_path, target):
    assert "Done" in in_child("fuzz_targets", target, tmp_path, BOUND, seconds=300)


# -- records ----------------------------------------------------------------------------------------------------------


def first_page(**fields: object) -> tuple[bytes, Record]:
    """A first page of the namespace, with other fields than it should have; its key fits them."""
    _, record = make_page(b"x" * 100, [1, 2, 3, 4], parent=SPACE.key, namespace=SPACE.key)
    return with_key(replace(record, **fields))


@pytest.mark.parametrize(
    "fields",
    [{"tokens": b""}, {"raw_bytes": 2**40 + 1}, {"stored_bytes": 2**64 - 1}, {"created": 2**63}],
    ids=["no tokens", "raw bytes", "stored bytes", "created"],
)
def test_a_sealed_record_of_an_impossible_page_is_refused(fields):
    key, record = first_page(**fields)
    with pytest.raises(CorruptError, match="impossible values"):
        Record.unpack(key, record.pack())
    assert (head_of(record.pack()) is None) == bool({"raw_bytes", "stored_bytes"} & fields.keys())


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
@pytest.mark.parametrize("start", [1, 2**31, 2**32 - 1])
def test_a_page_that_does_not_start_where_its_parent_ends_is_not_found_and_is_deleted(tmp_path, request, scheme, start):
    location = place(scheme, tmp_path, request)
    payload = b"x" * 100
    key, record = first_page(start=start)
    with closing(open_pages(location, max_bytes=64 << 20)) as backend, backend.update() as transaction:
        transaction.put_namespace(SPACE.key, SPACE.canonical)
        transaction.put(key, record, Usage(1), payload)
    with Archive(location) as archive:
        assert archive.pages() == []
        found, removed = archive.repair()
        assert {problem.rule for problem in found} == {"position"}
        assert removed.pages == 1
        assert archive.check() == []


# -- export files -----------------------------------------------------------------------------------------------------


def imported(tmp_path: Path, data: bytes) -> tuple[list[str], int]:
    """What a location complains of after an import, and how many pages it has."""
    with Archive(f"sqlite:///{tmp_path / 'kv.db'}", create=True) as archive:
        with pytest.raises(CorruptError):
            import_store(ExportReader(io.BytesIO(data), "forged"), archive)
        return [str(problem) for problem in archive.check()], len(archive.pages())


@pytest.mark.parametrize("usage", [Usage(2**64 - 1), Usage(1, expires=2**63)])
def test_times_that_do_not_fit_a_database_are_refused_before_they_reach_it(tmp_path, usage):
    key, record = first_page()
    assert imported(tmp_path, export_of(SPACE.canonical, [(key, record, usage, b"x" * 100)])) == ([], 0)


def test_a_page_at_the_wrong_position_is_not_imported(tmp_path):
    pages = [(*first_page(start=4), Usage(1), b"x" * 100), (*first_page(), Usage(1), b"x" * 100)]
    problems, n_pages = imported(tmp_path, export_of(SPACE.canonical, pages))
    assert problems == []
    assert n_pages == 1


SETTINGS = {
    "no object": b"[]",
    "no UTF-8": b"\xff",
    "UTF-16": '{"salt":"a"}'.encode("utf-16"),
    "not canonical": b'{"salt": "a"}',
    "twice": b'{"salt":"a","salt":"b"}',
    "an unpaired surrogate": b'{"salt":"\\ud800"}',
    "no scalar": b'{"salt":{"a":1}}',
    "deep": b'{"salt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_are_not_canonical_are_refused_and_block_no_one(tmp_path, settings):
    with pytest.raises(CorruptError, match="settings of a namespace"):
        Namespace.parse(settings)
    key = namespace_key(settings)
    page = make_page(b"x" * 100, [1, 2], parent=key, namespace=key)
    with pytest.raises(CorruptError, match="settings of a namespace"):
        ExportReader(io.BytesIO(export_of(settings, [(*page, Usage(1), b"x" * 100)])), "forged")
    # where they are in a store already
    location = f"lmdb://{tmp_path / 'kv'}"
    with closing(open_pages(location, max_bytes=64 << 20)) as backend, backend.update() as transaction:
        transaction.put_namespace(key, settings)
        transaction.put(*page, Usage(1), b"x" * 100)
    with Archive(location) as archive:
        assert [holding.namespace for holding in archive.holdings()] == [None]
