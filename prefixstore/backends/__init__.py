"""Where rows are kept: opens the backend for the scheme of a URL.

Another package adds one by an entry point in the group ``prefixstore.backends``: its name is the scheme, its value a
function ``open(location, *, max_bytes, read_only)`` that returns a `prefixstore.backends.contract.Backend`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points

from prefixstore.backends.contract import Backend
from prefixstore.backends.location import scheme_of, text_of, without_password
from prefixstore.errors import InvalidParameterError, MissingExtraError

__all__ = ["SCHEMES", "extra_needed", "is_persistent", "open_backend"]

ENTRY_POINTS = "prefixstore.backends"
_OBJECTS = ("prefixstore.backends.objects.object_backend:open_objects", "s3")
_POSTGRESQL = ("prefixstore.backends.sql:open_sql", "postgres")
_VALKEY = ("prefixstore.backends.valkey.valkey_backend:open_valkey", "valkey")
# scheme -> what opens a location, and the extra that it needs
SCHEMES = {
    "lmdb": ("prefixstore.backends.lmdb.lmdb_backend:open_lmdb", ""),
    "memory": ("prefixstore.backends.memory:open_memory", ""),
    "sqlite": ("prefixstore.backends.sql:open_sql", "sql"),
    **dict.fromkeys(("postgres", "postgresql"), _POSTGRESQL),
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), _VALKEY),
    **dict.fromkeys(("az", "file", "gs", "s3"), _OBJECTS),
}


def is_persistent(location: str | os.PathLike[str] | None) -> bool:
    """Whether the pages of a location outlive the process. Raises `InvalidParameterError` for an unknown scheme."""
    text = text_of(location)
    scheme = scheme_of(text)
    _find(scheme, text)
    return scheme != "memory"


def open_backend(location: str | os.PathLike[str] | None, *, max_bytes: int, read_only: bool = False) -> Backend:
    """Open the backend that a location names.

    Parameters
    ----------
    location
        ``"lmdb:///path"``, a bare path (LMDB), ``"memory:"``, ``"sqlite:////path"``,
        ``"postgresql+psycopg://user@host/db"``, ``"valkey://host/0"``, ``"s3://bucket/prefix"``, a URL of a backend
        that another package brings, or None for the default (`prefixstore.backends.location.default_location`).
    max_bytes
        The budget of the store.
    read_only
        Open an existing store and never write to it.

    Raises
    ------
    InvalidParameterError
        If the scheme is unknown.
    MissingExtraError
        If the backend needs a package that is not installed.
    LocationError, IncompatibleError
        If the location cannot be opened.
    """
    text = text_of(location)
    found = _find(scheme_of(text), text)
    if found.name in SCHEMES:
        with extra_needed(text):
            opener: Callable[..., Backend] = found.load()
            return opener(text, max_bytes=max_bytes, read_only=read_only)
    try:
        opener = found.load()
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            f"location={without_password(text)!r}: {found.value} cannot be imported: {error}"
        ) from error
    return opener(text, max_bytes=max_bytes, read_only=read_only)


@contextmanager
def extra_needed(location: str) -> Iterator[None]:
    """Report a package that cannot be imported in the block as the missing extra of this location."""
    try:
        yield
    except MissingExtraError:
        raise
    except ImportError as error:
        raise MissingExtraError.of_location(error, SCHEMES[scheme_of(location)][1]) from error


def _find(scheme: str, text: str) -> EntryPoint:
    if scheme in SCHEMES:
        return EntryPoint(scheme, SCHEMES[scheme][0], ENTRY_POINTS)
    plugins = {plugin.name: plugin for plugin in entry_points(group=ENTRY_POINTS)}
    if scheme not in plugins:
        known = ", ".join(sorted(SCHEMES.keys() | plugins.keys()))
        raise InvalidParameterError(
            f"location={without_password(text)!r}: the scheme {scheme!r} is unknown; known are {known}"
        )
    return plugins[scheme]
