"""The RAM tier: states of hot pages, within its limit, and never the only copy."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.index import Page
from prefixstore.engine.ram import ENTRY_BYTES, RamTier
from prefixstore.format.autocodec import pick
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import Usage
from prefixstore.stats import Counters
from prefixstore.store import PrefixStore
from tests.support.engines import NS, A, MemoryPages, Store
from tests.support.models import answer, prompt
from tests.support.pages import make_page
from tests.support.timeouts import wait_for

MIB = 1 << 20


def page_of(number, payload=b"payload"):
    """The node of a page that is not stored."""
    key, record = make_page(payload, [number])
    return Page.stored(key, record, Usage(1))


def put(backend, number, payload=b"payload"):
    """The node of a page that is stored."""
    key, record = make_page(payload, [number])
    with backend.update() as transaction:
        transaction.put(key, record, Usage(1), payload)
    return Page.stored(key, record, Usage(1))


def delete(backend, key):
    with backend.update() as transaction:
        transaction.delete(key)


@pytest.fixture
def tiered():
    """An engine with a RAM tier over a backend that others write to as well."""
    engine = Engine(
        MemoryPages(),
        Budget(64 * MIB),
        POLICIES["lru"](),
        pick("raw"),
        Counters(),
        ram_bytes=MIB,
        read_only=True,
    )
    with closing(engine):
        yield engine


def look_up(engine):
    engine.match(bytes(32), as_tokens([1]), 4)


def test_a_kept_state_is_a_copy():
    tier = RamTier(MIB)
    page = page_of(1)
    assert tier.state(page) is None
    memory = bytearray(b"state")
    tier.keep(page, memory)
    memory[:] = b"other"
    assert tier.state(page) == b"state"


def test_a_state_under_the_same_key_with_other_tokens_is_not_used():
    tier = RamTier(MIB)
    page = page_of(1)
    tier.keep(page, b"state")
    page.tokens += page.tokens
    assert tier.state(page) is None


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


def test_a_state_in_use_stays_valid_when_the_tier_drops_it():
    tier = RamTier(2000)
    first, second = page_of(1), page_of(2)
    tier.keep(first, b"a" * 1000)
    held = tier.state(first)
    tier.keep(second, b"b" * 1000)
    assert tier.state(first) is None
    assert held == b"a" * 1000


def test_a_tier_of_size_zero_keeps_nothing():
    tier = RamTier(0)
    page = page_of(1)
    tier.keep(page, b"")
    assert (tier.state(page), tier.used, tier.lacks([page])) == (None, 0, False)


def test_what_cannot_be_kept_together_is_not_copied_at_all():
    """A restore that copies verifies each state first, which takes longer."""
    tier = RamTier(3 * (1000 + ENTRY_BYTES))
    pages = [replace(page_of(i), raw_bytes=1000) for i in range(4)]
    assert tier.lacks(pages[:2])
    assert not tier.lacks(pages)
    tier.keep(pages[0], bytes(1000))
    assert not tier.lacks(pages[:1])


def test_a_state_that_waits_to_be_written_is_copied_when_that_is_done():
    with closing(Store(MemoryPages(), options={"ram_bytes": MIB})) as store:
        batch = store.announce(A)
        assert store.fetch(A) == 3
        assert store.engine.ram_bytes == 0
        assert store.engine.commit(batch) == 3
        assert store.engine.ram_bytes > 0
        store.engine.clear(NS)
        assert store.engine.ram_bytes == 0


@pytest.mark.parametrize("refreshed_before", [True, False])
def test_a_page_that_is_deleted_from_the_location_leaves_the_tier(tiered, refreshed_before):
    gone, kept = put(tiered._backend, 1), put(tiered._backend, 2)
    if refreshed_before:
        look_up(tiered)
    for page in (gone, kept):
        tiered._ram.keep(page, b"state")
    delete(tiered._backend, gone.key)
    tiered.match(gone.namespace, np.frombuffer(gone.tokens, "<i4"), len(gone.tokens) // 4)
    assert tiered._ram.state(gone) is None
    assert tiered._ram.state(kept) == b"state"
    assert tiered.ram_bytes == 5 + 4 + ENTRY_BYTES


def test_many_threads_keep_and_read_states_and_the_size_stays_correct():
    tier = RamTier(20 * (100 + 4 + ENTRY_BYTES))
    pages = [page_of(i) for i in range(50)]

    def work(seed):
        for i in np.random.default_rng(seed).integers(0, len(pages), 400):
            state = tier.state(pages[i])
            assert state is None or state == bytes([i]) * 100
            tier.keep(pages[i], bytes([i]) * 100)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.used == sum(state.bytes for state in tier._states.values()) <= 20 * (104 + ENTRY_BYTES)


@pytest.mark.slow
def test_pages_are_in_ram_after_a_capture_and_after_a_hit(llama, tmp_path):
    tokens = prompt(700)
    with PrefixStore(tmp_path / "kv", llm := llama(), ram_bytes="64MiB") as store:
        llm.set_cache(store)
        expected = answer(llm, tokens)
        store.flush()
        captured = store.stats()
        assert captured.bytes_in_ram >= captured.bytes_raw > 0
    with PrefixStore(tmp_path / "kv", llm := llama(), ram_bytes="64MiB", read_only=True) as store:
        llm.set_cache(store)
        assert store.stats().bytes_in_ram == 0
        assert answer(llm, tokens) == expected
        wait_for(lambda: store.stats().bytes_in_ram > 0, "a state in memory")
        # restored from RAM
        llm.reset()
        assert store.restore(tokens) == 699


def test_check_finds_damage_in_the_location_despite_the_tier(tmp_path, llama):
    with PrefixStore(tmp_path / "kv", llm := llama(), ram_bytes="64MiB", codec="raw") as store:
        llm.set_cache(store)
        answer(llm, prompt(600))
        store.flush()
        with store._engine._backend.update() as transaction:
            key, record, usage = next(iter(transaction.scan()))
            transaction.put(key, record, usage, bytes(record.stored_bytes))
        assert [violation.rule for violation in store.check()] == ["payload"]
