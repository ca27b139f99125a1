"""How the rows of an encrypted location are named: neighbours stay neighbours, and ranges stay ranges."""

import re
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.backends.contract import Range, Row, View, after_all
from prefixstore.backends.encryption_keys import Keys, key_id, key_of, line_of
from prefixstore.engine import child_rows, keyspace
from prefixstore.engine.encrypted import EncryptedView, RowCipher
from prefixstore.format.keys import PAGE

NEW = bytes(range(32, 64))
CIPHER = RowCipher(bytes(range(100, 132)), (key_id(NEW),), Keys.parse(line_of(NEW), ""))
TOKENS = st.lists(st.integers(0, 2), max_size=40)


def child(tokens, parent=b"p" * 32):
    """The first child row of a page with these tokens."""
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    return child_rows.child_path(parent, PAGE, raw)[0]


def in_common(a, b):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


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


def test_the_example_in_the_documents_which_another_tool_has_computed():
    text = (Path(__file__).parents[2] / "docs/format.md").read_text()
    example = text[text.index("An example: the key is the bytes 0 to 31") :]

    def shown(name):
        found = re.search(rf"^    {name} +([0-9a-f\s]+?)\n(    [a-z]|\n)", example, re.MULTILINE)
        return bytes.fromhex("".join(found[1].split()))

    key, secret = bytes(range(32)), bytes(range(32, 64))
    space = bytes.fromhex("bef4d35a61e0ce479e894621600a9988c88fa89a9c00bd33d43d338e1799db62")
    header, stored_key = shown("header"), shown("stored key")
    cipher = RowCipher.of(header, Keys.parse(line_of(key), ""))
    assert key_id(key) == shown("id of the key") == key_of(header)
    assert (cipher.secret, cipher.needed) == (secret, (key_id(key),))
    row = Row(keyspace.NAMESPACE + space, b"settings")
    assert cipher.stored_key(row.key) == stored_key
    view = EncryptedView(View, cipher, pytest.fail)
    assert view.opened(Row(stored_key, shown("stored value"))) == (bytes(16), row)
