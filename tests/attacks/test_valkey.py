"""A Valkey server whose memory is full, or whose password is another one meanwhile: misses, and nothing is wrong."""

from __future__ import annotations

from contextlib import suppress

import pytest
import valkey

from prefixstore.errors import FullError, LocationError, StorageError
from tests.attacks.server_work import WORK, lookup, stored, tried
from tests.support.engines import NS, A, B
from tests.support.timeouts import wait_for
from tests.support.valkey import private_valkey, user


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


def test_a_password_that_is_changed_meanwhile_is_an_error_and_no_crash(new_valkey, valkey_server):
    url = new_valkey()
    with (
        valkey_server.client() as client,
        user(client, "changing", ">before", "+@all", "~*"),
        stored(url.replace("unix://", "unix://changing:before@"), A) as store,
    ):
        client.execute_command("ACL", "SETUSER", "changing", "resetpass", ">after")
        client.execute_command("CLIENT", "KILL", "USER", "changing")
        with pytest.raises(LocationError, match="refuses") as caught:
            store.fetch(A)
        assert "before" not in str(caught.value)
        WORK["put"](store)
        client.execute_command("ACL", "SETUSER", "changing", ">before")
        wait_for(lambda: lookup(store, A) == 3, "a hit")
