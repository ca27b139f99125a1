"""Prometheus metrics of stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from prefixstore.counters import Histogram
from prefixstore.engine.engine import Engine
from prefixstore.errors import InvalidParameterError, MissingExtraError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

Found: TypeAlias = "float | Mapping[str, float] | Histogram | None"
"""The value of a metric, or one for each value of its label; None if there is none."""


# the label of all that have none of their own, so that labels have a bounded number of values
OTHER = "other"
CREATED = re.compile(rb"(# [A-Z]+ )?\w+_created\b")


def import_prometheus() -> ModuleType:
    """The package prometheus_client. Raises `MissingExtraError`."""
    try:
        import prometheus_client.core  # noqa: PLC0415 - the extra "server"
    except ImportError as error:
        raise MissingExtraError('metrics need prometheus_client; pip install "prefixstore[server]"') from error
    return prometheus_client


def new_registry() -> CollectorRegistry:
    """An empty registry, so that other code in the process neither adds to these metrics nor clashes with them.

    Raises
    ------
    MissingExtraError
        If prometheus_client is not installed.
    """
    registry: CollectorRegistry = import_prometheus().CollectorRegistry()
    return registry


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The body and the content type of the response to a scrape of this registry."""
    prometheus = import_prometheus()
    lines = prometheus.generate_latest(registry).splitlines(keepends=True)
    # without the times at which its series began, which are as many series again
    return b"".join(line for line in lines if not CREATED.match(line)), prometheus.CONTENT_TYPE_LATEST


class HasEngine(Protocol):
    """The stores that `StoreMetrics` accepts: a `PrefixStore`, a `SlotStore`, an `Archive`."""

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...


class Metric(NamedTuple):
    """A metric: its kind for Prometheus, its help, its label (empty for none), and what reads it."""

    kind: str
    text: str
    label: str
    read: Callable[[Engine], Found]


def _count(text: str, name: str) -> Metric:
    """What the counters count under this name."""
    return Metric("Counter", text, "", lambda engine: engine.counters[name])


def _time(text: str, name: str) -> Metric:
    return Metric("Counter", text, "", lambda engine: engine.counters.gained(name))


def _group(text: str, name: str, *first: str) -> Metric:
    """Counts by reason; those named here are there from the start, so that the first one counted is seen as a rise."""
    zeros = dict.fromkeys(first, 0)
    return Metric("Counter", text, "reason", lambda engine: zeros | engine.counters.group(name))


def _histogram(text: str, name: str) -> Metric:
    return Metric("Histogram", text, "", lambda engine: engine.counters.histogram(name))


def _gauge(text: str, read: Callable[[Engine], Found], label: str = "") -> Metric:
    return Metric("Gauge", text, label, read)


def _lookups(engine: Engine) -> Found:
    counters = engine.counters
    misses = sum(counters.group("miss").values())
    return {"store": counters["hits"], "live": counters["live_hits"], "none": misses}


def _captured(engine: Engine) -> Found:
    return {form: engine.counters[f"{form}s_captured"] for form in FORMS}


def _session_gauge(name: str, engine: Engine) -> Found:
    counted = engine.session_counts()
    return getattr(counted, name) if counted is not None else None


