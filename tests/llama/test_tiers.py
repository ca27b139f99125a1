"""A real Llama with a local location in front of a shared one."""

from __future__ import annotations

import pytest

from prefixstore import InvalidParameterError, LocationError, PrefixStore
from prefixstore.config import load_config
from prefixstore.opening import locations_of
from tests.support.models import answer, attached, evaluated, forget, prompt
from tests.support.places import place

TOKENS = prompt(1000)


def opened(tmp_path, name, far, llm, **options):
    store = PrefixStore([f"lmdb://{tmp_path / name}", far], **{"max_delay": None, **options})
    attached(store, llm)
    return store


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["lmdb", "valkey", "s3"])
def test_a_second_host_computes_nothing_again_and_needs_the_shared_location_once(llama, tmp_path, request, scheme):
    far = place(scheme, tmp_path, request, "far")
    llm = llama()
    with opened(tmp_path, "one", far, llm) as store:
        first = answer(llm, TOKENS, 8)
        store.flush()
        near, shared = store.stats().tiers
        assert shared.entries == near.entries > 0
        assert shared.bytes_used > 0
    forget(llm)
    with opened(tmp_path, "two", far, llm) as store:
        assert evaluated(store, lambda: answer(llm, TOKENS, 1)) == 1
        assert [tier.pages for tier in store.stats().tiers] == [0, 4]
        forget(llm)
        assert answer(llm, TOKENS, 8) == first
        assert [tier.pages for tier in store.stats().tiers] == [4, 4]
        # a conversation that goes on is passed on as well
        forget(llm)
        longer = [*TOKENS, *prompt(500, 1)]
        second = answer(llm, longer, 8)
        store.flush()
        assert store.check() == []
        assert store.stats().tiers[0].kept == 4
    forget(llm)
    with opened(tmp_path, "one", far, llm) as store:
        assert evaluated(store, lambda: answer(llm, longer, 1)) == 1
        forget(llm)
        assert answer(llm, longer, 8) == second
        assert store.stats().tiers[0].pages > 0


def test_a_slow_shared_location_does_not_count_against_the_local_one(llama, tmp_path):
    llm = llama()
    with opened(tmp_path, "one", f"lmdb://{tmp_path / 'far'}", llm) as store:
        answer(llm, TOKENS, 1)
        longer = [*TOKENS[:768], *prompt(300, 2)]
        store.flush()
    forget(llm)
    with opened(tmp_path, "two", f"lmdb://{tmp_path / 'far'}", llm) as store:
        context = store._current.context
        forget(llm)
        answer(llm, TOKENS[:600], 1)
        store.flush()
        context.rate.token_seconds, context.rate.page_seconds = 1e-3, 1e-6
        context.far_rate.page_seconds = 1e12
        forget(llm)
        before = store.stats().tokens_restored
        answer(llm, TOKENS, 1)
        # as far as it is near: three pages
        assert store.stats().tokens_restored - before == 768
        forget(llm)
        answer(llm, longer, 1)


def test_lists_of_locations(tmp_path):
    assert locations_of("x") == locations_of(["x"]) == ["x"]
    assert locations_of(None) == [None]
    for wrong in ([], ["a", "b", "c"], ["a", "a"], 3, b"a", ["a", 3]):
        with pytest.raises(InvalidParameterError):
            PrefixStore(wrong)
    for twice in ([f"{tmp_path}/kv", f"{tmp_path}/./kv"], [f"sqlite:///{tmp_path}/db", f"sqlite:///{tmp_path}/./db"]):
        with pytest.raises(InvalidParameterError, match="in front of itself"):
            PrefixStore(twice, namespace="x")
        assert not any(tmp_path.iterdir())
    (tmp_path / "c.toml").write_text('[store]\nlocation = ["kv", "s3://bucket/kv"]\nfar_max_bytes = "1TB"\n')
    config = load_config(tmp_path / "c.toml")
    assert config.store["location"] == [str(tmp_path / "kv"), "s3://bucket/kv"]
    with PrefixStore([f"lmdb://{tmp_path / 'a'}", f"sqlite:///{tmp_path / 'b'}"], namespace="x") as store:
        assert store.location == f"lmdb://{tmp_path / 'a'}, sqlite:///{tmp_path / 'b'}"
        assert "tier 2" in str(store.stats())


def test_a_shared_location_that_cannot_be_used_is_refused_at_once(tmp_path):
    (tmp_path / "far").write_text("something else")
    with pytest.raises(LocationError, match="far"):
        PrefixStore([f"lmdb://{tmp_path / 'a'}", f"lmdb://{tmp_path / 'far'}"], namespace="x")
    # and the local one is released
    PrefixStore(f"lmdb://{tmp_path / 'a'}", namespace="x").close()
