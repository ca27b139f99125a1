"""HTTP servers with the store: llama-server (its client, its slots, a proxy), and the servers of llama-cpp-python.

The names are imported when they are first used: llama-server's side works without llama-cpp-python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from prefixstore.errors import MissingExtraError

if TYPE_CHECKING:
    from prefixstore.server.client import LlamaServer
    from prefixstore.server.python_server import create_app
    from prefixstore.server.sequences import sequence_cache
    from prefixstore.server.slot_store import SlotStore

__all__ = ["LlamaServer", "SlotStore", "create_app", "sequence_cache"]

# the module of each name, and the extra that it needs
_MODULES = {
    "LlamaServer": ("prefixstore.server.client", "server"),
    "SlotStore": ("prefixstore.server.slot_store", "server"),
    "create_app": ("prefixstore.server.python_server", "python-server"),
    # not the name of its module: importing that would replace the function by the module
    "sequence_cache": ("prefixstore.server.sequences", "llama"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _MODULES[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f'{name} needs {error.name}; pip install "prefixstore[{extra}]"') from error
