"""Lookups of an engine that reads only what it needs: they find what one finds that knows everything."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.keyspace import CHILD, everything
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.format.keys import as_tokens
from tests.support.engines import MIB, NS, MemoryPages, P, Store
from tests.support.fragile import Fragile, Lent, assert_true
from tests.support.places import place

prompts = st.lists(st.integers(0, 2), max_size=4 * P + 3)
wide = st.lists(st.sampled_from([0, 1, 256, 65536, -1, 2**31 - 1]), max_size=4 * P + 3)


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["memory", "lmdb", "sqlite"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data(), kind=st.sampled_from([prompts, wide]))
def test_a_lookup_finds_the_longest_prefix_of_anything_stored(scheme, data, kind, tmp_path_factory, request):
    location = place(scheme, tmp_path_factory.mktemp("store"), request)
    with pytest.MonkeyPatch.context():
        backend = open_pages(location, max_bytes=64 * MIB, read_only=False)
        with (
            closing(Store(backend)) as writer,
            closing(Store(Lent(backend))) as reader,
        ):
            stored = []
            for _ in range(data.draw(st.integers(1, 12))):
                tokens = data.draw(kind)
                if data.draw(st.booleans()):
                    writer.put(tokens, 1)
                    stored.append(tokens)
                found = reader.match(tokens)
                assert found == max((shared(tokens, other) for other in stored), default=0)
                assert_true(reader.engine)


def test_what_was_learned_while_indexes_were_built_again_is_forgotten(tmp_path):
    """A lookup in the meantime finds no children, and takes that for granted."""
    with (
        closing(Pages(LMDBBackend(tmp_path, MIB))) as backend,
        closing(Store(backend)) as writer,
        closing(Store(Lent(Pages(LMDBBackend(tmp_path, MIB))))) as reader,
    ):
        for number in range(3):
            writer.put([1] * P + [number] * 3, 1)
        with backend.rows.update() as rows:
            for row in rows.ranges([everything(CHILD)])[0]:
                rows.delete(row.key)
        assert reader.match([1] * P + [2] * 3) == P
        backend.reindex()
        assert reader.match([1] * P + [2] * 3) == P + 3


def test_pages_that_another_engine_adds_and_deletes_are_followed():
    backend = MemoryPages()
    with closing(Store(backend)) as writer, closing(Store(Fragile(backend))) as reader:
        writer.put([1] * 8, 1)
        assert reader.match([1] * 12) == 8
        writer.put([1] * 12, 1)
        assert reader.match([1] * 12) == 12
        writer.put([1] * 10 + [2] * 2, 1)
        assert reader.match([1] * 10 + [2] * 2) == 12
        writer.engine.evict(0)
        assert reader.match([1] * 12) == 0
        writer.put([1] * 4, 1)
        assert reader.match([1] * 12) == 4
        assert_true(reader.engine)
        assert reader.engine.match(NS, as_tokens([1] * 4), P).n_tokens == 4
