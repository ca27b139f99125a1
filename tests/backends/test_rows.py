"""The contract of a backend that keeps rows, for memory; and what is special about memory, and about a draft."""

from __future__ import annotations

import os
import random
import threading
from contextlib import closing, contextmanager
from itertools import product

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


def test_a_fork_does_not_wait_for_an_update_and_the_child_may_write_at_once():
    backend = filled([b"a"])
    is_open, may_close = threading.Event(), threading.Event()

    def write():
        with backend.update() as draft:
            draft.put(b"a", b"half")
            assert draft.used >= 0
            is_open.set()
            may_close.wait(PATIENCE)

    thread = threading.Thread(target=write)
    thread.start()
    is_open.wait(PATIENCE)
    pid = os.fork()
    if pid == 0:
        backend.after_fork()
        with backend.update() as draft:
            draft.put(b"b", b"child")
        with backend.view() as view:
            os._exit(7 if view.get([b"a", b"b"]) == [b"stored", b"child"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    may_close.set()
    thread.join(PATIENCE)
    with backend.view() as view:
        assert view.get([b"a", b"b"]) == [b"half", None]


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


@pytest.mark.parametrize("seed", range(4))
def test_ranges_are_those_of_a_plain_dictionary_after_any_changes(open_draft, seed):
    chance = random.Random(seed)
    keys = [b"%03d" % i for i in range(0, 400, 2)]
    draft, rows = open_draft(keys), dict.fromkeys(keys, b"stored")
    for _ in range(60):
        for _ in range(chance.choice([1, 3, 10])):
            key = b"%03d" % chance.randrange(100, 300)
            if chance.random() < 0.8:
                draft.delete(key)
                rows.pop(key, None)
            else:
                draft.put(key, b"mine")
                rows[key] = b"mine"
        assert chance.random() < 0.9 or draft.used >= 0
        bounds = [b"%03d" % chance.choice([0, 99, 150, 300, 301, 399]) for _ in range(6)]
        wanted = [
            Range(start, stop, limit, reverse=reverse)
            for start, stop in product(bounds[:2], bounds[2:])
            for limit, reverse in product((0, 1, 3, 100, None), (False, True))
        ]
        for one, found in zip(wanted, draft.ranges(wanted), strict=True):
            expected = sorted((row for row in rows.items() if one.start <= row[0] < one.stop), reverse=one.reverse)
            assert found == expected[: one.limit]


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


def test_payloads_stay_in_step_while_rows_are_written(open_draft):
    keys = [b"a", b"b", b"c", b"d", b"e", b"f"]
    draft = open_draft(keys[:4], a=b"A", b=b"B", c=b"C", d=b"D")
    draft.put(b"b", b"mine", b"M")
    draft.put(b"c", b"renamed")
    draft.put(b"f", b"new")
    draft.delete(b"d")
    found = []
    for key, pair in zip(keys, draft.payloads(keys), strict=True):
        found.append(pair)
        draft.delete(key)
        assert draft.used >= 0
    assert found == [(b"stored", b"A"), (b"mine", b"M"), (b"renamed", b"C"), None, None, (b"new", None)]


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
