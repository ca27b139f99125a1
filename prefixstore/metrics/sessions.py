"""Prometheus metrics of the sessions of a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prefixstore.engine.engine import Engine
from prefixstore.stats import Counters

__all__ = ["COUNTS", "GAUGES", "SOURCES", "samples"]

SOURCES = ("cold", "live", "store")
# by the name of the counter: what `Counters` calls it
COUNTS = {
    "session_forks": ("session_forks", "Sessions that were forked."),
    "session_evictions": ("session_evicted", "Sessions that were forgotten: by name, or as the least recently used."),
    "session_discards": ("session_discarded", "Sessions that ended with an exception, or with unknown contents."),
    "session_stale_leases": ("session_stale_leases", "Calls refused because the lease of their session had ended."),
    "session_timeouts": ("session_timeouts", "Admissions given up because the Llama was busy for too long."),
}
GAUGES = {
    "sessions": "Sessions in this process.",
    "sessions_waiting": "Admissions that wait for the Llama, or hold it.",
}


class Sample(NamedTuple):
    """A value of a metric, and those of its labels."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def samples(engine: Engine) -> Iterator[Sample]:
    """The values for one store; none if it never had sessions. Names of sessions are not exposed."""
    counters: Counters = engine.counters
    counted = engine.session_counts()
    sources = counters.group("session")
    if counted is None and not sources:
        return
    for source in SOURCES:
        yield Sample("session_admissions", sources.get(source, 0), (source,))
    for name, (count, _) in COUNTS.items():
        yield Sample(name, counters[count])
    if counted is not None:
        yield Sample("sessions", counted.sessions)
        yield Sample("sessions_waiting", counted.waiting)
