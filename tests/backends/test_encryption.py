"""How rows are named and encrypted: neighbours stay neighbours, ranges stay ranges, and nothing can be changed."""

from __future__ import annotations

import os
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.backends.contract import Range, after_all
from prefixstore.backends.encryption import HEAD, SEGMENT, TAG_BYTES, Header, Safe, row_size, size_of
from prefixstore.backends.keys import key_id
from prefixstore.engine import keyspace, siblings
from prefixstore.errors import UndecryptableError
from prefixstore.format.keys import PAGE

OLD, NEW, OF_ALICE = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
ALICE = keyspace.tenant_of("alice", b"")
LOCATION, SECRET = bytes(16), bytes(range(100, 132))


def safe_of(*keys, tenants=None, location=LOCATION, secret=SECRET):
    masters = {key_id(key): key for key in keys or (NEW,)}
    header = Header(location, dict.fromkeys(masters, b""))
    return Safe(header, secret, masters, tenants or {}, keyspace.PARTS)


SAFE = safe_of()
TOKENS = st.lists(st.integers(0, 2), max_size=40)


def child(tokens, parent=b"p" * 32):
    """The first child row of a page with these tokens."""
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    return siblings.child_path(parent, PAGE, raw)[0]


def in_common(a, b):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# -- names ------------------------------------------------------------------------------------------------------------


@given(st.lists(TOKENS, min_size=1, max_size=30), TOKENS)
def test_the_row_with_most_tokens_in_common_is_beside_a_prompt(stored, prompt):
    rows = {SAFE.place(child(tokens)): tokens for tokens in stored}
    wanted = SAFE.place(child(prompt))
    ordered = sorted(rows)
    n_below = sum(place <= wanted for place in ordered)
    beside = [rows[place] for place in ordered[max(n_below - 1, 0) : n_below + 1]]
    most = max(in_common(tokens[:32], prompt[:32]) for tokens in stored)
    assert max(in_common(tokens[:32], prompt[:32]) for tokens in beside) == most


@given(st.lists(TOKENS, min_size=1, max_size=30), TOKENS, st.booleans())
def test_the_rows_of_a_range_are_a_range_of_names(stored, prompt, is_above):
    other = child(prompt, b"q" * 32)
    rows = {child(tokens) for tokens in stored} | {other}
    node = child([])[:17]
    bound = child(prompt)
    wanted = Range(bound + b"\0", after_all(node)) if is_above else Range(node, bound + b"\0")
    hidden = SAFE.range(wanted)
    found = {row for row in rows if hidden.start <= SAFE.place(row) < hidden.stop}
    # in another order than the tokens', but all of the node, and the row itself below
    whole = SAFE.range(Range(node, after_all(node)))
    assert found <= {row for row in rows if whole.start <= SAFE.place(row) < whole.stop} == rows - {other}
    assert (bound in found) == (bound in rows and not is_above)


@given(st.sets(st.binary(min_size=32, max_size=32), max_size=20), st.binary(min_size=32, max_size=32))
def test_the_rows_of_a_namespace_and_a_walk_are_ranges(keys, space):
    leaves = {keyspace.leaf_row(space, key) for key in keys} | {keyspace.leaf_row(bytes(32), key) for key in keys}
    hidden = SAFE.range(keyspace.leaves_of(space))
    inside = {row for row in leaves if hidden.start <= SAFE.place(row) < hidden.stop}
    assert inside == {row for row in leaves if row[1:33] == space}
    every = SAFE.range(keyspace.everything(keyspace.LEAF))
    assert all(every.start <= SAFE.place(row) < every.stop for row in leaves)
    # a walk goes on after any of them, and sees all
    first, *rest = sorted(map(SAFE.place, leaves)) or [b""]
    after = {SAFE.place(row): row for row in leaves}.get(first)
    if after is not None:
        there = SAFE.range(Range(after + b"\0", keyspace.everything(keyspace.LEAF).stop))
        assert [place for place in rest if there.start <= place < there.stop] == rest


def test_names_tell_nothing_without_the_secret_of_the_location():
    row = child([5, 6, 7])
    assert SAFE.place(row) != safe_of(secret=bytes(32)).place(row)
    assert SAFE.place(row) != safe_of(location=bytes(15) + b"x").place(row)
    assert SAFE.place(row)[:1] == b"c"
    assert len(SAFE.place(row)) == len(row)
    assert row[1:] not in SAFE.place(row)