FORMS = ("page", "snapshot")
METRICS: dict[str, Metric] = {
    # first: it brings the sizes up to date
    "location_up": _gauge(
        "1 if the location answers, 0 if it failed or is closed; then sizes are the last known ones.",
        lambda engine: not engine.is_closed and engine.upkeep.measure(),
    ),
    "lookups": Metric("Counter", "Lookups, by the source of the reused prefix.", "source", _lookups),
    "misses": _group(
        "Lookups that reused nothing from the store, by reason.",
        "miss",
        *("not_found", "diverged", "evicted", "short", "slow", "unreadable", "unavailable", "error"),
    ),
    "dropped_pages": _group(
        "Pages that were captured, or should have been, but are not stored, by reason.",
        "dropped",
        *("queue_full", "slow", "budget", "quota", "admission", "full", "unavailable", "error"),
    ),
    "outdated_pages": _group(
        "Captured pages that were superseded before they were written, by reason; nothing is lost.",
        "outdated",
        *("superseded", "thinned", "deleted"),
    ),
    "unreadable_pages": _group(
        "Pages that were found but could not be restored, by reason.",
        "unreadable",
        *("corrupt", "undecryptable", "vanished", "unavailable"),
    ),
    "captured_pages": Metric("Counter", "Pages and snapshots copied out of contexts.", "form", _captured),
    "prompt_tokens": _count("Tokens of the prompts that were looked up.", "prompt_tokens"),
    "restored_tokens": _count("Tokens restored from the store.", "tokens_restored"),
    "computed_tokens": _count(
        "Tokens computed by a Llama, with those of its answers; by llama-server, those of prompts.", "tokens_computed"
    ),
    "written_pages": _count("Pages and snapshots written to the location.", "allocations"),
    "deleted_pages": _count("Pages and snapshots deleted from the location, for any reason.", "frees"),
    "evicted_pages": _count("Pages evicted for space.", "evictions"),
    "expired_pages": _count("Pages deleted because their time to live had passed.", "expired"),
    "corrupt_pages": _count("Pages deleted because they were damaged.", "corrupt"),
    "packed_pages": _count("Pages that were written packed.", "packed"),
    "outages": _count("How often the circuit breaker opened because the location failed or was slow.", "outages"),
    "saved_seconds": _time(
        "Time by which restoring was faster than computing the same tokens; a slower one counts as 0.", "saved"
    ),
    "capture_seconds": _time("Time that completions have spent on capturing pages.", "capture"),
    "lost_seconds": _time("Time spent on requests to a location that failed or was slow.", "lost"),
    "late": Metric(
        "Counter",
        "Restores given up midway since computing was faster, and lookups that did not wait for a far location.",
        "",
        lambda engine: engine.late,
    ),
    "session_admissions": _group(
        "Admissions, by the source of the session's tokens.", "session", "cold", "live", "store"
    )._replace(label="source"),
    "session_evictions": _count(
        "Sessions that were forgotten: by name, or as the least recently used.", "session_evicted"
    ),
    "session_discards": _count("Sessions that ended with an exception, or with unknown contents.", "session_discarded"),
    "session_stale_leases": _count(
        "Calls refused because the lease of their session had ended.", "session_stale_leases"
    ),
    "session_timeouts": _count("Admissions given up because the Llama was busy for too long.", "session_timeouts"),
    "sessions": _gauge("Sessions in this process.", partial(_session_gauge, "sessions")),
    "sessions_waiting": _gauge("Admissions that wait for the Llama, or hold it.", partial(_session_gauge, "waiting")),
    "lookup_seconds": _histogram(
        "Time to find the longest stored prefix of a prompt; without failed lookups.", "lookup"
    ),
    "restore_seconds": _histogram("Time to read, verify and load the pages of a prompt.", "restore"),
    "eviction_age_seconds": _histogram(
        "Time from the last use of a page, or its capture, to its eviction.", "eviction_age"
    ),
    "first_reuse_seconds": _histogram(
        "Time from the capture of a page to its first use; without pages that are never used.", "first_reuse"
    ),
    "used_bytes": _gauge(
        "Bytes in use: the location with its index.", lambda engine: engine.upkeep.last_used()[0].bytes
    ),
    "budget_bytes": _gauge("Bytes that may be in use.", lambda engine: engine.budget.max_bytes),
    "peak_bytes": _gauge(
        "The largest size of the location that this process has seen since the store was opened.",
        lambda engine: engine.evictor.peak_bytes,
    ),
    "pages": _gauge("Pages in the location.", lambda engine: engine.upkeep.last_used()[0].entries),
    "budget_pages": _gauge(
        "Pages that may be in the location; missing if there is no limit.", lambda engine: engine.budget.max_entries
    ),
    "stored_bytes": _gauge("Size of the payloads, as stored.", lambda engine: engine.upkeep.last_used()[1]),
    "state_bytes": _gauge(
        "Size of the states that the payloads decode to.", lambda engine: engine.upkeep.last_used()[2]
    ),
    "pending_pages": _gauge(
        "Pages and snapshots captured but not yet written.",
        lambda engine: dict(zip(FORMS, engine.write_queue.pending, strict=True)),
        "form",
    ),
    "queued_bytes": _gauge("Bytes captured but not yet written.", lambda engine: engine.queued_bytes),
    "queue_budget_bytes": _gauge("Bytes that may wait to be written.", lambda engine: engine.queue_bytes),
}


