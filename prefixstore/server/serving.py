"""Puts all parts of the proxy together, and runs it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from prefixstore.errors import PrefixStoreError, ServerError
from prefixstore.metrics import RequestMetrics, render
from prefixstore.opening import Locations
from prefixstore.server.child import Child, ServerCommand, check_program, private_directory
from prefixstore.server.client import Props
from prefixstore.server.exchange import server_of
from prefixstore.server.find_process import process_at, running_process
from prefixstore.server.identity import ServerIdentity
from prefixstore.server.listener import address_of, bound, stopped_by_signals
from prefixstore.server.own_endpoints import OwnEndpoints
from prefixstore.server.proxy import Proxy
from prefixstore.server.server_session import OnDamage, ServerSession, opened, why_without
from prefixstore.server.slot_store import ADVICE
from prefixstore.server.tenants import Admission, TenantSource
from prefixstore.server.upstream import Upstream
from prefixstore.store import PrefixStore
from prefixstore.units import counted, format_bytes

log = logging.getLogger("prefixstore.server")

# How long requests may go on after a signal. aiohttp waits twice for so long before it ends one.
GRACE_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of ``prefixstore serve``."""

    location: Locations
    host: str = "127.0.0.1"
    port: int = 8080
    # for the endpoints of the proxy itself
    admin_key: str | None = None
    store_options: dict[str, Any] = field(default_factory=dict)
    on_damage: OnDamage = OnDamage.WITHOUT
    # bytes of the body of a request, and of those of all requests together; None: as many as sixteen of the largest
    max_body: int = 16 << 20
    max_bodies: int | None = None
    # what identifies the tenant of a request; None: all share
    tenants: TenantSource | None = None
    # fields of completions that are not known here, and do not change what is computed for a token
    allowed_fields: frozenset[str] = frozenset()
    # requests that may wait for a slot
    max_waiting: int = 256
    # seconds to wait for the next byte of the server
    timeout: float = 3600.0
    # told the address once somebody can connect to it, what the store has once the server is ready, and when it stops
    announce: Callable[[str], None] = log.info

    @property
    def separated(self) -> bool:
        """Whether tenants are separated."""
        return self.tenants is not None


def serve_child(settings: ServeSettings, argv: Sequence[str]) -> None:
    """Start a llama-server and serve it until SIGINT or SIGTERM.

    Raises
    ------
    InvalidParameterError
        If an option of the server cannot be used behind the proxy, its program is not found, or the port is in use.
    ServerError
        If the server cannot be started.
    StorageError
        If the store cannot be opened.
    """
    environ = dict(os.environ)
    # a model may take a minute to load: what can be said before is said before
    check_program(argv, environ)
    failure = ""
    try:
        # an unreachable far location is not an error
        options = {"namespace": "server", **settings.store_options}
        opened(settings.location, settings.on_damage, lambda: PrefixStore(settings.location, **options).close())
    except Exception as error:  # noqa: BLE001 - a fault of the cache never keeps a server from answering
        failure = why_without(error, settings.on_damage)
        settings.announce(f"THE STORE CANNOT BE USED, and every prompt will be computed: {failure}")
    with bound(settings.host, settings.port) as sockets, private_directory() as private:
        command = ServerCommand(argv, environ, private, separated=settings.separated)
        if settings.tenants is not None and settings.tenants.header is None and not command.has_keys:
            log.warning(
                "--salt-from api-key: llama-server has no API keys, so a client may name any key, and is the tenant of "
                "that; give it --api-key or --api-key-file"
            )

        def identify(props: Props) -> ServerIdentity:
            seen = running_process(process_at(command.socket))
            given = command.argv()
            if seen is None:
                return ServerIdentity.of_command(given, environ, props)
            if seen.argv[1:] != given[1 - len(seen.argv) :]:
                raise ServerError(
                    f"{given[0]} starts llama-server with other options than those after --, and what they change is "
                    "not known: write all of them after --"
                )
            return ServerIdentity.of_command(seen.argv, seen.environ, props, directory=seen.directory)

        upstream = Upstream(command.socket, timeout=settings.timeout)
        session = ServerSession(upstream, settings, command.slots_dir, identify, command.key)
        session.failure = failure
        child = Child(command, upstream.is_healthy, session.ready, session.down)
        session.when_lost = child.lost
        asyncio.run(_serve(settings, sockets, session, child, private, has_keys=command.has_keys))


async def _serve(
    settings: ServeSettings,
    sockets: list[socket.socket],
    session: ServerSession,
    child: Child,
    private: Path,
    *,
    has_keys: bool,
) -> None:
    """Serve while the child is kept running. The `private` directory is removed if somebody does not want to wait."""
    stopped = asyncio.Event()
    admission = Admission(session.upstream, has_keys=has_keys)

    def ready() -> None:
        admission.forget()
        settings.announce(_what_is_stored(session))

    session.when_ready = ready
    own = OwnEndpoints(session, admission, partial(render, session.registry), settings)
    proxy = Proxy(session, own, admission, RequestMetrics(session.registry), settings)

    def signalled(number: int) -> None:
        if not stopped.is_set():
            stopped.set()
            settings.announce("stopping: finishing running requests, and storing the contents of the slots")
        elif number == signal.SIGINT:
            settings.announce("stopping immediately: the contents of the slots are not stored")
            child.kill()
            shutil.rmtree(private, ignore_errors=True)
            # as after SIGKILL, the store is complete
            os._exit(0)

    loop = asyncio.get_running_loop()
    with stopped_by_signals(lambda number: loop.call_soon_threadsafe(signalled, number)):
        runner = web.ServerRunner(server_of(proxy), shutdown_timeout=GRACE_SECONDS)
        await runner.setup()
        for listener in sockets:
            await web.SockSite(runner, listener).start()
            settings.announce(f"listening on {address_of(listener)}")
        # from here on, llama-server writes to the same terminal, and a line in several parts
        working = asyncio.create_task(child.run())
        working.add_done_callback(lambda _: stopped.set())
        try:
            await stopped.wait()
            await runner.cleanup()
        finally:
            await session.close()
            await child.stop()
            await asyncio.gather(working, return_exceptions=True)
            await session.upstream.close()
    if (failure := failure_of(working)) is not None:
        raise failure


def failure_of(work: asyncio.Task[None]) -> PrefixStoreError | None:
    """Why this has ended; None if it was stopped."""
    error = None if work.cancelled() else work.exception()
    if error is None or isinstance(error, PrefixStoreError):
        return error
    log.error("llama-server cannot be watched any longer", exc_info=error)
    return ServerError(f"llama-server does not answer as it should: {type(error).__name__}: {error}")


def _what_is_stored(session: ServerSession) -> str:
    if session.store is None or session.reason is not None:
        # why a store cannot be opened has been told
        why = f" ({session.why})" if session.why and session.store is not None else ""
        return f"llama-server is ready; nothing is stored or restored: {session.reason}{why}"
    store = session.store.store
    stats = store.stats()
    held = f"{counted(stats.entries, 'page')}, {format_bytes(stats.bytes_used)}" if stats.entries else "empty"
    nearer = " in the nearer one" if stats.tiers else ""
    differ = session.store.differences()
    unusable = ""
    if differ:
        unusable = f"; it has pages of this model, and none for these settings: {', '.join(differ)}. {ADVICE}"
    return f"llama-server is ready; store {store.location}: {held}{nearer}{unusable}"
