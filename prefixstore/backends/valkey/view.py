"""A view of the rows in a Valkey server: each call is one script, which sees one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import lt
from typing import Any

from prefixstore.backends import refusals
from prefixstore.backends.contract import Range, Row, View
from prefixstore.backends.valkey.connections import Connections
from prefixstore.backends.valkey.payloads import KeptBuffers, parted, receive
from prefixstore.backends.valkey.scripts import HEAD, RANGES, ROW
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.record import Buffer

__all__ = ["MAGIC", "VALKEY_VERSION", "ServerView", "bytes_in"]

MAGIC = b"prefixstore"
# of the keys of a location and what is in them
VALKEY_VERSION = 3
# in a row: what it and its payload weigh comes first
VALUE_AT = 12
# of an empty location
BASE_BYTES = 4096
# rows of ranges that the server reads in one step: others wait meanwhile
ROWS_AT_ONCE = 2000


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


class ServerView(View):
    """The committed rows. Later commits are visible, but each call sees one moment.

    Parameters
    ----------
    connections
        To the server.
    buffers
        Memory for payloads.
    before
        Called before each request.
    """

    def __init__(
        self, connections: Connections, buffers: KeptBuffers, before: Callable[[], None] = lambda: None
    ) -> None:
        self._connections = connections
        self._buffers = buffers
        self._before = before

    @cached_property
    def n_bytes(self) -> int | None:
        """The bytes of all rows and payloads; None if the location is incomplete. Read once."""
        return bytes_in(self._connections.run(HEAD), self._connections.location)

    @property
    def used(self) -> int:
        return BASE_BYTES + (self.n_bytes or 0)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        self._before()
        return [
            row[VALUE_AT:] if row is not None else None
            for row in self._connections.call("HMGET", self._connections.names.rows, *keys)
        ]

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        found: list[list[Row]] = [[] for _ in wanted]
        # those that are not complete yet
        left = list(zip(found, wanted, strict=True))
        while left:
            self._before()
            arguments = [argument for _, one in left for argument in _arguments(one)]
            answer = self._connections.run(RANGES, ROWS_AT_ONCE, *arguments)
            for (rows, one), (keys, some) in zip(left, answer, strict=False):
                self._require_order(one, keys)
                rows += [Row(key, row[VALUE_AT:]) for key, row in zip(keys, some, strict=True) if row is not None]
            if sum(len(keys) for keys, _ in answer) < ROWS_AT_ONCE:
                break
            # the last one may go on
            rows, one = left[len(answer) - 1]
            left = [(rows, _after(one, answer[-1][0])), *left[len(answer) :]]
        return found

    def _require_order(self, wanted: Range, keys: Sequence[bytes]) -> None:
        """Raise `CorruptError` for keys that are not in order: some of them would be read again and again."""
        ordered = [wanted.start, *(keys[::-1] if wanted.reverse else keys), wanted.stop]
        if keys and not (ordered[0] <= ordered[1] and all(map(lt, ordered[1:], ordered[2:]))):
            raise CorruptError(f"{self._connections.location}: the rows are out of order")

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        names = [self._connections.names.payloads + key for key in keys]
        for key, stored in zip(keys, receive(self._connections, names, self._buffers, self), strict=True):
            self._before()
            yield stored if stored is not None else self._alone(key)

    def _alone(self, key: bytes) -> tuple[bytes, Buffer | None] | None:
        """A row without a payload, unless it has one by now."""
        row, stored = self._connections.run(ROW, key)
        if row is None:
            return None
        return (stored and parted(stored)) or (row[VALUE_AT:], None)


def _arguments(wanted: Range) -> tuple[bytes | int, ...]:
    """A range, as the script takes it."""
    return wanted.start, wanted.stop, -1 if wanted.limit is None else wanted.limit, b"R" if wanted.reverse else b""


def _after(wanted: Range, keys: Sequence[bytes]) -> Range:
    """What is left of a range after these keys."""
    limit = None if wanted.limit is None else wanted.limit - len(keys)
    if wanted.reverse:
        return wanted._replace(stop=keys[-1], limit=limit)
    return wanted._replace(start=keys[-1] + b"\0", limit=limit)
