"""Locations in a Valkey server: the contract, and what is special to them."""

import re
import shutil
import socket
import subprocess
import traceback
from contextlib import closing, suppress

import numpy as np
import pytest
from valkey.connection import Connection, SSLConnection, UnixDomainSocketConnection

from prefixstore.backends.contract import ConflictError
from prefixstore.backends.valkey import connections
from prefixstore.backends.valkey import valkey_backend as backend_module
from prefixstore.backends.valkey import valkey_view as view_module
from prefixstore.backends.valkey.connections import Address
from prefixstore.backends.valkey.valkey_backend import open_valkey
from prefixstore.engine.budget import Budget
from prefixstore.engine.invariants import violations
from prefixstore.engine.pages import open_pages
from prefixstore.errors import (
    CorruptError,
    LocationError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.record import Usage
from prefixstore.testing import PersistentBackendContract
from tests.support import ROOT
from tests.support.engines import Store
from tests.support.pages import make_page
from tests.support.places import contents, opened
from tests.support.rows import rows_of as stored
from tests.support.timeouts import wait_for
from tests.support.valkey import named, private_valkey, remove, user, valkey_client, valkey_url  # noqa: F401 - fixtures

MIB = 1 << 20


class TestOverASocket(PersistentBackendContract):
    """Each directory of a test is a location of its own."""

    kills, tcp = 3, False

    @pytest.fixture(autouse=True)
    def locations(self, new_valkey, monkeypatch, request):
        self.new, self.urls = new_valkey, {}
        if "killed" in request.node.name:
            # the others wait for as long
            monkeypatch.setattr(backend_module, "LOCK_MILLISECONDS", 2000)
            monkeypatch.setattr(backend_module, "RENEW_SECONDS", 0.5)

    def url(self, tmp_path):
        if tmp_path not in self.urls:
            self.urls[tmp_path] = self.new(tcp=self.tcp)
        return self.urls[tmp_path]

    def open_backend(self, tmp_path):
        return open_valkey(self.url(tmp_path), max_bytes=64 * MIB, read_only=False)


@pytest.mark.attack
class TestOverTCP(TestOverASocket):
    tcp = True


def put(backend, *numbers, payload=b"x" * 1000, then=lambda: None, **usage):
    keys = []
    with backend.update() as transaction:
        for number in numbers:
            key, record = make_page(payload, [number])
            transaction.put_namespace(record.namespace, b"{}")
            transaction.put(key, record, Usage(1, **usage), payload)
            keys.append(key)
        then()
    return keys


def rows_at(url):
    """The rows of a location, closed at the end of the block."""
    return closing(open_valkey(url, max_bytes=MIB, read_only=False))


def change_rows(backend, then=lambda: None, **rows):
    """Write rows, each with a payload or without one."""
    with backend.update() as draft:
        for key, value in rows.items():
            draft.put(key.encode(), *value)
        then()


def check(backend):
    with backend.view() as view:
        return violations(view, Budget(64 * MIB))


@pytest.mark.parametrize(
    ("url", "kind", "options"),
    [
        ("valkey://h", "tcp", {"host": "h", "port": 6379, "db": 0}),
        ("redis://h:1/2", "tcp", {"host": "h", "port": 1, "db": 2}),
        ("valkey://me:a%40b@h/0", "tcp", {"host": "h", "port": 6379, "db": 0, "username": "me", "password": "a@b"}),
        ("valkey://:pw@h", "tcp", {"host": "h", "port": 6379, "db": 0, "password": "pw"}),
        ("valkey://[::1]:7", "tcp", {"host": "::1", "port": 7, "db": 0}),
        ("rediss://h", "tls", {"host": "h", "port": 6379, "db": 0, "ssl_check_hostname": True}),
        (
            "valkeys://h?ssl_ca_certs=/a.pem&ssl_check_hostname=no",
            "tls",
            {"host": "h", "port": 6379, "db": 0, "ssl_ca_certs": "/a.pem", "ssl_check_hostname": False},
        ),
        ("unix:///run/v.sock?db=3", "unix", {"path": "/run/v.sock", "db": 3}),
        (
            "unix://me:pw@/run/v.sock",
            "unix",
            {"path": "/run/v.sock", "db": 0, "username": "me", "password": "pw"},
        ),
    ],
)
def test_a_url_says_where_the_server_is(url, kind, options):
    address = Address.parse(url)
    assert address.options == options
    assert address.kind is {"tcp": Connection, "tls": SSLConnection, "unix": UnixDomainSocketConnection}[kind]
    assert address.name == "prefixstore"
    for secret in ("pw", "a%40b", "a@b"):
        assert secret not in repr(address) + str(address) + address.shown


# -- users ------------------------------------------------------------------------------------------------------------


def test_a_user_with_the_documented_rights_can_do_everything(url, client, valkey_server):
    rights = re.search(r"`ACL SETUSER (.*?)`", (ROOT / "docs" / "backends.md").read_text())
    assert rights is not None
    name = url.rpartition("=")[2]
    _, *words = rights[1].replace("PASSWORD", "secret").replace("prefixstore", name).split()
    with user(client, "limited", *words):
        with opened(f"unix://limited:secret@{valkey_server.socket}?name={name}") as backend:
            keys = put(backend, 1, 2)
            with backend.update() as transaction:
                transaction.touch(keys[0], Usage(3, pinned=True))
                transaction.put_note(b"n", b"v")
                transaction.delete(keys[1])
            backend.sync()
            backend.rows.reclaim()
            backend.reindex()
            assert check(backend) == []
            assert contents(backend)[keys[0]][1] == Usage(3, pinned=True)
        with pytest.raises(LocationError, match="permission"):
            open_pages(f"unix://limited:secret@{valkey_server.socket}?name=other", max_bytes=MIB)


def test_a_wrong_password_is_refused_and_not_shown(client, valkey_server):
    with user(client, "known", ">right", "+@all", "~*"):
        for who in ("known", "unknown"):
            url = f"unix://{who}:wr0ng@{valkey_server.socket}"
            with pytest.raises(LocationError, match="refuses user and password") as caught:
                open_pages(url, max_bytes=MIB)
            assert "wr0ng" not in "".join(traceback.format_exception(caught.value))
        with opened(f"unix://known:right@{valkey_server.socket}?name=pw-test") as backend:
            assert "right" not in backend.location + repr(backend)
    remove(valkey_server.url, ["pw-test"])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("SET", "meta", "mine"), "another application"),
        (("SET", "rows", "mine"), "another application"),
        (("HSET", "meta", "a", "b"), "another application"),
        (("HSET", "meta", "magic", "prefixstore", "format", "1"), "format 1"),
        (("HSET", "meta", "magic", "prefixstore", "format", "99"), "format 99"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_keys_of_another_application_are_refused_and_untouched(url, client, command, says, read_only):
    name, key, *values = command
    client.execute_command(name, named(url, key), *values)
    before = client.dump(named(url, key))
    with pytest.raises(StorageError, match=says):
        open_pages(url, max_bytes=MIB, read_only=read_only)
    assert client.keys(named(url, "*")) == [named(url, key).encode()]
    assert client.dump(named(url, key)) == before


def test_a_lookup_takes_few_round_trips(url, monkeypatch):
    with closing(Store(open_pages(url, max_bytes=64 * MIB))) as writer:
        tokens = list(range(400))
        assert writer.put(tokens) == 100
    sent = []
    real = connections.Connections.use
    monkeypatch.setattr(connections.Connections, "use", lambda self, work: (sent.append(1), real(self, work))[1])
    with closing(Store(open_pages(url, max_bytes=64 * MIB))) as reader:
        del sent[:]
        assert reader.match(tokens) == 400
        assert len(sent) <= 6
        del sent[:]
        assert reader.match(tokens) == 400
        assert len(sent) <= 1


# -- transactions -----------------------------------------------------------------------------------------------------


def test_an_update_that_is_undone_or_lost_leaves_nothing(url, client, monkeypatch):
    with rows_at(url) as backend:
        before = set(client.keys(named(url, "*")))

        def fail(*_):
            staged = client.keys(named(url, "new:*"))
            assert len(staged) == 2
            # of a process that is killed here
            assert all(0 < client.pttl(name) <= 600_000 for name in staged)
            assert 0 < client.pttl(named(url, "lock")) <= 15_000
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "packed", fail)
            with suppress(ZeroDivisionError):
                change_rows(backend, a=(b"1", b"x"), b=(b"2", b"y"))
        assert set(client.keys(named(url, "*"))) == before
        assert stored(backend) == {}