class StoreMetrics:
    """Reports to a registry what stores have done. May be used from many threads.

    It reads the stores when they are scraped, and costs nothing otherwise. While a location fails, and after its
    store is closed, it reports the counts and the last known sizes. After a fork, a child reports what its parent had
    counted until then, and what it has done itself.

    Parameters
    ----------
    registry
        Where the metrics are registered. A registry takes one `StoreMetrics`, for all of its stores.
    store
        A store to begin with, without a name.

    Raises
    ------
    MissingExtraError
        If prometheus_client is not installed.
    InvalidParameterError
        If the registry has one already.
    """

    def __init__(self, registry: CollectorRegistry, store: Engine | HasEngine | None = None) -> None:
        self._prometheus = import_prometheus()
        self._engines: dict[str, Engine] = {}
        if store is not None:
            self.add(store)
        try:
            registry.register(self)
        except ValueError as error:
            raise InvalidParameterError("registry has a StoreMetrics already: add() the store to that") from error

    def add(self, store: Engine | HasEngine, name: str = "") -> None:
        """Report this store, too, instead of the one with this name: the value of the label `store`. Keeps its engine.

        Raises
        ------
        ClosedError
            If it is closed.
        """
        self._engines[name] = store if isinstance(store, Engine) else store.engine

    def remove(self, name: str = "") -> None:
        """Stop reporting the store with this name."""
        self._engines.pop(name, None)

    def describe(self) -> Iterator[Family]:
        """The metrics without values, for the registry."""
        yield from _families(self._prometheus, named=False).values()

    def collect(self) -> Iterator[Family]:
        """The metrics, for a scrape."""
        engines = tuple(self._engines.items())
        named = any(name for name, _ in engines)
        families = _families(self._prometheus, named=named)
        for store, engine in engines:
            for name, metric in METRICS.items():
                _add(families[name], (store,) if named else (), metric.read(engine))
        yield from (family for family in families.values() if family.samples)


def store_text(store: Engine | HasEngine) -> str:
    """The metrics of one store, as a scrape would be answered. Raises `MissingExtraError`."""
    registry = new_registry()
    StoreMetrics(registry, store)
    return render(registry)[0].decode()


def _families(prometheus: ModuleType, *, named: bool) -> dict[str, Any]:
    families = {}
    for name, metric in METRICS.items():
        labels = ["store"] if named else []
        if metric.label:
            labels.append(metric.label)
        family = getattr(prometheus.core, f"{metric.kind}MetricFamily")
        families[name] = family(f"prefixstore_{name}", metric.text, labels=labels)
    return families


def _add(family: Any, labels: tuple[str, ...], found: Found) -> None:
    """Add what one store has to tell to a metric."""
    if isinstance(found, Histogram):
        bounds = [*map(str, found.bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(found.counts), strict=True)), found.total)
    elif isinstance(found, Mapping):
        for label, value in found.items():
            family.add_metric((*labels, label), value)
    elif found is not None:
        family.add_metric(labels, found)
