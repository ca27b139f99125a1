"""The package obstore, as this process may use it: a forked child loads its own copy.

Its threads do not exist in a forked child, and what they wait with (an epoll instance) is shared with the parent: a
child that used it would hang, and so would its parent. So a child loads the library once more, from a copy of its file,
which the loader treats as another library: with its own threads, connections and state. What the child has
inherited is never used, nor destroyed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from typing import Any

from prefixstore.errors import MissingExtraError, UnavailableError

__all__ = ["library", "never_destroy"]

NAME = "_obstore"

# the process that loaded the library, and the library
_loaded: tuple[int, Any] | None = None
_loading = Lock()


def _renew_lock() -> None:
    global _loading
    _loading = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def library() -> Any:
    """The module with obstore's functions, its `_store` and its `exceptions`; a forked child has its own.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    UnavailableError
        If a forked child cannot load it again.
    """
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = os.getpid(), _installed()
        elif _loaded[0] != os.getpid():
            never_destroy(_loaded[1])
            _loaded = os.getpid(), _copy()
        return _loaded[1]


def never_destroy(inherited: object) -> None:
    """Keep an object for as long as the process lives, also when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _installed() -> Any:
    try:
        return import_module(f"obstore.{NAME}")
    except ImportError as error:
        raise MissingExtraError.of_location(error, "s3") from error


def _copy() -> Any:
    try:
        with Path(_installed().__file__).open("rb") as original:
            if hasattr(os, "memfd_create"):
                with os.fdopen(os.memfd_create("obstore"), "wb") as copy:
                    shutil.copyfileobj(original, copy, 1 << 20)
                    copy.flush()
                    return _load(f"/proc/self/fd/{copy.fileno()}")
            with tempfile.NamedTemporaryFile(prefix="obstore-", suffix=".so") as named:
                shutil.copyfileobj(original, named, 1 << 20)
                named.flush()
                return _load(named.name)
    except (OSError, ImportError) as error:
        raise UnavailableError(
            f"a forked process cannot load obstore again: {error}; start processes by spawn instead"
        ) from error


def _load(path: str) -> Any:
    loader = ExtensionFileLoader(NAME, path)
    spec = spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
