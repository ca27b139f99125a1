"""Prometheus metrics of a server's requests."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from prefixstore.counters import SECONDS_BUCKETS
from prefixstore.errors import InvalidParameterError
from prefixstore.metrics.stores import OTHER, import_prometheus

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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
# of sources and reasons
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
# each has the label endpoint, and some another one
COUNTERS: dict[str, tuple[str, ...]] = {
    "requests": ("Requests that queried the store, by the source of the reused prefix.", "source"),
    "request_misses": ("Requests for which the store had nothing, by reason.", "reason"),
    "requests_passed": ("Requests that did not query the store, by reason.", "reason"),
    "request_prompt_tokens": ("Tokens of the prompts.",),
    "request_live_tokens": ("Prompt tokens that the slot or context still held.",),
    "request_restored_tokens": ("Prompt tokens that were restored from the store.",),
    "request_computed_tokens": ("Prompt tokens that were computed.",),
    "request_saved_seconds": ("Time by which restoring was faster than computing the same tokens.",),
}
HISTOGRAMS = {
    "request_lookup_seconds": "Time to look up a prompt in the store.",
    "request_restore_seconds": "Time to restore pages for a request.",
}


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
        client, self._made = import_prometheus(), dict[str, Any]()
        try:
            for name, (text, *more) in COUNTERS.items():
                labels = ["endpoint", *more]
                self._made[name] = client.Counter(f"prefixstore_{name}_total", text, labels, registry=registry)
            for name, text in HISTOGRAMS.items():
                self._made[name] = client.Histogram(
                    f"prefixstore_{name}", text, ["endpoint"], registry=registry, buckets=SECONDS_BUCKETS
                )
        except ValueError as error:
            raise InvalidParameterError(
                "registry has such metrics already; use one RequestMetrics per registry"
            ) from error

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
            Why nothing came from the store: a plain name such as ``"not_found"``; others are counted as `OTHER`.
        prompt_tokens, live_tokens, restored_tokens, computed_tokens
            Tokens of the prompt: all, those that were live, those from the store, and those that were computed.
        lookup_seconds, restore_seconds
            How long it took; None if it was not done.
        saved_seconds
            Time that computing the restored tokens would have taken, less that of restoring them; below zero, it is
            counted as none.
        """
        where = _endpoint(endpoint)
        self._made["requests"].labels(where, _name(source)).inc()
        if reason:
            self._made["request_misses"].labels(where, _name(reason)).inc()
        for name, value in (
            ("prompt_tokens", prompt_tokens),
            ("live_tokens", live_tokens),
            ("restored_tokens", restored_tokens),
            ("computed_tokens", computed_tokens),
            ("saved_seconds", saved_seconds),
        ):
            self._made[f"request_{name}"].labels(where).inc(_at_least_zero(value))
        for name, seconds in (("lookup_seconds", lookup_seconds), ("restore_seconds", restore_seconds)):
            if seconds is not None:
                self._made[f"request_{name}"].labels(where).observe(_at_least_zero(seconds))

    def passed(self, endpoint: str, reason: str) -> None:
        """Count a request that was passed through without querying the store, for this reason."""
        self._made["requests_passed"].labels(_endpoint(endpoint), _name(reason)).inc()


def _endpoint(path: str) -> str:
    return path if path in ENDPOINTS else OTHER


def _name(value: str) -> str:
    """A source or a reason; what is no plain name, such as one with an id in it, would be a series of its own."""
    return value if NAME.fullmatch(value) else OTHER


def _at_least_zero(value: float | None) -> float:
    """A value that a counter accepts: it cannot fall, and what is not a number would stay for ever."""
    return value if value is not None and 0.0 <= value < math.inf else 0.0
