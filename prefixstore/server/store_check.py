"""The store of a server: whether it can be opened, what is done if not, and whether it has pages for the server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from prefixstore.backends.location import path_of, scheme_of, text_of
from prefixstore.config import explain_of_model
from prefixstore.errors import CorruptError, PrefixStoreError
from prefixstore.opening import Locations, locations_of
from prefixstore.server.slots import SlotStore
from prefixstore.store import PrefixStore

__all__ = ["ADVICE", "OnDamage", "check_store", "differences", "opened"]

log = logging.getLogger("prefixstore")

T = TypeVar("T")

# in a directory that may have files of others
LMDB_FILES = ("data.mdb", "lock.mdb", "checked")
SQLITE_FILES = ("", "-wal", "-shm", "-journal")
# what to do where `differences` finds some
ADVICE = "Start the server with the settings of the pages, or compute pages for its own: prefixstore warm --for-server."


class OnDamage(Enum):
    """What a server does if its store cannot be opened."""

    ASIDE = "aside"
    WITHOUT = "without"
    FAIL = "fail"


def opened(location: Locations, on_damage: OnDamage, open_it: Callable[[], T]) -> T:
    """What `open_it` returns, which raises as `PrefixStore` does; damaged files are moved aside before, if wanted."""
    try:
        return open_it()
    except CorruptError as error:
        place = _moved_aside(location) if on_damage is OnDamage.ASIDE else None
        if place is None:
            raise
        log.warning("the store cannot be used: %s; its files were moved to %s, and it begins empty", error, place)
    return open_it()


def _moved_aside(location: Locations) -> Path | None:
    """Move the files of a location, the nearer one of two, and return where they are; None if that cannot be done."""
    try:
        text = text_of(locations_of(location)[0])
        if scheme_of(text) not in ("lmdb", "sqlite"):
            return None
        path, aside = Path(path_of(text)), f"damaged-{time.strftime('%Y%m%d-%H%M%S')}"
        is_directory = path.is_dir()
        files = [path / name for name in LMDB_FILES] if is_directory else [Path(f"{path}{end}") for end in SQLITE_FILES]
        place = path / aside if is_directory else path.with_name(f"{path.name}.{aside}")
        place.mkdir()
        for file in files:
            if file.exists():
                file.rename(place / file.name)
    except (OSError, PrefixStoreError) as error:
        log.warning("the files of the store cannot be moved: %s", error)
        return None
    return place


def check_store(location: Locations, options: Mapping[str, Any]) -> None:
    """Open a store and close it again. Raises as `PrefixStore` does; an unreachable far location is not an error."""
    PrefixStore(location, **{"namespace": "server", **options}).close()


def differences(store: SlotStore) -> list[str]:
    """Why the server cannot use the pages of its model that are stored; empty if it can, or if there are none."""
    try:
        stored = store.engine.upkeep.namespaces()
        found = [explain_of_model(namespace, stored) for namespace in store.namespaces()]
        return min(found, key=len, default=[])
    except PrefixStoreError:
        return []  # a fault of the cache is told elsewhere
