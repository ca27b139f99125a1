"""How rows are named and encrypted: neighbours stay neighbours, ranges stay ranges, and nothing can be changed."""

from __future__ import annotations

import os
import re
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixstore.backends.encryption import PREFIX, SEGMENT, TAG_BYTES, Header, RowCipher, encrypted_size

from prefixstore.backends.contract import Range, after_all
from prefixstore.backends.keys import key_id
from prefixstore.engine import keyspace, siblings
from prefixstore.errors import IncompatibleError, UndecryptableError
from prefixstore.format.keys import PAGE

OLD, NEW, OF_ALICE = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
ALICE = keyspace.tenant_of("alice", b"")
LOCATION, SECRET = bytes(16), bytes(range(100, 132))


def cipher_of(*keys, tenants=None, location=LOCATION, secret=SECRET):
    masters = {key_id(key): key for key in keys or (NEW,)}
    return RowCipher(Header(location, tuple(masters)), secret, masters, tenants or {}, (), keyspace.PARTS)


CIPHER = cipher_of()
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
    rows = {CIPHER.stored_key(child(tokens)): tokens for tokens in stored}
    wanted = CIPHER.stored_key(child(prompt))
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
    hidden = CIPHER.stored_range(wanted)
    found = {row for row in rows if hidden.start <= CIPHER.stored_key(row) < hidden.stop}
    # in another order than the tokens', but all of the node, and the row itself below
    whole = CIPHER.stored_range(Range(node, after_all(node)))
    assert found <= {row for row in rows if whole.start <= CIPHER.stored_key(row) < whole.stop} == rows - {other}
    assert (bound in found) == (bound in rows and not is_above)
    rest = CIPHER.stored_range(Range(node, bound + b"\0") if is_above else Range(bound + b"\0", after_all(node)))
    others = {row for row in rows if rest.start <= CIPHER.stored_key(row) < rest.stop}
    assert (found | others, found & others) == (rows - {other}, set())


@given(st.sets(st.binary(min_size=32, max_size=32), max_size=20), st.binary(min_size=32, max_size=32))
def test_the_rows_of_a_namespace_and_a_walk_are_ranges(keys, space):
    leaves = {keyspace.leaf_row(space, key) for key in keys} | {keyspace.leaf_row(bytes(32), key) for key in keys}
    hidden = CIPHER.stored_range(keyspace.leaves_of(space))
    inside = {row for row in leaves if hidden.start <= CIPHER.stored_key(row) < hidden.stop}
    assert inside == {row for row in leaves if row[1:33] == space}
    every = CIPHER.stored_range(keyspace.everything(keyspace.LEAF))
    assert all(every.start <= CIPHER.stored_key(row) < every.stop for row in leaves)
    # a walk goes on after any of them, and sees all
    first, *rest = sorted(map(CIPHER.stored_key, leaves)) or [b""]
    after = {CIPHER.stored_key(row): row for row in leaves}.get(first)
    if after is not None:
        there = CIPHER.stored_range(Range(after + b"\0", keyspace.everything(keyspace.LEAF).stop))
        assert [place for place in rest if there.start <= place < there.stop] == rest


def test_names_tell_nothing_without_the_secret_of_the_location():
    row = child([5, 6, 7])
    assert CIPHER.stored_key(row) != cipher_of(secret=bytes(32)).stored_key(row)
    assert CIPHER.stored_key(row) != cipher_of(location=bytes(15) + b"x").stored_key(row)
    assert CIPHER.stored_key(row)[:1] == b"c"
    assert len(CIPHER.stored_key(row)) == len(row)
    assert row[1:] not in CIPHER.stored_key(row)


# -- contents ---------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_a_row_comes_back(key, value):
    stored = CIPHER.encrypt_row(b"place", key, value)
    assert CIPHER.decrypt_row(b"place", stored) == (key, value)
    assert len(stored) == encrypted_size(2 + len(key) + len(value))


@pytest.mark.parametrize("size", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5])
def test_a_payload_comes_back(size):
    payload = os.urandom(size)
    stored = CIPHER.encrypt_payload(b"place", memoryview(payload))
    assert bytes(CIPHER.decrypt_payload(b"place", stored)) == payload
    assert len(stored) == encrypted_size(size)


def test_each_byte_of_a_row_and_of_a_payload_counts():
    row, payload = CIPHER.encrypt_row(b"place", b"key", b"value"), bytes(CIPHER.encrypt_payload(b"place", b"payload"))
    for stored, opened in ((row, CIPHER.decrypt_row), (payload, CIPHER.decrypt_payload)):
        for at in range(len(stored)):
            changed = bytearray(stored)
            changed[at] ^= 1
            with pytest.raises(UndecryptableError):
                opened(b"place", bytes(changed))
        for cut in (0, 1, PREFIX.size, len(stored) - 1):
            with pytest.raises(UndecryptableError):
                opened(b"place", stored[:cut])


