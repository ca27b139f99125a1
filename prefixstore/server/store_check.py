"""Checks the store of a server: whether it can be opened, and whether it has pages for the settings of the server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from prefixstore.config import explain_of_model
from prefixstore.errors import PrefixStoreError
from prefixstore.opening import Locations
from prefixstore.server.slots import SlotStore
from prefixstore.store import PrefixStore

__all__ = ["ADVICE", "check_store", "differences"]

FAR = "the far location"
# what to do where `differences` finds some
ADVICE = "Start the server with the settings of the pages, or compute pages for its own: prefixstore warm --for-server."


def check_store(location: Locations, options: Mapping[str, Any]) -> None:
    """Open a store and close it again. Raises as `PrefixStore` does.

    An unreachable far location is not an error. It is not logged here: opening the store for the server logs it.
    """
    log = logging.getLogger("prefixstore")
    log.addFilter(_is_not_of_far)
    try:
        PrefixStore(location, **{"namespace": "server", **options}).close()
    finally:
        log.removeFilter(_is_not_of_far)


def differences(store: SlotStore) -> list[str]:
    """Why the server cannot use the pages of its model that are stored; empty if it can, or if there are none."""
    try:
        stored = store.engine.namespaces()
        found = [explain_of_model(namespace, stored) for namespace in store.namespaces()]
        return min(found, key=len, default=[])
    except PrefixStoreError:
        return []  # a fault of the cache is told elsewhere


def _is_not_of_far(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(FAR)
