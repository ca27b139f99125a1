"""How the rows of an encrypted location are named: neighbours stay neighbours, and ranges stay ranges."""

import hashlib
import hmac
import re
import subprocess
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


def blake2(text, person, size, key=b""):
    return hashlib.blake2b(text, digest_size=size, key=key, person=person.encode()).digest()


def sealed(key, salt, random, bound_to, message):
    """A short sealed message, by the words of docs/format.md, with nothing of ours: AES is that of openssl."""
    secret = hmac.digest(hmac.digest(salt, key, "sha256"), b"prefixstore 1\1", "sha256")
    nonce = bytes(11) + b"\1"
    blocks = bytes(16) + b"".join(nonce + n.to_bytes(4, "big") for n in range(1, len(message) // 16 + 3))
    command = ["openssl", "enc", "-aes-256-ecb", "-nopad", "-K", blake2(random, "prefixstore mesg", 32, secret).hex()]
    stream = subprocess.run(command, input=blocks, capture_output=True, check=True).stdout
    text = bytes(a ^ b for a, b in zip(message, stream[32:], strict=False))
    tag, factor = 0, int.from_bytes(stream[:16], "big")
    lengths = b"".join((8 * len(one)).to_bytes(8, "big") for one in (bound_to, text))
    hashed = b"".join(one + bytes(-len(one) % 16) for one in (bound_to, text)) + lengths
    for at in range(0, len(hashed), 16):
        # multiplied in GF(2^128), the first bit of a byte being that of the lowest power
        one, tag, power = tag ^ int.from_bytes(hashed[at : at + 16], "big"), 0, factor
        for bit in range(127, -1, -1):
            tag ^= power * (one >> bit & 1)
            power = power >> 1 ^ (0xE1 << 120) * (power & 1)
    tag ^= int.from_bytes(stream[16:32], "big")
    return blake2(key, "prefixstore key", 8) + random + text + tag.to_bytes(16, "big")


def test_the_example_in_the_documents_is_what_another_tool_computes():
    text = (Path(__file__).parents[2] / "docs/format.md").read_text()
    example = text[text.index("An example: the key is the bytes 0 to 31") :]

    def shown(name):
        found = re.search(rf"^    {name} +([0-9a-f\s]+?)\n(    [a-z]|\n)", example, re.MULTILINE)
        return bytes.fromhex("".join(found[1].split()))

    key, secret, random = bytes(range(32)), bytes(range(32, 64)), bytes(range(80, 104))
    space = bytes.fromhex("bef4d35a61e0ce479e894621600a9988c88fa89a9c00bd33d43d338e1799db62")
    name = blake2(key, "prefixstore key", 8)
    stored_key = b"n" + blake2(b"n" + space, "prefixstore rows", 16, secret)
    value = bytes(16) + (33).to_bytes(2, "little") + b"n" + space + b"settings"
    header = b"prefixstore encrypted\n" + sealed(key, b"", random, b"prefixstore encrypted\n", secret + name)
    stored = sealed(key, secret, random, b"row" + stored_key, value)
    documented = [shown(one) for one in ("id of the key", "header", "stored key", "stored value")]
    assert documented == [name, header, stored_key, stored]
    # and ours reads it
    cipher = RowCipher.of(header, Keys.parse(line_of(key), ""))
    row = Row(keyspace.NAMESPACE + space, b"settings")
    assert (cipher.secret, cipher.needed, cipher.stored_key(row.key)) == (secret, (name,), stored_key)
    assert key_id(key) == name == key_of(header)
    assert EncryptedView(View, cipher, pytest.fail).opened(Row(stored_key, stored)) == (bytes(16), row)
