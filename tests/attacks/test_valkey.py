"""A Valkey server that fails, forgets or fills up in the middle of anything: lookups are misses, nothing is wrong."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import valkey

from prefixstore.errors import FullError, LocationError, StorageError
from tests.attacks.server_work import WORK, is_intact, lookup, stored, tried
from tests.support.engines import NS, A, B
from tests.support.models import TORTURE
from tests.support.timeouts import wait_for
from tests.support.valkey import forget_lock, private_valkey


def name_of(url):
    return url.rpartition("?name=")[2]


# -- lost servers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", ["yes", "no"])
def test_a_server_that_is_killed_while_pages_are_written_keeps_what_its_log_has(log):
    with private_valkey(appendonly=log, appendfsync="everysec") as server, stored(server.url) as store:
        chance = random.Random(5)
        flushed = []
        for k in range(4 * TORTURE):
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
            assert store.engine.upkeep.check() == []
        if log == "yes":
            is_intact(server.url, *flushed)
        assert store.put([7] * 12) == 3
        assert store.fetch([7] * 12) == 3


def test_keys_that_vanish_at_any_time_are_misses(new_valkey, valkey_server):
    """As under a policy that evicts any key: structures as well as pages, and what is not committed yet."""
    url, chance = new_valkey(), random.Random(7)
    sequences = [[100 + n] * 12 for n in range(20)]
    with valkey_server.client() as client, stored(url) as store, stored(url) as other:
        real = store.backend.rows._connections.take

        def take(work):
            if chance.random() < 0.05:
                names = sorted(client.keys(f"{{{name_of(url)}}}:*"))
                if names:
                    client.delete(chance.choice(names))
            return real(work)

        n_found = 0
        for _ in range(150 * TORTURE):
            store.backend.rows._connections.take = take
            tried(lambda each: each.put(chance.choice(sequences)))(store)
            n_found += lookup(store, chance.choice(sequences)) == 3
            if chance.random() < 0.1:
                WORK[chance.choice(["evict", "pin", "flush", "note", "reindex"])](store)
            store.backend.rows._connections.take = real
            lookup(other, chance.choice(sequences))
        assert n_found > 0
        # what is left can be mended; where a part of the location itself has vanished, the next write creates it again
        store.put(sequences[0])
        for _ in range(3):
            store.engine.deleter.repair(store.engine.upkeep.check())
            store.backend.rows.reclaim()
        assert store.engine.upkeep.check() == []
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
        assert store.engine.upkeep.check() == []
        # what is not ours may fill it to the last byte: then pages are dropped, and can still be read and deleted
        with server.client() as client, suppress(valkey.exceptions.OutOfMemoryError):
            for n in range(1000):
                client.set(f"other{n}", bytes(100_000))
        held = store.fetch(written[-1])
        with suppress(StorageError):
            store.put([5] * 12, size=500_000)
        assert lookup(store, written[-1]) in (0, held)
        store.engine.upkeep.clear(NS)
        assert store.engine.upkeep.check() == []
        for n in range(1000):
            server.client().unlink(f"other{n}")
        wait_for(lambda: tried(lambda each: each.put(B))(store) or lookup(store, B) == 3, "a put")


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_password_that_is_changed_meanwhile_is_an_error_and_no_crash(new_valkey, valkey_server):
    url = new_valkey()
    rights = ["on", "+@all", "~*"]
    with valkey_server.client() as client:
        client.execute_command("ACL", "SETUSER", "changing", *rights, ">before")
        try:
            with stored(url.replace("unix://", "unix://changing:before@"), A) as store:
                client.execute_command("ACL", "SETUSER", "changing", "resetpass", ">after")
                client.execute_command("CLIENT", "KILL", "USER", "changing")
                with pytest.raises(LocationError, match="refuses") as caught:
                    store.fetch(A)
                assert "before" not in str(caught.value)
                WORK["put"](store)
                client.execute_command("ACL", "SETUSER", "changing", ">before")
                wait_for(lambda: lookup(store, A) == 3, "a hit")
        finally:
            client.execute_command("ACL", "DELUSER", "changing")
