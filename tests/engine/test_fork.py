"""A process that forks with an engine open."""

from __future__ import annotations

import os
import threading

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.threads import close_soon
from prefixstore.engine.pages import Pages
from tests.support.engines import MIB, A, B, C, Store, gated, store_of, wait_for, writer_of


def test_parent_and_forked_child_each_write_their_own_pages(tmp_path):
    with store_of(Pages(LMDBBackend(tmp_path, MIB))) as store:
        with writer_of(store) as writer:
            store.put(C)
            for new in store.pages(A):
                writer.captures.submit(new)
            pid = os.fork()
            if pid == 0:
                done = 1
                try:
                    store.buffers = store.engine._queue._buffers
                    assert store.fetch(C) == 3
                    for new in store.pages(B):
                        writer.captures.submit(new)
                    writer.close()
                    assert store.fetch(B) == 3
                    store.engine.close()
                    done = 0
                finally:
                    os._exit(done)
            assert os.waitpid(pid, 0)[1] == 0
            writer.flush()
        assert [store.fetch(tokens) for tokens in (A, B, C)] == [3, 3, 3]


def test_a_forked_child_closes_its_own_copy_of_an_engine_that_the_parent_is_closing(tmp_path):
    gate = threading.Event()

    store = Store(gated(Pages, gate)(LMDBBackend(tmp_path, MIB)))
    for new in store.pages(A):
        assert store.engine.captures.submit(new)
    close_soon(store.engine)
    wait_for(lambda: store.engine._queue._closing, "the thread that closes the engine")
    pid = os.fork()
    if pid == 0:
        done = 1
        try:
            # as for a store that the child collects, and at its end
            close_soon(store.engine)
            wait_for(lambda: store.engine.is_closed, "the close in the child")
            store.engine.close()
            done = 0
        finally:
            os._exit(done)
    assert os.waitpid(pid, 0)[1] == 0
    assert not store.engine.is_closed
    gate.set()
    wait_for(lambda: store.engine.is_closed, "the close in the parent")
    with store_of(Pages(LMDBBackend(tmp_path, MIB))) as again:
        assert again.fetch(A) == 3
