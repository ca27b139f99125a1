"""A persistent prefix cache for llama-cpp-python: computed once, restored in milliseconds, by every process."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prefixstore.errors import (
    BusyError,
    ClosedError,
    ContextError,
    CorruptError,
    FullError,
    IncompatibleError,
    InvalidParameterError,
    LocationError,
    MissingExtraError,
    MisuseError,
    NotAttachedError,
    PrefixStoreError,
    StaleLeaseError,
    StorageError,
    UnavailableError,
    UndecryptableError,
)

if TYPE_CHECKING:
    from prefixstore.backends.encryption_keys import KeyProvider
    from prefixstore.config import load
    from prefixstore.diagnosis.explanation import Explanation
    from prefixstore.engine.budget import Evicted
    from prefixstore.engine.invariants import Violation
    from prefixstore.format.namespace import Namespace
    from prefixstore.results import LastPrompt, Match, Stats
    from prefixstore.store import PrefixStore
    from prefixstore.warming.job import Progress, WarmReport, warm
    from prefixstore.warming.prompt_list import Problem

__all__ = [
    "BusyError",
    "ClosedError",
    "ContextError",
    "CorruptError",
    "Evicted",
    "Explanation",
    "FullError",
    "IncompatibleError",
    "InvalidParameterError",
    "KeyProvider",
    "LastPrompt",
    "LocationError",
    "Match",
    "MissingExtraError",
    "MisuseError",
    "Namespace",
    "NotAttachedError",
    "PrefixStore",
    "PrefixStoreError",
    "Problem",
    "Progress",
    "StaleLeaseError",
    "Stats",
    "StorageError",
    "UnavailableError",
    "UndecryptableError",
    "Violation",
    "WarmReport",
    "load",
    "warm",
]
__version__ = "0.1.0"

# where the other names are: each module is loaded when one of its names is first used
_HOMES = {
    "Evicted": "engine.budget",
    "Explanation": "diagnosis.explanation",
    "KeyProvider": "backends.encryption_keys",
    "LastPrompt": "results",
    "Match": "results",
    "Namespace": "format.namespace",
    "PrefixStore": "store",
    "Problem": "warming.prompt_list",
    "Progress": "warming.job",
    "Stats": "results",
    "Violation": "engine.invariants",
    "WarmReport": "warming.job",
    "load": "config",
    "warm": "warming.job",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
