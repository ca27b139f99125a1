"""Sealed messages: they come back, and nothing of them can be changed, moved, shortened or joined."""

from __future__ import annotations

import io
import os

import pytest

from prefixstore import LocationError
from prefixstore.backends import sealing as module
from prefixstore.backends.keys import Keys, key_id
from prefixstore.backends.sealing import HEAD, SEGMENT, TAG_BYTES, Sealer, sealed_size, sealing, unsealed
from prefixstore.errors import CorruptError, UndecryptableError
from prefixstore.format.export import ENCRYPTED

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
BOTH = {key_id(key): key for key in (NEW, OLD)}
KEYS = Keys(BOTH)
SEALER = Sealer(BOTH, b"salt", "rows")
NAME = key_id(NEW)


@pytest.mark.parametrize("size", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5])
def test_a_message_comes_back(size):
    message = os.urandom(size)
    stored = SEALER.seal(NAME, b"place", memoryview(message))
    assert bytes(SEALER.unseal(b"place", stored)) == message
    assert len(stored) == sealed_size(size)


def test_each_byte_counts():
    whole = bytes(SEALER.seal(NAME, b"place", b"message"))
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for wrong in [*changed, *(whole[:cut] for cut in (0, 1, HEAD.size, -1)), whole + b"\0"]:
        with pytest.raises(UndecryptableError):
            SEALER.unseal(b"place", wrong)


@pytest.mark.parametrize("size", [SEGMENT - 5, SEGMENT, 2 * SEGMENT - 5])
def test_nothing_can_be_appended_beyond_a_segment(size):
    stored = bytes(SEALER.seal(NAME, b"place", bytes(size)))
    for n_more in (1, 5, TAG_BYTES, TAG_BYTES + 5):
        with pytest.raises(UndecryptableError):
            SEALER.unseal(b"place", stored + bytes(n_more))


def test_segments_cannot_be_exchanged_left_out_or_appended():
    stored = bytes(SEALER.seal(NAME, b"place", os.urandom(3 * SEGMENT)))
    size = SEGMENT + TAG_BYTES
    head, *pieces = stored[: HEAD.size], *(stored[HEAD.size + i * size :][:size] for i in range(3))
    for order in ([1, 0, 2], [0, 1], [0, 2], [0, 1, 2, 2], [2], [0, 0, 2]):
        with pytest.raises(UndecryptableError):
            SEALER.unseal(b"place", head + b"".join(pieces[i] for i in order))


def test_a_message_cannot_be_taken_for_another_one():
    stored = SEALER.seal(NAME, b"place", b"message")
    for other in (Sealer(BOTH, b"other", "rows"), Sealer(BOTH, b"salt", "header")):
        with pytest.raises(UndecryptableError):
            other.unseal(b"place", stored)
    with pytest.raises(UndecryptableError):
        SEALER.unseal(b"other", stored)
    with pytest.raises(UndecryptableError, match=NAME.hex()):
        Sealer({key_id(OLD): OLD}, b"salt", "rows").unseal(b"place", stored)
    # the same key under the id of another one
    with pytest.raises(UndecryptableError):
        SEALER.unseal(b"place", key_id(OLD) + bytes(stored[8:]))


def test_the_same_message_never_looks_the_same():
    assert len({bytes(SEALER.seal(NAME, b"place", b"message")) for _ in range(100)}) == 100


# -- files ------------------------------------------------------------------------------------------------------------

CONTENT = bytes(range(250)) * 2


@pytest.fixture
def sealed(monkeypatch):
    """Messages of 100 bytes: the beginning of a file with five of them, and each."""
    monkeypatch.setattr(module, "MESSAGE_BYTES", 100)
    file = io.BytesIO()
    with sealing(file, KEYS) as into:
        for at in range(0, len(CONTENT), 7):
            into.write(CONTENT[at : at + 7])
    file.seek(0)
    return file.read(16), [part for _ in range(5) if (part := file.read(sealed_size(100)))], file.read()


def opened(begin, parts, keys=KEYS):
    file = unsealed(begin, io.BytesIO(b"".join(parts)), keys, "name")
    return b"".join(iter(lambda: file.read(33), b""))


def test_a_file_comes_back_and_nothing_of_it_can_be_left_out_exchanged_or_appended(sealed):
    begin, parts, rest = sealed
    assert (begin[:8], len(parts), rest) == (ENCRYPTED, 5, b"")
    assert opened(begin, parts) == CONTENT
    for order in ([0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 2, 3, 4], [0, 1, 2, 3, 4, 4], [1, 2, 3, 4], [4]):
        with pytest.raises(CorruptError):
            opened(begin, [parts[i] for i in order])
    for wrong in ([*parts[:4], parts[4][:-1]], [*parts, b"\0"], [parts[0][:20]]):
        with pytest.raises(CorruptError):
            opened(begin, wrong)
    # of another file
    with pytest.raises(CorruptError):
        opened(begin[:-1] + b"?", parts)
    # what is left of an empty one is said by who reads it: an export has an end
    assert opened(begin, []) == b""


def test_a_file_says_which_key_it_needs(sealed):
    begin, parts, _ = sealed
    with pytest.raises(LocationError, match=f"needs the key {NAME.hex()}; give it by --from-key"):
        opened(begin, parts, Keys({key_id(OLD): OLD}))
