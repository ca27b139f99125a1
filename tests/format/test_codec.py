"""Packed states: what was written is read back, and nothing else is accepted."""

import dataclasses
import random
import struct
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixstore.buffers import BufferPool
from prefixstore.errors import CorruptError, IncompatibleError, InvalidParameterError
from prefixstore.format.autocodec import Encoder, encode
from prefixstore.format.codec import CODECS, PACKINGS, decode, decode_into, verify_payload
from prefixstore.format.record import Record, checksum

NS = b"n" * 32
PACKED = [name for name in CODECS if name != "raw"]


def record_of(stored, raw_bytes, number=0):
    return Record(NS, NS, 0, b"\1\0\0\0", number, raw_bytes, len(stored), checksum(stored), 0, 1)


def floats(n=20_000, seed=0):
    """16-bit floats as a model makes them: mantissas that nothing compresses."""
    return np.random.default_rng(seed).standard_normal(n).astype("<f2").tobytes()


def chance(n=40_000, seed=0):
    return random.Random(seed).randbytes(n)


# odd and even lengths, from nothing to more than one block
states = st.one_of(
    st.binary(max_size=300),
    st.integers(0, 5000).map(bytes),
    st.builds(
        lambda raw, n: (raw * n)[: len(raw) * n - n % 2], st.binary(min_size=1, max_size=100), st.integers(1, 400)
    ),
)


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CODECS, "auto", "zstd:9", "planes:3", "zstd:22"])
@settings(max_examples=50)
@given(raw=states)
def test_every_codec_returns_the_page(name, raw):
    number, stored = Encoder(name)(NS, raw)
    assert bytes(decode(record_of(stored, len(raw), number), stored)) == raw
    assert len(stored) <= len(raw)


@pytest.mark.parametrize("name", PACKED)
@given(raw=states)
@example(raw=b"")
@example(raw=b"x")
@example(raw=b"xy")
@example(raw=b"xyz")
def test_packed_bytes_can_be_unpacked_even_where_they_did_not_shrink(name, raw):
    stored = memoryview(PACKINGS[name].pack(raw))
    out = bytearray(b"?" * len(raw))
    assert PACKINGS[name].claimed(stored) == len(raw)
    PACKINGS[name].unpack(stored, memoryview(out), BufferPool(0))
    assert out == raw


def test_a_raw_page_is_not_copied():
    stored = bytearray(b"page")
    state = decode(record_of(stored, 4), stored)
    stored[0:1] = b"P"
    assert bytes(state) == b"Page"


def test_planes_save_most_on_floats_and_the_level_is_not_part_of_the_codec_number():
    raw = floats()
    sizes = {name: len(encode(raw, name)[1]) for name in CODECS}
    assert sizes["planes"] < 0.95 * sizes["zstd"] < 0.9 * sizes["raw"]
    text = b"".join(struct.pack("<I", i * i % 977) for i in range(20_000))
    (low, small), (high, smaller) = Encoder("zstd:1")(NS, text), Encoder("zstd:19")(NS, text)
    assert low == high == CODECS["zstd"]
    assert len(smaller) < len(small)


def test_a_page_is_decoded_into_the_given_memory_and_lent_buffers_are_returned():
    raw, buffers = floats(), BufferPool(1 << 20)
    for name in CODECS:
        number, stored = encode(raw, name)
        record = record_of(stored, len(raw), number)
        out = bytearray(len(raw) + 8)
        decode_into(record, verify_payload(record, stored), memoryview(out)[4:-4], buffers)
        assert out == bytes(4) + raw + bytes(4)
        assert buffers.in_use == 0


