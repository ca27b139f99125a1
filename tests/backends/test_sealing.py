"""Sealed messages: they come back, and nothing of them can be changed, moved, shortened or joined."""

import io
import os

import pytest

from prefixstore import LocationError
from prefixstore.backends import sealing as module
from prefixstore.backends.encryption_keys import Keys, key_id, line_of
from prefixstore.backends.sealing import HEAD, SEGMENT, TAG_BYTES, SealedFile, Sealer, sealed_size, sealing
from prefixstore.errors import CorruptError, UndecryptableError
from prefixstore.format.export import ENCRYPTED

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
KEYS = Keys.parse(line_of(OLD) + line_of(NEW), "")
SEALER = Sealer(KEYS.secrets, b"salt")
NAME = key_id(NEW)


@pytest.mark.parametrize("size", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5])
def test_a_message_comes_back(size):
    message = os.urandom(size)
    stored = SEALER.seal(NAME, b"place", memoryview(message))
    assert bytes(SEALER.unseal(b"place", stored)) == message
    assert len(stored) == sealed_size(size)


@pytest.mark.parametrize("size", [7, SEGMENT - 5, SEGMENT, 3 * SEGMENT])
def test_nothing_can_be_left_out_exchanged_or_appended(size):
    stored, step = bytes(SEALER.seal(NAME, b"place", os.urandom(size))), SEGMENT + TAG_BYTES
    head, *pieces = stored[: HEAD.size], *(stored[at : at + step] for at in range(HEAD.size, len(stored), step))
    orders = [[0, 0], [], [1, 0, 2], [0, 1], [0, 2], [0, 1, 2, 2], [2], [0, 0, 2]]
    wrong = [head + b"".join(pieces[i] for i in order if i < len(pieces)) for order in orders]
    wrong += [*(stored[:cut] for cut in (0, 1, -1)), *(stored + bytes(n) for n in (1, 5, TAG_BYTES, TAG_BYTES + 5))]
    for other in {*wrong} - {stored}:
        with pytest.raises(UndecryptableError):
            SEALER.unseal(b"place", other)


def test_a_message_cannot_be_taken_for_another_one():
    stored = SEALER.seal(NAME, b"place", b"message")
    with pytest.raises(UndecryptableError):
        Sealer(KEYS.secrets, b"other").unseal(b"place", stored)
    with pytest.raises(UndecryptableError):
        SEALER.unseal(b"other", stored)
    with pytest.raises(UndecryptableError, match=NAME.hex()):
        Sealer({key_id(OLD): OLD}, b"salt").unseal(b"place", stored)
    # the same key under the id of another one
    with pytest.raises(UndecryptableError):
        SEALER.unseal(b"place", key_id(OLD) + bytes(stored[8:]))


def test_the_same_message_never_looks_the_same():
    assert len({bytes(SEALER.seal(NAME, b"place", b"message")) for _ in range(100)}) == 100


# -- files ------------------------------------------------------------------------------------------------------------

CONTENT = bytes(range(250)) * 2


@pytest.fixture
def sealed(monkeypatch):
    """The beginning of a file with five messages of 100 bytes, and each."""
    monkeypatch.setattr(module, "SEGMENT", 100)
    file = io.BytesIO()
    into = sealing(file, KEYS)
    for some in (CONTENT[:200], CONTENT[200:300], CONTENT[300:]):
        into.write(some)
    whole, size = file.getvalue(), 4 + sealed_size(100)
    return whole[:16], [whole[at : at + size] for at in range(16, len(whole), size)]


def opened(begin, parts, keys=KEYS):
    return SealedFile(io.BytesIO(b"".join(parts)), begin, keys, "name").read(1000)


def test_a_file_comes_back_and_nothing_of_it_can_be_left_out_exchanged_or_appended(sealed):
    begin, parts = sealed
    assert (begin[:8], begin[8:], len(parts)) == (ENCRYPTED, NAME, 5)
    assert opened(begin, parts) == CONTENT
    for order in ([0, 1, 2, 4], [1, 0, 2, 3, 4], [0, 1, 2, 3, 4, 4], [1, 2, 3, 4], [4]):
        with pytest.raises(CorruptError):
            opened(begin, [parts[i] for i in order])
    for wrong in ([*parts[:4], parts[4][:-1]], [*parts, bytes(4)], [*parts, b"\xff" * 4], [parts[0][:20]]):
        with pytest.raises(CorruptError):
            opened(begin, wrong)
    # under the other key
    with pytest.raises(CorruptError):
        opened(ENCRYPTED + key_id(OLD), parts)
    # who reads it knows where it has to end: an export does
    assert opened(begin, parts[:4]) == CONTENT[:400]


def test_a_file_says_which_key_it_needs(sealed):
    with pytest.raises(LocationError, match=f"needs the key {NAME.hex()}; give it by --from-key"):
        opened(*sealed, Keys.parse(line_of(OLD), ""))
