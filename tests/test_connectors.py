"""The benchmark of LMCache's connectors: our part, with a program in LMCache's place; and LMCache, if it is there."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import pytest

from benchmarks import connectors, remote
from benchmarks.connectors import Ours
from prefixstore.format.keys import as_tokens, page_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, StoredPage, Usage, checksum
from prefixstore.maintenance.archive import Archive
from tests.support.s3 import weed

SHAPE = {"n_layer": 1, "n_head_kv": 1, "head_dim": 32}
N = 3


@pytest.fixture
def stored(tmp_path):
    """A prompt of whole pages, a location that has it, its pages, and its values as a file."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, N * 256).tolist()
    chunks = connectors.Chunks(tmp_path / "values", tokens, *SHAPE.values())
    settings = Namespace({"label": "a", "salt": None})
    parent, pages = settings.key, []
    for i in range(N):
        part = as_tokens(np.asarray(tokens[i * 256 : (i + 1) * 256], np.int32)).tobytes()
        payload = rng.bytes(chunks.chunk_bytes + 8)
        size = len(payload)
        record = Record(settings.key, parent, i * 256, part, 0, size, size, checksum(payload), 0, time.time_ns())
        parent = page_key(parent, part)
        pages.append(StoredPage(parent, record, Usage(record.created), payload))
    url = f"lmdb://{tmp_path}/kv"
    with Archive(url, create=True) as archive:
        assert archive.engine.importer.import_pages(pages, {settings.key: settings.canonical}).pages == N
    return chunks, url, pages, {settings.key: settings.canonical}


def test_pages_are_written_and_read_and_compared(stored):
    chunks, url, pages, settings = stored
    assert connectors.stored_pages(url) == (pages, settings)
    chunks.write(pages)
    assert chunks.file.stat().st_size == N * chunks.chunk_bytes
    assert chunks.file.read_bytes()[: chunks.chunk_bytes] == pages[0].payload[:-8]
    ours = Ours(url, chunks, pages, settings)
    answer = ours.ask("get")
    assert (answer["chunks"], answer["good"]) == (N, True)
    assert 0 < answer["lookup"] < answer["seconds"]
    # what is there is deleted first
    assert ours.ask("put")["seconds"] > 0
    assert ours.ask("get")["good"]
    ours.close()
    other = [page._replace(payload=page.payload[::-1]) for page in pages]
    ours = Ours(url, chunks, other, settings)
    assert not ours.ask("get")["good"]
    ours.close()


@pytest.mark.skipif(connectors.interpreter() is None, reason=f"{connectors.VARIABLE} names no environment with LMCache")
def test_the_connectors_of_lmcache_give_back_what_they_are_given(stored):
    pytest.importorskip("valkey")
    chunks, url, pages, settings = stored
    chunks.write(pages)
    ours = Ours(url, chunks, pages, settings)
    with ExitStack() as stack:
        stack.callback(ours.close)
        places = remote._valkey(stack)
        if not places or weed() is None:
            pytest.skip("no Valkey server, or no SeaweedFS")
        addresses = {
            "Valkey, socket": (places["Valkey, socket"].url.partition("://")[2], None),
            "Valkey, TCP": (places["Valkey, TCP"].target, None),
            connectors.BUCKETS: stack.enter_context(connectors.object_storage()),
        }
        for server, (address, options) in addresses.items():
            python = connectors.interpreter()
            with connectors.clients(server, python, ours, chunks, address, options) as among:
                found = connectors.measured(among, N, 1, 1)
            for name in connectors.CLIENTS[server]:
                assert found[name].get("chunks") == N, (name, found[name])
