"""Servers of Valkey that answer otherwise than usual: strange commands, missing rights, keys that others have put."""

from __future__ import annotations

import socket
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from valkey.connection import UnixDomainSocketConnection

from prefixstore.backends import received
from prefixstore.backends.contract import ConflictError
from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.valkey import backend as backend_module
from prefixstore.backends.valkey import open_valkey, payloads
from prefixstore.backends.valkey.connections import translated
from prefixstore.engine.budget import Budget
from prefixstore.engine.invariants import violations
from prefixstore.engine.pages import open_pages
from prefixstore.errors import (
    CorruptError,
    IncompatibleError,
    InvalidParameterError,
    LocationError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.record import Usage
from tests.support.engines import A, B, store_of
from tests.support.pages import make_page
from tests.support.timeouts import wait_for
from tests.support.valkey import private_valkey, valkey_client, valkey_url  # noqa: F401 - fixtures

MIB = 1 << 20


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that answers each request alike; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        while connection.recv(1 << 16):
                            connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def test_a_server_that_repeats_the_arguments_of_auth_shows_no_password():
    # as it does where AUTH was renamed; a traceback shows the lines of this file, too
    secret = "s3"[::-1] * 3
    answer = f"-ERR unknown command 'AUTH', with args beginning with: 'me' '{secret}' \r\n"
    with answering(answer.encode()) as port:
        url = f"valkey://me:{secret}@127.0.0.1:{port}"
        with pytest.raises(StorageError, match="unknown command 'AUTH'") as caught:
            open_pages(url, max_bytes=MIB)
    assert secret not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("answer", [b"-MOVED 1 nowhere\r\n", b"-MOVED 1 127.0.0.1:\r\n", b":x\r\n", b"*x\r\n"])
def test_what_should_be_a_number_and_is_none_is_an_error_of_ours(answer):
    with answering(answer) as port, pytest.raises(UnavailableError):
        open_pages(f"valkey://127.0.0.1:{port}", max_bytes=MIB)


def test_a_host_whose_name_cannot_be_encoded_is_an_error_of_ours():
    with pytest.raises(UnavailableError):
        open_pages(f"valkey://{'a' * 70}.b", max_bytes=MIB)


# -- what a commit cannot do ------------------------------------------------------------------------------------------


def put(transaction, number, **usage):
    key, record = make_page(b"x" * 1000, [number])
    transaction.put_namespace(record.namespace, b"%d" % number)
    transaction.put(key, record, Usage(1, **usage), b"x" * 1000)
    return key


def all_changes(backend, key, number):
    """Every kind of change, in one transaction; the key of the new page."""
    with backend.update() as transaction:
        transaction.delete(key)
        transaction.put_note(b"name", b"%d" % number)
        return put(transaction, number)


def check(backend):
    with backend.view() as view:
        return violations(view, Budget(MIB))


def sound(backend):
    """All keys; nothing in the location contradicts another part of it."""
    assert check(backend) == []
    with backend.view() as view:
        return {key for key, _, _ in view.scan()}


@pytest.mark.parametrize("kind", ["lock", "rows", "order", "meta"])
def test_a_key_that_another_application_has_replaced_is_refused_before_anything_is_written(url, client, kind):
    name = f"{{{url.rpartition('=')[2]}}}:{kind}"
    with closing(open_pages(url, max_bytes=MIB)) as backend:
        with backend.update() as transaction:
            key = put(transaction, 1)
        old = client.dump(name)
        client.delete(name)
        client.rpush(name, "theirs")
        for number in (2, 3):
            with pytest.raises(IncompatibleError, match="another application"):
                all_changes(backend, key, number)
        client.delete(name)
        if old is not None:
            client.restore(name, 0, old)
        assert sound(backend) == {key}
        assert {all_changes(backend, key, 4)} == sound(backend)


@pytest.mark.parametrize("command", ["rename", "unlink", "persist", "hset", "hdel", "zadd", "zrem", "del", "set"])
def test_a_user_who_lacks_a_command_writes_nothing(url, client, valkey_server, command):
    name = url.rpartition("=")[2]
    with closing(open_pages(url, max_bytes=MIB)) as backend, backend.update() as transaction:
        key = put(transaction, 1)
    client.execute_command("ACL", "SETUSER", "lacking", "reset", "on", ">secret", "+@all", "~*", f"-{command}")
    try:
        theirs = open_pages(f"unix://lacking:secret@{valkey_server.socket}?name={name}", max_bytes=MIB)
        with closing(theirs):
            with pytest.raises(LocationError, match=rf"permission.*\b{command}\b"):
                all_changes(theirs, key, 2)
            assert sound(theirs) == {key}
            client.execute_command("ACL", "SETUSER", "lacking", f"+{command}")
            assert {all_changes(theirs, key, 3)} == sound(theirs)
    finally:
        client.execute_command("ACL", "DELUSER", "lacking")


@pytest.mark.parametrize("before", [b"", b"*2\r\n", b"*2\r\n$1\r\nr\r\n"])
@pytest.mark.parametrize("answer", [b"$abc", b"$", b"$1e3", b"$%d" % (1 << 62), b":1", b"**", b"+OK", b"-ERR no"])
def test_an_answer_that_is_no_value_is_an_error_of_ours(before, answer):
    near, far = socket.socketpair()
    with near, far:
        connection = UnixDomainSocketConnection()
        connection._sock = near
        far.sendall(b"+OK\r\n+QUEUED\r\n+QUEUED\r\n" + before + answer + b"\r\n")
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(UnavailableError), translated("here"):
            payloads._Replies(connection, ReceivedMemory(), SimpleNamespace()).next()


def test_a_payload_for_which_there_is_no_memory_is_an_error_of_ours(url, monkeypatch):
    with closing(open_pages(url, max_bytes=MIB)) as backend:
        with backend.update() as transaction:
            key = put(transaction, 1)

        def refuse(size):
            raise MemoryError

        with monkeypatch.context() as patch, backend.view() as view:
            patch.setattr(received, "bytearray", refuse, raising=False)
            with pytest.raises(UnavailableError, match="no memory"):
                view.payload(key)
        assert sound(backend) == {key}


# -- servers that take each other's place -----------------------------------------------------------------------------


@contextmanager
def redirecting(answer: list[bytes]) -> Iterator[int]:
    """A node of a cluster that answers every command but those of a new connection with `answer[0]`; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                while request := connection.recv(1 << 20):
                    connection.sendall(b"+OK\r\n" if b"SELECT" in request or b"CLIENT" in request else answer[0])

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def moved_to(port):
    return b"-MOVED 1 127.0.0.1:%d\r\n" % port


def test_a_node_that_is_gone_is_looked_for_again():
    with private_valkey() as one, private_valkey() as two:
        answer = [moved_to(one.port)]
        with redirecting(answer) as port, closing(open_pages(f"valkey://127.0.0.1:{port}", max_bytes=MIB)) as backend:
            with backend.update() as transaction:
                key = put(transaction, 1)
            assert sound(backend) == {key}
            one.kill()
            answer[0] = moved_to(two.port)
            with backend.update() as transaction:
                key = put(transaction, 2)
            assert sound(backend) == {key}
            # a ring of nodes that all name another one is no more than an error
            two.kill()
            answer[0] = moved_to(port)
            with pytest.raises(UnavailableError):
                sound(backend)


def test_a_server_that_has_become_a_replica_is_left_for_the_one_at_its_address():
    with private_valkey() as one, private_valkey() as two, tempfile.TemporaryDirectory(dir="/tmp") as directory:
        address = Path(directory, "s")
        address.symlink_to(one.socket)
        with closing(open_pages(f"unix://{address}", max_bytes=MIB)) as backend:
            with backend.update() as transaction:
                key = put(transaction, 1)
            two.client().execute_command("REPLICAOF", "127.0.0.1", one.port)
            wait_for(lambda: two.client().info()["master_link_status"] == "up", "the replica")
            two.client().execute_command("REPLICAOF", "NO", "ONE")
            one.client().execute_command("REPLICAOF", "127.0.0.1", two.port)
            # before the address follows, nothing can be written
            with pytest.raises(UnavailableError, match="read only replica"), backend.update():
                pass
            address.unlink()
            address.symlink_to(two.socket)
            with backend.update() as transaction:
                other = put(transaction, 2)
            assert sound(backend) == {key, other}


def test_a_flush_that_the_user_may_not_wait_for_is_no_promise(url, client, valkey_server):
    with closing(open_pages(url, max_bytes=MIB)):
        pass
    client.execute_command("ACL", "SETUSER", "hasty", "reset", "on", ">secret", "+@all", "~*", "-waitaof")
    try:
        theirs = f"unix://hasty:secret@{valkey_server.socket}?name={url.rpartition('=')[2]}"
        with closing(open_pages(theirs, max_bytes=MIB)) as backend, pytest.raises(LocationError, match="waitaof"):
            backend.sync()
    finally:
        client.execute_command("ACL", "DELUSER", "hasty")


# -- values that nobody of us has written -----------------------------------------------------------------------------


def name_of(url, kind):
    return f"{{{url.rpartition('=')[2]}}}:{kind}"


@pytest.mark.parametrize("kind", ["rows", "order", "both", "out of order"])
def test_rows_that_are_none_are_found_and_end_every_walk(url, client, kind):
    with store_of(open_pages(url, max_bytes=64 * MIB)) as store:
        store.put(A)
        # more than are read at a time, before all others and after them; or with places in another order
        members = [b"%c%d" % (first, number) for first in b"\0\xff" for number in range(3000)]
        if kind != "order":
            client.hset(name_of(url, "rows"), mapping=dict.fromkeys(members, b"short"))
        if kind != "rows":
            client.zadd(name_of(url, "order"), dict.fromkeys(members, int(kind == "out of order")))
        with suppress(CorruptError):
            assert store.fetch(A) in (0, 3)
        with suppress(CorruptError), store.backend.view() as view:
            assert len(list(view.scan())) < 7000
        with pytest.raises(CorruptError):
            store.engine.check()
        # the location starts over
        assert (store.put(B), store.fetch(B), store.fetch(A)) == (3, 3, 0)
        assert store.engine.check() == []


@pytest.mark.parametrize("field", ["rows", "bytes"])
@pytest.mark.parametrize("value", [None, b"", b"nan", b"1e3", b"-1", b"\xff"])
def test_counts_that_cannot_be_read_start_the_location_over(url, client, field, value):
    with store_of(open_pages(url, max_bytes=64 * MIB)) as store:
        store.put(A)
        if value is None:
            client.hdel(name_of(url, "meta"), field)
        else:
            client.hset(name_of(url, "meta"), field, value)
        # what can be read is read
        assert store.fetch(A) == 3
        with store_of(open_pages(url, max_bytes=64 * MIB)) as other:
            assert other.put(B) == 3
        # a process that has missed this notices it at the next miss
        assert (store.fetch(A), store.put(A), store.fetch(A), store.fetch(B)) == (0, 3, 3, 3)


def test_what_is_left_of_a_location_of_another_version_stays(url, client):
    with closing(open_pages(url, max_bytes=MIB)) as backend, backend.update() as transaction:
        put(transaction, 1)
    client.hset(name_of(url, "meta"), "format", "99")
    client.delete(name_of(url, "order"))
    before = set(client.keys(name_of(url, "*")))
    with pytest.raises(IncompatibleError, match="upgrade"):
        open_pages(url, max_bytes=MIB)
    assert set(client.keys(name_of(url, "*"))) == before


# -- slow lines -------------------------------------------------------------------------------------------------------


def test_a_lock_lasts_as_long_as_a_large_payload_is_sent(url, client, monkeypatch):
    monkeypatch.setattr(backend_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(backend_module, "RENEW_SECONDS", 0)
    lock, left, renew = name_of(url, "lock"), [], backend_module.Turn.keep

    def renewed(turn):
        renew(turn)
        left.append(client.pttl(lock))
        # almost over when the next piece is sent
        client.pexpire(lock, 5000)

    monkeypatch.setattr(backend_module.Turn, "keep", renewed)
    with closing(open_valkey(url, max_bytes=MIB, read_only=False)) as backend:
        with backend.update() as draft:
            draft.put(b"a", b"1", bytes(10_000))
        assert len(left) >= 10
        assert min(left) > 5000
        # one that is lost all the same ends the sending
        del left[:]
        monkeypatch.setattr(client, "pexpire", lambda name, _: len(left) > 5 and client.delete(name))
        with pytest.raises(ConflictError), backend.update() as draft:
            draft.put(b"a", b"2", bytes(10_000))
        assert len(left) < 10
        with backend.view() as view:
            assert view.get([b"a"]) == [b"1"]
        assert client.keys(name_of(url, "new:*")) == []


def test_values_of_unknown_options_are_not_repeated():
    with pytest.raises(InvalidParameterError, match="unknown options key") as caught:
        open_pages("valkey://host/0?key=S3CRET", max_bytes=MIB)
    assert "S3CRET" not in str(caught.value)
