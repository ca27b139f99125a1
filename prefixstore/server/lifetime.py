"""What runs as long as the proxy: its own llama-server, or a watch over one that it did not start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from prefixstore.errors import PrefixStoreError, ServerError
from prefixstore.server.child import Child
from prefixstore.server.session import ServerSession
from prefixstore.server.upstream import UpstreamError

__all__ = ["OwnServer", "RunningServer"]

log = logging.getLogger("prefixstore.server")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0


class OwnServer:
    """Keeps a child running.

    Parameters
    ----------
    child
        The child. Its `when_ready` and `when_down` are those of the session.
    session
        What is known of the server.
    failed
        Called with the reason if the child cannot be used at all.
    """

    def __init__(self, child: Child, session: ServerSession, failed: Callable[[PrefixStoreError], None]) -> None:
        self._child, self._session, self._failed = child, session, failed
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the child; requests are answered with 503 until it is ready."""
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._child.run()
        except PrefixStoreError as error:
            self._failed(error)
        except Exception as error:
            # nothing else would restart it
            log.exception("llama-server cannot be watched any longer")
            self._failed(_unexpected(error))

    async def stop(self) -> None:
        """End the child."""
        await self._child.stop(at_once=self._session.is_hurried)
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)

    def lost(self) -> None:
        """Called when a connection to it has failed. If it has ended, its parent notices."""


class RunningServer:
    """Watches a running server.

    Parameters
    ----------
    session
        What is known of the server.
    failed
        Called with the reason if the server cannot be used.
    """

    def __init__(self, session: ServerSession, failed: Callable[[PrefixStoreError], None]) -> None:
        self._session, self._failed = session, failed
        self._lost = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch."""
        self._session.when_replaced = self._replaced
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching. The server keeps running."""
        tasks = [task for task in (self._watching, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lost(self) -> None:
        """A connection has failed: the server may have ended, and another one may answer next.

        Or it has closed the connection, as it does with some requests that it refuses: then it answers the next one.
        One that is started in its place does not, as long as it loads its model.
        """
        if self._session.is_ready and not self._session.is_certainly_alive() and self._looking is None:
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            if not await self._is_healthy() and self._session.is_ready:
                self._replaced()
        finally:
            self._looking = None

    def _replaced(self) -> None:
        self._session.down()
        self._lost.set()

    async def _watch(self) -> None:
        pause, said = FIRST_PAUSE, ""
        while True:
            try:
                problem = "it does not answer"
                if await self._is_healthy():
                    await self._session.ready()
                    said = ""
                    await self._lost.wait()
                    self._lost.clear()
                    await self._session.reopen()
                    pause = FIRST_PAUSE
                    continue
            except (ServerError, UpstreamError, ValueError, LookupError, TypeError) as error:
                problem = str(error)
            except PrefixStoreError as error:
                self._failed(error)
                return
            except Exception as error:
                # nothing else would notice when it answers again
                log.exception("the server cannot be watched any longer")
                self._failed(_unexpected(error))
                return
            if problem != said:
                log.warning("waiting for %s: %s", self._session.upstream.url, problem)
                said = problem
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _is_healthy(self) -> bool:
        with contextlib.suppress(UpstreamError):
            return (await self._session.upstream.ask("/health")).is_ok
        return False


def _unexpected(error: Exception) -> ServerError:
    return ServerError(f"llama-server does not answer as it should: {type(error).__name__}: {error}")
