"""Prometheus metrics of stores and of their locations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from prefixstore.engine.engine import Engine
from prefixstore.errors import InvalidParameterError
from prefixstore.metrics import sessions
from prefixstore.metrics.exposition import import_prometheus, new_registry, render
from prefixstore.metrics.labels import bounded
from prefixstore.stats import Counters

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = ["GAUGES", "HasEngine", "StoreMetrics", "store_text"]


class HasEngine(Protocol):
    """The stores that `StoreMetrics` accepts: a `PrefixStore`, a `SlotStore`, an `Archive`."""

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...


# by the name of the counter: what `Counters` calls it
COUNTS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of the prompts that were looked up."),
    "restored_tokens": ("tokens_restored", "Tokens restored from the store."),
    "computed_tokens": ("tokens_computed", "Tokens computed by eval, including those of the answers."),
    "written_pages": ("allocations", "Pages and snapshots written to the location."),
    "deleted_pages": ("frees", "Pages and snapshots deleted from the location, for any reason."),
    "evicted_pages": ("evictions", "Pages evicted for space."),
    "expired_pages": ("expired", "Pages deleted because their time to live had passed."),
    "corrupt_pages": ("corrupt", "Pages deleted because they were damaged."),
    "packed_pages": ("packed", "Pages that were written packed."),
    "outages": ("outages", "How often the circuit breaker opened because the location failed or was slow."),
}
TIMES = {
    "saved_seconds": ("saved", "Time by which restoring was faster than computing the same tokens."),
    "capture_seconds": ("capture", "Time that completions have spent on capturing pages."),
    "lost_seconds": ("lost", "Time spent on requests to a location that failed or was slow."),
}
# with the reasons that are there from the start, so that the first one counted is seen as a rise
GROUPS = {
    "misses": (
        "miss",
        "Lookups that reused nothing from the store, by reason.",
        ("not_found", "diverged", "evicted", "short", "slow", "unreadable", "unavailable", "error"),
    ),
    "dropped_pages": (
        "dropped",
        "Pages that were captured, or should have been, but are not stored, by reason.",
        ("queue_full", "budget", "quota", "admission", "full", "unavailable", "error"),
    ),
    "outdated_pages": (
        "outdated",
        "Captured pages that were superseded before they were written, by reason; nothing is lost.",
        ("superseded", "thinned", "deleted"),
    ),
    "unreadable_pages": (
        "unreadable",
        "Pages that were found but could not be restored, by reason.",
        ("corrupt", "vanished", "unavailable"),
    ),
}
HISTOGRAMS = {
    "lookup_seconds": ("lookup", "Time to find the longest stored prefix of a prompt."),
    "restore_seconds": ("restore", "Time to restore the pages of a prompt."),
    "eviction_age_seconds": ("eviction_age", "Time from the last use of a page, or its capture, to its eviction."),
    "first_reuse_seconds": ("first_reuse", "Time from the capture of a page to its first use."),
}
GAUGES = {
    "used_bytes": "Bytes in use, by tier: the location with its index, and the states in RAM.",
    "budget_bytes": "Bytes that may be in use, by tier.",
    "peak_bytes": "The largest size of the location that this process has seen since the store was opened.",
    "pages": "Pages in the location.",
    "budget_pages": "Pages that may be in the location; missing if there is no limit.",
    "stored_bytes": "Size of the payloads, as stored.",
    "state_bytes": "Size of the states that the payloads decode to.",
    "pending_pages": "Pages and snapshots captured but not yet written.",
    "queued_bytes": "Bytes captured but not yet written.",
    "queue_budget_bytes": "Bytes that may wait to be written.",
    "location_up": "1 if the location answers, 0 if it failed or is closed; then sizes are the last known ones.",
}
FORMS = ("page", "snapshot")
# of gauges
LABELS = {
    "used_bytes": ("tier",),
    "budget_bytes": ("tier",),
    "pending_pages": ("form",),
}


class _Family(NamedTuple):
    kind: str
    text: str
    labels: tuple[str, ...] = ()


FAMILIES: dict[str, _Family] = {
    "lookups": _Family("counter", "Lookups, by the source of the reused prefix.", ("source",)),
    **{name: _Family("counter", text, ("reason",)) for name, (_, text, _) in GROUPS.items()},
    "captured_pages": _Family("counter", "Pages and snapshots copied out of contexts.", ("form",)),
    **{name: _Family("counter", text) for name, (_, text) in (COUNTS | TIMES | sessions.COUNTS).items()},
    "late": _Family("counter", "Restores given up midway, and lookups that did not wait for a far location."),
    "session_admissions": _Family("counter", "Admissions, by the source of the session's tokens.", ("source",)),
    **{name: _Family("histogram", text) for name, (_, text) in HISTOGRAMS.items()},
    **{name: _Family("gauge", text, LABELS.get(name, ())) for name, text in (GAUGES | sessions.GAUGES).items()},
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

    def describe(self) -> Iterator[Metric]:
        """The metrics without values, for the registry."""
        yield from _families(self._prometheus, named=False).values()

    def collect(self) -> Iterator[Metric]:
        """The metrics, for a scrape."""
        engines = tuple(self._engines.items())
        named = any(name for name, _ in engines)
        families = _families(self._prometheus, named=named)
        for name, engine in engines:
            _Filler(families, (name,) if named else ()).fill(engine)
        yield from (family for family in families.values() if family.samples)


def store_text(store: Engine | HasEngine) -> str:
    """The metrics of one store, as a scrape would be answered. Raises `MissingExtraError`."""
    registry = new_registry()
    StoreMetrics(registry, store)
    return render(registry)[0].decode()


def _families(prometheus: ModuleType, *, named: bool) -> dict[str, Any]:
    kinds = {
        "counter": prometheus.core.CounterMetricFamily,
        "gauge": prometheus.core.GaugeMetricFamily,
        "histogram": prometheus.core.HistogramMetricFamily,
    }
    first = ("store",) if named else ()
    return {
        name: kinds[family.kind](f"prefixstore_{name}", family.text, labels=first + family.labels)
        for name, family in FAMILIES.items()
    }


class _Filler:
    """Adds what one store has to tell to the families."""

    def __init__(self, families: Mapping[str, Any], labels: tuple[str, ...]) -> None:
        self._families = families
        self._labels = labels

    def fill(self, engine: Engine) -> None:
        self._counted(engine.counters)
        self._sized(engine)
        for name, value, labels in sessions.samples(engine):
            self._add(name, value, *labels)

    def _add(self, name: str, value: float, *labels: str) -> None:
        self._families[name].add_metric((*self._labels, *labels), value)

    def _counted(self, counters: Counters) -> None:
        for name, (count, _) in COUNTS.items():
            self._add(name, counters[count])
        for name, (time, _) in TIMES.items():
            self._add(name, counters.gained(time))
        for name, (group, _, first) in GROUPS.items():
            for reason, n in bounded(dict.fromkeys(first, 0) | counters.group(group)).items():
                self._add(name, n, reason)
        self._add("lookups", counters["hits"], "store")
        self._add("lookups", counters["live_hits"], "live")
        self._add("lookups", sum(counters.group("miss").values()), "none")
        for form in FORMS:
            self._add("captured_pages", counters[f"{form}s_captured"], form)
        for name, (histogram, _) in HISTOGRAMS.items():
            taken = counters.histogram(histogram)
            bounds = [*map(str, taken.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(taken.counts), strict=True))
            self._families[name].add_metric(self._labels, buckets, taken.total)

    def _sized(self, engine: Engine) -> None:
        is_up = engine.measure()
        used, stored, raw = engine.last_used()
        budget = engine.budget
        self._add("used_bytes", used.bytes, "location")
        self._add("used_bytes", engine.ram_bytes, "ram")
        self._add("budget_bytes", budget.max_bytes, "location")
        self._add("budget_bytes", engine.ram_budget, "ram")
        self._add("peak_bytes", engine.peak_bytes)
        self._add("pages", used.entries)
        if budget.max_entries is not None:
            self._add("budget_pages", budget.max_entries)
        self._add("stored_bytes", stored)
        self._add("state_bytes", raw)
        for form, n in zip(FORMS, engine.pending, strict=True):
            self._add("pending_pages", n, form)
        self._add("queued_bytes", engine.queued_bytes)
        self._add("queue_budget_bytes", engine.queue_bytes)
        self._add("location_up", is_up)
        self._add("late", engine.late)
