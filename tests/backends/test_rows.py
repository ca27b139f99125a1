"""The contract of a backend that keeps rows, for memory; and what is special about memory, and about a draft."""

import random

import pytest

from prefixstore.backends.contract import Draft, Range
from prefixstore.backends.memory import COSTS, MemoryBackend
from prefixstore.testing import BackendContract


class TestMemory(BackendContract):
    def open_backend(self, tmp_path):
        return MemoryBackend()


@pytest.fixture(params=["flushed", "kept"])
def open_draft(request):
    """Opens drafts over rows, whose changes are in the view already, or are not."""

    def opened(keys):
        backend = MemoryBackend()
        with backend.update() as draft:
            for key in keys:
                draft.put(key, b"stored")
        with backend.view() as committed:
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
