"""Export files, real ones and forged ones: with the checksums that `transfer` computes, whatever is in them."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from contextlib import closing

import xxhash

from prefixstore.format.export import ENTRY, EXPORT_VERSION, HEADER, MAGIC
from prefixstore.format.keys import namespace_key
from prefixstore.format.record import FORMAT_VERSION, Record, Usage
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import export_store
from tests.support.places import fill, space


def an_export() -> bytes:
    """Sequences that share their beginning, of two namespaces."""
    with closing(Archive("memory:", create=True)) as archive:
        for settings in (space(), space("tenant")):
            fill(archive.backend, settings, [list(range(12)), [0, 1, 2, 3, 9, 9, 9, 9]], size=40)
        file = io.BytesIO()
        export_store(archive, file)
        archive.purge(everything=True)
    return file.getvalue()


def sealed_entry(kind: bytes, head: bytes, n_bytes: int) -> bytes:
    start = ENTRY.pack(kind, len(head), n_bytes) + head
    return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start))


def with_key(record: Record) -> tuple[bytes, Record]:
    return record.key, record


def export_of(settings: bytes, pages: Iterable[tuple[bytes, Record, Usage, bytes]]) -> bytes:
    """A file with pages of one namespace; its end is missing."""
    space = namespace_key(settings) + settings
    data = HEADER.pack(MAGIC, EXPORT_VERSION, FORMAT_VERSION) + sealed_entry(b"NAME", space, 0)
    for key, record, usage, payload in pages:
        data += sealed_entry(b"PAGE", key + usage.pack() + record.pack(), len(payload)) + payload
    return data
