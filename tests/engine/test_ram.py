"""The tier in RAM: states at hand, within its budget, never the only copy."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.memory import MemoryBackend
from prefixstore.engine.ram import ENTRY_BYTES, TieredBackend
from prefixstore.format.record import Usage
from prefixstore.store import PrefixStore
from prefixstore.testing import BackendContract, PersistentBackendContract, make_page
from tests.support.models import answer, prompt

MIB = 1 << 20


class TestTierOverMemory(BackendContract):
    def open_backend(self, tmp_path):
        return TieredBackend(MemoryBackend(), 8 * MIB)


class TestTierOverLMDB(PersistentBackendContract):
    def open_backend(self, tmp_path):
        return TieredBackend(LMDBBackend(tmp_path / "kv", 128 * MIB), 8 * MIB)

    reopen = open_backend


def put(backend, number, payload=b"payload"):
    key, record = make_page(payload, [number])
    with backend.update() as transaction:
        transaction.put(key, record, Usage(1), payload)
    return key, record.tokens


def delete(backend, key):
    with backend.update() as transaction:
        transaction.delete(key)


def look(backend):
    with backend.view():
        pass


def test_a_state_that_was_kept_is_at_hand_and_is_a_copy():
    tier = TieredBackend(MemoryBackend(), MIB)
    key, tokens = put(tier, 1)
    assert tier.state(key, tokens) is None
    memory = bytearray(b"state")
    tier.keep(key, tokens, memory)
    memory[:] = b"other"
    assert tier.state(key, tokens) == b"state"


def test_other_tokens_under_the_same_key_are_not_believed():
    tier = TieredBackend(MemoryBackend(), MIB)
    key, tokens = put(tier, 1)
    tier.keep(key, tokens, b"state")
    assert tier.state(key, tokens + tokens) is None


def test_the_least_recently_used_states_go_and_the_budget_holds():
    tier = TieredBackend(MemoryBackend(), 3 * (1000 + 4 + ENTRY_BYTES))
    pages = [put(tier, i) for i in range(4)]
    for key, tokens in pages[:3]:
        tier.keep(key, tokens, bytes(1000))
    assert tier.state(*pages[0]) is not None
    tier.keep(*pages[3], bytes(1000))
    assert [tier.state(*page) is not None for page in pages] == [True, False, True, True]
    assert tier.ram_used == 3 * (1000 + 4 + ENTRY_BYTES)
    tier.keep(*pages[1], bytes(5000))
    assert tier.state(*pages[1]) is None, "larger than the tier"


def test_a_state_that_is_held_stays_as_it_is_when_the_tier_lets_it_go():
    tier = TieredBackend(MemoryBackend(), 2000)
    first, second = put(tier, 1), put(tier, 2)
    tier.keep(*first, b"a" * 1000)
    held = tier.state(*first)
    tier.keep(*second, b"b" * 1000)
    assert tier.state(*first) is None
    assert held == b"a" * 1000


@pytest.mark.parametrize("through_the_tier", [True, False])
def test_a_page_that_leaves_the_location_leaves_the_tier(through_the_tier):
    inner = MemoryBackend()
    tier = TieredBackend(inner, MIB)
    gone, kept = put(tier, 1), put(tier, 2)
    look(tier)
    for page in (gone, kept):
        tier.keep(*page, b"state")
    delete(tier if through_the_tier else inner, gone[0])
    look(tier)
    assert tier.state(*gone) is None
    assert tier.state(*kept) == b"state"
    assert tier.ram_used == 5 + 4 + ENTRY_BYTES


def test_after_too_many_changes_to_tell_only_what_is_there_stays(monkeypatch):
    inner = MemoryBackend()
    tier = TieredBackend(inner, MIB)
    gone, kept = put(tier, 1), put(tier, 2)
    look(tier)
    for page in (gone, kept):
        tier.keep(*page, b"state")
    delete(inner, gone[0])
    monkeypatch.setattr(inner._pages, "changes", inner._pages.changes.__class__())
    look(tier)
    assert (tier.state(*gone), tier.state(*kept)) == (None, b"state")


def test_many_threads_keep_and_ask_and_the_sum_is_right():
    tier = TieredBackend(MemoryBackend(), 20 * (100 + 4 + ENTRY_BYTES))
    pages = [put(tier, i) for i in range(50)]

    def work(seed):
        for i in np.random.default_rng(seed).integers(0, len(pages), 400):
            key, tokens = pages[i]
            state = tier.state(key, tokens)
            assert state is None or state == bytes([i]) * 100
            tier.keep(key, tokens, bytes([i]) * 100)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.ram_used == sum(state.bytes for state in tier._states.values()) <= 20 * (104 + ENTRY_BYTES)


def test_pages_are_at_hand_after_a_capture_and_after_a_hit(llama, tmp_path):
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
        until = threading.Event()
        for _ in range(400):
            if store.stats().bytes_in_ram:
                break
            until.wait(0.05)
        assert store.stats().bytes_in_ram > 0
        # from now on no payload is read any more
        llm.reset()
        assert store.restore(tokens) == 699


def test_damage_in_the_location_is_not_hidden_from_check(tmp_path, llama):
    with PrefixStore(tmp_path / "kv", llm := llama(), ram_bytes="64MiB", codec="raw") as store:
        llm.set_cache(store)
        answer(llm, prompt(600))
        store.flush()
        tier = store._engine._backend
        with tier.update() as transaction:
            key, record, usage = next(iter(transaction.scan()))
            transaction.put(key, record, usage, bytes(record.stored_bytes))
        assert [violation.rule for violation in store.check()] == ["payload"]
