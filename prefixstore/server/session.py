"""The server behind the proxy, and its store: opened when the server is ready, kept or reopened after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prefixstore.errors import (
    ContextError,
    PrefixStoreError,
    ServerError,
    ServerRefusedError,
    StorageError,
)
from prefixstore.models.boundaries import TokenKind, kinds_of_vocabulary
from prefixstore.server.client import LlamaServer, Props, props_of
from prefixstore.server.namespace import ServerIdentity
from prefixstore.server.rates import Rates, Usage
from prefixstore.server.slot_manager import SlotManager
from prefixstore.server.slot_pool import SlotPool
from prefixstore.server.slot_record import Claim
from prefixstore.server.slots import SlotStore
from prefixstore.server.store_check import OnDamage, opened
from prefixstore.server.tokenizer import Tokenizer
from prefixstore.server.upstream import Headers, Upstream, UpstreamError, UpstreamLostError

if TYPE_CHECKING:
    from prefixstore.server.serving import ServeSettings

__all__ = ["ServerSession"]

log = logging.getLogger("prefixstore.server")

# Saves are deferred while a slot is busy, and large ones take long.
SERVER_SECONDS = 60.0
STOP_SECONDS = 60.0
# a server may have gone to sleep, and lost its slots, when it had nothing to do for this long
MAY_SLEEP_AFTER = 1.0
# how often a server whose process is not known is asked whether it is the same
LOOK_SECONDS = 1.0
# how long a request waits for another server to be known
READY_SECONDS = 10.0
# between two attempts to open a store that could not be opened
REOPEN_SECONDS = 60.0
# between two questions whether a server that does not answer does so now
PAUSE = 0.5


class ServerSession:
    """The state of the server and its store, from one `ready` to the next.

    Parameters
    ----------
    upstream
        The server. If it listens on a Unix socket, it is our child.
    settings
        Those of the proxy.
    slots_dir
        The directory in which the server saves slots.
    identify
        Makes the identity of the server from what it says about itself.
    key
        The key with which slots are saved and restored.

    Attributes
    ----------
    manager
        Its slots; None until it was ready for the first time.
    store
        The store; None if it could not be opened.
    when_store
        Called with the store when it was opened, and with None when it is closed to be opened again.
    when_ready
        Called each time `ready` has ended.
    when_lost
        Called if the server, our child, has not answered a request.
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
        self._headers: Headers = {"authorization": f"Bearer {key}"} if key else {}
        self.is_child = upstream.socket is not None
        self.server = LlamaServer(upstream.url, SERVER_SECONDS, key, socket=upstream.socket)
        self.tokenizer = Tokenizer(upstream)
        self.rates = Rates()
        self.manager: SlotManager | None = None
        self.store: SlotStore | None = None
        self._is_up, self._is_lost = asyncio.Event(), asyncio.Event()
        self._reopening: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[bool] | None = None
        self._props: Props | None = None
        self.when_store: Callable[[SlotStore | None], None] = lambda _: None
        self.when_ready: Callable[[], None] = lambda: None
        self.when_lost: Callable[[], None] = lambda: None
        self._was_open = False
        self._failure = ""
        self._last_opened = 0.0
        self._saving: asyncio.Task[None] | None = None
        self._last_use = self._last_look = 0.0
        self._kinds: asyncio.Future[Callable[[int], TokenKind]] | None = None

    @property
    def reason(self) -> str | None:
        """Why the store is not used at present; None if it is."""
        if self.store is None:
            return "store_failed"
        return self.store.reason

    @property
    def why(self) -> str:
        """That reason in words; empty if there is nothing to add."""
        return self._failure if self.store is None else self.store.why

    @property
    def is_ready(self) -> bool:
        """Whether requests can be passed on."""
        return self._is_up.is_set()

    async def ready(self) -> None:
        """Called when the server is healthy, for the first time or again."""
        await self._meet()
        if self._reopening is not None:
            await asyncio.wait({self._reopening})
        if self.store is not None and not await asyncio.to_thread(self._is_of_this_server, self.store):
            log.warning("the model of the server was replaced: reopening the store")
            await self._close_store()
        if self.store is None:
            await self._open()
        else:
            self._use(self.store)
        self._is_up.set()
        self.when_ready()

    async def _meet(self) -> None:
        """Learn which slots the server has: another one than before may answer."""
        self._props, slots = await self._ask_props(), await self._slots()
        if self.manager is not None:
            if self.manager.pool.replaced(slots, are_empty=self.is_child):
                log.warning("the server has %d slots of %d tokens now", len(slots), slots[0][1])
            return
        settings = self._settings
        pool = SlotPool(slots, self.rates, max_waiting=settings.max_waiting, separated=settings.separated)
        # what is in the slots of a server that runs already may have been moved there from other positions
        pool.restarted(are_empty=self.is_child)
        self.manager = SlotManager(pool, None, self.server.erase)
        self._saving = asyncio.create_task(self.manager.save_when_idle())

    async def _open(self) -> None:
        """Open the store. A fault of it must not keep the server from answering, unless that is wanted at the start."""
        settings, self._last_opened = self._settings, asyncio.get_running_loop().time()
        identity: ServerIdentity | None = None
        try:
            identity = await asyncio.to_thread(lambda: self._identify(self.server.props()))
            open_it = partial(self._open_store, identity)
            store = await asyncio.to_thread(opened, settings.location, settings.on_damage, open_it)
        except Exception as error:
            # a server that cannot show what its slots look like, since all are busy, say, is served all the same
            is_refused = isinstance(error, ServerError) and identity is None
            is_wrong = isinstance(error, PrefixStoreError) and not isinstance(error, (StorageError, ServerError))
            is_wrong |= isinstance(error, StorageError) and settings.on_damage is OnDamage.FAIL
            if is_refused or (is_wrong and not self._was_open):
                raise
            if self._failure != str(error):
                log.warning("the store cannot be used: %s", error)
            self._failure = str(error)
            return
        self.store, self._was_open, self._failure = store, True, ""
        self.when_store(store)
        self._use(store)

    def _use(self, store: SlotStore) -> None:
        """Give the requests of the server this store."""
        assert self.manager is not None, "it was met"
        self.manager.pool.can_cut = store.can_cut
        self.manager.use(store if store.reason is None else None)
        if not store.can_cut:
            # a large vocabulary takes a second
            self._kinds = asyncio.ensure_future(asyncio.to_thread(_kinds_of, store.identity))

    async def _open_again(self) -> None:
        """Open the store that could not be opened before: its location may be there by now."""
        try:
            await self._open()
        except PrefixStoreError as error:
            log.warning("the store cannot be used: %s", error)
        finally:
            self._reopening = None

    def _is_of_this_server(self, store: SlotStore) -> bool:
        try:
            store.identity.check(self.server)
        except ServerRefusedError:
            return False
        return True

    def _open_store(self, identity: ServerIdentity) -> SlotStore:
        settings = self._settings
        return SlotStore(settings.location, self.server, self._slots_dir, identity, **settings.store_options)

    async def _slots(self) -> list[tuple[int, int]]:
        slots = await asyncio.to_thread(self.server.slots)
        if self.server.is_drafting and self._settings.separated:
            raise ServerError(
                "--salt-from cannot be used with a llama-server that drafts tokens: drafts keep something of the "
                "prompts of all, which shows in how fast others are answered; start it without --spec-type and -md"
            )
        return [(slot.id, slot.n_ctx) for slot in slots]

    async def _ask_props(self) -> Props | None:
        """What the server says about itself; None if it refuses to, as while it loads a model.

        Raises `UpstreamError`, `ServerError`, or `ValueError`.
        """
        reply = await self.upstream.ask("/props", self._headers)
        if not reply.is_ok:
            return None
        props = props_of(reply.json())
        self.tokenizer.marker = props.raw.get("media_marker")
        return props

    async def kinds(self) -> Callable[[int], TokenKind]:
        """What each token of the model does in a prompt; all are text if its file cannot be read."""
        return await asyncio.shield(self._kinds) if self._kinds is not None else _any_kind

    def is_certainly_alive(self) -> bool:
        """Whether the process of the server is the same as before, as far as that is known."""
        return self.store is not None and self.store.identity.is_running()

    def down(self) -> None:
        """Called when the server has ended, and the contents of its slots are lost."""
        self._is_up.clear()
        self.tokenizer.forget()
        if self.manager is not None:
            # of one that is not our child it is not even certain that it has ended
            self.manager.pool.restarted(are_empty=self.is_child)

    async def _close_store(self) -> None:
        """Close the store: it is opened again for the server that answers next, if there is one."""
        store, self.store = self.store, None
        self.when_store(None)
        if self.manager is not None:
            self.manager.use(None)
        if store is not None:
            try:
                await asyncio.to_thread(store.close)
            except PrefixStoreError as error:
                log.warning("not all pages were stored: %s", error)

    # -- a server that is no child of ours -----------------------------------------------------------------------------

    async def watch(self) -> None:
        """Keep up with a server that somebody else starts and stops, until cancelled.

        Raises
        ------
        PrefixStoreError
            If the server or the store cannot be used.
        """
        said = ""
        while True:
            try:
                problem = "it does not answer"
                if await self.upstream.is_healthy():
                    await self.ready()
                    said = ""
                    await self._is_lost.wait()
                    self._is_lost.clear()
                    await self._close_store()
                    continue
            except (ServerError, UpstreamError, ValueError, LookupError, TypeError) as error:
                problem = str(error)
            if problem != said:
                log.warning("waiting for %s: %s", self.upstream.url, problem)
                said = problem
            await asyncio.sleep(PAUSE)

    def lost(self) -> None:
        """A connection has failed: the server may have ended. If a child has, `Child` notices.

        Or it has closed the connection, as it does with some requests that it refuses.
        """
        self._last_look = 0.0
        if not self.is_ready:
            return
        if self.is_child:
            self.when_lost()
        elif self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.look())

    # -- requests ------------------------------------------------------------------------------------------------------

    async def look(self) -> bool:
        """Check for changes of the server since the last request; returns whether it can be used now.

        It may have unloaded its model, and its slots are empty then. Or an operator has started another one at the same
        place, with other slots, another model: then this waits until that is known.
        """
        now = asyncio.get_running_loop().time()
        idle, self._last_use = now - self._last_use, now
        manager, store = self.manager, self.store
        has_process = store is not None and store.identity.process is not None
        is_other = has_process and not self.is_certainly_alive()
        may_be_other = not has_process and not self.is_child and now >= self._last_look + LOOK_SECONDS
        if not is_other and (idle >= MAY_SLEEP_AFTER or may_be_other):
            self._last_look = now
            try:
                props = await self._ask_props()
            except UpstreamLostError:
                if self.is_certainly_alive() or await self.upstream.is_healthy():
                    return True
                props = None
            except (UpstreamError, ServerError, ValueError):
                return True  # what comes next says so
            if props is not None and props.is_sleeping and manager is not None:
                manager.pool.restarted()
            is_other = props != self._props
        if is_other and self.is_ready and not self.is_child:
            log.warning("none or a different server answers at %s now", self.upstream.url)
            self.down()
            self._is_lost.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_up.wait(), READY_SECONDS)
        is_missing = self.store is None and self.is_ready and self._reopening is None
        if is_missing and now >= self._last_opened + REOPEN_SECONDS:
            self._reopening = asyncio.create_task(self._open_again())
        return self.is_ready

    def computed(self, usage: Usage) -> None:
        """Note how fast the server has computed."""
        if usage.computed_seconds is not None:
            self.rates.computed(usage.computed_tokens, usage.computed_seconds)
            if self.store is not None:
                self.store.rate.computed(usage.computed_tokens, usage.computed_seconds)

    def note(self, usage: Usage | None, claim: Claim, *, is_counted: bool) -> None:
        """Note what the server has done for a prompt, and count the lookup if it was one (`is_counted`)."""
        if usage is not None and self.store is not None:
            counters, found = self.store.counters, self.store.namespace(claim.owner)
            namespace = found.key if found is not None else None
            counters.count("tokens_computed", usage.computed_tokens, namespace=namespace)
            if is_counted:
                n = usage.cached_tokens + usage.computed_tokens
                counters.count("prompt_tokens", n, namespace=namespace)
                # the store has counted what became of a restore
                if claim.restored_seconds is None or claim.reason == "error":
                    if claim.reason is not None:
                        counters.count(f"miss:{claim.reason}", namespace=namespace)
                    elif usage.cached_tokens:
                        counters.count("live_hits", namespace=namespace)

    def used(self) -> None:
        """Note that the server has just been used."""
        self._last_use = asyncio.get_running_loop().time()

    def remove_files(self) -> None:
        """Delete what is left in the directory of the slots."""
        if self.store is not None:
            self.store.directory.close()

    async def close(self) -> None:
        """Store what the slots hold, and close the store."""
        tasks = [task for task in (self._saving, self._reopening, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            # a save that was begun ends before that
            await asyncio.wait(tasks)
        if self.manager is not None:
            if self.is_ready and self.reason is None:
                await self.manager.save_all(STOP_SECONDS)
            await self.manager.keep_copies(STOP_SECONDS)
            await asyncio.to_thread(self.manager.close)
        await self._close_store()


def _kinds_of(identity: ServerIdentity) -> Callable[[int], TokenKind]:
    for path in identity.files:
        try:
            return kinds_of_vocabulary(path)
        except ContextError as error:
            log.warning("where messages and documents end in a prompt is not known: %s", error)
            break
    return _any_kind


def _any_kind(_: int) -> TokenKind:
    return TokenKind()