def test_a_payload_that_the_server_would_not_take_is_refused_before_it_is_sent(url, client, monkeypatch):
    monkeypatch.setattr(backend_module, "LARGEST_VALUE", 100)
    with rows_at(url) as backend:
        with pytest.raises(UnavailableError, match="101 bytes: no more than 100 are stored"):
            change_rows(backend, a=(b"1", bytes(101)))
        assert client.keys(named(url, "new:*")) == []
        change_rows(backend, a=(b"1", bytes(100)))
        assert stored(backend) == {b"a": (b"1", bytes(100))}


def test_an_update_that_has_lost_its_lock_writes_nothing(url, client):
    with rows_at(url) as backend, rows_at(url) as other:
        for lose in (
            lambda: client.delete(named(url, "lock")),
            lambda: client.set(named(url, "lock"), b"somebody else"),
            lambda: (client.delete(named(url, "lock")), change_rows(other, five=(b"5", b"of another"))),
        ):
            with pytest.raises(ConflictError, match="lock"):
                change_rows(backend, one=(b"1", b"payload"), five=(b"1",), then=lose)
            client.delete(named(url, "lock"))
        assert stored(backend) == {b"five": (b"5", b"of another")}
        assert client.keys(named(url, "new:*")) == []
        change_rows(backend, six=(b"6",))


