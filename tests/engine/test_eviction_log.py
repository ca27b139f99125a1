"""The note of the latest evictions: bounded, merged, and never in the way."""

from __future__ import annotations

import time

from prefixstore.engine import eviction_log
from prefixstore.engine.budget import Quota
from prefixstore.engine.eviction_log import REMEMBERED, Cause, EvictionLog
from prefixstore.engine.miss import miss_reason
from prefixstore.format.keys import as_tokens, page_keys
from tests.support.engines import NS, A, B, C, P, entry, store_of


def key(number):
    return number.to_bytes(8, "little") + bytes(24)


def test_the_latest_are_remembered_and_each_page_once():
    log = EvictionLog()
    for number in range(REMEMBERED + 10):
        log.add(key(number), Cause.SPACE, 1000.0 + number)
    log.add(key(20), Cause.ASKED, 9000.0)
    assert log.find(key(9)) is None
    assert log.find(key(10)) is not None
    assert log.find(key(20)) == (9000.0, Cause.ASKED)
    packed = log.pack(None, 1 << 30)
    assert len(packed) == 13 * REMEMBERED
    assert eviction_log.parsed(packed)[key(20)[:8]] == (9000.0, Cause.ASKED)
    # what does not fit is what is oldest
    assert list(eviction_log.parsed(log.pack(None, 30))) == [key(20)[:8], key(REMEMBERED + 9)[:8]]
    assert log.pack(None, -5) == b""


def found(store, tokens):
    (key,) = page_keys(NS, as_tokens(tokens[:P]), P)
    one = store.engine.evictions([key]).get(key)
    return one.cause if one is not None else None


def test_the_cause_is_space_a_quota_a_request_or_the_time_to_live():
    with store_of(max_bytes=4 * entry()) as store:
        store.put(A)
        assert found(store, A) is None
        store.put(B)
        store.put(C)
        assert found(store, A) is Cause.SPACE
        store.engine.evict(0)
        assert found(store, C) is Cause.ASKED
    with store_of(quota=Quota(namespace=4 * 1100)) as store:
        for tokens in (A, B, C):
            store.put(tokens)
        assert found(store, A) is Cause.QUOTA
    with store_of(options={"ttl": 1e-6}) as store:
        store.put(A)
        time.sleep(0.001)
        for _ in range(4):
            store.match(A)
            store.put(B)
        assert found(store, A) in (Cause.EXPIRED, None)


def test_the_reason_of_a_miss_tells_short_prompts_evicted_ones_and_those_that_differ_from_new_ones():
    def reason(store, tokens, n_matched=0):
        return miss_reason(store.engine, NS, as_tokens(tokens), P, n_matched=n_matched, min_tokens=3)

    with store_of() as store:
        store.put(A)
        assert reason(store, A[:2], 2) == reason(store, []) == "short"
        assert reason(store, [1, 9, 9, 9], 1) == "diverged"
        assert reason(store, B) == "not_found"
        store.engine.evict(0)
        assert reason(store, A) == reason(store, [*A[:P], 7, 7]) == "evicted"
        assert reason(store, [1, 9, 9, 9]) == "not_found"
