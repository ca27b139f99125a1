"""Metrics for Prometheus: of stores, and of the requests of a server.

They need ``prometheus_client``, which the extra "server" installs. No label holds a prompt, a token, a key, or a path
that a client has chosen: each label has a bounded number of values.
"""

from prefixstore.metrics.requests import ENDPOINTS, RequestMetrics
from prefixstore.metrics.stores import StoreMetrics, new_registry, render, store_text

__all__ = [
    "ENDPOINTS",
    "RequestMetrics",
    "StoreMetrics",
    "new_registry",
    "render",
    "store_text",
]