def test_a_writer_waits_for_another_and_gives_up_after_a_while(url, monkeypatch):
    monkeypatch.setattr(backend_module, "WAIT_SECONDS", 0.2)
    with opened(url) as one, opened(url) as two:
        says = "another process has been writing"
        with one.update(), pytest.raises(UnavailableError, match=says), two.update():
            raise AssertionError("it began")


@pytest.mark.parametrize("kind", ["meta", "rows", "order"])
def test_a_structure_that_the_server_has_evicted_starts_the_location_over(url, client, kind):
    with rows_at(url) as backend, rows_at(url) as other:
        change_rows(backend, a=(b"1", b"payload"), b=(b"2",))
        client.delete(named(url, kind))
        with pytest.raises(CorruptError, match="evicted"):
            other.check()
        # a reader fails in nothing
        stored(other)
        with other.view() as view:
            assert view.used == view_module.BASE_BYTES
        other.sync()
        change_rows(backend, b=(b"new",))
        assert stored(other) == {b"b": (b"new", None)}
        # what was left of the old one is gone
        assert client.keys(named(url, "payload:*")) == []
        other.check()
        change_rows(other, a=(b"1", b"again"))
        assert stored(backend) == {b"a": (b"1", b"again"), b"b": (b"new", None)}


def test_an_error_is_not_followed_by_the_answers_to_what_was_asked_with_it(url, client):
    with rows_at(url) as backend:
        change_rows(backend, a=(b"1", b"x"), b=(b"2", b"y"), c=(b"3", b"z"))
        client.delete(named(url, "payload:a"))
        client.lpush(named(url, "payload:a"), b"x")
        with backend.view() as view:
            with pytest.raises(StorageError):
                list(view.payloads([b"a", b"b", b"c"]))
            assert next(iter(view.payloads([b"b"]))) == (b"2", b"y")
            assert view.get([b"a", b"b", b"c"]) == [b"1", b"2", b"3"]


@pytest.mark.slow
def test_a_replica_is_read_and_may_take_the_place_of_its_server():
    with private_valkey() as one, opened(one.url) as backend:
        (key,) = put(backend, 1)
        with private_valkey(replicaof=f"127.0.0.1 {one.port}") as two:
            wait_for(lambda: two.client().exists("{prefixstore}:meta"), "the copy")
            with opened(two.url, read_only=True) as reader:
                assert set(contents(reader)) == {key}
                (new,) = put(backend, 2)
                wait_for(lambda: set(contents(reader)) == {key, new}, "the next page")
                with opened(two.url) as writer:
                    with pytest.raises(UnavailableError, match="read only replica"):
                        put(writer, 3)
                    two.client().execute_command("REPLICAOF", "NO", "ONE")
                    more = put(writer, 3)
                assert set(contents(reader)) == {key, new, *more}
                assert check(reader) == []


# -- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of localhost, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", "key", "-out", "cert"], cwd=directory, check=True, capture_output=True)
    return directory / "cert", directory / "key"


def test_tls_is_verified(certificate):
    cert, key = certificate
    with socket.create_server(("127.0.0.1", 0)) as some:
        port = some.getsockname()[1]
    files = {"tls-cert-file": str(cert), "tls-key-file": str(key), "tls-ca-cert-file": str(cert)}
    try:
        server = private_valkey(**files, **{"tls-port": str(port), "tls-auth-clients": "no"})
        server.__enter__()
    except AssertionError:
        pytest.skip("this server is built without TLS")
    try:
        for scheme in ("valkeys", "rediss"):
            with opened(f"{scheme}://localhost:{port}/0?ssl_ca_certs={cert}") as backend:
                payload = np.random.default_rng(1).bytes(3_000_000)
                keys = put(backend, 1, payload=payload)
                assert contents(backend)[keys[0]][2] == payload
        with pytest.raises(UnavailableError, match=r"(?i)certificate"):
            open_pages(f"valkeys://localhost:{port}", max_bytes=MIB)
        with pytest.raises(UnavailableError, match=r"(?i)certificate"):
            open_pages(f"valkeys://127.0.0.1:{port}?ssl_ca_certs={cert}", max_bytes=MIB)
    finally:
        server.__exit__(None, None, None)


def test_an_update_that_has_begun_ends_although_another_thread_closes_the_location(url, client):
    with rows_at(url) as backend, rows_at(url) as other:
        change_rows(backend, backend.close, a=(b"1", b"x"))
        assert stored(other) == {b"a": (b"1", b"x")}
    with rows_at(url) as backend:

        def fail():
            backend.close()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            change_rows(backend, fail, b=(b"2", b"y"))
        # or nobody could write for as long as the lock lasts
        assert not client.exists(named(url, "lock"))
