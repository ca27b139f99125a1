"""Prometheus metrics of a server's requests."""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING

from prefixstore.errors import InvalidParameterError
from prefixstore.metrics.exposition import import_prometheus
from prefixstore.metrics.labels import OTHER, Reasons
from prefixstore.stats import SECONDS_BUCKETS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

__all__ = ["ENDPOINTS", "RequestMetrics"]

# a client chooses the path of its request: what is not here is counted as `OTHER`
ENDPOINTS = frozenset(
    {
        "/chat/completions",
        "/completion",
        "/completions",
        "/embeddings",
        "/infill",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
    }
)
SOURCES = ("none", "live", "store")


class RequestMetrics:
    """Counts the requests of a server. May be used from many threads.

    A server that forks workers makes one in each worker, after the fork.

    Parameters
    ----------
    registry
        Where the metrics are registered. A registry takes one `RequestMetrics`.

    Raises
    ------
    MissingExtraError
        If prometheus_client is not installed.
    InvalidParameterError
        If the registry has one already.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reasons = Reasons()
        try:
            self._register(import_prometheus(), registry)
        except ValueError as error:
            raise InvalidParameterError(
                "registry has such metrics already; use one RequestMetrics per registry"
            ) from error

    def _register(self, prometheus: ModuleType, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            made: Counter = prometheus.Counter(f"prefixstore_{name}", text, labels, registry=registry)
            return made

        def histogram(name: str, text: str) -> Histogram:
            labels, buckets = ("endpoint",), SECONDS_BUCKETS
            made: Histogram = prometheus.Histogram(
                f"prefixstore_{name}", text, labels, registry=registry, buckets=buckets
            )
            return made

        self._requests = counter(
            "requests_total",
            "Requests that queried the store, by the source of the reused prefix.",
            "endpoint",
            "source",
        )
        self._misses = counter(
            "request_misses_total", "Requests for which the store had nothing, by reason.", "endpoint", "reason"
        )
        self._passed = counter(
            "requests_passed_total", "Requests that did not query the store, by reason.", "endpoint", "reason"
        )
        self._prompt = counter("request_prompt_tokens_total", "Tokens of the prompts.", "endpoint")
        self._live = counter(
            "request_live_tokens_total", "Prompt tokens that the slot or context still held.", "endpoint"
        )
        self._restored = counter(
            "request_restored_tokens_total", "Prompt tokens that were restored from the store.", "endpoint"
        )
        self._computed = counter("request_computed_tokens_total", "Prompt tokens that were computed.", "endpoint")
        self._saved = counter(
            "request_saved_seconds_total",
            "Time by which restoring was faster than computing the same tokens.",
            "endpoint",
        )
        self._lookup = histogram("request_lookup_seconds", "Time to look up a prompt in the store.")
        self._restore = histogram("request_restore_seconds", "Time to restore pages for a request.")

    def observe(
        self,
        endpoint: str,
        source: str = "none",
        reason: str | None = None,
        prompt_tokens: float | None = 0,
        live_tokens: float | None = 0,
        restored_tokens: float | None = 0,
        computed_tokens: float | None = 0,
        lookup_seconds: float | None = None,
        restore_seconds: float | None = None,
        saved_seconds: float | None = 0.0,
    ) -> None:
        """Count a request that queried the store. Never raises because of a value.

        Parameters
        ----------
        endpoint
            Path of the request; one that is not in `ENDPOINTS` is counted as `OTHER`.
        source
            Where the beginning of the prompt came from: ``"store"``, ``"live"`` (the slot or context still held it) or
            ``"none"``.
        reason
            Why nothing came from the store: a plain name such as ``"not_found"``.
        prompt_tokens, live_tokens, restored_tokens, computed_tokens
            Tokens of the prompt: all, those that were live, those from the store, and those that were computed.
        lookup_seconds, restore_seconds
            How long it took; None if it was not done.
        saved_seconds
            Time that computing the restored tokens would have taken, less that of restoring them; below zero, it is
            counted as none.
        """
        where = self._endpoint(endpoint)
        self._requests.labels(where, source if source in SOURCES else OTHER).inc()
        if reason:
            self._misses.labels(where, self._reasons.label(reason)).inc()
        for counter, value in (
            (self._prompt, prompt_tokens),
            (self._live, live_tokens),
            (self._restored, restored_tokens),
            (self._computed, computed_tokens),
            (self._saved, saved_seconds),
        ):
            counter.labels(where).inc(_at_least_zero(value))
        for histogram, seconds in ((self._lookup, lookup_seconds), (self._restore, restore_seconds)):
            if seconds is not None:
                histogram.labels(where).observe(_at_least_zero(seconds))

    def passed(self, endpoint: str, reason: str) -> None:
        """Count a request that was passed through without querying the store, for this reason."""
        self._passed.labels(self._endpoint(endpoint), self._reasons.label(reason)).inc()

    def _endpoint(self, path: str) -> str:
        return path if path in ENDPOINTS else OTHER


def _at_least_zero(value: float | None) -> float:
    """A value that a counter accepts: it cannot fall, and what is not a number would stay for ever."""
    return value if value is not None and 0.0 <= value < math.inf else 0.0