def test_segments_cannot_be_exchanged_left_out_or_appended():
    stored = bytes(CIPHER.encrypt_payload(b"place", os.urandom(3 * SEGMENT)))
    size = SEGMENT + TAG_BYTES
    head, *pieces = stored[: PREFIX.size], *(stored[PREFIX.size + i * size :][:size] for i in range(3))
    wrong = ([1, 0, 2], [0, 1], [0, 2], [0, 1, 2, 2], [2], [0, 0, 2])
    for order in wrong:
        with pytest.raises(UndecryptableError):
            CIPHER.decrypt_payload(b"place", head + b"".join(pieces[i] for i in order))


def test_what_is_encrypted_cannot_be_moved_to_another_row_or_location_or_taken_for_a_payload():
    row = CIPHER.encrypt_row(b"place", b"key", b"value")
    payload = bytes(CIPHER.encrypt_payload(b"place", b"payload"))
    for cipher, place, stored in (
        (CIPHER, b"other", row),
        (cipher_of(location=b"y" * 16), b"place", row),
        (CIPHER, b"place", payload),
    ):
        with pytest.raises(UndecryptableError):
            cipher.decrypt_row(place, stored)
    for place, stored in ((b"other", payload), (b"place", row)):
        with pytest.raises(UndecryptableError):
            CIPHER.decrypt_payload(place, stored)


def test_the_newest_key_encrypts_and_older_ones_still_decrypt():
    old, both = cipher_of(OLD), cipher_of(NEW, OLD)
    assert both.decrypt_row(b"place", old.encrypt_row(b"place", b"key", b"value")) == (b"key", b"value")
    with pytest.raises(UndecryptableError, match=key_id(NEW).hex()):
        old.decrypt_row(b"place", both.encrypt_row(b"place", b"key", b"value"))


def test_what_a_tenant_with_a_key_of_its_own_has_stored_cannot_be_read_without_it():
    with_key, without = cipher_of(tenants={ALICE: OF_ALICE}), cipher_of()
    owner = with_key.tag(ALICE)
    row = with_key.encrypt_row(b"place", b"key", b"value", owner)
    payload = with_key.encrypt_payload(b"place", b"payload", owner)
    assert with_key.decrypt_row(b"place", row) == (b"key", b"value")
    with pytest.raises(UndecryptableError):
        without.decrypt_row(b"place", row)
    with pytest.raises(UndecryptableError):
        without.decrypt_payload(b"place", payload)
    # what was stored before the tenant had one can still be read, and so can what others have
    before = without.encrypt_row(b"place", b"key", b"value", owner)
    assert with_key.decrypt_row(b"place", before) == (b"key", b"value")
    with pytest.raises(UndecryptableError):
        cipher_of(tenants={ALICE: NEW}).decrypt_row(b"place", row)


def test_the_same_row_never_looks_the_same():
    assert len({CIPHER.encrypt_row(b"place", b"key", b"value") for _ in range(100)}) == 100


def test_the_example_in_the_documents_which_another_tool_has_computed():
    text = (Path(__file__).parents[2] / "docs/format.md").read_text()
    example = text[text.index("An example: the key is the bytes 0 to 31") :]

    def shown(name):
        return bytes.fromhex(
            "".join(re.search(rf"^    {name} +([0-9a-f\s]+?)\n(    [a-z]|\n)", example, re.MULTILINE)[1].split())
        )

    key, secret, location = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 80))
    space = bytes.fromhex("bef4d35a61e0ce479e894621600a9988c88fa89a9c00bd33d43d338e1799db62")
    masters = {key_id(key): key}
    header = Header(location, tuple(masters))
    assert key_id(key) == shown("id of the key")
    assert header.pack(secret, masters).rpartition(b"\n")[2] == shown("wrapped secret").hex().encode()
    cipher = RowCipher(header, secret, masters, {}, (), keyspace.PARTS)
    row = keyspace.namespace_row(space)
    assert cipher.stored_key(row) == shown("stored key")
    assert cipher.decrypt_row(shown("stored key"), shown("stored value")) == (row, b"settings")


# -- the header -------------------------------------------------------------------------------------------------------


def test_a_header_comes_back_and_no_byte_of_it_can_be_changed():
    masters = {key_id(key): key for key in (OLD, NEW)}
    header = Header(LOCATION, (key_id(NEW), key_id(OLD)), *map(frozenset, ({b"gone"}, {b"of-alice"}, {b"bob"})))
    packed = header.pack(SECRET, masters)
    assert Header.unpack(packed, "url") == header
    assert header.secret_in(packed, masters, "url") == SECRET
    for at in range(len(packed)):
        changed = bytearray(packed)
        changed[at] ^= 1
        with pytest.raises((IncompatibleError, KeyError)):
            Header.unpack(bytes(changed), "url").secret_in(bytes(changed), masters, "url")


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"[" * 100_000,
        b'{"version": 1, "location": "00", "keys": [], "retired": [], "tenants": [], "forgotten": []}',
        b'{"version": 1, "location": 5, "keys": ["00"], "retired": [], "tenants": [], "forgotten": []}',
        b'{"version": 1, "location": "00", "keys": {"a": "b"}, "retired": [], "tenants": [], "forgotten": []}',
        b'{"version": 9, "location": "00", "keys": ["00"], "retired": [], "tenants": [], "forgotten": []}',
    ],
)
def test_a_forged_header_is_an_error(told):
    with pytest.raises(IncompatibleError):
        Header.unpack(b"prefixstore encrypted\n" + told + b"\n00", "url")
