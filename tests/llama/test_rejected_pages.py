"""A restore that does not end as it should: what was not verified leaves nothing in the context."""

from __future__ import annotations

import functools
from contextlib import suppress

import llama_cpp
import numpy as np
import pytest
import zstandard

from prefixstore import PrefixStore
from prefixstore.engine import source
from prefixstore.engine.fetch import States
from prefixstore.errors import UnavailableError
from prefixstore.format.codec import CODECS, decode
from prefixstore.format.record import checksum
from prefixstore.llama.paged_memory import PagedMemory
from tests.support.garbage import NAN, OTHER, SHORT, Case, Victim, rows_replaced
from tests.support.models import answer, caching, forget, load, logits, prompt, state_digest

PAGE = 32
TOKENS = prompt(4 * PAGE + 9)
SETTINGS = {"page_tokens": PAGE, "min_tokens": 16, "codec": "raw", "namespace": "x", "write_behind": False}


@pytest.fixture(params=[False, True], ids=["one by one", "together"])
def together(request, monkeypatch):
    """Whether pages are joined before they are loaded, as on a GPU."""
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: request.param)
    return request.param


@pytest.fixture
def victim(llama, together):
    with PrefixStore("memory:", **SETTINGS) as store:
        llm = llama(n_ctx=512, n_batch=PAGE, n_gpu_layers=-1)
        yield Victim(store, llm, TOKENS)
        assert store._current.context.memory.copies_together == together


def with_nan(victim: Victim, i: int) -> Case:
    """Rows of NaN under the key of page `i` of the prompt; the completion is in its last page."""
    path = victim.store.path(TOKENS).pages
    record, _, payload = victim.pages[path[i].key]
    return Case(path[i].key, "nan", rows_replaced(bytes(decode(record, payload)), NAN))


# -- whatever ends it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *((where, error) for where in ("verify_checksum", "inspect") for error in (MemoryError, ZeroDivisionError)),
        ("verify_checksum", UnavailableError),
        ("verify_checksum", SystemExit),
    ],
)
@pytest.mark.parametrize("live", [0, PAGE + 5])
def test_an_error_at_any_page_is_at_most_a_miss(victim, monkeypatch, where, error, live):
    real = getattr(source, where)
    for i in range(5):
        case = with_nan(victim, i)

        def fail(record, *args, key=case.key):
            if record.key == key:
                raise error("on purpose")
            return real(record, *args)

        monkeypatch.setattr(source, where, fail)
        assert victim.run(case, live) == []
        assert not victim.store._current.context.memory.unfinished.unverified
    monkeypatch.undo()
    victim.put()
    forget(victim.llm)
    assert victim.store.restore([*TOKENS, 1]) == len(TOKENS)


@pytest.mark.parametrize("where", [(PagedMemory, "load"), (PagedMemory, "cut"), (States, "verified")], ids=str)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("live", [0, PAGE + 5])
def test_an_interrupt_at_any_page_leaves_nothing_that_is_not_verified(victim, monkeypatch, where, after, live):
    llm = victim.llm
    real = getattr(*where)
    for i in range(1, 5):
        calls = []

        def interrupted(*args, n=i, calls=calls):
            calls.append(args)
            if len(calls) != n:
                return real(*args)
            if after:
                real(*args)
            raise KeyboardInterrupt

        victim.put(with_nan(victim, min(i, 3)))
        forget(llm)
        if live:
            llm.eval(TOKENS[:live])
        with monkeypatch.context() as patch:
            patch.setattr(*where, interrupted)
            # a restore may make fewer of these calls
            with suppress(KeyboardInterrupt):
                victim.answer_to(TOKENS)
        assert not victim.store._current.context.memory.unfinished.unverified
        assert [victim.answer_to(tokens) for tokens in (SHORT, TOKENS, OTHER)] == [victim.cold[i] for i in (1, 0, 2)]


