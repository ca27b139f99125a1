"""A persistent prefix cache for llama-cpp-python: computed once, restored in milliseconds, by every process."""

from prefixstore.check import Violation
from prefixstore.errors import (
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
    StorageError,
    UnavailableError,
)
from prefixstore.namespace import Namespace
from prefixstore.stats import Stats
from prefixstore.store import Match, PrefixStore

__all__ = [
    "ClosedError",
    "ContextError",
    "CorruptError",
    "FullError",
    "IncompatibleError",
    "InvalidParameterError",
    "LocationError",
    "Match",
    "MissingExtraError",
    "MisuseError",
    "Namespace",
    "NotAttachedError",
    "PrefixStore",
    "PrefixStoreError",
    "Stats",
    "StorageError",
    "UnavailableError",
    "Violation",
]
__version__ = "0.1.0"
