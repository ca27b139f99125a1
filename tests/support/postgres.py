"""A PostgreSQL server for the tests: the one in PREFIXSTORE_TEST_POSTGRES, or a private one, from what is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.places import DISK, small_disk
from tests.support.signals import started, suspend

S = TypeVar("S", bound="Server")

ACCOUNTS = ("postgres", "nobody")
# it does nothing of itself, at times that no test knows: neither vacuum tables nor flush its log
QUIET = ("-c", "autovacuum=off", "-c", "wal_writer_delay=10s")


def server_program(name: str) -> str | None:
    """Where a program of the server is: on PATH, or where Debian puts it; the newest one."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    return shutil.which(name) or (str(installed[-1]) if installed else None)


class Server:
    """A private server that listens only on a socket in its own directory."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self.sockets = directory
        # PostgreSQL does not run as root
        self.account = None
        if os.geteuid() == 0:
            self.account = next(one for name in ACCOUNTS for one in pwd.getpwall() if one.pw_name == name)
            os.chown(directory, self.account.pw_uid, self.account.pw_gid)
        self._make()

    def _make(self, *more: str) -> None:
        settings = ("-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync")
        self._run("initdb", "-D", self.data, *settings, *more)

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@/postgres?host={self.sockets}"

    def _command(self, program: str, *arguments: object) -> list[str]:
        path = server_program(program)
        assert path is not None, f"{program} is not installed"
        return [path, *map(str, arguments)]

    def _identity(self) -> dict[str, Any]:
        if self.account is None:
            return {}
        return {"user": self.account.pw_uid, "group": self.account.pw_gid, "extra_groups": []}

    def _run(self, program: str, *arguments: object) -> None:
        subprocess.run(
            self._command(program, *arguments),
            check=True,
            cwd=self.sockets,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=180,
            **self._identity(),
        )

    def start(self) -> None:
        """Start it, and return when it answers. It ends with this process, however that ends."""
        # of one that was killed
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        program, *arguments = self._command("postgres", "-D", self.data, "-k", self.sockets, "-F", "-N", 200)
        command = [program, *arguments, "-c", "listen_addresses=", *QUIET]
        self.process = started(command, self.sockets / "log", cwd=self.sockets, **self._identity())
        for _ in range(3600):
            if (self.data / "postmaster.pid").exists() and "ready" in (self.data / "postmaster.pid").read_text():
                return
            time.sleep(0.05)
        raise AssertionError((self.sockets / "log").read_text())

    def kill(self) -> None:
        """End it and all its processes at once, as if the machine had stopped."""
        # it takes no connections any more, so it has no other children than these
        suspend(self.process)
        family = [self.process.pid, *_children(self.process.pid)]
        for one in family:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.process.wait(60)
        for _ in range(6000):
            if not any(map(_is_running, family)):
                return
            time.sleep(0.01)
        raise AssertionError(f"processes of the server do not end: {family}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(60)


class SmallDiskServer(Server):
    """A private server whose data are on a disk that a test can fill: `small_disk`, mounted in its directory."""

    def _make(self, *more: str) -> None:
        self._disk = self.sockets / DISK
        self.data = self._disk / "data"
        if self.account is not None:
            os.chown(self._disk, self.account.pw_uid, self.account.pw_gid)
        super()._make("--wal-segsize=1", *more)

    def _command(self, program: str, *arguments: object) -> list[str]:
        more = ("-c", "max_wal_size=2MB", "-c", "min_wal_size=2MB") if program == "postgres" else ()
        return super()._command(program, *arguments, *more)

    def fill(self, left: int) -> None:
        """Leave so many bytes on the disk, or fewer: the server writes meanwhile."""
        with (self._disk / "filler").open("ab", buffering=0) as filler, suppress(OSError):
            while (more := self._n_free() - left) > 0:
                filler.write(bytes(min(more, 1 << 20)))

    def _n_free(self) -> int:
        status = os.statvfs(self._disk)
        return status.f_bavail * status.f_frsize

    def empty(self) -> None:
        """Give the space back."""
        (self._disk / "filler").unlink()

    def keep_running(self) -> None:
        """Start the server again if it has stopped, as it does a moment after it could not write."""
        if self.process.poll() is not None:
            self.start()


def _children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,pid="], check=True, capture_output=True, text=True).stdout
    return [int(pid) for ppid, pid in map(str.split, listed.splitlines()) if int(ppid) == parent]


def _is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], check=False, capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")


@contextmanager
def private_server() -> Iterator[Server]:
    """A server that runs until the block is left; its directory is short, because the path of a socket has to be."""
    with tempfile.TemporaryDirectory(prefix="pfxs-pg-", dir="/tmp") as directory:
        yield from _running(Server(Path(directory)))


@contextmanager
def small_disk_server() -> Iterator[SmallDiskServer]:
    """As `private_server`, with a disk that the test can fill."""
    with tempfile.TemporaryDirectory(prefix="pfxs-pg-", dir="/tmp") as directory, small_disk(Path(directory), 96):
        yield from _running(SmallDiskServer(Path(directory)))


def _running(server: S) -> Iterator[S]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A private server that a test may stop and start."""
    if server_program("initdb") is None:
        pytest.skip("PostgreSQL is not installed: no initdb on PATH or in /usr/lib/postgresql")
    with private_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url(request: pytest.FixtureRequest) -> str:
    """A server on which databases may be created."""
    given = os.environ.get("PREFIXSTORE_TEST_POSTGRES")
    return given or request.getfixturevalue("postgres_server").url