# -- contents ---------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_a_row_comes_back(key, value):
    stored = SAFE.close_row(b"place", key, value)
    assert SAFE.open_row(b"place", stored) == (key, value)
    assert len(stored) == row_size(key, value)


@pytest.mark.parametrize("size", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5])
def test_a_payload_comes_back(size):
    payload = os.urandom(size)
    stored = SAFE.close_payload(b"place", memoryview(payload))
    assert bytes(SAFE.open_payload(b"place", stored)) == payload
    assert len(stored) == size_of(size)


def test_each_byte_of_a_row_and_of_a_payload_counts():
    row, payload = SAFE.close_row(b"place", b"key", b"value"), bytes(SAFE.close_payload(b"place", b"payload"))
    for stored, opened in ((row, SAFE.open_row), (payload, SAFE.open_payload)):
        for at in range(len(stored)):
            changed = bytearray(stored)
            changed[at] ^= 1
            with pytest.raises(UndecryptableError):
                opened(b"place", bytes(changed))
        for cut in (0, 1, HEAD.size, len(stored) - 1):
            with pytest.raises(UndecryptableError):
                opened(b"place", stored[:cut])


def test_segments_cannot_be_exchanged_left_out_or_appended():
    stored = bytes(SAFE.close_payload(b"place", os.urandom(3 * SEGMENT)))
    size = SEGMENT + TAG_BYTES
    head, *pieces = stored[: HEAD.size], *(stored[HEAD.size + i * size :][:size] for i in range(3))
    wrong = ([1, 0, 2], [0, 1], [0, 2], [0, 1, 2, 2], [2], [0, 0, 2])
    for order in wrong:
        with pytest.raises(UndecryptableError):
            SAFE.open_payload(b"place", head + b"".join(pieces[i] for i in order))


def test_what_is_encrypted_cannot_be_moved_to_another_row_or_location_or_taken_for_a_payload():
    row = SAFE.close_row(b"place", b"key", b"value")
    payload = bytes(SAFE.close_payload(b"place", b"payload"))
    for safe, place, stored in (
        (SAFE, b"other", row),
        (safe_of(location=b"y" * 16), b"place", row),
        (SAFE, b"place", payload),
    ):
        with pytest.raises(UndecryptableError):
            safe.open_row(place, stored)
    for place, stored in ((b"other", payload), (b"place", row)):
        with pytest.raises(UndecryptableError):
            SAFE.open_payload(place, stored)


def test_the_newest_key_encrypts_and_older_ones_still_decrypt():
    old, both = safe_of(OLD), safe_of(NEW, OLD)
    assert both.open_row(b"place", old.close_row(b"place", b"key", b"value")) == (b"key", b"value")
    with pytest.raises(UndecryptableError, match=key_id(NEW).hex()):
        old.open_row(b"place", both.close_row(b"place", b"key", b"value"))


def test_what_a_tenant_with_a_key_of_its_own_has_stored_cannot_be_read_without_it():
    with_key, without = safe_of(tenants={ALICE: OF_ALICE}), safe_of()
    owner = with_key.owner(ALICE)
    row = with_key.close_row(b"place", b"key", b"value", owner)
    payload = with_key.close_payload(b"place", b"payload", owner)
    assert with_key.open_row(b"place", row) == (b"key", b"value")
    with pytest.raises(UndecryptableError):
        without.open_row(b"place", row)
    with pytest.raises(UndecryptableError):
        without.open_payload(b"place", payload)
    # what was stored before the tenant had one can still be read, and so can what others have
    before = without.close_row(b"place", b"key", b"value", owner)
    assert with_key.open_row(b"place", before) == (b"key", b"value")
    with pytest.raises(UndecryptableError):
        safe_of(tenants={ALICE: NEW}).open_row(b"place", row)


def test_the_same_row_never_looks_the_same():
    assert len({SAFE.close_row(b"place", b"key", b"value") for _ in range(100)}) == 100


# -- the header -------------------------------------------------------------------------------------------------------


def test_a_header_comes_back_and_damage_is_seen():
    header = Header(LOCATION, {b"abcd": b"wrapped", b"efgh": b"other"}, frozenset({b"abcd"}))
    packed = header.pack()
    assert Header.unpack([packed, packed], "url") == header
    for at in range(len(packed)):
        changed = bytearray(packed)
        changed[at] ^= 1
        assert Header.unpack([bytes(changed), packed], "url") == header