@pytest.mark.parametrize("live", [0, PAGE + 5])
def test_a_page_that_llama_cpp_refuses_after_copying_rows_leaves_none_of_them(victim, monkeypatch, live):
    real = PagedMemory.load
    for i in range(5):
        case = with_nan(victim, i)
        given = []

        def refused(self, state, n=i - (live // PAGE), given=given):
            given.append(1)
            if len(given) != n + 1:
                return real(self, state)
            assert real(self, state)
            _, mem = self._pointers()
            llama_cpp.llama_memory_seq_rm(mem, 0, self._llm().n_tokens + n * PAGE, -1)
            llama_cpp.llama_memory_seq_rm(mem, 1, -1, -1)
            return False

        with monkeypatch.context() as patch:
            patch.setattr(PagedMemory, "load", refused)
            assert victim.run(case, live) == []


@pytest.mark.parametrize("write_behind", [True, False])
def test_a_page_that_llama_cpp_refuses_ends_the_restore_with_what_is_there(llama, monkeypatch, write_behind):
    llm, tokens = llama(), prompt(700)
    cold = answer(llm, tokens, 6)
    forget(llm)
    with PrefixStore("memory:", llm, write_behind=write_behind) as store:
        if write_behind:
            # pages that wait to be written need no check
            monkeypatch.setattr(store.engine.write_queue, "_commit", lambda batch: None)
        llm.set_cache(store)
        answer(llm, tokens, 1)
        real, loads = llama_cpp.llama_state_seq_set_data, []
        monkeypatch.setattr(
            llama_cpp, "llama_state_seq_set_data", lambda *args: loads.append(1) or (len(loads) != 2 and real(*args))
        )
        llm.reset()
        assert answer(llm, tokens, 6) == cold
        assert store.stats().unreadable == {"refused": 1}
        assert store.stats().tokens_restored == 256


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_good_pages_are_loaded_again_with_those_of_the_live_prefix(victim):
    llm, store = victim.llm, victim.store
    forget(llm)
    llm.set_cache(None)
    llm.eval(TOKENS[: 2 * PAGE])
    expected = state_digest(llm, 2 * PAGE)
    llm.set_cache(store)
    victim.put(with_nan(victim, 2))
    forget(llm)
    llm.eval(TOKENS[: PAGE + 9])
    before = store.stats()
    assert store.restore(TOKENS) == 2 * PAGE
    assert store._current.context.lineage.n == llm.n_tokens == 2 * PAGE
    assert llm.input_ids[: 2 * PAGE].tolist() == TOKENS[: 2 * PAGE]
    assert state_digest(llm, 2 * PAGE) == expected
    assert store.stats().hits == before.hits + 1
    assert store.stats().tokens_restored - before.tokens_restored == PAGE - 9


# -- sizes -------------------------------------------------------------------------------------------------------------

BOMB = 1 << 28


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "lfm2"])
@pytest.mark.parametrize("codec", ["zstd", "planes"])
@pytest.mark.parametrize("known", [False, True])
def test_a_page_that_claims_more_than_the_context_can_hold_is_not_unpacked(
    llama, tmp_path, monkeypatch, arch, codec, known
):
    llm = llama(arch, n_ctx=512, n_batch=PAGE)
    place = f"lmdb://{tmp_path / 'kv'}"
    with caching(place, llm, **SETTINGS) as store:
        answer(llm, TOKENS, 4)
        # a state of recurrent memory is stored whole: it helps a prompt that continues it
        tokens = [*llm.input_ids[: llm.n_tokens].tolist(), 7, 8, 9]
        store.flush()
        forge_all(store._engine._backend, codec)
    llm.set_cache(None)
    forget(llm)
    cold = answer(llm, tokens, 4)
    forget(llm)
    sizes = []
    real = source.decode_into

    def watched(record, *args):
        sizes.append(record.raw_bytes)
        real(record, *args)

    monkeypatch.setattr(source, "decode_into", watched)
    with caching(place, llm, **SETTINGS) as store:
        if known:
            # the shape is known from a page of its own
            answer(llm, OTHER, 1)
        forget(llm)
        assert answer(llm, tokens, 4) == cold
        store.flush()
        assert store.stats().unreadable["shape"] >= 1
        assert set(store.stats().unreadable) == {"shape"}
        assert max(sizes, default=0) < BOMB
        if known and arch in ("llama", "gemma3"):
            # they are deleted, and their places are free for what was computed
            assert store.match(tokens).n_tokens >= len(tokens)
            assert store.check() == []


@functools.cache
def zeros(n):
    """So many zeros, packed."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=16)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(n))


def forge_all(backend, codec):
    """Every state becomes one that unpacks to very many zeros, with a right checksum."""
    frame = zeros(BOMB if codec == "zstd" else BOMB // 2)
    payload = frame if codec == "zstd" else len(frame).to_bytes(8, "little") + frame + frame
    with backend.view() as view:
        found = [(key, record, usage) for key, record, usage in view.scan() if record.raw_bytes]
    forged = {"codec": CODECS[codec], "raw_bytes": BOMB, "stored_bytes": len(payload), "checksum": checksum(payload)}
    with backend.update() as transaction:
        for key, record, usage in sorted(found, key=lambda one: one[1].start):
            for name, value in forged.items():
                object.__setattr__(record, name, value)
            transaction.put(key, record, usage, payload)


# -- a prompt longer than the context ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "lfm2"])
@pytest.mark.parametrize("n_ctx", [300, 512])
def test_a_prompt_longer_than_the_context_leaves_a_place_for_the_next_token(llama, arch, n_ctx):
    llm = llama(arch, n_ctx=n_ctx, n_batch=64)
    tokens = prompt(n_ctx + 200, seed=9)
    with PrefixStore("memory:", llm, page_tokens=PAGE, min_tokens=16, snapshot_interval=PAGE) as store:
        if arch in ("llama", "gemma3"):
            llm.eval(tokens[:n_ctx])
            store.capture()
            # it is live already, all of it
            assert store.restore(tokens) == n_ctx - 1
        else:
            # there is nothing to cut: the deepest snapshot that leaves a place
            for end in (n_ctx - 40, n_ctx):
                llm.eval(tokens[llm.n_tokens : end])
                store.capture()
        forget(llm)
        n = store.restore(tokens, always=True)
        assert PAGE < n < n_ctx
        llm.eval(tokens[n : n + 1])
        forget(llm)
        assert store[tokens].n_tokens == n
        llm.eval(tokens[n : n + 1])
        restored = logits(llm)
        forget(llm)
        llm.set_cache(None)
        llm.eval(tokens[: n + 1])
        np.testing.assert_allclose(restored, logits(llm), atol=0.05)


def test_places_and_not_the_padded_context_bound_what_is_restored(models, caplog):
    """A Llama has as many places as it was asked for; its context has more, to the next multiple of 256."""
    tokens = prompt(500, seed=9)
    large = load(models("llama"), n_ctx=768)
    with PrefixStore("memory:", page_tokens=PAGE) as store:
        large.set_cache(store)
        answer(large, tokens, 2)
        small = load(models("llama"), n_ctx=300)
        small.set_cache(store)
        assert store.restore(tokens, small) == 299
        small.reset()
        assert answer(small, tokens[:280], 4) == answer(load(models("llama"), n_ctx=300), tokens[:280], 4)
        # more than it has places for: the same error as without a store
        with pytest.raises(ValueError, match="broadcast"):
            small(tokens[:400], max_tokens=4)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
