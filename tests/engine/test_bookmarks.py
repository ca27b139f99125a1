"""Bookmarks: bounded, within the budget, written after their pages, and gone with them."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.backends.contract import ConflictError
from prefixstore.engine import bookmarks as module
from prefixstore.engine.bookmarks import Bookmark, bookmarks_in
from prefixstore.engine.delete import Choice, subtree
from prefixstore.engine.keyspace import bookmarks_note
from prefixstore.errors import CorruptError
from prefixstore.format.keys import KEY_BYTES, PAGE, as_tokens, page_keys
from prefixstore.format.saved_state import pack_state
from tests.support.engines import NS, A, B, MemoryPages, P, Store


@pytest.fixture
def store():
    one = Store(MemoryPages())
    yield one
    one.engine.close()


def bookmark_of(tokens, set_at=1, form=PAGE):
    """A name for a sequence that is stored in pages of `P` tokens."""
    keys = page_keys(NS, as_tokens(tokens), P)
    rest = as_tokens(tokens).tobytes()[4 * P * len(keys) :]
    return Bookmark(keys[-1] if keys else NS, rest, len(tokens), form, 0, set_at)


def test_a_bookmark_gives_its_sequence(store):
    for tokens in (A, [*A, 5, 6], [7, 8]):
        store.submit(tokens)
        store.engine.write_queue.set_bookmark(NS, str(len(tokens)), bookmark_of(tokens))
    for _ in range(2):
        for mark in store.engine.bookmarks.read(NS).values():
            found = store.engine.bookmarks.tokens(NS, mark)
            assert found is None or found.dtype == np.dtype("<i4")
        store.engine.flush()
    assert {
        name: store.engine.bookmarks.tokens(NS, mark).tolist() for name, mark in store.engine.bookmarks.read(NS).items()
    } == {
        "12": A,
        "14": [*A, 5, 6],
        "2": [7, 8],
    }
    assert store.engine.bookmarks.whole(NS) == ["12", "14", "2"]


def test_a_tail_that_a_longer_page_has_replaced_is_found_in_that_page(store):
    store.submit([*A, 5])
    store.engine.write_queue.set_bookmark(NS, "a", bookmark_of([*A, 5]))
    store.engine.flush()
    store.submit([*A, 5, 6, 7, 8])
    store.engine.flush()
    assert store.engine.bookmarks.tokens(NS, store.engine.bookmarks.read(NS)["a"]).tolist() == [*A, 5]


def test_there_are_so_many_at_most_and_those_set_last_stay(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_BOOKMARKS", 5)
    store.submit(A)
    for i in range(12):
        store.engine.write_queue.set_bookmark(NS, str(i), bookmark_of(A, i))
        if i % 3 == 0:
            store.engine.flush()
    store.engine.flush()
    assert list(store.engine.bookmarks.read(NS)) == [str(i) for i in range(7, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [30_000, 100_000, 1_000_000])
def test_they_take_no_more_than_a_part_of_the_budget(max_bytes):
    store = Store(MemoryPages(), max_bytes=max_bytes)
    sequences = [[i] * 9 for i in range(2 * max_bytes // 3000)]
    for i, tokens in enumerate(sequences):
        store.submit(tokens)
        store.engine.write_queue.set_bookmark(NS, f"{i:500}", bookmark_of(tokens, i))
        if i % 8 == 0:
            store.engine.flush()
        assert store.engine.upkeep.used()[0].bytes <= max_bytes
    store.engine.flush()
    with store.engine.view() as view:
        note = view.note(bookmarks_note(NS)) or b""
    assert len(note) <= max_bytes / 256
    store.engine.close()


def delete(store, tokens):
    """Delete a sequence; how many pages."""
    with store.engine.view() as view:
        keys = subtree(view, page_keys(NS, as_tokens(tokens), P)[0])
    return store.engine.deleter.delete(Choice(keys=keys)).pages


def test_a_deletion_does_not_fail_because_another_process_commits_at_the_same_time(store, monkeypatch):
    for tokens in (A, B):
        store.submit(tokens)
    store.engine.write_queue.set_bookmark(NS, "a", bookmark_of(A))
    store.engine.flush()
    update, n_calls = store.backend.update, count()

    def conflicting():
        if next(n_calls) % 2 == 0:
            raise ConflictError("another process was faster")
        return update()

    monkeypatch.setattr(store.backend, "update", conflicting)
    assert delete(store, A) == 3
    assert store.engine.bookmarks.read(NS) == {}


def test_a_process_that_still_has_a_name_does_not_bring_it_back_after_a_purge(store):
    store.submit(A)
    store.engine.flush()
    store.engine.upkeep.clear(NS)
    store.engine.write_queue.set_bookmark(NS, "a", bookmark_of(A))
    store.engine.flush()
    assert store.engine.bookmarks.read(NS) == {}


marks = st.builds(
    Bookmark,
    page=st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    rest=st.binary(max_size=10).map(lambda some: some * 4),
    n_tokens=st.integers(10, 2**32 - 1),
    form=st.integers(0, 1),
    generation=st.integers(0, 2**31 - 1),
    set_at=st.integers(0, 2**63 - 1),
)


@given(marks)
def test_a_bookmark_is_read_as_it_was_written(mark):
    assert Bookmark.unpack(mark.pack()) == mark


@given(marks, st.data())
def test_damaged_bytes_are_refused(mark, data):
    packed = mark.pack()
    n = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(CorruptError):
        Bookmark.unpack(packed[:n])
    with pytest.raises(CorruptError):
        Bookmark.unpack(replace(mark, form=2).pack())
    for grown in ({"generation": 2**32 - 1}, {"set_at": 2**64 - 1}):
        # the next one could not be written
        with pytest.raises(CorruptError):
            Bookmark.unpack(replace(mark, **grown).pack())
    assert bookmarks_in(pack_state({"bad": packed[:n], "good": packed})) == {"good": mark}
