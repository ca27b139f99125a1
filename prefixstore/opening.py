"""Opens one location, or a near and a far one; `OpenLocation` is what a store is without a ``Llama``."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from prefixstore.backends.encryption_keys import Key
from prefixstore.backends.files import place_of
from prefixstore.backends.location import text_of, without_password
from prefixstore.backends.threads import close_soon
from prefixstore.counters import Counters, Kind
from prefixstore.engine.budget import Evicted
from prefixstore.engine.engine import Engine
from prefixstore.engine.invariants import Violation
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.engine.tiers import FarEngine, TieredEngine
from prefixstore.errors import ClosedError, InvalidParameterError, MisuseError, StorageError, UnavailableError
from prefixstore.format.figures import History
from prefixstore.parameters import Parameters
from prefixstore.results import Stats
from prefixstore.units import parse_target

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("prefixstore")

Location: TypeAlias = "str | os.PathLike[str] | None"
Locations: TypeAlias = "Location | Sequence[str | os.PathLike[str]]"

# how many locations a store may have
MOST = 2

# fields of `Stats`: counters of the same name, counters by reason with their group, and times
COUNTS = (
    *("hits", "live_hits", "prompt_tokens", "tokens_restored", "tokens_computed", "pages_captured"),
    *("snapshots_captured", "evictions", "expired", "corrupt", "packed", "outages", "allocations", "frees"),
)
GROUPS = {"misses": "miss", "unreadable": "unreadable", "dropped": "dropped", "outdated": "outdated"}
TIMES = ("restore", "capture", "lost")


def locations_of(given: Locations) -> list[Location]:
    """One location, or two, the nearer one first.

    Raises `InvalidParameterError` if there are none or more, or one of them twice.
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
    places = [place_of(text_of(each)) for each in given]
    if len(set(places)) < len(places) and places[0] != "memory:":
        raise InvalidParameterError(f"{without_password(places[0])} cannot be in front of itself")
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
        "queue_bytes": parameters.queue_bytes,
        "write_behind": parameters.write_behind,
        "read_only": parameters.read_only,
    }
    if not further:
        return Engine(*arguments, **options)
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
        backend = Pages(None, without_password(text_of(location)), open_it)
    if backend.location == near != "memory:":
        # one location, whose URL was written in two ways
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


