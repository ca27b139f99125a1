"""The response to a scrape."""

from __future__ import annotations

import re
from types import ModuleType
from typing import TYPE_CHECKING

from prefixstore.errors import MissingExtraError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["OTHER", "import_prometheus", "new_registry", "render"]

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
