"""Opens the engine of a location, or of two, one in front of the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from prefixstore.backends.keys import Key
from prefixstore.backends.lazy import LazyBackend
from prefixstore.backends.location import text_of, without_password
from prefixstore.engine.engine import Engine
from prefixstore.engine.far import FarEngine
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.engine.tiers import TieredEngine
from prefixstore.errors import InvalidParameterError, UnavailableError
from prefixstore.parameters import Parameters
from prefixstore.stats import Counters

__all__ = ["Location", "Locations", "locations_of", "open_engine"]

log = logging.getLogger("prefixstore")

Location: TypeAlias = "str | os.PathLike[str] | None"
Locations: TypeAlias = "Location | Sequence[str | os.PathLike[str]]"

# a location in front of another one
MOST = 2


def locations_of(given: Locations) -> list[Location]:
    """One location, or two, the nearer one first.

    Raises
    ------
    InvalidParameterError
        If there are none or more, or one of them twice.
    """
    if given is None or isinstance(given, (str, os.PathLike)):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        raise InvalidParameterError(f"location must be a path, a URL or a list of two, not {type(given).__name__}")
    if not 1 <= len(given) <= MOST:
        raise InvalidParameterError(
            f"a list of {len(given)} locations cannot be used; pass one, or a local one and a far one: "
            '["lmdb:///var/cache/kv", "s3://bucket/kv"]'
        )
    texts = [text_of(each) for each in given]
    if len(set(texts)) < len(texts) and texts[0] != "memory:":
        raise InvalidParameterError(f"{without_password(texts[0])} cannot be in front of itself")
    return list(given)


def open_engine(location: Locations, parameters: Parameters) -> Engine:
    """Open a location, or two; see `PrefixStore`.

    A far location that cannot be reached is opened later. Anything else that is wrong with it is raised.
    """
    nearest, *further = locations_of(location)
    near_key, far_key = parameters.keys
    size, counters = parameters.budget.max_bytes, Counters()
    near = open_pages(nearest, max_bytes=size, read_only=parameters.read_only, key=near_key, count=counters.count)
    arguments = near, parameters.budget, parameters.policy, parameters.encoder, counters
    options: dict[str, Any] = {
        "ttl": parameters.ttl,
        "priority": parameters.priority,
        "ram_bytes": parameters.ram_bytes,
        "queue_bytes": parameters.queue_bytes,
        "write_behind": parameters.write_behind,
        "read_only": parameters.read_only,
    }
    if not further:
        return Engine(*arguments, **options)
    # the pages that wait for the far location are in buffers of the nearer one
    options["queue_bytes"] *= 2
    make_far = partial(_open_far, further[0], far_key, parameters, near.location)
    return TieredEngine(*arguments, make_far=make_far, max_delay=parameters.max_delay, **options)


def _open_far(
    location: Location, key: Key | None, parameters: Parameters, near: str, nearer: TieredEngine
) -> FarEngine:
    size, counters = parameters.far_budget.max_bytes, Counters()
    open_it = partial(
        open_pages, location, max_bytes=size, read_only=parameters.read_only, key=key, count=counters.count
    )
    try:
        backend = open_it()
    except UnavailableError as error:
        log.warning("the far location is tried again later: %s", error)
        backend = Pages(LazyBackend(without_password(text_of(location)), lambda: open_it().rows))
    if backend.location == near != "memory:":
        # written in two ways
        backend.close()
        raise InvalidParameterError(f"{near} cannot be in front of itself")
    return FarEngine(
        backend,
        parameters.far_budget,
        parameters.far_policy,
        parameters.far_encoder,
        counters,
        nearer=nearer,
        ttl=parameters.ttl,
        priority=parameters.priority,
        queue_bytes=parameters.queue_bytes,
        read_only=parameters.read_only,
    )
