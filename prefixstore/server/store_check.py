"""Checks that the store of a server can be opened, before the server starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from prefixstore.opening import Locations
from prefixstore.store import PrefixStore

__all__ = ["check_store"]

FAR = "the far location"


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


def _is_not_of_far(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(FAR)
