"""The RAM tier: states of hot pages, within its limit, and never the only copy."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import numpy as np

from prefixstore.engine.page import Page
from prefixstore.engine.ram import ENTRY_BYTES, RamTier
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import Usage
from prefixstore.testing.together import together
from tests.support.engines import NS, A, MemoryPages, P, Store
from tests.support.pages import make_page

MIB = 1 << 20


def page_of(number, payload=b"payload"):
    """The node of a page that is not stored."""
    key, record = make_page(payload, [number])
    return Page.stored(key, record, Usage(1))


def test_a_kept_state_is_a_copy_and_stays_valid_when_it_is_dropped():
    tier = RamTier(MIB)
    page = page_of(1)
    assert tier.state(page) is None
    memory = bytearray(b"state")
    tier.keep(page, memory)
    memory[:] = b"other"
    held = tier.state(page)
    tier.keep(page_of(2), bytes(MIB - 1000))
    assert tier.state(page) is None
    # it is in use
    assert held == b"state"


def test_the_least_recently_used_states_are_dropped_and_the_limit_holds():
    tier = RamTier(3 * (1000 + 4 + ENTRY_BYTES))
    pages = [page_of(i) for i in range(4)]
    for page in pages[:3]:
        tier.keep(page, bytes(1000))
    assert tier.state(pages[0]) is not None
    tier.keep(pages[3], bytes(1000))
    assert [tier.state(page) is not None for page in pages] == [True, False, True, True]
    assert tier.used == 3 * (1000 + 4 + ENTRY_BYTES)
    tier.keep(pages[1], bytes(5000))
    assert tier.state(pages[1]) is None, "larger than the tier"


def test_a_state_is_that_of_its_own_tokens_also_where_another_page_has_its_key():
    tier, page, other = RamTier(MIB), page_of(1), page_of(2)
    tier.keep(page, b"state")
    other.key = page.key
    assert tier.state(page) is not None
    assert tier.state(other) is None


def test_many_threads_keep_and_read_states_and_the_size_stays_correct():
    tier = RamTier(20 * (100 + 4 + ENTRY_BYTES))
    pages = [page_of(i) for i in range(50)]

    def work(seed):
        for i in np.random.default_rng(seed).integers(0, len(pages), 400):
            state = tier.state(pages[i])
            assert state is None or state == bytes([i]) * 100
            tier.keep(pages[i], bytes([i]) * 100)

    together(*(partial(work, seed) for seed in range(4)))
    assert tier.used == (104 + ENTRY_BYTES) * len(tier._states) <= 20 * (104 + ENTRY_BYTES)


def test_a_page_that_another_process_has_deleted_leaves_the_tier():
    backend = MemoryPages()
    with closing(Store(backend, options={"ram_bytes": MIB})) as store:
        store.put(A)
        before = store.engine.ram_bytes
        gone = store.engine.match(NS, as_tokens(A), P).pages[-1]
        with backend.update() as transaction:
            transaction.delete(gone.key)
        store.match(A)
        assert store.engine._ram.state(gone) is None
        assert 0 < store.engine.ram_bytes < before
