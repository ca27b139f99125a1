"""The settings of a namespace are stored as long as it has pages, and no longer."""

import pytest

from prefixstore.engine.delete import Choice
from prefixstore.errors import UnavailableError
from prefixstore.format.keys import as_tokens, page_keys
from tests.support.engines import NS, A, B, MemoryPages, P, store_of
from tests.support.faults import FlakyBackend
from tests.support.newer import make_corrupt


def settings_of(store):
    with store.backend.view() as view:
        return set(view.namespaces())


@pytest.mark.parametrize("how", ["expired", "cleared", "purged", "evicted", "damaged", "repaired", "unreadable"])
def test_whatever_deletes_the_last_page_deletes_the_settings(how, clock):
    with store_of(options={"ttl": 60.0}) as store:
        store.put(A)
        if how == "expired":
            clock[0] += 61 * 10**9
            assert store.match(A) == 0
            store.engine.commit([])
        elif how == "cleared":
            store.engine.upkeep.clear(None)
        elif how == "purged":
            store.engine.deleter.delete(Choice({NS}))
        elif how == "evicted":
            store.engine.evictor.evict(0)
        elif how == "damaged":
            store.engine.condemn(store.path(A).pages[0])
            store.engine.commit([])
        elif how == "repaired":
            with store.backend.update() as transaction:
                transaction.delete(page_keys(NS, as_tokens(A), P)[0])
            store.engine.deleter.repair(store.engine.upkeep.check())
        else:
            make_corrupt(store.backend, page_keys(NS, as_tokens(A), P)[0])
            store.open(ttl=60.0)
            assert store.match(A) == 0
            store.engine.commit([])
        assert store.stored_keys() == set()
        assert settings_of(store) == set()


def test_a_pending_page_of_a_deleted_namespace_brings_its_settings_back():
    with store_of() as store:
        store.put(A)
        pending = store.announce(B)
        store.engine.evictor.evict(0)
        assert settings_of(store) == set()
        assert store.engine.commit(pending) == 3
        assert settings_of(store) == {NS}


@pytest.mark.parametrize("operation", ["delete", "commit"])
def test_a_transaction_that_fails_keeps_the_settings(operation):
    backend = MemoryPages()
    with store_of(backend) as store:
        store.put(A)
    with store_of(FlakyBackend(backend, operation, failing=(1,))) as store:
        with pytest.raises(UnavailableError):
            store.engine.upkeep.clear(None)
        assert settings_of(store) == {NS}
        assert store.engine.upkeep.clear(None) == 3
        assert settings_of(store) == set()
