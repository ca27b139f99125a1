"""A process that forks with an engine open."""

from __future__ import annotations

import os

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.pages import Pages
from tests.support.engines import MIB, A, B, C, store_of, writer_of


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
                    store.buffers = store.engine.captures._buffers
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
