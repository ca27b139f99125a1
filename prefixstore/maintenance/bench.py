"""Measures how fast a location is."""

from __future__ import annotations

import time
import uuid

import numpy as np

from prefixstore.errors import FullError, StorageError
from prefixstore.format.codec import decode
from prefixstore.format.keys import page_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, Usage, checksum
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import read_facts

# size of the pages that are written, if there are none to take the size from
PAGE_BYTES = 8 << 20
# how much is written, and how much is read at most
SCRATCH_BYTES = 64 << 20
READ_BYTES = 256 << 20


def measure_rates(archive: Archive) -> tuple[float | None, float | None]:
    """Bytes per second: of states read, verified and unpacked, and of payloads durably written. None: not measured.

    It writes a few pages into a temporary namespace, reads them and others, and deletes them again. Nothing is evicted
    for this: where there is no space, only reading is measured.
    """
    with archive.view() as view:
        sizes = read_facts(view)["stored_bytes"]
    size = round(sizes.mean()) if len(sizes) else PAGE_BYTES
    settings = Namespace({"label": f"bench-{uuid.uuid4().hex}", "salt": None})
    try:
        written = _write(archive, settings, min(max(size, 1), SCRATCH_BYTES))
        return _read(archive), written
    finally:
        _forget(archive, settings)


def _forget(archive: Archive, settings: Namespace) -> None:
    with archive.view() as view:
        is_there = settings.key in view.namespaces()
    if is_there:
        archive.purge(namespace=settings.key.hex())


def _write(archive: Archive, settings: Namespace, size: int) -> float | None:
    payload = np.random.default_rng(0).bytes(size)
    n = max(min(SCRATCH_BYTES // size, 64), 1)
    now = time.time_ns()
    started = time.perf_counter()
    try:
        for i in range(n):
            tokens = np.array([i, i], "<i4").tobytes()
            record = Record(settings.key, settings.key, 0, tokens, 0, size, size, checksum(payload), 0, now)
            with archive.backend.update() as transaction:
                transaction.put_namespace(settings.key, settings.canonical)
                transaction.put(page_key(settings.key, tokens), record, Usage(now), payload)
        archive.backend.sync()
    except FullError:
        return None
    return n * size / (time.perf_counter() - started)


def _read(archive: Archive) -> float | None:
    """Bytes of states per second, read and unpacked, those used last first; None if nothing can be read."""
    size = 0
    with archive.backend.view() as view:
        facts = read_facts(view)
        started = time.perf_counter()
        for key in facts["key"][np.argsort(facts["last_used"])[::-1]]:
            if size > READ_BYTES:
                break
            try:
                for record, payload in view.fetch([bytes(key)]):
                    size += len(decode(record, payload))
            except StorageError:
                continue
    return size / (time.perf_counter() - started) if size else None
