"""A llama-server as a child process: its command line, checked and completed; started, watched, restarted, ended.

It runs beside a directory in memory that only this user can read, gone when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefixstore.errors import InvalidParameterError, ServerError
from prefixstore.server.arguments import Arguments, config_files, option_name, parse_arguments, values_of
from prefixstore.server.model_settings import gains_from_full_window

log = logging.getLogger("prefixstore.server")

# Options that would work against the proxy, and what to do instead.
REFUSED = {
    "--host": "the proxy listens; give --host before the --",
    "--port": "the proxy listens; give --port before the --",
    "--slot-save-path": "the proxy has a directory of its own, in memory",
    "--no-slots": "the proxy reads /slots",
    "--context-shift": "shifted rows cannot be stored",
    "--cache-reuse": "shifted rows cannot be stored",
    "--cache-idle-slots": "it empties the slots that the proxy has filled",
    "--api-prefix": "the proxy passes paths on as they are",
    "--ssl-key-file": "the proxy is reached first; put TLS in front of it",
    "--ssl-cert-file": "the proxy is reached first; put TLS in front of it",
    "--models-dir": "a router starts other servers, whose slots the proxy does not see; serve one model",
    "--models-preset": "a router starts other servers, whose slots the proxy does not see; serve one model",
}
# what is added to the command overrides these, if they are in the environment
OVERRIDDEN = {"--host", "--port", "--slot-save-path", "--no-slots", "--cache-idle-slots"}
OFF = {"", "0", "false", "off", "disabled"}
KEY_OPTION, KEY_VARIABLE = "--api-key", "LLAMA_API_KEY"
# in a line of a file of settings that is no comment
API_KEY = re.compile(r"^[^#;\n]*api[-_]key", re.IGNORECASE | re.MULTILINE)
# llama-server takes it for a Unix socket by its ending. No other user of the machine can reach it, and no other process
# can have it before the server does, as it could have a port.
SOCKET = "server.sock"
MAX_SOCKET = 103
MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a unique directory for this user only
PREFIX = "prefixstore-"
# locked as long as its process lives: unlike a process id, that is right between containers, too
LOCK = "lock"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
# a server that has lived so long begins again with the shortest pause
STABLE_SECONDS = 60.0
HEALTH_INTERVAL = 0.05
STOP_SECONDS = 15.0
# how long a process that dies may still run after it has not answered as it should
DYING_SECONDS = 2.0
PR_SET_PDEATHSIG = 1


class ServerCommand:
    """The arguments of a llama-server: those of the user, program first, and what is added.

    It runs in `environ`, from which it takes options, too. It saves slots in `private`, a directory that only this user
    can read. If tenants are `separated`, it has no cache of prompts in RAM.

    Raises
    ------
    InvalidParameterError
        If an option cannot be used behind the proxy.
    """

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], private: Path, *, separated: bool = False
    ) -> None:
        if not argv:
            raise InvalidParameterError("no llama-server is given; put its command after --: -- llama-server -m FILE")
        check_options(argv, environ)
        self.socket = private / SOCKET
        if len(os.fsencode(self.socket)) > MAX_SOCKET:
            raise InvalidParameterError(f"{private} is too long for the path of a socket; set TMPDIR to a shorter one")
        self.slots_dir = private / "slots"
        self._given, self.environ, self.key = tuple(argv), dict(environ), None
        keys = [key for key in (*values_of(argv, (KEY_OPTION,)), environ.get(KEY_VARIABLE)) if key]
        self.has_keys = bool(keys) or _has_file_of_keys(argv, environ)
        if self.has_keys:
            # all in the variable, since it warns of two options; ours first, since a quote in another swallows the rest
            self.key = secrets.token_urlsafe(32)
            self._given = tuple(_without(argv, KEY_OPTION))
            self.environ[KEY_VARIABLE] = ",".join((self.key, *keys))
        self._private = private
        self.prepare()
        arguments = parse_arguments(argv[1:], environ)
        cache_ram = _cache_ram_of(arguments)
        if separated and cache_ram not in (None, 0):
            raise InvalidParameterError(
                f"--cache-ram {cache_ram:g}: tenants would see each other's prompts in the server's cache; leave it out"
            )
        self._cache_ram = cache_ram
        self._full_window = gains_from_full_window(arguments, arguments.settings.get("model"))

    def prepare(self) -> None:
        """Create what the server needs in the directory, and the directory if it was removed.

        Logind does that to users who are not system users, when they log out.

        Raises
        ------
        ServerError
            If it cannot be created, or belongs to another user.
        """
        try:
            self._private.mkdir(mode=0o700, exist_ok=True)
            found = self._private.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ServerError(f"{self._private} was replaced by something that is not private; start again")
            # of one that was killed: the next one would not start
            self.socket.unlink(missing_ok=True)
            self.slots_dir.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ServerError(f"{self._private} cannot be prepared for llama-server: {error.strerror}") from error

    def argv(self) -> list[str]:
        """All arguments, for a server that listens on `socket`."""
        ours = ["--host", str(self.socket), "--slots", "--slot-save-path", str(self.slots_dir)]
        ours += ["--no-cache-idle-slots", "--no-context-shift"]
        if self._full_window:
            ours.append("--swa-full")
        if not self._cache_ram:
            # pages are in the store, whose budget is known
            ours += ["--cache-ram", "0"]
        return [*self._given, *ours]


def check_program(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise `InvalidParameterError` if the command does not begin with a program that can be started."""
    if argv and argv[0].startswith("-"):
        raise InvalidParameterError(f"{argv[0]} follows --; the program comes first: -- llama-server {argv[0]} ...")
    if argv and shutil.which(argv[0], path=environ.get("PATH")) is None:
        where = "is not an executable file" if "/" in argv[0] else "is not on the PATH"
        raise InvalidParameterError(f"{argv[0]} {where}; give the path of llama-server")


