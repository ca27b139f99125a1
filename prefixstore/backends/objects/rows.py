"""How rows are stored in a bucket: an object each, whose name says the key, so that a LIST is a range of rows.

Their names and bytes are defined in this module only; ``docs/format.md`` describes them.
"""

from __future__ import annotations

import base64
import os
import struct
from typing import NamedTuple

from prefixstore.backends.contract import Costs
from prefixstore.format.record import Buffer

# Of a key: what the first folder of an object's name says, which is all that can be listed on its own, and each further
# part. Servers that keep objects in files have names of at most 255 bytes, and payloads have more in theirs.
FOLDER_BYTES = 16
PART_BYTES = 160
# The end of a part that others follow, in place of a part without bytes, and between the key of a row and what is
# random in the name of its payload. They come before all that stands for bytes.
FOLDER, EMPTY, MARK = "(/", "!", "!"
NONCE_BYTES = 16
# base64 in the order of the bytes that it stands for
_IN_ORDER = b"-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
_STANDARD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_TO_NAME, _TO_KEY = bytes.maketrans(_STANDARD, _IN_ORDER), bytes.maketrans(_IN_ORDER, _STANDARD)

# the random part of the name of a payload's object, and its size
_PAYLOAD = struct.Struct(f"<{NONCE_BYTES}sQ")

COSTS = Costs(row=1, payload=_PAYLOAD.size)


def _encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").translate(_TO_NAME).decode()


def name_of(key: bytes) -> str:
    """The name of the object with this row. Names are in the order of the keys, and none is that of a folder."""
    ends = range(FOLDER_BYTES, max(len(key), FOLDER_BYTES + 1), PART_BYTES)
    parts = [key[:FOLDER_BYTES], *(key[at : at + PART_BYTES] for at in ends)]
    return FOLDER.join(_encoded(part) or EMPTY for part in parts)


def key_in(name: str) -> bytes:
    """The key of the row in the object of this name. Raises `ValueError` if it is none."""
    parts = (b"" if part == EMPTY else part.encode("ascii").translate(_TO_KEY) for part in name.split(FOLDER))
    return b"".join(base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)) for part in parts)


def listing(start: bytes, stop: bytes) -> tuple[str, str]:
    """The folder to list for a range, empty for all of them, and what the names of its rows come after."""
    first = start[:FOLDER_BYTES]
    second = (int.from_bytes(first, "big") + 1).to_bytes(FOLDER_BYTES + 1, "big")[1:]
    if len(first) == FOLDER_BYTES and (stop[:FOLDER_BYTES] == first or stop == second):
        return _encoded(first) + FOLDER[0], "" if start == first else name_of(start)[:-1]
    # a name without its last letter comes before those of all keys from this one on
    return "", name_of(start)[:-1] if len(start) > FOLDER_BYTES else _encoded(start)[:-1]


def new_payload(size: int) -> bytes:
    """Refers to a new payload of this size."""
    return _PAYLOAD.pack(os.urandom(NONCE_BYTES), size)


def payload_name(key: bytes, payload: bytes) -> str:
    """The name of the object with a payload of this row. Those of one row follow each other, in the order of rows."""
    return name_of(key) + MARK + _encoded(payload[:NONCE_BYTES])


class Stored(NamedTuple):
    """What is stored of a row.

    Attributes
    ----------
    value
        Its value.
    payload
        What refers to its payload, as `new_payload` makes it; empty if it has none.
    """

    value: bytes
    payload: bytes = b""

    @property
    def payload_bytes(self) -> int:
        """The size of the object with its payload; 0 if there is none, since the payload has no bytes or is none."""
        return int(_PAYLOAD.unpack(self.payload)[1]) if self.payload else 0

    def cost(self, key: bytes) -> int:
        """What it takes of the budget: names are counted as the keys that they say."""
        return COSTS.of(key, self.value, self.payload_bytes if self.payload else None)

    def pack(self) -> bytes:
        """The bytes of the row's object: how long what refers to the payload is, that, and the value."""
        return bytes([len(self.payload)]) + self.payload + self.value

    @classmethod
    def unpack(cls, stored: Buffer) -> Stored:
        """Read the bytes. What is damaged has a wrong value, or none: whoever reads it finds out."""
        packed = bytes(stored)
        size = packed[0] if packed else 0
        if size not in (0, _PAYLOAD.size) or len(packed) < 1 + size:
            return cls(b"")
        return cls(packed[1 + size :], packed[1 : 1 + size])
