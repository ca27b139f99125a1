"""The server behind the proxy, and its store: opened when the server is ready, kept or reopened after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from prefixstore.backends.files import local_path
from prefixstore.backends.location import text_of
from prefixstore.errors import (
    ContextError,
    CorruptError,
    LocationError,
    PrefixStoreError,
    ServerError,
    ServerRefusedError,
    StorageError,
)
from prefixstore.metrics import StoreMetrics, new_registry
from prefixstore.models.boundaries import TokenKind, kinds_of_vocabulary
from prefixstore.opening import Locations, locations_of
from prefixstore.server.client import LlamaServer, Props
from prefixstore.server.identity import ServerIdentity
from prefixstore.server.rates import Rates, RequestUsage
from prefixstore.server.slot_manager import SlotManager
from prefixstore.server.slot_pool import Claim, SlotPool
from prefixstore.server.slot_store import SlotStore
from prefixstore.server.upstream import SERVER_URL, Headers, Upstream

if TYPE_CHECKING:
    from prefixstore.server.serving import ServeSettings

log = logging.getLogger("prefixstore.server")

T = TypeVar("T")

# Saves are deferred while a slot is busy, and large ones take long.
SERVER_SECONDS = 60.0
# how often a server is asked whether it has gone to sleep, and lost its slots
LOOK_SECONDS = 1.0
# between two attempts to open a store that could not be opened
REOPEN_SECONDS = 60.0
# in a directory that may have files of others
LMDB_FILES = ("data.mdb", "lock.mdb", "checked")
SQLITE_FILES = ("", "-wal", "-shm", "-journal")


class OnDamage(Enum):
    """What a server does if its store cannot be opened."""

    ASIDE = "aside"
    WITHOUT = "without"
    FAIL = "fail"


def why_without(error: Exception, on_damage: OnDamage) -> str:
    """Why a server starts without its store, which could not be opened.

    Raises
    ------
    PrefixStoreError
        If it does not start: `error` is one of usage, or `on_damage` says so.
    """
    if isinstance(error, StorageError) and on_damage is OnDamage.FAIL:
        raise LocationError(str(error)) from error
    if isinstance(error, PrefixStoreError) and not isinstance(error, (StorageError, ServerError)):
        raise error
    return str(error)


def opened(location: Locations, on_damage: OnDamage, open_it: Callable[[], T]) -> T:
    """What `open_it` returns, which raises as `PrefixStore` does; damaged files are moved aside before, if wanted."""
    try:
        return open_it()
    except CorruptError as error:
        place = _moved_aside(location) if on_damage is OnDamage.ASIDE else None
        if place is None:
            raise
        # the error says what to do with the files, which is done
        reason = str(error).partition(";")[0]
        log.warning("the store is damaged: %s; its files were moved to %s, and it begins empty", reason, place)
    return open_it()


def _moved_aside(location: Locations) -> Path | None:
    """Move the files of a location, the nearer one of two, and return where they are; None if that cannot be done."""
    try:
        text = text_of(locations_of(location)[0])
        if (path := local_path(text)) is None:
            return None
        aside = f"damaged-{time.strftime('%Y%m%d-%H%M%S')}"
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


class ServerSession:
    """The server and its store, and the slots of each of its starts.

    The server may be started again. `manager` has its slots; it is None until the server was ready for the first time.
    `store` is None if it could not be opened.

    Parameters
    ----------
    identify
        Makes the identity of the server from what it says about itself.
    key
        The proxy's own key of the server.

    Attributes
    ----------
    registry
        Where metrics are registered; it has those of the store that is open.
    when_ready
        Called each time `ready` has ended, and when a store was opened later.
    when_lost
        Called if the server has not answered a request.
    """

    def __init__(
        self,
        upstream: Upstream,
        settings: ServeSettings,
        slots_dir: Path,
        identify: Callable[[Props], ServerIdentity],
        key: str | None = None,
    ) -> None:
        self.upstream, self._settings = upstream, settings
        self._slots_dir, self._identify = slots_dir, identify
        self.credentials: Headers = {"authorization": f"Bearer {key}"} if key else {}
        self.server = LlamaServer(SERVER_URL, SERVER_SECONDS, key, socket=upstream.socket)
        # stands for an image in a prompt of the server
        self.marker: str | None = None
        self.rates = Rates()
        self.manager: SlotManager | None = None
        self.store: SlotStore | None = None
        self.is_ready = False
        self._reopening: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.registry = new_registry()
        self._metrics = StoreMetrics(self.registry)
        self.when_ready: Callable[[], None] = lambda: None
        self.when_lost: Callable[[], None] = lambda: None
        self._was_open = False
        # why the store could not be opened, as it was told last
        self.failure = ""
        self._last_opened = 0.0
        self._last_look = 0.0
        self._kinds: asyncio.Future[Callable[[int], TokenKind]] | None = None

    @property
    def reason(self) -> str | None:
        """Why the store is not used at present; None if it is."""
        if self.store is None:
            return "store_failed"
        return self.store.reason

    @property
    def is_never_stored(self) -> bool:
        """Whether nothing can be stored of this server. A store that could not be opened may be soon."""
        return self.store is not None and self.store.reason is not None

    @property
    def why(self) -> str:
        """That reason in words; empty if there is nothing to add."""
        return self.failure if self.store is None else self.store.why

    async def ready(self) -> None:
        """Called when the server is healthy, for the first time or again."""
        await self._meet()
        if self._reopening is not None:
            await asyncio.wait({self._reopening})
        if self.store is not None:
            try:
                await asyncio.to_thread(self.store.identity.check, self.server)
            except ServerRefusedError:
                log.warning("the model of the server was replaced: reopening the store")
                await self._close_store()
        if self.store is None:
            await self._open()
        else:
            self._use(self.store)
        self.is_ready = True
        self.when_ready()

    async def _meet(self) -> None:
        """Learn which slots the server has."""
        settings, before = self._settings, self.manager
        await self._is_asleep()
        slots = [(slot.id, slot.n_ctx) for slot in await asyncio.to_thread(self.server.slots)]
        if self.server.is_drafting and settings.separated:
            raise ServerError(
                "--salt-from cannot be used with a llama-server that drafts tokens: drafts keep something of the "
                "prompts of all, which shows in how fast others are answered; start it without --spec-type and -md"
            )
        pool = SlotPool(slots, self.rates, separated=settings.separated)
        if before is not None:
            # What is done to its slots may still reach this server. A client that reads nothing keeps one for a minute.
            await before.given_back()
            ending = asyncio.create_task(before.end())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            for slot in pool.slots:
                slot.doubt()
        self.manager = SlotManager(pool, self.server.erase, max_waiting=settings.max_waiting)
        self.manager.start()

    async def _open(self) -> None:
        """Open the store. A fault of it must not keep the server from answering, unless that is wanted at the start."""
        settings, self._last_opened = self._settings, asyncio.get_running_loop().time()
        identity: ServerIdentity | None = None
        try:
            identity = await asyncio.to_thread(lambda: self._identify(self.server.props()))
            open_it = partial(
                SlotStore, settings.location, self.server, self._slots_dir, identity, **settings.store_options
            )
            store = await asyncio.to_thread(opened, settings.location, settings.on_damage, open_it)
        except Exception as error:
            # a server that cannot show what its slots look like, since all are busy, say, is served all the same
            if isinstance(error, ServerError) and identity is None:
                raise
            why = str(error) if self._was_open else why_without(error, settings.on_damage)
            if self.failure != why:
                log.warning("the store cannot be used: %s", why)
            self.failure = why
            return
        self.store, self._was_open, self.failure = store, True, ""
        self._metrics.add(store.engine)
        self._use(store)

    def _use(self, store: SlotStore) -> None:
        """Give the requests of the server this store."""
        assert self.manager is not None, "it was met"
        self.manager.use(store if store.reason is None else None)
        if not store.can_cut:
            # a large vocabulary takes a second
            self._kinds = asyncio.ensure_future(asyncio.to_thread(_kinds_of, store.identity))

    async def _open_again(self) -> None:
        """Open the store that could not be opened before: its location may be there by now. If it is, say so."""
        try:
            await self._open()
            if self.store is not None:
                self.when_ready()
        except PrefixStoreError as error:
            log.warning("the store cannot be used: %s", error)

    async def _is_asleep(self) -> bool:
        """Ask the server about itself; whether it has unloaded its model, so that its slots are empty."""
        props = await asyncio.to_thread(self.server.props)
        self.marker = props.raw.get("media_marker")
        return props.is_sleeping

    async def kinds(self) -> Callable[[int], TokenKind]:
        """What each token of the model does in a prompt; all are text if its file cannot be read."""
        return await asyncio.shield(self._kinds) if self._kinds is not None else _any_kind

    def down(self) -> None:
        """Called when the server has ended, and the contents of its slots are lost."""
        self.is_ready = False
        if self.manager is not None:
            self.manager.close()

    async def _close_store(self) -> None:
        """Close the store: it is opened again for the server that answers next, if there is one."""
        store, self.store = self.store, None
        self._metrics.remove()
        if self.manager is not None:
            self.manager.use(None)
        if store is not None:
            try:
                await asyncio.to_thread(store.close)
            except PrefixStoreError as error:
                log.warning("not all pages were stored: %s", error)

    def lost(self) -> None:
        """A request was not answered: the server may have ended, or closed the connection, as if it refuses one."""
        self._last_look = 0.0
        if self.is_ready:
            self.when_lost()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def look(self) -> bool:
        """Ask the server whether it has unloaded its model, so that its slots are empty; whether it can be used now."""
        now = asyncio.get_running_loop().time()
        # one that computes does not sleep
        is_at_work = self.manager is not None and self.manager.pool.n_busy > 0
        if not is_at_work and now >= self._last_look + LOOK_SECONDS:
            self._last_look = now
            with suppress(ServerError):
                if await self._is_asleep() and self.manager is not None:
                    self.manager.forget()
        is_missing = self.store is None and self.is_ready and (self._reopening is None or self._reopening.done())
        if is_missing and now >= self._last_opened + REOPEN_SECONDS:
            self._reopening = asyncio.create_task(self._open_again())
        return self.is_ready

    def computed(self, usage: RequestUsage) -> None:
        """Note how fast the server has computed."""
        if usage.computed_seconds is not None:
            self.rates.computed(usage.computed_tokens, usage.computed_seconds)
            if self.store is not None:
                self.store.rate.computed(usage.computed_tokens, usage.computed_seconds)

    def note(self, usage: RequestUsage, claim: Claim, reason: str | None) -> None:
        """Note what became of a prompt, and count the lookup if it was one."""
        if self.store is None:
            return
        counters, found = self.store.counters, self.store.namespace(claim.owner)
        namespace = found.key if found is not None else None
        counters.count("tokens_computed", usage.computed_tokens, namespace=namespace)
        if claim.asks:
            counters.count("prompt_tokens", usage.cached_tokens + usage.computed_tokens, namespace=namespace)
            # the store has counted what became of a restore
            if claim.restored_seconds is None or claim.reason == "error":
                counters.count("live_hits" if reason is None else f"miss:{reason}", namespace=namespace)
            if self.manager is not None:
                self.manager.note_use(claim)

    async def close(self) -> None:
        """Store what the slots hold, and close the store."""
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait({self._reopening})
        try:
            if self.manager is not None:
                await self.manager.end(saves=self.is_ready and self.reason is None)
            await asyncio.gather(*self._ending)
        finally:
            await self._close_store()


def _kinds_of(identity: ServerIdentity) -> Callable[[int], TokenKind]:
    try:
        return kinds_of_vocabulary(next(iter(identity.files)))
    except ContextError as error:
        log.warning("where messages and documents end in a prompt is not known: %s", error)
        return _any_kind


def _any_kind(_: int) -> TokenKind:
    return TokenKind()