class OpenLocation:
    """A location that is open: what can be done with it, whichever ``Llama`` uses it, or none.

    Parameters
    ----------
    engine
        It is closed at the latest when the store is garbage-collected, or at the end of the process.
    capacity
        The bytes that 100 % stands for; None if it was not said what the location may hold.

    Attributes
    ----------
    location
        Its URL.
    """

    def __init__(self, engine: Engine, capacity: int | None) -> None:
        self._engine, self._capacity = engine, capacity
        self.location = engine.location
        self._finalizer = weakref.finalize(self, _finalize, weakref.ref(self), engine)

    def __reduce__(self) -> NoReturn:
        # also what `copy` calls
        raise MisuseError(
            f"a store cannot be pickled or copied: it holds threads and an open location; pass the location on, and "
            f"open it there: PrefixStore({self.location!r})"
        )

    def close(self) -> None:
        """Write queued pages, make them durable, and release the location. A second call does nothing.

        Raises
        ------
        StorageError
            If something cannot be written, or made durable. The store is closed all the same.
        MisuseError
            If the calling thread is in the block of a view or of a restore. The store stays open.
        """
        # an interrupt ends the wait only: another call, or the end of the process, waits for the rest
        try:
            self._engine.close()
        except StorageError:
            self._finalizer.detach()
            raise
        self._finalizer.detach()

    def __enter__(self) -> Self:
        self._alive()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _alive(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("the store is closed; open a new PrefixStore")

    @property
    def kind(self) -> Kind:
        """What is stored; unbound without a ``Llama``."""
        return Kind.UNBOUND

    @property
    def engine(self) -> Engine:
        """The engine, for jobs that iterate over pages."""
        self._alive()
        return self._engine

    @property
    def read_only(self) -> bool:
        """Whether the store never writes."""
        return self._engine.read_only

    def flush(self) -> None:
        """Return when everything captured so far is durable.

        Raises
        ------
        StorageError
            If the location fails, or writes nothing for half a minute.
        """
        self._alive()
        self._engine.flush()

    def drain(self) -> None:
        """Wait until captured pages are written; they may not be durable yet (see `flush`).

        Raises
        ------
        UnavailableError
            If nothing can be written to the location for half a minute.
        """
        self._alive()
        self._engine.drain()

    def check(self) -> list[Violation]:
        """Verify every invariant and every checksum of the location; the violations found."""
        self._alive()
        self._engine.drain()
        return self._engine.upkeep.check()

    def evict(self, to: float | str, *, dry_run: bool = False) -> Evicted:
        """Evict pages until the location holds no more than `to`, in the order of the store's policy.

        Only leaves are evicted, as always: pages on which no other page depends. Pinned pages and their ancestors stay,
        and so do pages that are being written, or that another process has used meanwhile. Queued pages are written
        first.

        Parameters
        ----------
        to
            A share of `max_bytes` (a float from 0.0 to 1.0, or ``"80%"``), or a size (an int, or ``"5GiB"``).
        dry_run
            Only report what would be evicted. The eviction runs in one transaction that is rolled back;
            other writers wait meanwhile.

        Returns
        -------
        Evicted
            The ``pages`` and ``bytes``, the ``policy`` that chose them, and what is left.

        Raises
        ------
        InvalidParameterError
            If `to` is not valid.
        MisuseError
            If the store is open with ``read_only=True``.
        StorageError
            If the location fails. Pages evicted until then stay evicted.
        """
        self._alive()
        self._writable("evict")
        target = parse_target(to, self._capacity, "to")
        self._engine.drain()
        return self._engine.evictor.evict(target, dry_run=dry_run)

    def _writable(self, name: str) -> None:
        if self.read_only:
            raise MisuseError(f"{name}() writes, and the store is open with read_only=True")

    def stats(self) -> Stats:
        """What the store has done since it was opened, and what its location holds now."""
        self._alive()
        engine, count = self._engine, self._engine.counters
        try:
            used, stored, raw = engine.upkeep.used()
        except StorageError:
            # the counters are needed most when the location fails
            used, stored, raw = engine.upkeep.last_used()
        pending_pages, pending_snapshots = engine.write_queue.pending
        counted: dict[str, Any] = {name: count[name] for name in COUNTS}
        counted |= {name: count.group(group) for name, group in GROUPS.items()}
        counted |= {f"{name}_seconds": count.seconds(name) for name in TIMES}
        return Stats(
            **counted,
            seconds_saved=count.seconds("saved"),
            entries=used.entries,
            bytes_used=used.bytes,
            bytes_stored=stored,
            bytes_raw=raw,
            queued_bytes=engine.queued_bytes,
            pending_pages=pending_pages,
            pending_snapshots=pending_snapshots,
            capacity_bytes=engine.budget.max_bytes,
            capacity_entries=engine.budget.max_entries,
            peak_bytes=engine.evictor.peak_bytes,
            kind=self.kind,
            sessions=engine.session_counts(),
            late=engine.late,
            tiers=engine.tiers(),
        )

    def history(self) -> History:
        """How the location was used on each of the last 31 days, by all its processes, in each namespace.

        Prompts of warming jobs do not count. Figures that this process has not written yet are included.

        Raises
        ------
        StorageError
            If the location fails.

        Examples
        --------
        >>> history = store.history()  # doctest: +SKIP
        >>> history.total(1).hit_rate, history.total().seconds_saved  # of today, of all days  # doctest: +SKIP
        """
        self._alive()
        return self._engine.history()

    def metrics(self) -> str:
        """What `stats` says, with histograms, as a text for Prometheus: see docs/metrics.md.

        While the location fails, the sizes are the last known ones.

        Raises
        ------
        MissingExtraError
            If prometheus_client is not installed.
        """
        self._alive()
        from prefixstore.metrics import store_text  # noqa: PLC0415 - the extra "server"

        return store_text(self._engine)

    @property
    def capacity_bytes(self) -> int:
        """The budget, in bytes."""
        return self._engine.budget.max_bytes

    @property
    def cache_size(self) -> int:
        """What the location holds, in bytes, index included."""
        self._alive()
        return self._engine.upkeep.used()[0].bytes

    def __len__(self) -> int:
        """How many pages the location holds."""
        self._alive()
        return self._engine.upkeep.used()[0].entries

    def __bool__(self) -> bool:
        # llama-cpp-python asks `if self.cache:` and means `is not None`; an empty store is no missing one
        return True


def _finalize(store: weakref.ref[OpenLocation], engine: Engine) -> None:
    """Close the engine of a store: at once at the end of the process; in a thread if the store is being collected."""
    if store() is not None:
        engine.close()
    else:
        close_soon(engine)
