"""Locations in a Valkey server: the contract, and what is special to them."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import closing, suppress

import numpy as np
import pytest
import valkey

from prefixstore.backends import open_backend
from prefixstore.backends.valkey import connections
from prefixstore.backends.valkey import transaction as transaction_module
from prefixstore.backends.valkey.address import Address
from prefixstore.backends.valkey.layout import LENGTH
from prefixstore.backends.valkey.payloads import AHEAD_BYTES, MOST_AHEAD, KeptBuffers, receive
from prefixstore.backends.valkey.view import KEPT_VIEWS, Shared
from prefixstore.engine.budget import Budget
from prefixstore.engine.invariants import violations
from prefixstore.errors import (
    CorruptError,
    InvalidParameterError,
    LocationError,
    MissingExtraError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import Usage
from prefixstore.testing import PersistentBackendContract, make_page
from tests.support import PATIENCE, ROOT
from tests.support.engines import NS, A, B, P, Store
from tests.support.places import contents, opened
from tests.support.timeouts import wait_for
from tests.support.valkey import private_valkey, remove, valkey_client, valkey_url  # noqa: F401 - fixtures

MIB = 1 << 20


class ValkeyContract(PersistentBackendContract):
    """Each directory of a test is a location of its own."""

    tcp = False

    @pytest.fixture(autouse=True)
    def locations(self, new_valkey):
        self.new, self.urls = new_valkey, {}

    def open_backend(self, tmp_path):
        if tmp_path not in self.urls:
            self.urls[tmp_path] = self.new(tcp=self.tcp)
        return open_backend(self.urls[tmp_path], max_bytes=64 * MIB)


class TestUnixSocket(ValkeyContract):
    pass


@pytest.mark.slow
class TestTCP(ValkeyContract):
    tcp = True


# -- helpers ----------------------------------------------------------------------------------------------------------


def named(url, kind):
    """The name of a key of a location."""
    return f"{{{url.rpartition('=')[2]}}}:{kind}"


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


def generation_of(backend):
    with backend.view() as view:
        return view.generation


def changes_of(backend, since):
    with backend.view() as view:
        return view.changes(since)


def check(backend):
    with backend.view() as view:
        return [violation.rule for violation in violations(view, Budget(64 * MIB))]


# -- the URL ----------------------------------------------------------------------------------------------------------


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
        ("unix://me:pw@/run/v.sock", "unix", {"path": "/run/v.sock", "db": 0, "username": "me", "password": "pw"}),
    ],
)
def test_a_url_says_where_the_server_is(url, kind, options):
    address = Address.parse(url)
    assert (address.kind, address.options) == (kind, options)
    assert address.name == "prefixstore"
    for secret in ("pw", "a%40b", "a@b"):
        assert secret not in repr(address) + str(address) + address.shown


@pytest.mark.parametrize(
    "url",
    [
        "valkey://h/kv",
        "valkey://h?db=x",
        "valkey://h?name=a%20b",
        "valkey://h?name=",
        "valkey://h?timeout=1",
        "valkey://h?ssl_ca_certs=/x",
        "valkey://h#f",
        "valkey://h:port",
        "valkey://u:p@ss@h",
        "valkey:",
        "unix://",
    ],
)
def test_a_url_that_is_wrong_is_refused(url):
    with pytest.raises(InvalidParameterError, match="location"):
        open_backend(url, max_bytes=MIB)


def test_without_the_client_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("prefixstore.backends.valkey.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == "valkey"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"prefixstore\[valkey\]"):
        open_backend("valkey://localhost", max_bytes=MIB)


def test_locations_of_one_server_are_apart(new_valkey):
    with opened(new_valkey()) as one, opened(new_valkey()) as other:
        assert put(one, 1)
        assert contents(other) == {}


# -- users ------------------------------------------------------------------------------------------------------------


def test_a_user_with_the_documented_rights_can_do_everything(url, client, valkey_server):
    rights = re.search(r"`ACL SETUSER (.*?)`", (ROOT / "docs" / "backends.md").read_text())
    assert rights is not None
    name = url.rpartition("=")[2]
    _, *words = rights[1].replace("PASSWORD", "secret").replace("prefixstore", name).split()
    client.execute_command("ACL", "SETUSER", "limited", "reset", *words)
    try:
        with opened(f"unix://limited:secret@{valkey_server.socket}?name={name}") as backend:
            keys = put(backend, 1, 2)
            with backend.update() as transaction:
                transaction.touch(keys[0], Usage(3, pinned=True), announce=True)
                transaction.put_note(b"n", b"v")
                transaction.delete(keys[1])
            backend.sync()
            backend.reclaim()
            backend.reindex()
            assert check(backend) == []
            assert contents(backend)[keys[0]][1] == Usage(3, pinned=True)
        with pytest.raises(LocationError, match="permission"):
            open_backend(f"unix://limited:secret@{valkey_server.socket}?name=other", max_bytes=MIB)
    finally:
        client.execute_command("ACL", "DELUSER", "limited")


def test_a_wrong_password_is_refused_and_not_shown(client, valkey_server):
    client.execute_command("ACL", "SETUSER", "known", "on", ">right", "+@all", "~*")
    try:
        for who in ("known", "unknown"):
            url = f"unix://{who}:wr0ng@{valkey_server.socket}"
            with pytest.raises(LocationError, match="refuses user and password") as caught:
                open_backend(url, max_bytes=MIB)
            assert "wr0ng" not in "".join(traceback.format_exception(caught.value))
        with opened(f"unix://known:right@{valkey_server.socket}?name=pw-test") as backend:
            assert "right" not in backend.location + repr(backend)
    finally:
        client.execute_command("ACL", "DELUSER", "known")
        remove(valkey_server.url, ["pw-test"])


# -- whose keys they are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("SET", "meta", "mine"), "another application"),
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
    if command[0] == "HSET" and "magic" not in command and read_only:
        says = "no store"
    with pytest.raises(StorageError, match=says):
        open_backend(url, max_bytes=MIB, read_only=read_only)
    assert client.keys(named(url, "*")) == [named(url, key).encode()]
    assert client.dump(named(url, key)) == before


def test_read_only_needs_a_store_and_writes_nothing(url, client):
    with pytest.raises(LocationError, match="no store"):
        open_backend(url, max_bytes=MIB, read_only=True)
    assert client.keys(named(url, "*")) == []
    with opened(url) as backend:
        (key,) = put(backend, 1)
    with opened(url, read_only=True) as reader:
        assert set(contents(reader)) == {key}
        reader.sync()
        reader.reclaim()
        for write in (reader.reindex, lambda: put(reader, 2)):
            with pytest.raises(UnavailableError, match="read-only"):
                write()


def test_every_key_has_the_name_of_the_location_in_braces(url, client):
    before = set(client.keys("*"))
    with opened(url) as backend, backend.update() as transaction:
        put_one = make_page(b"x", [1])
        transaction.put(*put_one, Usage(1), b"x")
        during = set(client.keys("*"))
    after = set(client.keys("*"))
    name = named(url, "").encode()
    assert {key for key in during | after if not key.startswith(name)} <= before
    assert len(after - before) == 7  # five structures, the log, one page


# -- round trips ------------------------------------------------------------------------------------------------------


def test_a_lookup_takes_three_round_trips_and_one_if_all_is_known(url, monkeypatch):
    with closing(Store(open_backend(url, max_bytes=64 * MIB))) as writer:
        tokens = list(range(400))
        assert writer.put(tokens) == 100
    sent = []
    real = connections.Connections.use
    monkeypatch.setattr(connections.Connections, "use", lambda self, work: (sent.append(1), real(self, work))[1])
    with closing(Store(open_backend(url, max_bytes=64 * MIB))) as reader:
        del sent[:]
        assert reader.match(tokens) == 400
        assert len(sent) <= 3
        del sent[:]
        assert reader.match(tokens) == 400
        assert len(sent) == 1
        with closing(Store(open_backend(url, max_bytes=64 * MIB))) as writer:
            assert writer.put([7] * 40) == 10
        del sent[:]
        assert reader.match(tokens) == 400
        assert len(sent) == 1  # what was changed comes with the generation
        assert reader.match([7] * 40) == 40


# -- transactions -----------------------------------------------------------------------------------------------------


def test_a_transaction_that_is_undone_or_lost_leaves_nothing(url, client):
    with opened(url) as backend:
        before = set(client.keys(named(url, "*")))
        with suppress(ZeroDivisionError), backend.update() as transaction:
            transaction.put(*make_page(b"x", [1]), Usage(1), b"x")
            staged = client.keys(named(url, "new:*"))
            assert len(staged) == 1
            # of a process that is killed here
            assert 0 < client.pttl(staged[0]) <= 600_000
            assert 0 < client.pttl(named(url, "lock")) <= 15_000
            raise ZeroDivisionError
        assert set(client.keys(named(url, "*"))) == before
        assert contents(backend) == {}


def test_a_transaction_that_has_lost_its_lock_writes_nothing(url, client):
    with opened(url) as backend, opened(url) as other:
        for lose in (
            lambda: client.delete(named(url, "lock")),
            lambda: client.set(named(url, "lock"), b"somebody else"),
            lambda: (client.delete(named(url, "lock")), put(other, 5)),
        ):
            with pytest.raises(UnavailableError, match="lock"):
                put(backend, 1, then=lose)
            client.delete(named(url, "lock"))
        assert set(contents(backend)) == {make_page(b"x" * 1000, [5])[0]}
        assert check(backend) == []
        assert client.keys(named(url, "new:*")) == []
        put(backend, 6)


def test_a_writer_waits_for_another_and_gives_up_after_a_while(url, monkeypatch):
    monkeypatch.setattr(transaction_module, "WAIT_SECONDS", 0.2)
    with opened(url) as one, opened(url) as two:
        says = "another process has been writing"
        with one.update(), pytest.raises(UnavailableError, match=says), two.update():
            raise AssertionError("it began")


def test_a_lock_is_renewed_while_its_transaction_works(url, client, monkeypatch):
    monkeypatch.setattr(transaction_module, "RENEW_SECONDS", 0)
    with opened(url) as backend, backend.update() as transaction:
        client.pexpire(named(url, "lock"), 5000)
        transaction.put(*make_page(b"x", [1]), Usage(1), b"x")
        assert client.pttl(named(url, "lock")) > 5000


def test_a_commit_whose_answer_is_lost_is_sent_again_and_counts_once(url, monkeypatch):
    with opened(url) as backend:
        before = generation_of(backend)
        real, cut = connections.Connections._use, []

        def use(self, connection, work):
            answer = real(self, connection, work)
            if answer == b"committed" and not cut:
                cut.append(1)
                raise valkey.ConnectionError("cut")
            return answer

        monkeypatch.setattr(connections.Connections, "_use", use)
        (key,) = put(backend, 1)
        assert cut
        assert generation_of(backend) == before + 1
        assert changes_of(backend, before) == [key]
        assert check(backend) == []


def test_what_was_staged_and_is_evicted_is_not_committed(url, client):
    with opened(url) as backend:
        with pytest.raises(UnavailableError, match="evicted"):
            put(backend, 1, 2, then=lambda: client.delete(client.keys(named(url, "new:*"))[0]))
        assert contents(backend) == {}
        assert client.keys(named(url, "new:*")) == []
        put(backend, 1)


def test_old_changes_are_forgotten(url, monkeypatch):
    monkeypatch.setattr(transaction_module, "CHANGES_KEPT", 3)
    with opened(url) as backend:
        start = generation_of(backend)
        written = [put(backend, 2 * i, 2 * i + 1) for i in range(6)]
    for keeps_up in (False, True):
        # a process that has seen nothing, and one that has
        with opened(url) as backend:
            if keeps_up:
                generation_of(backend)
            known = [changes_of(backend, start + since) for since in range(7)]
        expected = [[key for keys in written[since:] for key in keys] for since in range(7)]
        assert known == [None, None, None, *expected[3:]]


# -- what the server forgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["meta", "entries", "order", "children", "settings"])
def test_a_structure_that_the_server_has_evicted_starts_the_location_over(url, client, kind):
    with opened(url) as backend, opened(url) as other:
        (key,) = put(backend, 1)
        seen = generation_of(other)
        client.delete(named(url, kind))
        # a reader notices by the generation, and fails in nothing
        assert generation_of(other) > seen
        assert changes_of(other, seen) is None
        with other.view() as view:
            assert view.used.entries == 0
            view.leading([key])
            view.neighbors(bytes(32), b"")
        other.sync()
        other.reclaim()
        assert set(check(other)) <= {"index", "namespace"}
        (new,) = put(backend, 2)
        assert generation_of(other) > seen + 1
        assert changes_of(other, seen) is None
        assert set(contents(other)) == {new}
        # what was left of the old one is gone
        assert len(client.keys(named(url, "page:*"))) == 1
        assert check(other) == []
        put(other, 1)
        assert set(contents(other)) == {key, new}


@pytest.mark.parametrize("kind", ["log", "notes"])
def test_a_structure_that_can_be_missed_costs_nothing_stored(url, client, kind):
    with opened(url) as backend:
        before = generation_of(backend)
        keys = put(backend, 1)
        client.delete(named(url, kind))
        assert changes_of(backend, before) in (None, keys)
        keys += put(backend, 2)
        assert set(contents(backend)) == set(keys)
        assert check(backend) == []


def test_a_payload_that_the_server_has_evicted_is_a_damaged_page_that_is_computed_again(url, client):
    with closing(Store(open_backend(url, max_bytes=64 * MIB))) as store:
        assert store.put(A) == 3
        keys = [page.key for page in store.engine.match(NS, as_tokens(A), P).pages]
        client.delete(named(url, f"page:{keys[1].hex()}"))
        assert store.fetch(A) == 1
        assert [one.rule for one in store.engine.check()] == ["payload"]
        store.engine.flush()
        # the next commit has deleted it, and what came after it
        assert store.put(B) == 3
        assert store.engine.check() == []
        assert store.put(A) == 2
        assert store.fetch(A) == 3


def test_a_server_that_lost_its_last_changes_is_not_taken_for_the_one_before():
    with private_valkey(save="3600 1") as server, opened(server.url) as backend, opened(server.url) as other:
        put(backend, 1)
        server.client().save()
        lost = put(backend, 2) + put(backend, 3)
        seen = generation_of(other)
        server.kill()
        server.start()
        # as many generations as before, with other changes
        kept = put(backend, 4) + put(backend, 5)
        assert generation_of(other) > seen
        assert changes_of(other, seen) is None
        assert not set(contents(other)) & set(lost)
        now = generation_of(other)
        more = put(backend, 6)
        assert changes_of(other, now) == more
        assert set(kept + more) < set(contents(other))
        assert check(other) == []


def test_a_server_that_restarts_empty_is_used_again():
    with private_valkey() as server, closing(Store(open_backend(server.url, max_bytes=64 * MIB))) as store:
        assert store.put(A) == 3
        server.kill()
        server.start()
        assert store.fetch(A) == 0
        assert store.put(A) == 3
        assert store.fetch(A) == 3
        assert store.engine.check() == []


# -- payloads ---------------------------------------------------------------------------------------------------------


def test_payloads_expire_in_the_server_some_time_after_their_pages(url, client):
    soon = time.time_ns() + 3600 * 10**9
    with opened(url) as backend:
        (key,) = put(backend, 1, expires=soon)
        name = named(url, f"page:{key.hex()}")
        assert 3_600_000 < client.pttl(name) < 2 * 3_600_000

        def life(usage):
            with backend.update() as transaction:
                transaction.touch(key, usage)
            return client.pttl(name)

        assert life(Usage(2, pinned=True, expires=soon)) == -1
        assert 3_600_000 < life(Usage(2, expires=soon)) < 2 * 3_600_000
        assert life(Usage(2, expires=soon + 3600 * 10**9)) > 7_200_000
        assert life(Usage(2)) == -1
        assert life(Usage(2, expires=1)) > 0
        # when the server has dropped it, nobody takes that for damage
        client.delete(name)
        assert check(backend) == []


def test_memory_is_used_again_only_when_nobody_refers_to_it():
    kept = KeptBuffers()
    one = kept.acquire(100_000)
    one[:3] = b"one"
    part = one[1:3]
    del one
    two = kept.acquire(100_000)
    two[:3] = b"two"
    assert bytes(part) == b"ne"
    del part
    three = kept.acquire(90_000)
    three[:3] = b"333"
    assert bytes(two[:3]) == b"two"
    assert len(kept._all) == 2
    kept.trim()
    assert kept._all == []
    assert (bytes(two[:3]), bytes(three[:3])) == (b"two", b"333")


def test_a_restore_uses_few_buffers_whatever_its_length(url):
    with opened(url) as backend:
        payloads = {n: bytes([n]) * 300_000 for n in range(20)}
        keys = [put(backend, n, payload=payload)[0] for n, payload in payloads.items()]
        with backend.view() as view:
            for n, (_, payload) in enumerate(view.fetch(keys)):
                assert payload == payloads[n]
            assert n == 19
            assert len(view._kept._all) <= 3
        # a caller that ends early leaves no answer behind that another would take for its own
        with backend.view() as view:
            assert next(iter(view.fetch(keys)))[1] == payloads[0]
            assert view.payload(keys[5]) == payloads[5]
            assert view.records(keys[:1])
        with backend.view() as view:
            assert [bytes(payload[:1]) for _, payload in view.fetch(keys[::-1])] == [bytes([n]) for n in range(20)][
                ::-1
            ]


class Unhurried(threading.Thread):
    """A server that answers a GET only when the next `least` are there, or the last; it notes how many wait."""

    def __init__(self, values, least):
        super().__init__(daemon=True)
        self.values, self.least = values, least
        self.waiting = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.start()

    def run(self):
        end, _ = self.listener.accept()
        with end, end.makefile("rb") as commands:
            asked = answered = 0
            while line := commands.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(commands.readline()[1:])
                    words.append(commands.read(size + 2)[:-2])
                if words[0] != b"GET":
                    end.sendall(b"+OK\r\n")
                    continue
                assert words[1] == b"%d" % asked
                asked += 1
                while answered < asked and (asked > answered + self.least or asked == len(self.values)):
                    self.waiting.append(asked - answered)
                    value = self.values[answered]
                    end.sendall(b"$%d\r\n%s\r\n" % (len(value), value))
                    answered += 1


@pytest.mark.parametrize("size", [1000, 8 << 20, 20 << 20])
def test_requests_are_always_on_their_way_and_not_too_many(size):
    # two beyond the one that is received: of pages of 8 MiB that is more than 1 Gbit/s delivers in 50 ms
    values = [LENGTH.pack(1) + b"r" + bytes([n]) * size for n in range(6)]
    server = Unhurried(values, 2)
    with closing(server.listener):
        pool = connections.Connections(Address.parse(f"valkey://127.0.0.1:{server.port}/0"))
        found = receive(pool, [b"%d" % n for n in range(6)], KeptBuffers())
        for n, value in enumerate(found):
            assert (value[0], value[1][-1], len(value[1])) == (b"r", n, size)
        pool.close()
        server.join(PATIENCE)
    assert len(server.waiting) == 6
    assert max(server.waiting) <= max(3, min(AHEAD_BYTES // size, MOST_AHEAD))


def test_an_error_is_not_followed_by_the_answers_to_what_was_asked_with_it(url, client):
    with opened(url) as backend:
        keys = put(backend, 1, 2, 3)
        name = named(url, f"page:{keys[0].hex()}")
        client.delete(name)
        client.lpush(name, b"x")
        with backend.view() as view:
            with pytest.raises(StorageError):
                list(view.fetch(keys))
            assert view.payload(keys[1]) is not None
            assert sorted(view.records(keys)) == sorted(keys)


def test_a_value_that_is_not_ours_is_damage(url, client):
    with opened(url) as backend:
        (key,) = put(backend, 1)
        (other,) = put(backend, 2)
        name = named(url, f"page:{key.hex()}")
        for value in (b"", b"abc", b"\xff" * 100, client.get(named(url, f"page:{other.hex()}"))):
            client.set(name, value)
            with backend.view() as view, pytest.raises(CorruptError):
                list(view.fetch([key]))
            assert "payload" in check(backend)


def test_entries_that_are_damaged_are_found_and_can_be_deleted(url, client):
    with opened(url) as backend:
        keys = put(backend, 1, 2, 3)
        entry = client.hget(named(url, "entries"), keys[0])
        for value in (b"abc", entry[:60], entry[:-1], entry[:80] + b"x" + entry[81:]):
            client.hset(named(url, "entries"), keys[0], value)
            assert "record" in check(backend)
            with backend.view() as view:
                assert len(view.facts(b"", 9)) == 3
                view.neighbors(make_page(b"", [1])[1].parent, b"")
        with backend.update() as transaction:
            assert transaction.delete(keys[0])
        backend.reindex()
        assert check(backend) == []
        assert set(contents(backend)) == set(keys[1:])


@pytest.mark.parametrize("kind", ["order", "children"])
def test_an_order_that_lacks_a_page_or_has_another_is_found_and_mended(url, client, kind):
    with opened(url) as backend:
        keys = put(backend, *range(20))
        name = named(url, kind)
        members = [member for member in client.zrange(name, 0, -1) if member]
        client.zrem(name, members[3])
        client.zadd(name, {bytes(70): 0})
        before = generation_of(backend)
        assert "index" in check(backend)
        backend.reindex()
        assert check(backend) == []
        assert changes_of(backend, before) is None
        assert set(contents(backend)) == set(keys)
        assert set(client.zrange(name, 0, -1)) == {b"", *members}


def test_values_without_an_entry_are_found_and_deleted(url, client):
    with opened(url) as backend:
        keys = put(backend, 1)
        for number in (7, 8):
            client.copy(named(url, f"page:{keys[0].hex()}"), named(url, f"page:{bytes([number] * 32).hex()}"))
        assert check(backend) == ["orphan"] * 2
        with backend.update() as transaction:
            assert transaction.delete(bytes([7] * 32))
        assert check(backend) == ["orphan"]
        backend.reclaim()
        assert check(backend) == []
        assert set(contents(backend)) == set(keys)


def used_memory(client):
    """What the server uses, once it has freed what was deleted: it does that in a thread."""
    wait_for(lambda: client.info("memory")["lazyfree_pending_objects"] == 0, "the end of freeing")
    return client.info("memory")["used_memory"]


def test_what_is_counted_is_about_what_the_server_uses(url, client):
    payload = np.random.default_rng(1).bytes(100_000)
    with opened(url) as backend:
        with backend.view() as view:
            empty = view.used.bytes
        before = used_memory(client)
        put(backend, *range(300), payload=payload)
        grown = used_memory(client) - before
        with backend.view() as view:
            counted = view.used.bytes - empty
    # allocators round up, some more than others; connections take some, too
    assert 0.9 * grown < counted < 1.4 * grown


# -- replicas ----


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
                seen = generation_of(reader)
                with opened(two.url) as writer:
                    with pytest.raises(UnavailableError, match="read only replica"):
                        put(writer, 3)
                    two.client().execute_command("REPLICAOF", "NO", "ONE")
                    more = put(writer, 3)
                assert changes_of(reader, seen) == more
                assert check(reader) == []


# -- clusters ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_location_in_a_cluster_is_found_through_any_node():
    options = {"cluster-enabled": "yes", "cluster-announce-ip": "127.0.0.1"}
    with private_valkey(**options) as one, private_valkey(**options) as two:
        # all slots are of the second one
        two.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        one.client().execute_command("CLUSTER", "MEET", "127.0.0.1", two.port)

        def is_known():
            with suppress(valkey.ValkeyError):
                one.client().get("a")
            try:
                one.client().execute_command("GET", "a")
            except valkey.exceptions.ResponseError as error:
                return "MOVED" in str(error) or type(error).__name__ == "MovedError"
            return False

        wait_for(is_known, "the cluster")
        wait_for(lambda: b"cluster_state:ok" in two.client().execute_command("CLUSTER", "INFO"), "the cluster")
        with closing(Store(open_backend(one.tcp_url, max_bytes=64 * MIB))) as store:
            assert store.put(A) == 3
            assert store.fetch(A) == 3
            assert store.engine.check() == []
        with closing(Store(open_backend(two.tcp_url, max_bytes=64 * MIB))) as store:
            assert store.fetch(A) == 3


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
            open_backend(f"valkeys://localhost:{port}", max_bytes=MIB)
        with pytest.raises(UnavailableError, match=r"(?i)certificate"):
            open_backend(f"valkeys://127.0.0.1:{port}?ssl_ca_certs={cert}", max_bytes=MIB)
    finally:
        server.__exit__(None, None, None)


def test_the_buffers_of_few_views_are_kept():
    shared = Shared(None)
    many = [shared.take_buffers() for _ in range(20)]
    for buffers in many:
        shared.give_buffers_back(buffers)
    assert len(shared._buffers) == KEPT_VIEWS
