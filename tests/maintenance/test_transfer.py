"""Pages from any backend into any other, directly or through a portable file."""

import io
import struct
from contextlib import closing
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest

from prefixstore.errors import CorruptError, FullError, IncompatibleError, UnavailableError
from prefixstore.format import export
from prefixstore.format.export import ExportReader
from prefixstore.format.namespace import Namespace
from prefixstore.maintenance import transfer
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import copy_store, export_store, import_store
from prefixstore.units import counted
from tests.support.faults import FlakyBackend
from tests.support.places import SCHEMES, contents, fill, place, space

SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 10], [20, 21, 22, 23, 24], [30, 31])
MINE, YOURS = space("mine"), space("yours")


@pytest.fixture
def source(tmp_path):
    with Archive(tmp_path / "source", create=True) as archive:
        fill(archive.backend, MINE, SEQUENCES)
        fill(archive.backend, YOURS, SEQUENCES[:1], pinned=True)
        yield archive


def packed(archive, **options):
    file = io.BytesIO()
    export_store(archive, file, **options)
    return file.getvalue()


def through_a_file(here, there, **options):
    return import_store(ExportReader(io.BytesIO(packed(here, **options)), "f"), there)


MOVES = copy_store, through_a_file


class Pipe(io.RawIOBase):
    """Bytes that can only be read in order."""

    def __init__(self, data):
        self._file = io.BytesIO(data)

    def read(self, n=-1):
        return self._file.read(n)

    def seekable(self):
        return False

    def close(self):
        self._file.close()


# from each and to each: an export does not know where it goes
@pytest.mark.parametrize(("one", "other"), [*zip(SCHEMES, (*SCHEMES[1:], SCHEMES[0]), strict=True)])
def test_pages_move_between_all_backends_unchanged(one, other, tmp_path, request):
    with (
        Archive(place(one, tmp_path, request, "one"), create=True) as source,
        Archive(place(other, tmp_path, request, "other"), create=True) as target,
    ):
        fill(source.backend, MINE, SEQUENCES)
        fill(source.backend, YOURS, SEQUENCES[:1], pinned=True)
        before = contents(source.backend)
        moved = import_store(ExportReader(io.BytesIO(packed(source)), "f"), target)
        assert (moved.pages, moved.bytes, moved.namespaces, moved.present) == (9, 9000, 2, 0)
        assert contents(target.backend) == before
        assert target.check() == []
        with target.backend.view() as there, source.backend.view() as here:
            assert there.namespaces() == here.namespaces()
        assert copy_store(source, target).present == 9
        target.purge(everything=True)
        assert copy_store(source, target).pages == 9
        assert contents(target.backend) == before
        assert target.check() == []


def test_a_namespace_whose_settings_are_damaged_keeps_no_other_from_being_moved(source, tmp_path):
    fill(source.backend, MINE, SEQUENCES)
    fill(source.backend, YOURS, SEQUENCES)
    with source.backend.update() as transaction:
        transaction.put_namespace(YOURS.key, b"damaged")
    for move in MOVES:
        with Archive(tmp_path / "target", create=True) as target:
            target.purge(everything=True)
            assert move(source, target).pages == 7
    assert export_store(source, io.BytesIO()).damaged == 7


@pytest.mark.parametrize("move", MOVES)
def test_a_copy_and_an_export_know_what_the_models_are_called(source, tmp_path, move):
    named = Namespace({**MINE.settings, "model": "a" * 64})
    fill(source.backend, named, SEQUENCES)
    source.engine.describe(named, "Llama 3 Q4_K_M")
    with Archive(tmp_path / "target", create=True) as target:
        move(source, target, namespaces={named.key})
    with Archive(tmp_path / "target", read_only=True) as target:
        assert target.history().models == {"a" * 12: "Llama 3 Q4_K_M"}


def test_only_the_chosen_pages_are_exported_with_their_ancestors(source, tmp_path):
    page = fill(source.backend, MINE, SEQUENCES)[1][-1].hex()
    with Archive(tmp_path / "target", create=True) as target:
        data = packed(source, keys=source.select(page=page))
        moved = import_store(ExportReader(io.BytesIO(data), "f"), target)
        assert (moved.pages, moved.namespaces) == (3, 1)
        assert target.check() == []
        data = packed(source, namespaces={YOURS.key})
        assert import_store(ExportReader(io.BytesIO(data), "f"), target).pages == 2


def ends_of_entries(data):
    """Where each entry of a file ends, and how many pages there are up to there."""
    ends, at, pages = [], export.HEADER.size, 0
    while at < len(data):
        kind, head, body = export.ENTRY.unpack_from(data, at)
        at += export.ENTRY.size + head + export.SEAL.size + body
        pages += kind == export.PAGE
        ends.append((at, pages))
    return ends


