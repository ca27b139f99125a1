"""A llama-server as a child process: started, watched, restarted if it crashes, ended with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from prefixstore.errors import ServerError
from prefixstore.server.upstream import ASK_SECONDS, Upstream

if TYPE_CHECKING:
    from prefixstore.server.command import ServerCommand

__all__ = ["CHILD_URL", "Child"]

log = logging.getLogger("prefixstore.server")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
# a server that has lived so long begins again with the shortest pause
STABLE_SECONDS = 60.0
HEALTH_INTERVAL = 0.05
STOP_SECONDS = 15.0
# how long a process that dies may still run after it has not answered as it should
DYING_SECONDS = 2.0
PR_SET_PDEATHSIG = 1
# a name: it listens on a socket
CHILD_URL = "http://llama-server"


class Child:
    """A llama-server that runs until `stop`, and is restarted if it ends before.

    It must be run from a thread that lives as long as the process: Linux kills the child when the
    thread that started it ends. `when_ready` is called each time the server answers that it is healthy, and `when_down`
    as soon as its process has ended.
    """

    def __init__(
        self,
        command: ServerCommand,
        environ: Mapping[str, str],
        when_ready: Callable[[], Awaitable[None]],
        when_down: Callable[[], None],
    ) -> None:
        self._command, self._environ = command, dict(environ)
        self._when_ready, self._when_down = when_ready, when_down
        self.process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._was_ready = False

    async def run(self) -> None:
        """Keep it running until `stop`.

        Raises
        ------
        ServerError
            If it ends before it was healthy for the first time, or cannot be started at all.
        """
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            began = asyncio.get_running_loop().time()
            process = await self._start()
            if self._stopping.is_set():
                # `stop` has not seen this one
                await self.stop()
            await self._watch(process)
            # of a script that has ended alone: so that nothing keeps the model in memory
            self.kill()
            self._when_down()
            if self._stopping.is_set():
                return
            how = _how_it_ended(process.returncode)
            if not self._was_ready:
                raise ServerError(f"llama-server {how} before it was ready; its own messages say why")
            if asyncio.get_running_loop().time() - began > STABLE_SECONDS:
                pause = FIRST_PAUSE
            log.warning("llama-server %s; it is started again in %.1f s", how, pause)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def kill(self) -> None:
        """Kill it, with all that it has started."""
        if self.process is not None:
            _signal_group(self.process.pid, signal.SIGKILL)

    def lost(self) -> None:
        """Have it started again if its socket was deleted, as logind does when a user logs out: nobody can reach it."""
        if self._was_ready and not self._command.socket.exists():
            log.warning("the socket of llama-server was deleted: it is started again")
            self.kill()

    async def stop(self) -> None:
        """End it, and wait until it has ended."""
        self._stopping.set()
        process = self.process
        if process is None or process.returncode is not None:
            return
        if _signal_group(process.pid, signal.SIGTERM):
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except asyncio.TimeoutError:
                log.warning("llama-server did not end within %.0f s of SIGTERM and is killed", STOP_SECONDS)
        self.kill()
        await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        argv = self._command.argv()
        self._command.prepare()
        try:
            # a session of its own: Ctrl-C in the terminal must not end it before its slots are stored
            self.process = await asyncio.create_subprocess_exec(
                *argv,
                env=self._environ,
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                preexec_fn=_die_with(os.getpid()),
            )
        except (OSError, ValueError) as error:
            raise ServerError(f"{argv[0]} cannot be started: {error}") from error
        return self.process

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the process ends. Raises what `when_ready` has raised, if the process lives."""
        ended, looking = asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._begin())
        try:
            await asyncio.wait((ended, looking), return_when=asyncio.FIRST_COMPLETED)
            error = looking.exception() if looking.done() else None
            if error is not None:
                # it may have died while it was asked
                await asyncio.wait((ended,), timeout=DYING_SECONDS)
                if not ended.done():
                    raise error
            await ended
        finally:
            for task in (looking, ended):
                task.cancel()
            await asyncio.gather(looking, ended, return_exceptions=True)

    async def _begin(self) -> None:
        """Tell when it is healthy."""
        server = Upstream(CHILD_URL, timeout=ASK_SECONDS, socket=self._command.socket)
        try:
            while not await server.is_healthy():  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(HEALTH_INTERVAL)
        finally:
            await server.close()
        await self._when_ready()
        self._was_ready = True


def _signal_group(leader: int, number: int) -> bool:
    """Signal the session that was made for a child, with all that it has started; whether there was anything of it."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        # macOS: of processes that have ended
        return False
    return True


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _die_with(parent: int) -> Callable[[], None] | None:
    """What the child does before it becomes llama-server: have Linux kill it when its parent ends in any way."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has ended before the call
            os._exit(1)

    return prepare