@pytest.fixture(scope="session")
def postgres_template(postgres_url: str) -> Iterator[tuple[str, str]]:
    """A database with an empty store in it, to be copied."""
    from prefixstore.backends.sql import migrations as migrate

    with database(postgres_url, None) as url:
        migrate.upgrade(url)
        yield postgres_url, name_of(url)


@pytest.fixture
def new_database(postgres_template: tuple[str, str]) -> Iterator[Callable[..., str]]:
    """Creates a database with an empty store, or an empty one; its URL."""
    from contextlib import ExitStack

    server, template = postgres_template
    with ExitStack() as stack:
        yield lambda *, empty=False: stack.enter_context(database(server, None if empty else template))


def name_of(url: str) -> str:
    """The name of a database."""
    return url.split("?", maxsplit=1)[0].rsplit("/", 1)[1]


@contextmanager
def database(server: str, template: str | None) -> Iterator[str]:
    from sqlalchemy import make_url

    name = f"pfxs_{uuid.uuid4().hex[:12]}"
    as_administrator(server, f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        as_administrator(server, f"DROP DATABASE {name} WITH (FORCE)")


def store_on(server: Server) -> str:
    """The URL of a new database with an empty store, on a server that ends with the test."""
    from sqlalchemy import make_url

    from prefixstore.backends.sql import migrations as migrate

    as_administrator(server.url, "CREATE DATABASE kv")
    location: str = make_url(server.url).set(database="kv").render_as_string(hide_password=False)
    migrate.upgrade(location)
    return location


def libpq(url: str) -> str:
    """The URL of a database, for psycopg itself."""
    from sqlalchemy import make_url

    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def as_administrator(url: str, *statements: str) -> None:
    """Run statements as the superuser that the tests connect as."""
    import psycopg

    with psycopg.connect(libpq(url), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@contextmanager
def role(url: str, name: str) -> Iterator[str]:
    """A role for one test, which roles of all databases share; the URL with which it connects."""
    from sqlalchemy import make_url

    as_administrator(url, f"CREATE ROLE {name} LOGIN")
    try:
        yield make_url(url).set(username=name).render_as_string(hide_password=False)
    finally:
        as_administrator(url, f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")
