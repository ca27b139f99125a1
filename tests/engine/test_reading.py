"""Lookups of an engine that reads only what it needs: they find what one finds that knows everything."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine import contents, follow
from prefixstore.engine.keyspace import CHILD, everything
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import Usage
from tests.support import PATIENCE
from tests.support.engines import MIB, NS, MemoryPages, P, Store, put_snapshots
from tests.support.fragile import Fragile, Lent, assert_true
from tests.support.pages import make_page
from tests.support.places import place

prompts = st.lists(st.integers(0, 2), max_size=4 * P + 3)
wide = st.lists(st.sampled_from([0, 1, 256, 65536, -1, 2**31 - 1]), max_size=4 * P + 3)


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [4, 10_000])
@pytest.mark.parametrize("scheme", ["memory", "lmdb", "sqlite"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data(), kind=st.sampled_from([prompts, wide]))
def test_a_lookup_finds_the_longest_prefix_of_anything_stored(scheme, kept, data, kind, tmp_path_factory, request):
    location = place(scheme, tmp_path_factory.mktemp("store"), request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "CACHED_PAGES", kept)
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


def test_nothing_is_read_at_the_start_and_a_known_prompt_needs_only_the_generation():
    backend = MemoryPages()
    with closing(Store(backend)) as writer:
        for number in range(200):
            writer.put([number] * (3 * P + 1), 1)
        with closing(Store(Fragile(backend))) as reader:
            assert reader.match([7] * (3 * P + 1)) == 3 * P + 1
            assert len(reader.engine._catalog._contents.index.pages) < 10
            calls = reader.backend.calls.copy()
            assert reader.match([7] * (3 * P + 1)) == 3 * P + 1
            assert reader.match([7] * (2 * P)) == 2 * P
            read = reader.backend.calls - calls
            assert set(read) <= {"generation", "changes"}
            # a prompt that nothing begins with is known as well, once it was looked up
            assert reader.match([1000] * P) == 0
            calls = reader.backend.calls.copy()
            assert reader.match([1000] * P) == 0
            assert set(reader.backend.calls - calls) <= {"generation", "changes"}
            assert "scan" not in reader.backend.calls
            assert "facts" not in reader.backend.calls


@pytest.mark.parametrize("scheme", ["memory", "lmdb", "sqlite"])
def test_a_lookup_waits_for_a_commit_that_just_ends(scheme, tmp_path, request, monkeypatch):
    """What it reads is newer than what the catalog knows, which learns of the commit a moment later."""
    monkeypatch.setattr(follow, "LONGEST_END", 1000.0)
    backend = open_pages(place(scheme, tmp_path, request), max_bytes=64 * MIB, read_only=False)
    with closing(Store(backend)) as writer:
        writer.put([1] * (2 * P), 1)
        with closing(Store(Lent(backend))) as reader:
            reader.put([2] * P, 1)
            committed, gate, found = threading.Event(), threading.Event(), []

            def commit():
                def just_before_the_end():
                    committed.set()
                    assert gate.wait(PATIENCE)

                with reader.engine._catalog.update(backend, just_before_the_end) as transaction:
                    key, record = make_page(b"x", [3] * P, parent=NS, namespace=NS)
                    transaction.put(key, record, Usage(1), b"x")

            threads = [
                threading.Thread(target=work, daemon=True)
                for work in (commit, lambda: found.append(reader.match([1] * (2 * P))))
            ]
            threads[0].start()
            assert committed.wait(PATIENCE)
            threads[1].start()
            # it cannot end before the commit; this only gives it the time to end too early
            threads[1].join(0.2)
            gate.set()
            for thread in threads:
                thread.join(PATIENCE)
            assert found == [2 * P]


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


def test_snapshots_are_found_by_an_engine_that_reads_only_what_it_needs():
    backend = MemoryPages()
    with closing(Store(backend)) as writer:
        put_snapshots(writer, [1] * 12, [3, 6, 12])
        put_snapshots(writer, [1] * 8 + [2] * 4, [10])
        with closing(Store(Fragile(backend))) as reader:
            assert [reader.match_snapshot([1] * 12, limit) for limit in (2, 3, 5, 11, 12)] == [0, 3, 3, 6, 12]
            assert reader.match_snapshot([1] * 8 + [2] * 4) == 10
            calls = reader.backend.calls.copy()
            assert reader.match_snapshot([1] * 12, 11) == 6
            assert set(reader.backend.calls - calls) <= {"generation", "changes"}
            # another engine adds one
            put_snapshots(writer, [1] * 12, [9])
            assert reader.match_snapshot([1] * 12, 11) == 9
            assert_true(reader.engine)


def test_pages_that_another_engine_adds_and_deletes_are_followed():
    backend = MemoryPages()
    with closing(Store(backend)) as writer, closing(Store(Fragile(backend))) as reader:
        writer.put([1] * 8, 1)
        assert reader.match([1] * 12) == 8
        writer.put([1] * 12, 1)
        assert reader.match([1] * 12) == 12
        writer.put([1] * 10 + [2] * 2, 1)
        assert reader.match([1] * 10 + [2] * 2) == 12
        writer.engine.evict_to(0)
        assert reader.match([1] * 12) == 0
        writer.put([1] * 4, 1)
        assert reader.match([1] * 12) == 4
        assert_true(reader.engine)
        assert reader.engine.match(NS, as_tokens([1] * 4), P).n_tokens == 4
