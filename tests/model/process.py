"""Stores in processes of their own, driven through pipes; and disks that lose power."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.attacks.power import MARK, Disk, read_journal
from tests.model import driver
from tests.support import python
from tests.support.sql_rows import before_statements
from tests.support.timeouts import disable_timeouts

# beginnings of statements that change something
WRITES = ("INSERT", "UPDATE", "DELETE", "COMMIT", "VACUUM", "PRAGMA wal_", "BEGIN; SET")
_patches = ExitStack()


class Processes:
    """Makes processes with a store: forked by one that has imported all it takes, so that each costs milliseconds.

    Parameters
    ----------
    shim
        A library that records what is written to files; see `tests.attacks.power`.
    """

    def __init__(self, shim: Path | None = None) -> None:
        environment = os.environ | ({"LD_PRELOAD": str(shim)} if shim is not None else {})
        self._forks = python("from tests.model.process import fork_for_ever; fork_for_ever()", env=environment)
        self._last: Process | None = None
        self._mutation = ""

    def mutate(self, name: str) -> None:
        """Put one of `mutations` into each process from now on."""
        self.kill()
        self._mutation = name

    def __call__(self) -> Process:
        """A process; the one that was given last, if nothing has happened to it."""
        if self._last is None or not self._last.is_idle:
            self.kill()
            with Listener(family="AF_UNIX") as listener:
                print(f"{listener.address} {self._mutation}", file=self._forks.stdin, flush=True)
                self._last = Process(listener.accept())
        return self._last

    def kill(self) -> None:
        if self._last is not None:
            self._last.kill()

    def close(self) -> None:
        self.kill()
        self._forks.communicate()


def fork_for_ever() -> None:
    """Fork a child for each address that comes in, with a mutation or none."""
    import prefixstore.backends.sql.sqlite  # noqa: F401 - once here, instead of in each child
    from tests.model import mutations

    disable_timeouts()
    _watch_what_changes_something()
    # those that have ended stay zombies until this process ends: no other process gets the number of one
    for line in sys.stdin:
        address, _, mutation = line.strip("\n").partition(" ")
        if os.fork() == 0:
            if mutation:
                mutations.apply(mutation)
            with driver.driven_time(), Client(address) as pipe:
                _serve(pipe)
            os._exit(0)


def _watch_what_changes_something() -> None:
    """A process may die before each statement that writes, and around each command and request, until it ends."""
    from prefixstore.backends.objects.bucket import Client
    from prefixstore.backends.valkey.connections import Connections
    from prefixstore.engine import child_rows

    def before(statement: Any) -> None:
        if isinstance(statement, str) and statement.lstrip().startswith(WRITES):
            driver.point()

    def connect(*arguments: Any, connect: Any = sqlite3.connect, **options: Any) -> sqlite3.Connection:
        made: sqlite3.Connection = connect(*arguments, **options)
        # many rows are written by one call
        made.set_trace_callback(before)
        return made

    def around(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def use(*arguments: Any) -> Any:
            driver.point()
            answer = real(*arguments)
            driver.point()
            return answer

        setattr(owner, name, use)

    sqlite3.connect = connect
    _patches.enter_context(before_statements(before))
    around(Connections, "use")
    around(Client, "_asked")
    around(child_rows, "add_child")


def _serve(pipe: Connection) -> None:
    """Do what comes out of the pipe."""
    store: Any = None
    pipe.send(os.getpid())
    while True:
        try:
            name, driver.CLOCK.now, arguments, options = pipe.recv()
        except EOFError:
            return
        found, error = None, None
        try:
            if name == "open":
                # credentials of a server that was started after the process that forks
                os.environ.update(options.pop("environment"))
                store = driver.Store(*arguments, **options)
            else:
                found = getattr(store, name)(*arguments, **options)
        except Exception as raised:  # noqa: BLE001 - raised again at the other end
            error = raised
        pipe.send((found, error, driver.CLOCK.now))


class Process:
    """A process with a `driver.Store` in it: has its methods, and `open` with its parameters."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._pid = pipe.recv()
        self.is_idle = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.begin(name, *arguments, **options)
            return self.end()

        return call

    def open(self, *arguments: Any) -> None:
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self.begin("open", *arguments, environment=environment)
        self.end()

    def begin(self, name: str, *arguments: Any, **options: Any) -> None:
        """Have it do something; `end` waits for it. Raises `EOFError` there if it died."""
        self.is_idle = False
        self._pipe.send((name, driver.CLOCK.now, arguments, options))

    def end(self) -> Any:
        found, error, driver.CLOCK.now = self._pipe.recv()
        self.is_idle = True
        if error is not None:
            raise error
        return found

    def kill(self) -> None:
        if not self._pipe.closed:
            os.kill(self._pid, signal.SIGKILL)
            # until the end of what it has open
            while self._pipe.poll(None):
                try:
                    self._pipe.recv()
                except (EOFError, ConnectionResetError):
                    break
            self._pipe.close()
        self.is_idle = False


class Disks:
    """The files of a store whose only process writes below a directory, and which lose power from time to time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._begin(self._new())

    def _new(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._directory))

    def _begin(self, root: Path) -> None:
        self.root = root
        self.journal = str(root), f"{root}.journal"
        Path(self.journal[1]).touch()
        self._disk = Disk(root, root.stat().st_ino)
        self._disk.hold()

    def lose_power(self, process: Process, moment: float, mode: str, seed: int) -> None:
        """What is left becomes the new directory: some moment since the last flush, from 0 to 1, is the last one."""
        entries = read_journal(Path(self.journal[1]))
        # its handles are of no use any more; what it writes now is not in the entries
        process.close()
        flushed = max((i + 1 for i, entry in enumerate(entries) if entry.kind == MARK), default=0)
        for entry in entries[: flushed + round(moment * (len(entries) - flushed))]:
            self._disk.apply(entry)
        left = self._new()
        self._disk.after_power_loss(left, mode, random.Random(seed))
        shutil.rmtree(self.root)
        self._begin(left)
