"""The file of a slot: every byte is accounted for, in files that are read and in those that are written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixstore.errors import CorruptError, UnknownVersionError
from prefixstore.server.slot_file import HEAD, SlotFile, parse_slot_file, slot_assembly
from tests.support.models import prompt, write

SLOT = 2
N = 40


@pytest.fixture(scope="module", params=["llama", "gemma3", "mamba", "lfm2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of slot 2 of 3, not unified."""
    from tests.support.llama_server import start

    directory = tmp_path_factory.mktemp("slot-file")
    running = start(write(directory, request.param), directory / "slots", "-np", "3")
    try:
        running.complete(prompt(N), n=1, slot=SLOT)
        running.client.save(SLOT, "file")
        return (directory / "slots" / "file").read_bytes()
    finally:
        running.stop()


def written(file: SlotFile, slot: int) -> bytes:
    assert file.layout is not None
    recurrent = file.view.recurrent.data if file.view.recurrent is not None else b""
    view = replace(file.view, recurrent=None)
    assembly = slot_assembly(file.layout, view.shape, view.positions, file.tokens, slot, recurrent)
    data = bytearray(assembly.size)
    assembly.write(memoryview(data), [view])
    return bytes(data)


def test_what_is_parsed_is_written_back_and_parsed_alike(saved: bytes):
    file = parse_slot_file(saved, SLOT)
    assert file.tokens.tolist() == prompt(N)
    assert file.layout is not None
    assert file.layout.streams == (3 if file.view.sections else 1)
    again = written(file, SLOT)
    # the cells may be those of another stream, and in another order
    assert len(again) == len(saved)
    parsed = parse_slot_file(again, SLOT)
    assert parsed.layout == file.layout
    assert written(parsed, SLOT) == again
    for one, other in zip(file.view.sections, parsed.view.sections, strict=True):
        assert np.array_equal(one.positions, other.positions)
        assert all(np.array_equal(a.rows, b.rows) for a, b in zip(one.tensors, other.tensors, strict=True))


def test_a_file_that_is_cut_is_refused(saved: bytes):
    lengths = {0, 1, 11, 12, 13, 12 + 4 * (N + 4), len(saved) - 1, len(saved) // 2, *range(100, 1500, 97)}
    for n in lengths:
        with pytest.raises(CorruptError):
            parse_slot_file(saved[:n], SLOT)
    with pytest.raises(CorruptError):
        parse_slot_file(saved + b"\0", SLOT)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_changed_byte_is_refused_or_changes_only_what_it_says(saved: bytes, data: st.DataObject):
    at = data.draw(st.integers(0, min(len(saved), 2000) - 1))
    changed = bytearray(saved)
    changed[at] = data.draw(st.integers(0, 255))
    try:
        file = parse_slot_file(bytes(changed), SLOT)
    except (CorruptError, UnknownVersionError):
        return
    if file.layout is not None:
        assert len(written(file, SLOT)) == len(saved)


def test_images_are_seen_and_plain_tokens_are_read(saved: bytes):
    file = parse_slot_file(saved, SLOT)
    magic, version, n_words = HEAD.unpack_from(saved)
    words = np.frombuffer(saved, "<i4", n_words, 12)
    rest = saved[12 + 4 * n_words :]
    with_media = words.copy()
    with_media[-1] = 1
    with pytest.raises(CorruptError, match="not tokens"):
        parse_slot_file(HEAD.pack(magic, version, n_words) + with_media.tobytes() + rest, SLOT)
    # the place of the first token, and the picture itself
    with_media = np.append(with_media, np.array([20, 1, 7], "<i4"))
    with_media[3 + 20 : 3 + 30] = -1
    pictured = parse_slot_file(HEAD.pack(magic, version, n_words + 3) + with_media.tobytes() + rest, SLOT)
    assert pictured.has_media
    assert pictured.layout == file.layout
    assert pictured.tokens.tolist() == file.tokens[:20].tolist()
    assert pictured.view is not None
    assert pictured.view.recurrent is None
    for section in pictured.view.sections:
        assert (section.positions < 20).all()
    plain = file.tokens.tobytes()
    older = parse_slot_file(HEAD.pack(magic, version, len(file.tokens)) + plain + rest, SLOT)
    assert older.tokens.tolist() == file.tokens.tolist()
    assert older.layout is not None
    assert not older.layout.is_packed
    assert parse_slot_file(written(older, 0), 0).tokens.tolist() == file.tokens.tolist()
    with pytest.raises(CorruptError, match="begins with"):
        parse_slot_file(HEAD.pack(magic + 1, version, n_words) + saved[12:], SLOT)
    with pytest.raises(UnknownVersionError, match="slot files of version 4, and prefixstore knows 3"):
        parse_slot_file(HEAD.pack(magic, version + 1, n_words) + saved[12:], SLOT)
    packed = words.copy()
    packed[1] = 2
    with pytest.raises(UnknownVersionError, match="tokens of slot files in version 2, and prefixstore knows 1"):
        parse_slot_file(saved[:12] + packed.tobytes() + rest, SLOT)
    negative = words.copy()
    negative[4] = -5
    with pytest.raises(CorruptError, match="not tokens"):
        parse_slot_file(saved[:12] + negative.tobytes() + rest, SLOT)
