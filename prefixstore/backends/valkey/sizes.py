"""What rows take in the server, as its ``used_memory`` counts it, and how changes of them are sent."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from prefixstore.backends.contract import Change, Costs

__all__ = ["COSTS", "packed"]

# What a row takes beside its bytes: its slots in a hash and a sorted set; and a payload: its name, and its slot in the
# database. Measured with 50,000 of each.
ROW_BYTES = 120
PAYLOAD_BYTES = 100
_KEY = struct.Struct("<H")
# what the row weighs and its payload, and the length of its value
_REST = struct.Struct("<IQI")


@dataclass(frozen=True)
class ServerCosts(Costs):
    """As the server allocates memory."""

    def of(self, key: bytes, value: bytes, payload: int | None = None) -> int:
        return self.of_row(key, value) + self.of_payload(key, value, payload)

    def of_row(self, key: bytes, value: bytes) -> int:
        """A row without its payload."""
        return self.row + 2 * len(key) + _allocated(len(value))

    def of_payload(self, key: bytes, value: bytes, payload: int | None) -> int:
        """The payload of a row."""
        return self.payload + len(key) + _allocated(len(value) + payload) if payload is not None else 0


COSTS = ServerCosts(row=ROW_BYTES, payload=PAYLOAD_BYTES)


def packed(change: Change) -> bytes:
    """A change, as the script takes it."""
    key, value, payload = change
    if value is None:
        weights, value = (0, 0), b""
    else:
        weights = COSTS.of_row(key, value), COSTS.of_payload(key, value, len(payload) if payload is not None else None)
    return _KEY.pack(len(key)) + key + _REST.pack(*weights, len(value)) + value


def _allocated(n_bytes: int) -> int:
    """What an allocation of so many bytes takes: jemalloc has four sizes between two powers of two."""
    step = 1 << max((n_bytes - 1).bit_length() - 3, 4)
    return -(-n_bytes // step) * step
