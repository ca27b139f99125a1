"""A Valkey server that fails, forgets or fills up in the middle of anything: lookups are misses, nothing is wrong."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import valkey

from prefixstore.backends.valkey import connections
from prefixstore.errors import FullError, StorageError
from tests.attacks.server_work import WORK, is_intact, lookup, stored, tried
from tests.support.engines import NS, A, B, C
from tests.support.models import volume
from tests.support.timeouts import wait_for
from tests.support.valkey import forget_lock, private_valkey


def name_of(url):
    return url.rpartition("?name=")[2]


def forget(client, url):
    """Drop the location."""
    client.delete(*client.keys(f"{{{name_of(url)}}}:*"))


# -- lost connections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", WORK)
def test_connections_that_are_ended_at_any_command_cost_nothing(new_valkey, valkey_server, monkeypatch, name, when):
    url, left, sent = new_valkey(), [-1], []
    real = connections.Connections._use

    def use(self, connection, work):
        """The first attempt; a second one is made on a new connection."""
        if left[0] == 0:
            left[0] = -1
            if when == "before":
                valkey_server.client().execute_command("CLIENT", "KILL", "TYPE", "normal")
            else:
                real(self, connection, work)
            raise valkey.ConnectionError("ended")
        left[0] -= left[0] > 0
        sent.append(1)
        return real(self, connection, work)

    monkeypatch.setattr(connections.Connections, "_use", use)
    with valkey_server.client() as client:
        k = 0
        while True:
            with stored(url, A) as store:
                del sent[:]
                left[0] = k
                WORK[name](store)
                is_over, left[0] = left[0] > 0, -1
                assert store.match(A) in ((0, 12) if name in ("clear", "evict") else (12,))
                assert store.put(C) == 3
                assert store.fetch(C) == 3
                assert store.engine.check() == []
            is_intact(url, C)
            forget(client, url)
            if is_over:
                break
            k += 1
    assert k > 0


# -- lost servers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", ["yes", "no"])
def test_a_server_that_is_killed_while_pages_are_written_keeps_what_its_log_has(log):
    with private_valkey(appendonly=log, appendfsync="everysec") as server, stored(server.url) as store:
        chance = random.Random(5)
        flushed = []
        for k in range(volume(4)):
            tokens = [100 + k] * 12
            assert store.put(tokens) == 3
            store.engine.flush()
            flushed.append(tokens)
            at = chance.randrange(20)
            real = store.backend.rows._connections.use

            def use(work, real=real, left=[at]):  # noqa: B006 - counts down
                left[0] -= 1
                if left[0] == 0:
                    server.kill()
                return real(work)

            store.backend.rows._connections.use = use
            for i in range(5):
                tried(lambda each, i=i, k=k: each.put([10_000 + 1000 * k + i] * 12))(store)
            del store.backend.rows._connections.use
            if server.process.poll() is not None:
                assert lookup(store, tokens) == 0
                server.start()
                # its log has the lock of a transaction that has ended with it
                forget_lock(server.url)
            wait_for(lambda tokens=tokens: lookup(store, tokens) == 3 or log == "no", "a hit")
            assert store.engine.check() == []
        if log == "yes":
            is_intact(server.url, *flushed)
        assert store.put([7] * 12) == 3
        assert store.fetch([7] * 12) == 3


def test_keys_that_vanish_at_any_time_are_misses(new_valkey, valkey_server):
    """As under a policy that evicts any key: structures as well as pages, and what is not committed yet."""
    url, chance = new_valkey(), random.Random(7)
    sequences = [[100 + n] * 12 for n in range(20)]
    with valkey_server.client() as client, stored(url) as store, stored(url) as other:
        real = store.backend.rows._connections._use

        def use(connection, work):
            if chance.random() < 0.05:
                names = sorted(client.keys(f"{{{name_of(url)}}}:*"))
                if names:
                    client.delete(chance.choice(names))
            return real(connection, work)

        n_found = 0
        for _ in range(volume(150)):
            store.backend.rows._connections._use = use
            tried(lambda each: each.put(chance.choice(sequences)))(store)
            n_found += lookup(store, chance.choice(sequences)) == 3
            if chance.random() < 0.1:
                WORK[chance.choice(["evict", "pin", "flush", "note", "reindex"])](store)
            store.backend.rows._connections._use = real
            lookup(other, chance.choice(sequences))
        assert n_found > 0
        # what is left can be mended; where a part of the location itself has vanished, the next write creates it again
        store.put(sequences[0])
        for _ in range(3):
            store.engine.deleter.repair(store.engine.check())
            store.backend.reclaim()
        assert store.engine.check() == []
        for tokens in sequences:
            store.put(tokens)
            assert store.fetch(tokens) == 3
            assert lookup(other, tokens) == 3
    is_intact(url, *sequences)


# -- no memory --------------------------------------------------------------------------------------------------------


def test_a_server_out_of_memory_evicts_by_our_policy():
    with (
        private_valkey(maxmemory="24mb", **{"maxmemory-policy": "noeviction"}) as server,
        stored(server.url, A, max_bytes=1 << 30) as store,
    ):
        written = []
        for n in range(60):
            tokens = [1000 + n] * 12
            with suppress(FullError):
                if store.put(tokens, size=500_000) == 3:
                    written.append(tokens)
        assert len(written) > 20
        assert store.counters.group("evictions") or store.counters["evictions"] > 0
        assert lookup(store, written[-1]) == 3
        assert store.engine.check() == []
        # what is not ours may fill it to the last byte: then pages are dropped, and can still be read and deleted
        with server.client() as client, suppress(valkey.exceptions.OutOfMemoryError):
            for n in range(1000):
                client.set(f"other{n}", bytes(100_000))
        held = store.fetch(written[-1])
        with suppress(StorageError):
            store.put([5] * 12, size=500_000)
        assert lookup(store, written[-1]) in (0, held)
        store.engine.clear(NS)
        assert store.engine.check() == []
        for n in range(1000):
            server.client().unlink(f"other{n}")
        wait_for(lambda: tried(lambda each: each.put(B))(store) or lookup(store, B) == 3, "a put")


# -- refused ----------------------------------------------------------------------------------------------------------
