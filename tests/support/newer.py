"""Records that cannot be read: of a newer version, or damaged."""

import xxhash

from prefixstore.engine.keyspace import RECORD
from prefixstore.format.record import FORMAT_VERSION


def newer(stored):
    """A stored record as a newer version would write it."""
    body = bytes([FORMAT_VERSION + 1]) + stored[1:-8]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def make_newer(backend, key):
    """Make a stored page one that a newer version has written."""
    _replace(backend, key, newer)


def make_corrupt(backend, key):
    """Make the record of a stored page unreadable."""
    _replace(backend, key, lambda stored: stored[:-1])


def _replace(backend, key, changed):
    with backend.update() as transaction:
        rows = transaction.rows
        rows.put(RECORD + key, changed(rows.get([RECORD + key])[0]))
        transaction._has_changed = True
