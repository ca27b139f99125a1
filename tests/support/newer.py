"""Records that cannot be read, in a memory backend: of a newer version, or damaged."""

from __future__ import annotations

from prefixstore.backends import memory
from prefixstore.errors import CorruptError, IncompatibleError

__all__ = ["make_corrupt", "make_newer"]


class _NewerError(IncompatibleError):
    """Stands for a record, of which a memory backend knows the place and the tokens."""


class _DamagedError(CorruptError):
    """As above."""


def make_newer(backend, key, monkeypatch):
    """Make a stored page one that a newer version has written."""
    _replace(backend, key, _NewerError("written by a newer version"), monkeypatch)


def make_corrupt(backend, key, monkeypatch):
    """Make the record of a stored page unreadable."""
    _replace(backend, key, _DamagedError("damaged"), monkeypatch)


def _replace(backend, key, error, monkeypatch):
    monkeypatch.setattr(memory._View, "record", _record)
    entry = backend._pages.entries[key]
    # what a location knows of a page beside its record
    for name in ("parent", "form", "tokens", "stored_bytes", "raw_bytes"):
        setattr(error, name, getattr(entry.record, name))
    with backend.update() as transaction:
        transaction._staged[key] = memory._Entry(error, entry.usage, entry.payload)
        transaction._structural.append(key)


def _record(view, key):
    entry = view._entry(key)
    if entry is not None and isinstance(entry.record, Exception):
        raise entry.record
    return entry.record if entry is not None else None
