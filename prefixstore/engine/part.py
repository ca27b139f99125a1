"""What the parts of an engine have in common: the location, and what this process knows of it."""

from __future__ import annotations

from typing import NamedTuple

from prefixstore.backends.threads import Threads
from prefixstore.engine.breaker import CircuitBreaker
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.pages import Pages
from prefixstore.engine.ram import RamTier
from prefixstore.stats import Counters

__all__ = ["Part", "Shared"]


class Shared(NamedTuple):
    """What the parts of an engine share. The threads do what callers ask for."""

    threads: Threads
    backend: Pages
    catalog: Catalog
    ram: RamTier
    breaker: CircuitBreaker
    budget: Budget
    read_only: bool
    counters: Counters


class Part:
    """A part of an engine. Callers ask it directly."""

    def __init__(self, shared: Shared) -> None:
        self.threads = shared.threads
        self.breaker = shared.breaker
        self._backend = shared.backend
        self._catalog = shared.catalog
        self._ram = shared.ram
        self._budget = shared.budget
        self._read_only = shared.read_only
        self._counters = shared.counters
