"""Servers of Valkey that answer otherwise than usual: strange commands, missing rights, keys that others have put."""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace

import pytest
from valkey.connection import UnixDomainSocketConnection

from prefixstore.backends.received import ReceivedMemory
from prefixstore.backends.valkey import valkey_view as payloads
from prefixstore.backends.valkey.connections import translated
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
from tests.support import keys_of
from tests.support.engines import A, B, store_of
from tests.support.pages import make_page
from tests.support.places import opened
from tests.support.valkey import named, user, valkey_client, valkey_url  # noqa: F401 - fixtures

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


# -- what a commit cannot do ------------------------------------------------------------------------------------------


def put(transaction, number):
    key, record = make_page(b"x" * 1000, [number])
    transaction.put_namespace(record.namespace, b"%d" % number)
    transaction.put(key, record, Usage(1), b"x" * 1000)
    return key


def all_changes(backend, key, number):
    """Every kind of change, in one transaction; the key of the new page."""
    with backend.update() as transaction:
        transaction.delete(key)
        transaction.put_note(b"name", b"%d" % number)
        return put(transaction, number)


def sound(backend):
    """All keys; nothing in the location contradicts another part of it."""
    with backend.view() as view:
        assert violations(view, Budget(MIB)) == []
    return keys_of(backend)


@pytest.mark.parametrize("command", ["rename", "unlink", "persist", "hset", "hdel", "zadd", "zrem", "del", "set"])
def test_a_user_who_lacks_a_command_writes_nothing(url, client, valkey_server, command):
    name = url.rpartition("=")[2]
    with closing(open_pages(url, max_bytes=MIB)) as backend, backend.update() as transaction:
        key = put(transaction, 1)
    location = f"unix://lacking:secret@{valkey_server.socket}?name={name}"
    with user(client, "lacking", ">secret", "+@all", "~*", f"-{command}"), opened(location) as theirs:
        with pytest.raises(LocationError, match=rf"permission.*\b{command}\b"):
            all_changes(theirs, key, 2)
        assert sound(theirs) == {key}
        client.execute_command("ACL", "SETUSER", "lacking", f"+{command}")
        assert {all_changes(theirs, key, 3)} == sound(theirs)


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


def test_a_flush_that_the_user_may_not_wait_for_is_no_promise(url, client, valkey_server):
    with closing(open_pages(url, max_bytes=MIB)):
        pass
    theirs = f"unix://hasty:secret@{valkey_server.socket}?name={url.rpartition('=')[2]}"
    with (
        user(client, "hasty", ">secret", "+@all", "~*", "-waitaof"),
        opened(theirs) as backend,
        pytest.raises(LocationError, match="waitaof"),
    ):
        backend.sync()


# -- values that nobody of us has written -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rows", "order", "both", "out of order"])
def test_rows_that_are_none_are_found_and_end_every_walk(url, client, kind):
    with store_of(open_pages(url, max_bytes=64 * MIB)) as store:
        store.put(A)
        # more than are read at a time, before all others and after them; or with places in another order
        members = [b"%c%d" % (first, number) for first in b"\0\xff" for number in range(3000)]
        if kind != "order":
            client.hset(named(url, "rows"), mapping=dict.fromkeys(members, b"short"))
        if kind != "rows":
            client.zadd(named(url, "order"), dict.fromkeys(members, int(kind == "out of order")))
        with suppress(CorruptError):
            assert store.fetch(A) in (0, 3)
        with suppress(CorruptError), store.backend.view() as view:
            assert len(list(view.scan())) < 7000
        with pytest.raises(CorruptError):
            store.engine.upkeep.check()
        # the location starts over
        assert (store.put(B), store.fetch(B), store.fetch(A)) == (3, 3, 0)
        assert store.engine.upkeep.check() == []
