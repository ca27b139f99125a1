"""The contract of a backend that keeps rows, for memory; and what is special about memory, and about a draft."""

from __future__ import annotations

import random
import threading
from contextlib import closing, contextmanager

import pytest

from prefixstore.backends.contract import Draft, Range
from prefixstore.backends.memory import COSTS, MemoryBackend
from prefixstore.backends.sorted_rows import ROWS_OF_BLOCK
from prefixstore.errors import UnavailableError
from prefixstore.testing import BackendContract
from tests.support import PATIENCE

ALL = Range(b"", b"\xff" * 100)


class TestMemory(BackendContract):
    def open_backend(self, tmp_path):
        return MemoryBackend()


class Estimated(MemoryBackend):
    """As on a server: changes are written when the update ends, and until then their size is estimated."""

    @contextmanager
    def update(self):
        with super().update() as draft:
            estimated = Draft(draft._view, draft.costs)
            yield estimated
            draft._apply(estimated.changes)


class TestMemoryWithAnEstimatedSize(BackendContract):
    def open_backend(self, tmp_path):
        return Estimated()


def filled(keys, **payloads):
    """A memory with rows of these keys."""
    backend = MemoryBackend()
    with backend.update() as draft:
        for key in keys:
            draft.put(key, b"stored", payloads.get(key.decode()))
    return backend


# -- memory -----------------------------------------------------------------------------------------------------------


def test_rows_stay_in_order_while_blocks_are_divided_and_emptied():
    chance = random.Random(3)
    rows = {}
    with closing(MemoryBackend()) as backend:
        for step in range(60):
            with backend.update() as draft:
                for _ in range(300):
                    key = chance.randrange(3000).to_bytes(2, "big")
                    if chance.random() < step / 60:
                        draft.delete(key)
                        rows.pop(key, None)
                    else:
                        draft.put(key, b"%d" % step)
                        rows[key] = b"%d" % step
            with backend.view() as view:
                assert view.ranges([ALL, ALL._replace(reverse=True)]) == [
                    sorted(rows.items()),
                    sorted(rows.items(), reverse=True),
                ]
                blocks = view._blocks
                assert max(map(len, blocks)) <= ROWS_OF_BLOCK
                assert all(blocks[1:])
        with backend.update() as draft:
            for key in rows:
                draft.delete(key)
        with backend.view() as view:
            assert (view.ranges([ALL]), view.used, len(view._blocks)) == ([[]], 0, 1)


def test_a_view_of_memory_stays_as_it_was_when_it_opened():
    with closing(filled([b"a", b"b"], a=b"payload")) as backend, backend.view() as view:

        def change():
            with backend.update() as draft:
                draft.delete(b"a")
                draft.put(b"b", b"new", b"new")

        thread = threading.Thread(target=change)
        thread.start()
        thread.join(PATIENCE)
        assert view.ranges([ALL]) == [[(b"a", b"stored"), (b"b", b"stored")]]
        assert list(view.payloads([b"a", b"b"])) == [(b"stored", b"payload"), (b"stored", None)]
        with backend.view() as later:
            assert later.get([b"a", b"b"]) == [None, b"new"]


def test_a_closed_memory_with_a_name_leaves_the_rows_to_the_others():
    one, two = MemoryBackend("shared rows"), MemoryBackend("shared rows")
    with one.update() as draft:
        draft.put(b"a", b"1")
    one.close()
    with pytest.raises(UnavailableError, match="memory://shared rows is closed"), one.view():
        pass
    with two.view() as view:
        assert view.get([b"a"]) == [b"1"]
    two.close()
    with closing(MemoryBackend("shared rows")) as three, three.view() as view:
        assert view.get([b"a"]) == [None]


# -- drafts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["flushed", "kept"])
def open_draft(request):
    """Opens drafts over rows, whose changes are in the view already, or are not."""

    def opened(keys, **payloads):
        with filled(keys, **payloads).view() as committed:
            view = committed.copy()
            return Draft(view, COSTS, view.apply if request.param == "flushed" else None)

    return opened


@pytest.mark.parametrize("order", [sorted, reversed, lambda keys: random.Random(5).sample(keys, len(keys))])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_row_that_was_deleted_is_read_a_few_times_however_often_its_neighbors_are(open_draft, order, reverse):
    keys = [b"%04d" % i for i in range(1000)]
    draft, n_read = open_draft(keys), 0
    real = draft._view.ranges

    def ranges(wanted):
        nonlocal n_read
        found = real(wanted)
        n_read += sum(map(len, found))
        return found

    draft._view.ranges = ranges
    left = set(keys)
    for key in order(keys):
        draft.delete(key)
        left.discard(key)
        [found] = draft.ranges([Range(b"0", b"9", 1, reverse=reverse)])
        assert [row.key for row in found] == ([max(left) if reverse else min(left)] if left else [])
    assert n_read < 20 * len(keys)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_row_put_after_its_deletion_has_no_old_payload(open_draft, is_read):
    draft = open_draft([b"a", b"b", b"c"], a=b"old", b=b"old", c=b"old")

    def step():
        assert not is_read or draft.used >= 0

    draft.delete(b"a")
    step()
    draft.put(b"a", b"1")
    draft.put(b"b", b"1", b"new")
    step()
    draft.delete(b"b")
    draft.put(b"b", b"2")
    step()
    draft.put(b"b", b"3")
    draft.put(b"c", b"1")
    draft.delete(b"d")
    step()
    draft.put(b"d", b"1", b"new")
    draft.put(b"d", b"2")
    expected = [(b"1", None), (b"3", None), (b"1", b"old"), (b"2", b"new")]
    assert list(draft.payloads([b"a", b"b", b"c", b"d"])) == expected
    draft._view.apply(draft.changes)
    assert list(draft._view.payloads([b"a", b"b", b"c", b"d"])) == expected


def test_a_value_is_read_once(open_draft):
    draft = open_draft([b"a", b"b"])
    assert draft.get([b"a", b"x", b"a"]) == [b"stored", None, b"stored"]
    read = []
    draft._view.get = lambda keys: read.append(keys) or [None] * len(keys)
    draft.put(b"c", b"mine")
    assert draft.get([b"a", b"c", b"x"]) == [b"stored", b"mine", None]
    draft.delete(b"a")
    assert draft.used >= 0
    assert draft.get([b"a", b"c", b"x"]) == [None, b"mine", None]
    assert read == []


def test_a_size_is_measured_or_estimated_from_the_changes_and_from_what_the_caller_says(open_draft):
    draft = open_draft([b"a"], a=bytes(6))
    draft.get([b"a"])
    before = draft.used
    draft.put(b"b", b"", bytes(1000))
    assert draft.used - before == COSTS.of(b"b", b"", 1000)
    draft.put(b"b", b"", bytes(10))
    assert draft.used - before == COSTS.of(b"b", b"", 10)
    draft.put(b"a", b"stored", bytes(500), replaced=6)
    draft.delete(b"b")
    assert draft.used - before == COSTS.of(b"a", b"stored", 500) - COSTS.of(b"a", b"stored", 6)
    draft.delete(b"a", replaced=500)
    assert draft.used - before == -COSTS.of(b"a", b"stored", 6)