def check_options(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise `InvalidParameterError` if an option, or a variable, cannot be used behind the proxy."""
    for i, argument in enumerate(argv):
        name = option_name(argument.split("=", 1)[0])
        if name == "--cache-reuse" and argv[i + 1 : i + 2] == ["0"]:
            continue
        if name in REFUSED:
            raise InvalidParameterError(f"{name} cannot be used behind the proxy: {REFUSED[name]}")
    for name in REFUSED.keys() - OVERRIDDEN:
        variable = "LLAMA_ARG_" + name.removeprefix("--").replace("-", "_").upper()
        if environ.get(variable, "").lower() not in OFF:
            raise InvalidParameterError(f"{variable} cannot be used behind the proxy: {REFUSED[name]}")


def _cache_ram_of(arguments: Arguments) -> float | None:
    """What is given with ``--cache-ram``; None if that is nothing."""
    try:
        return float(arguments.settings["cache_ram"])
    except (KeyError, ValueError):
        return None  # the server says so


def _without(argv: Sequence[str], option: str) -> Iterator[str]:
    """The arguments without an option and its values."""
    left = iter(argv)
    for argument in left:
        if option_name(argument) == option:
            next(left, None)
        else:
            yield argument


def _has_file_of_keys(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the server is given a file that has keys of its clients."""
    given = [*values_of(argv, (f"{KEY_OPTION}-file",)), environ.get("LLAMA_ARG_API_KEY_FILE")]
    return any(given) or any(_names_key(path) for path in config_files(environ))


def _names_key(path: Path) -> bool:
    try:
        return API_KEY.search(path.read_text(errors="replace")) is not None
    except OSError:
        return False


@contextmanager
def private_directory(parent: Path | None = None) -> Iterator[Path]:
    """Create the directory, with mode 0700, and remove it with its contents at the end.

    What processes that were killed have left behind is removed first.

    Parameters
    ----------
    parent
        Where to make it; None: ``/dev/shm`` if there is one, else the directory for temporary files.
    """
    if parent is None:
        parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _remove_left_behind(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    new = path / f"{LOCK}.new"
    try:
        with new.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(path / LOCK)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left_behind(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        # without a lock file it is another's, or just being made
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


class Child:
    """A llama-server that runs until `stop`, and is restarted if it ends before.

    It must be run from a thread that lives as long as the process: Linux kills the child when the
    thread that started it ends. `when_ready` is called each time the server answers that it is healthy (`is_healthy`),
    and `when_down` as soon as its process has ended.
    """

    def __init__(
        self,
        command: ServerCommand,
        is_healthy: Callable[[], Awaitable[bool]],
        when_ready: Callable[[], Awaitable[None]],
        when_down: Callable[[], None],
    ) -> None:
        self._command, self._is_healthy = command, is_healthy
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
                env=self._command.environ,
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
        while not await self._is_healthy():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(HEALTH_INTERVAL)
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
