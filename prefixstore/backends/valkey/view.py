"""A view of the rows in a Valkey server: each call is one command or script, which sees one moment."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prefixstore.backends import refusals
from prefixstore.backends.contract import Range, Row, View
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.valkey.connections import Connections
from prefixstore.backends.valkey.payloads import receive
from prefixstore.backends.valkey.scripts import HEAD, MAGIC, RANGES, VALKEY_VERSION, VALUE_AT
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.record import Buffer

__all__ = ["ServerView", "bytes_in", "size"]

# of an empty location
BASE_BYTES = 4096
# what the script answers: how many rows; of each the lengths of its key and of what is stored
_COUNT = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")


def bytes_in(answer: Sequence[Any], where: str) -> int | None:
    """The bytes of a location, as a script has answered; None if it is incomplete: nothing is there, or not all.

    Raises
    ------
    IncompatibleError
        If the location is that of another application, or has another format.
    """
    exists, magic, version, n_bytes = answer[:4]
    if exists and magic != MAGIC:
        raise refusals.foreign(where, "keys")
    if exists and (version is None or not version.isdigit()):
        raise IncompatibleError(f"{where} has no format; choose another location")
    if exists and int(version) != VALKEY_VERSION:
        raise refusals.other_format(where, int(version), VALKEY_VERSION)
    return int(n_bytes) if n_bytes is not None else None


def size(connections: Connections) -> int | None:
    """The bytes of all rows and payloads; None if the location is incomplete: nothing is there, or not all."""
    return bytes_in(connections.run(HEAD), connections.location)


class ServerView(View):
    """The committed rows. Later commits are visible, but each call sees one moment.

    `n_bytes` are those of all rows and payloads, if they are known. `before` is called often while this reads: an
    update renews its lock.
    """

    def __init__(
        self,
        connections: Connections,
        memory: ReceivedMemory,
        n_bytes: int | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._connections = connections
        self._memory = memory
        self._n_bytes = n_bytes
        self._before = before

    @property
    def used(self) -> int:
        if self._n_bytes is None:
            self._n_bytes = size(self._connections) or 0
        return BASE_BYTES + self._n_bytes

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        self._before()
        rows = self._connections.call("HMGET", self._connections.names.rows, *keys)
        return [row[VALUE_AT:] if row is not None else None for row in rows]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        self._before()
        arguments: list[bytes | int] = []
        for start, stop, limit, reverse in wanted:
            arguments += start, stop, -1 if limit is None else limit, b"R" if reverse else b""
        answer, at, found = self._connections.run(RANGES, *arguments), 0, []
        for one in wanted:
            rows: list[Row] = []
            (n_rows,) = _COUNT.unpack_from(answer, at)
            at += _COUNT.size
            for _ in range(n_rows):
                n_key, n_stored = _LENGTHS.unpack_from(answer, at)
                value_at = at + _LENGTHS.size + n_key
                rows.append(Row(answer[value_at - n_key : value_at], answer[value_at + VALUE_AT : value_at + n_stored]))
                at = value_at + n_stored
            self._require_order(one, [row.key for row in rows])
            found.append(rows)
        return found

    def _require_order(self, wanted: Range, keys: Sequence[bytes]) -> None:
        """Raise `CorruptError` for keys that are not in order: who goes on after the last one would never end."""
        ordered = sorted(keys, reverse=wanted.reverse)
        if keys and not (wanted.start <= min(keys) and max(keys) < wanted.stop and keys == ordered):
            raise CorruptError(f"{self._connections.location}: the rows are out of order")

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        for row, payload in receive(self._connections, keys, self._memory, self):
            self._before()
            yield None if row is None else (row[VALUE_AT:], payload)