# -- what is damaged or forged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@given(raw=st.binary(min_size=1, max_size=200), data=st.data())
def test_a_flipped_bit_of_a_page_is_found(name, raw, data):
    number, stored = encode(raw * 8, name)
    record = record_of(stored, len(raw) * 8, number)
    wrong = bytearray(stored)
    wrong[data.draw(st.integers(0, len(wrong) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(wrong), stored[:-1], bytes(stored) + b"\0", b""):
        with pytest.raises(CorruptError):
            decode(record, bad)


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_page_with_a_new_checksum_writes_nothing_outside_its_memory(name, data):
    # the checksum fits: only the codec is left to notice, and it may not, but it stays within bounds
    raw = floats(500)
    wrong = bytearray(PACKINGS[name].pack(raw))
    for _ in range(data.draw(st.integers(1, 4))):
        wrong[data.draw(st.integers(0, len(wrong) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    stored = bytes(wrong[: data.draw(st.integers(0, len(wrong)))])
    record, buffers = record_of(stored, len(raw), CODECS[name]), BufferPool(1 << 20)
    out = bytearray(b"?" * (len(raw) + 64))
    with suppress(CorruptError):
        decode_into(record, verify_payload(record, stored), memoryview(out)[32:-32], buffers)
    assert out[:32] == out[-32:] == b"?" * 32
    assert buffers.in_use == 0


def planes_of(upper, lower, *, split=None):
    return struct.pack("<Q", len(upper) if split is None else split) + upper + lower


def test_a_page_whose_frames_or_length_do_not_fit_its_record_is_refused():
    pack = zstandard.ZstdCompressor().compress
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress
    bomb, one, two = pack(bytes(10_000_000)), pack(b"a"), pack(b"ab")
    for stored, raw_bytes, codec in [
        (b"abc", 4, "raw"),
        (bomb, 100, "zstd"),
        (unsized(b"abc"), 3, "zstd"),
        (b"no frame at all", 15, "zstd"),
        (b"", 0, "zstd"),
        (bomb[:-5], 10_000_000, "zstd"),
        (b"", 0, "planes"),
        (b"1234567", 7, "planes"),
        (planes_of(bomb, bomb), 100, "planes"),
        (planes_of(bomb, bomb[:-5]), 20_000_000, "planes"),
        (planes_of(two, one), 3, "planes"),  # the upper plane is never the longer one
        (planes_of(one, pack(b"abc")), 4, "planes"),
        (planes_of(unsized(b"a"), one), 2, "planes"),
        (planes_of(one, unsized(b"a")), 2, "planes"),
        (planes_of(one, one, split=2**64 - 1), 2, "planes"),
        (planes_of(one, one, split=0), 2, "planes"),
        (planes_of(one, b""), 1, "planes"),
        (bytes(100), 50, "planes"),
    ]:
        with pytest.raises(CorruptError):
            decode(record_of(stored, raw_bytes, CODECS[codec]), stored)


@pytest.mark.parametrize("name", PACKED)
def test_a_forged_size_is_refused_before_memory_is_taken_for_it(name, monkeypatch):
    raw = bytes(50_000_000)
    stored = PACKINGS[name].pack(raw)
    monkeypatch.setattr(np, "empty", lambda *args: pytest.fail("memory was taken"))
    with pytest.raises(CorruptError, match="50000000 bytes of state, 1000 expected"):
        decode(record_of(stored, 1000, CODECS[name]), stored)


def test_an_unknown_codec_number_is_taken_for_a_newer_version():
    with pytest.raises(IncompatibleError, match="codec 9"):
        decode(dataclasses.replace(record_of(b"x", 1), codec=9), b"x")
    with pytest.raises(CorruptError, match="checksum"):
        decode(dataclasses.replace(record_of(b"x", 1), codec=9), b"y")


UNKNOWN = r"codec=.* is unknown; choose one of 'auto', 'raw', 'zstd', 'planes'"
REFUSED = {
    UNKNOWN: ["lzma", "", "ZSTD", "zstd ", "planes2", "blosc2:3", "auto:3", None, 3, b"zstd"],
    "the level must be a number from 1 to 22": [
        "zstd:0",
        "zstd:23",
        "zstd:",
        "zstd:-1",
        "zstd:x",
        "zstd:1.5",
        "zstd:²",
    ],
    "'raw' has no levels": ["raw:1"],
}


@pytest.mark.parametrize(("name", "says"), [(name, says) for says, names in REFUSED.items() for name in names])
def test_an_unknown_codec_or_level_is_refused_and_the_known_ones_are_listed(name, says):
    with pytest.raises(InvalidParameterError, match=says):
        Encoder(name)


# -- what is picked where nothing was asked for ------------------------------------------------------------------------


def slow():
    """As it is with pages of a location that was slow so far."""
    auto = Encoder()
    auto.read_rate.observe(1 << 20, 60.0)
    return auto


def numbers_of(auto, raw, n, namespace=NS):
    return {auto(namespace, raw)[0] for _ in range(n)}


def test_auto_packs_what_shrinks_in_a_slow_location_and_leaves_what_does_not():
    assert numbers_of(slow(), floats(), 10) == {CODECS["planes"]}
    assert numbers_of(slow(), chance(), 10) == {CODECS["raw"]}
    assert numbers_of(slow(), b"a sentence that goes on and on " * 1000, 10) <= {CODECS["zstd"], CODECS["planes"]}


def test_auto_stores_raw_until_it_knows_that_the_location_is_slow():
    auto = Encoder()
    assert numbers_of(auto, floats(), 10) == {CODECS["raw"]}
    auto.read_rate.observe(1 << 20, 60.0)
    assert numbers_of(auto, floats(), 10) == {CODECS["planes"]}
    for _ in range(1000):
        auto.read_rate.observe(1 << 30, 1e-9)
    assert numbers_of(auto, floats(), 10) == {CODECS["raw"]}


def test_auto_decides_by_the_first_page_and_measures_again():
    auto, turn = slow(), Encoder.MEASURED_EVERY
    assert numbers_of(auto, chance(), turn - 5) == {CODECS["raw"]}
    assert numbers_of(auto, floats(), 5) == {CODECS["raw"]}
    assert numbers_of(auto, floats(), turn) == {CODECS["planes"]}
    # until the next measurement these are packed for nothing, and stored raw as they do not shrink
    assert numbers_of(auto, chance(), 2 * turn) == {CODECS["raw"]}
    assert auto(NS, floats())[0] == CODECS["planes"]


@pytest.mark.slow
def test_a_frame_gets_no_more_memory_than_one_of_ours_needs():
    """A frame says how much zstd needs to unpack it, unless that can be done in one pass: not if it is cut off."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    state = random.Random(1).randbytes(1 << 20) * 130
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(state)
    with pytest.raises(CorruptError, match="too much memory"):
        PACKINGS["zstd"].unpack(memoryview(frame)[:-9], memoryview(bytearray(len(state))), BufferPool(None))