@pytest.mark.parametrize("batch_bytes", [1, 2500, transfer.BATCH_BYTES])
def test_a_truncated_file_yields_its_complete_pages_and_a_second_import_the_rest(
    source, tmp_path, batch_bytes, monkeypatch
):
    monkeypatch.setattr(transfer, "BATCH_BYTES", batch_bytes)
    data = packed(source)
    ends = ends_of_entries(data)
    first_page = next(end for end, pages in ends if pages == 0 and end > ends[0][0])
    for i, cut in enumerate((first_page, first_page + 3, len(data) // 2, ends[-2][0], len(data) - 1)):
        whole = max((pages for end, pages in ends if end <= cut), default=0)
        with Archive(tmp_path / f"target{i}", create=True) as target:
            # the start of the entry after the namespaces is read with them
            with (
                closing(Pipe(data[:cut])) as file,
                pytest.raises(CorruptError, match=f"truncated after {counted(whole, 'page')}; import again"),
            ):
                import_store(ExportReader(file, "f"), target)
            assert len(contents(target.backend)) == whole
            assert target.check() == []
            with closing(Pipe(data)) as file:
                moved = import_store(ExportReader(file, "f"), target)
            assert (moved.pages, moved.present) == (9 - whole, whole)
            assert contents(target.backend) == contents(source.backend)


def test_an_import_that_cannot_be_written_ends_with_the_error(source, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "BATCH_BYTES", 2000)
    with Archive(tmp_path / "target", create=True) as target:
        write = target.engine.importer.import_pages
        # the first batch is written
        writing = Mock(side_effect=[DEFAULT, FullError("the disk is full")], wraps=write)
        monkeypatch.setattr(target.engine.importer, "import_pages", writing)
        with pytest.raises(FullError, match="the disk is full"):
            import_store(ExportReader(io.BytesIO(packed(source)), "f"), target)
        assert len(contents(target.backend)) == 2


@pytest.mark.slow
def test_a_flipped_bit_is_detected_anywhere_and_nothing_wrong_is_stored(source, tmp_path):
    data = packed(source)
    good = contents(source.backend)
    rng = np.random.default_rng(0)
    for at in [*range(60), *rng.integers(60, len(data), 120).tolist(), *range(len(data) - 80, len(data))]:
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        with Archive("memory:", create=True) as target:
            with pytest.raises((CorruptError, IncompatibleError)):
                import_store(ExportReader(io.BytesIO(bytes(changed)), "f"), target)
            assert contents(target.backend).items() <= good.items()
            assert target.check() == []


def test_other_files_and_other_versions_are_refused(source):
    with pytest.raises(IncompatibleError, match="not written by prefixstore"):
        ExportReader(io.BytesIO(b"GGUF" + bytes(100)), "f")
    with pytest.raises(IncompatibleError, match="not written by prefixstore"):
        ExportReader(io.BytesIO(b""), "f")
    for versions, says in (((5, 2), "upgrade"), ((4, 3), "upgrade"), ((3, 2), "any more"), ((4, 1), "any more")):
        data = struct.pack("<8sII", export.MAGIC, *versions)
        with pytest.raises(IncompatibleError, match=says):
            ExportReader(io.BytesIO(data), "f")


def test_a_tail_is_replaced_by_the_page_that_continues_it_and_is_not_imported_again(tmp_path):
    with Archive(tmp_path / "a", create=True) as short, Archive(tmp_path / "b", create=True) as long:
        fill(short.backend, MINE, [[1, 2]], pinned=True)
        fill(long.backend, MINE, [[1, 2, 3]])
        assert copy_store(long, short).pages == 1
        assert [page.n_tokens for page in short.pages()] == [3]
        fill(short.backend, YOURS, [[1, 2, 3]])
        with Archive(tmp_path / "c", create=True) as tail:
            fill(tail.backend, YOURS, [[1, 2]])
            moved = copy_store(tail, short)
        assert (moved.pages, moved.present) == (0, 1)
        assert short.check() == []


def test_a_location_that_fails_in_the_middle_is_an_error_and_its_pages_are_not_called_damaged(source, tmp_path):
    source.backend = FlakyBackend(source.backend, "payload", failing=range(3, 100))
    with pytest.raises(UnavailableError, match="on purpose"):
        export_store(source, io.BytesIO())
    with Archive(tmp_path / "target", create=True) as target, pytest.raises(UnavailableError, match="on purpose"):
        copy_store(source, target)


def test_pages_that_are_deleted_meanwhile_are_left_out_with_their_descendants(source, monkeypatch):
    look = source.pages

    def pages():
        found = look()
        monkeypatch.setattr(source, "pages", look)
        source.purge(page=next(page.key for page in found if page.children).hex())
        return found

    monkeypatch.setattr(source, "pages", pages)
    moved = export_store(source, io.BytesIO())
    assert moved.pages == len(look()) < 9
    assert moved.damaged == 0


@pytest.mark.slow
def test_the_memory_of_a_transfer_does_not_grow_with_the_store(tmp_path):
    import tracemalloc

    sequences = [list(range(1000 * i, 1000 * i + 40)) for i in range(20)]
    with Archive(tmp_path / "source", create=True) as source, Archive(tmp_path / "target", create=True) as target:
        fill(source.backend, MINE, sequences, size=1 << 20)
        tracemalloc.start()
        with (tmp_path / "f").open("wb") as file:
            export_store(source, file)
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 16 << 20
        tracemalloc.reset_peak()
        with (tmp_path / "f").open("rb") as file:
            assert import_store(ExportReader(file, "f"), target).pages == 200
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 80 << 20
