"""Maintenance works on all that is stored, also on what lookups have forgotten, and while others commit."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.pages import Pages
from prefixstore.errors import UnavailableError
from tests.support import PATIENCE
from tests.support.engines import MIB, NS, A, B, MemoryPages, store_of
from tests.support.fragile import known_keys


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_a_transaction_of_this_process_does_not_hide_pages(kind, tmp_path):
    backend = MemoryPages() if kind == "memory" else Pages(LMDBBackend(tmp_path, MIB))
    with store_of(backend) as store:
        store.put(A)
        store.put(B)
        # an engine that knows nothing yet
        store.open()
        found, is_open, gate = [], threading.Event(), threading.Event()

        def commit():
            with store.engine._catalog.update(store.backend):
                is_open.set()
                gate.wait(PATIENCE)

        threads = [threading.Thread(target=commit, daemon=True)]
        threads[0].start()
        assert is_open.wait(PATIENCE)
        threads.append(threading.Thread(target=lambda: found.append(known_keys(store.engine)), daemon=True))
        threads[1].start()
        # it waits for nobody
        threads[1].join(PATIENCE)
        gate.set()
        threads[0].join(PATIENCE)
        assert found == [store.stored_keys()]


def test_what_a_transaction_deletes_and_puts_back_is_deleted_by_a_purge():
    with store_of() as store:
        store.put(A)
        store.put(B)
        engine = store.engine
        pages = engine.lookups.pages()
        assert len(pages) == 6
        removed, gate = threading.Event(), threading.Event()

        def evict():
            with suppress(UnavailableError), engine._catalog.update(store.backend) as transaction:
                for page in pages[2::-1]:
                    transaction.delete(page.key)
                removed.set()
                gate.wait(PATIENCE)
                raise UnavailableError("the location does not answer")

        purged = []

        def purge():
            purged.append(engine.upkeep.clear(NS))

        threads = [threading.Thread(target=work, daemon=True) for work in (evict, purge)]
        threads[0].start()
        assert removed.wait(PATIENCE)
        threads[1].start()
        threads[1].join(0.2)
        gate.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert purged == [6]
        assert store.stored_keys() == set()
