"""Damaged pages in an engine: they are not restored, and are deleted with their descendants."""

import lmdb
import pytest

from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.engine.pages import Pages
from prefixstore.format.keys import as_tokens, page_keys
from prefixstore.format.record import RECORD
from tests.support.engines import MIB, NS, A, B, C, P, store_of
from tests.support.newer import newer


def flip(path, key, at):
    """Flip a bit of a stored value, past the store."""
    with lmdb.open(str(path), map_size=64 * MIB) as env, env.begin(write=True) as txn:
        value = bytearray(txn.get(key))
        value[at] ^= 16
        txn.put(key, bytes(value))


def raw_keys(path, kind):
    """The keys of the pages that have rows, or payloads, of a kind."""
    with lmdb.open(str(path), readonly=True) as env, env.begin() as txn:
        return {key[2:] for key, _ in txn.cursor() if key[:2] == kind}


@pytest.mark.parametrize("damage", ["payload", "no payload", "record", "other tokens"])
def test_a_damaged_page_ends_the_restore_and_is_deleted_with_its_descendants(tmp_path, damage):
    tokens = list(range(16))
    keys = page_keys(NS, as_tokens(tokens), P)
    with store_of(Pages(LMDBBackend(tmp_path, MIB))) as store:
        store.put(tokens)
        store.put([7] * 8)
    if damage == "payload":
        flip(tmp_path, b"pr" + keys[1], 500)
    elif damage == "record":
        flip(tmp_path, b"rr" + keys[1], RECORD.size + 1)
    else:
        with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
            if damage == "no payload":
                assert txn.delete(b"pr" + keys[1])
            else:
                txn.put(b"rr" + keys[1], txn.get(b"rr" + keys[2]))
    with store_of(Pages(LMDBBackend(tmp_path, MIB))) as store:
        assert {violation.key for violation in store.engine.upkeep.check()} >= {keys[1].hex()}
        # a record is read when the store is opened, a payload when it is fetched
        assert store.match(tokens) == (4 if damage in ("record", "other tokens") else 16)
        assert store.fetch(tokens) == 1
        assert store.match(tokens) == 4
        assert store.engine.write_queue.has_deferred
        assert store.engine.commit([]) == 0
        assert store.counters["corrupt"] == 3
        assert not store.engine.write_queue.has_deferred
        assert store.engine.upkeep.check() == []
        assert store.match([7] * 8) == 8
        assert store.put(tokens) == 3
        assert store.fetch(tokens) == 4
    records = raw_keys(tmp_path, b"rr")
    assert raw_keys(tmp_path, b"pr") == records == raw_keys(tmp_path, b"ru")
    assert len(records) == 6


def test_a_page_of_a_newer_version_is_not_changed(tmp_path):
    with store_of(Pages(LMDBBackend(tmp_path, MIB))) as store:
        store.put(A)
        store.put(B)
    keys = page_keys(NS, as_tokens(A), P)
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        txn.put(b"rr" + keys[1], newer(txn.get(b"rr" + keys[1])))
    with store_of(Pages(LMDBBackend(tmp_path, MIB))) as store:
        assert store.match(A) == 4
        batch = store.pages(A)
        announced = [new for new in [*batch, *store.pages(C)] if store.engine.write_queue.announce(new)]
        # A's second page may not be replaced, so its children cannot be stored; C can
        assert store.engine.commit(announced) == 3
        assert sum(store.counters.group("dropped").values()) == len(announced) - 3
        assert keys[1] in store.stored_keys()
        assert store.match(C) == 12
