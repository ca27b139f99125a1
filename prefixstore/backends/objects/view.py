"""A view of a location in object storage: rows from memory, payloads from the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from prefixstore.backends.contract import Change, Range, Row, View
from prefixstore.backends.objects.client import Client
from prefixstore.backends.objects.log import Log
from prefixstore.backends.objects.read_ahead import Arrived, ahead
from prefixstore.backends.objects.segments import name_of, size_of
from prefixstore.backends.sorted_rows import SortedRows
from prefixstore.format.record import Buffer

__all__ = ["ObjectsView"]

# how often a payload is asked for again because it was replaced meanwhile
READS = 8


class ObjectsView(View):
    """Reads one state of the log. A payload that was deleted meanwhile is read in a later one.

    Parameters
    ----------
    log, client
        Of the location.
    rows
        What is known of it.
    """

    def __init__(self, log: Log, client: Client, rows: SortedRows) -> None:
        self._log = log
        self._client = client
        self._rows = rows

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._rows.get(keys)

    def ranges(self, wanted: Sequence[Range]) -> list[list[Row]]:
        return self._rows.ranges(wanted)

    @property
    def used(self) -> int:
        return self._rows.used

    def payloads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        return self._payloads([self._rows.row(key) for key in keys])

    def _payloads(self, rows: Sequence[Change | None]) -> Iterator[tuple[bytes, Buffer | None] | None]:
        self.arrived = 0
        there = [row for row in rows if row is not None and size_of(row.payload)]
        arriving = ahead(there, lambda row: size_of(row.payload), self._read, self._client.window, self._note_arrived)
        with closing(arriving):
            for row in rows:
                if row is not None and size_of(row.payload):
                    yield next(arriving)[1]
                else:
                    yield None if row is None else _without_bytes(row)

    def _note_arrived(self, n_bytes: int) -> None:
        self.arrived = n_bytes

    def _read(self, row: Change, arrived: Arrived) -> tuple[bytes, Buffer | None] | None:
        """Value and payload of a row, as they are now if that was replaced; the payload is None if it is missing."""
        for _ in range(READS):
            if not size_of(row.payload):
                return _without_bytes(row)
            found = self._client.receive(name_of(row.payload or b""), arrived)
            if found is not None:
                return row.value or b"", found
            now = self._log.refresh().rows.row(row.key)
            if now is None:
                return None
            if now.payload == row.payload:
                break
            row = now
        return row.value or b"", None


def _without_bytes(row: Change) -> tuple[bytes, Buffer | None]:
    """A row whose payload has no bytes, or that has none."""
    return row.value or b"", b"" if row.payload else None
