"""A persistent prefix cache for llama-cpp-python: computed once, restored in milliseconds, by every process."""

from prefixstore.config import load
from prefixstore.diagnosis.explanation import Explanation
from prefixstore.engine.budget import Evicted
from prefixstore.engine.invariants import Violation
from prefixstore.engine.queue import Drained
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
)
from prefixstore.format.namespace import Namespace
from prefixstore.last_prompt import LastPrompt
from prefixstore.stats import Shortage, Stats
from prefixstore.store import Match, PrefixStore
from prefixstore.warming.job import warm
from prefixstore.warming.prompts import Problem
from prefixstore.warming.report import Progress, WarmReport

__all__ = [
    "BusyError",
    "ClosedError",
    "ContextError",
    "CorruptError",
    "Drained",
    "Evicted",
    "Explanation",
    "FullError",
    "IncompatibleError",
    "InvalidParameterError",
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
    "Shortage",
    "StaleLeaseError",
    "Stats",
    "StorageError",
    "UnavailableError",
    "Violation",
    "WarmReport",
    "load",
    "warm",
]
__version__ = "0.1.0"
