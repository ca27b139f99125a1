"""Where pages are kept: a backend by the scheme of its URL."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from prefixstore.backends.base import Backend
from prefixstore.errors import InvalidParameterError, LocationError

__all__ = ["SCHEMES", "cache_directory", "is_persistent", "open_backend"]

# scheme -> module and the function in it that opens a location
SCHEMES = {
    "lmdb": ("prefixstore.backends.lmdb", "open_lmdb"),
    "memory": ("prefixstore.backends.memory", "open_memory"),
}


def cache_directory() -> Path:
    """The directory of prefixstore in the user's cache directory."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "prefixstore"


def _split(location: str | os.PathLike[str] | None) -> tuple[str, str]:
    """Scheme and path of a location; a bare path is LMDB's."""
    if location is None:
        return "lmdb", str(cache_directory() / "kv")
    text = os.fspath(location)
    if not isinstance(text, str) or not text.strip():
        raise InvalidParameterError(
            'location is empty; give a path, a URL such as "lmdb:///var/cache/kv", or "memory:"'
        )
    parts = urlsplit(text)
    # one letter is a Windows drive
    if len(parts.scheme) < 2 or isinstance(location, os.PathLike):
        return "lmdb", text
    if parts.scheme not in SCHEMES:
        known = ", ".join(sorted(SCHEMES))
        raise InvalidParameterError(f"location={text!r}: the scheme {parts.scheme!r} is unknown; known are {known}")
    if parts.query or parts.fragment:
        raise InvalidParameterError(f"location={text!r}: options in the URL are not known; give them as parameters")
    return parts.scheme, unquote(parts.netloc + parts.path)


def is_persistent(location: str | os.PathLike[str] | None) -> bool:
    """Whether what is stored there outlives the process."""
    return _split(location)[0] != "memory"


def open_backend(location: str | os.PathLike[str] | None, *, max_bytes: int, read_only: bool = False) -> Backend:
    """Open the backend that a location names.

    Parameters
    ----------
    location
        ``"lmdb:///path"``, a bare path (LMDB), ``"memory:"``, or None for LMDB in the user's cache directory.
    max_bytes
        The budget of the store.
    read_only
        Open an existing store and never write to it.

    Raises
    ------
    InvalidParameterError
        If the scheme is unknown.
    LocationError, IncompatibleError
        If the location cannot be opened.
    """
    scheme, path = _split(location)
    module, name = SCHEMES[scheme]
    opener: Callable[..., Backend] = getattr(importlib.import_module(module), name)
    options: dict[str, Any] = {"max_bytes": max_bytes, "read_only": read_only}
    if scheme != "memory" and not path:
        raise LocationError(f'location={location!r} has no path; write for example "{scheme}:///var/cache/kv"')
    return opener(path, **options)
