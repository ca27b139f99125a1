"""The listening sockets of a server, until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from prefixstore.errors import InvalidParameterError

__all__ = ["Listener", "bound", "run"]

CANCEL_SECONDS = 5.0


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets with an address, one for each that the host has; they do not listen yet.

    Made before a model is loaded: a port in use is then reported immediately.

    Raises
    ------
    InvalidParameterError
        If the host has no address here, or the port is in use.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidParameterError(f"--host {host!r} is not an address of this machine: {error.strerror}") from None
    with ExitStack() as opened:
        sockets = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listener = opened.enter_context(socket.socket(family, kind, protocol))
            except OSError:
                continue  # this machine does not speak that family
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                with suppress(OSError):
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind(address)
            except OSError as error:
                raise InvalidParameterError(
                    f"cannot listen on {address[0]}:{port}: {os.strerror(error.errno or 0)}; choose another --host or "
                    "--port (0: any port that is free)"
                ) from None
            sockets.append(listener)
        yield sockets


class Listener(uvicorn.Server):
    """A server for which SIGINT, SIGTERM and SIGHUP are a clean stop: they are not raised again afterwards.

    A second SIGINT is for somebody who does not want to wait: requests are not answered to their end. Then, and once a
    stop has begun, nothing that takes long is left, and signals are ignored until the process ends.

    Parameters
    ----------
    config
        Of uvicorn.
    announce
        Told the address, once somebody can connect to it, and `farewell`.
    farewell
        What is printed when a signal has arrived; None for nothing.
    hurry
        Called at the second SIGINT, in the event loop.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        announce: Callable[[str], None] = lambda _: None,
        farewell: str | None = None,
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._announce, self._farewell, self._hurry = announce, farewell, hurry
        self._is_signalled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        hangup = getattr(signal, "SIGHUP", None)
        # of a terminal that is closed; nohup has it ignored
        if hangup is not None and signal.getsignal(hangup) == signal.SIG_DFL:
            numbers.append(hangup)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._is_signalled else handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_signalled and sig == signal.SIGINT and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hurry)
        self._is_signalled = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for server in getattr(self, "servers", ()):
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                self._announce(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._farewell is not None and self._is_signalled:
            self._announce(self._farewell)
        await super().shutdown(sockets)
        if self.force_exit:
            # left out by uvicorn then
            await self._end_requests()
            await self.lifespan.shutdown()

    async def _end_requests(self) -> None:
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run this in an event loop of its own: that of uvloop if it is installed, since it takes less processor time."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        asyncio.run(work)  # Windows
    else:
        uvloop.run(work)
