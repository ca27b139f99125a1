"""A persistent prefix cache for llama-cpp-python: computed once, restored in milliseconds, by every process."""

from prefixstore.config import load
from prefixstore.engine.invariants import Violation
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
from prefixstore.format.namespace import Namespace
from prefixstore.stats import Stats
from prefixstore.store import Match, PrefixStore
from prefixstore.warming.job import warm
from prefixstore.warming.prompts import Problem
from prefixstore.warming.report import Progress, WarmReport

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
    "Problem",
    "Progress",
    "Stats",
    "StorageError",
    "UnavailableError",
    "Violation",
    "WarmReport",
    "load",
    "warm",
]
__version__ = "0.1.0"
