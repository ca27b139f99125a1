"""What rows take in the server, as its ``used_memory`` counts it, and how they are stored with that."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from prefixstore.backends.contract import Change, Costs

__all__ = ["COSTS", "VALUE_AT", "packed"]

# What a row takes beside its bytes: its slots in a hash and a sorted set; and a payload: its name, and its slot in the
# database. Measured with 50,000 of each.
ROW_BYTES = 120
PAYLOAD_BYTES = 100
# in a row: what it and its payload weigh, and then its value
_WEIGHTS = struct.Struct("<IQ")
VALUE_AT = _WEIGHTS.size
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class ServerCosts(Costs):
    """As the server allocates memory."""

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        return sum(self.parts(key, value, payload))

    def parts(self, key: bytes, value: bytes, payload: int | None) -> tuple[int, int]:
        """Of a row, and of its payload."""
        own = self.row + 2 * len(key) + _allocated(len(value))
        return own, 0 if payload is None else self.payload + len(key) + _allocated(len(value) + payload)


COSTS = ServerCosts(row=ROW_BYTES, payload=PAYLOAD_BYTES)


def packed(change: Change) -> bytes:
    """A change, as the script takes it: a key, and what is stored in the row, each with its length."""
    key, value, payload = change
    row = b""
    if value is not None:
        row = _WEIGHTS.pack(*COSTS.parts(key, value, None if payload is None else len(payload))) + value
    return _LENGTH.pack(len(key)) + key + _LENGTH.pack(len(row)) + row


def _allocated(n_bytes: int) -> int:
    """What an allocation of so many bytes takes: jemalloc has four sizes between two powers of two."""
    step = 1 << max((n_bytes - 1).bit_length() - 3, 4)
    return -(-n_bytes // step) * step
