"""Where pages are kept: a backend by the scheme of its URL.

Another package adds one by an entry point in the group ``prefixstore.backends``: its name is the scheme, its value a
function ``open(location, *, max_bytes, read_only)`` that returns a `prefixstore.backends.base.Backend`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeAlias

from prefixstore.backends.base import Backend
from prefixstore.backends.location import scheme_of, text_of, without_password
from prefixstore.errors import InvalidParameterError, MissingExtraError

__all__ = ["is_persistent", "open_backend"]

Opener: TypeAlias = Callable[..., Backend]

ENTRY_POINTS = "prefixstore.backends"
# scheme -> module and the function in it that opens a location
SCHEMES = {
    "lmdb": ("prefixstore.backends.lmdb.backend", "open_lmdb"),
    "memory": ("prefixstore.backends.memory", "open_memory"),
    "postgres": ("prefixstore.backends.sql", "open_sql"),
    "postgresql": ("prefixstore.backends.sql", "open_sql"),
    "sqlite": ("prefixstore.backends.sql", "open_sql"),
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
        ``"postgresql+psycopg://user@host/db"``, a URL of a backend that another package brings, or None for LMDB in the
        user's cache directory.
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
    return _opener(scheme_of(text), text)(text, max_bytes=max_bytes, read_only=read_only)


def _find(scheme: str, text: str) -> EntryPoint:
    if scheme in SCHEMES:
        return EntryPoint(scheme, ":".join(SCHEMES[scheme]), ENTRY_POINTS)
    plugins = {plugin.name: plugin for plugin in entry_points(group=ENTRY_POINTS)}
    if scheme not in plugins:
        known = ", ".join(sorted(SCHEMES.keys() | plugins.keys()))
        raise InvalidParameterError(
            f"location={without_password(text)!r}: the scheme {scheme!r} is unknown; known are {known}"
        )
    return plugins[scheme]


def _opener(scheme: str, text: str) -> Opener:
    found = _find(scheme, text)
    try:
        opener: Opener = found.load()
    except MissingExtraError:
        raise
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            f"location={without_password(text)!r}: {found.value} cannot be imported: {error}"
        ) from error
    return opener
