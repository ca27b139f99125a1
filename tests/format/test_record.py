"""Records and usage: what was written is read back, and nothing else is accepted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import FORMAT_VERSION, RECORD, RECORD_SEAL, Record, Usage

u32, u40, u63 = st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 2**63 - 1)
sixteen = st.binary(min_size=16, max_size=16)
keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
records = st.builds(
    Record,
    keys,
    keys,
    u32,
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20).map(
        lambda tokens: np.array(tokens, "<i4").tobytes()
    ),
    st.integers(0, 255),
    u40,
    u40,
    sixteen,
    u32,
    u63,
)


@given(records)
def test_a_record_survives_packing(record):
    assert Record.unpack(record.key, record.pack()) == record
    assert len(record.pack()) == RECORD.size + len(record.tokens) + RECORD_SEAL.size


@settings(max_examples=150)
@given(records, st.data())
def test_a_record_with_a_flipped_byte_is_refused(record, data):
    stored = bytearray(record.pack())
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        Record.unpack(record.key, bytes(stored))
    if at:
        # a future version: anything may follow the version
        stored[0] = FORMAT_VERSION + 1
        with pytest.raises(IncompatibleError):
            Record.unpack(record.key, bytes(stored))


@given(records, st.data())
def test_a_record_of_another_length_is_refused(record, data):
    stored = record.pack()
    n = data.draw(st.integers(0, len(stored) - 1))
    for wrong in (stored[:n], stored + b"\0", stored + stored):
        with pytest.raises(CorruptError):
            Record.unpack(record.key, wrong)


@given(records, records)
def test_a_record_is_valid_only_under_its_own_key(one, other):
    if one.key != other.key:
        with pytest.raises(CorruptError, match="another page"):
            Record.unpack(other.key, one.pack())


@given(u63, u32, st.booleans())
def test_a_usage_survives_packing(last_used, hits, pinned):
    usage = Usage(last_used, hits, pinned)
    assert Usage.unpack(usage.pack()) == usage
    for wrong in (usage.pack()[:-1], usage.pack() + b"\0", b""):
        with pytest.raises(CorruptError):
            Usage.unpack(wrong)
