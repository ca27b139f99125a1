"""Requests that go past a store: they find nothing in it, leave nothing in it, and spoil nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.models import answer, attached, prompt

KINDS = {
    "llama": {},
    "gemma3": {"swa_full": False},
    "mamba": {},
    "lfm2": {},
}


def stored(store, tokens) -> int:
    store.drain()
    return store.match(tokens).n_tokens


@pytest.mark.slow
@pytest.mark.parametrize("arch", KINDS)
def test_a_request_goes_past_the_store_and_later_ones_do_not(llama, store, arch):
    llm = attached(store, llama(arch, **KINDS[arch]))
    plain = llama(arch, **KINDS[arch])
    known, private = prompt(600), prompt(300) + prompt(300, seed=8)
    expected = {n: answer(plain, tokens, 6) for n, tokens in (("known", known), ("private", private))}
    assert answer(llm, known, 6) == expected["known"]
    before = store.stats()
    with store.bypass():
        # it shares 300 tokens with what is live and stored
        assert answer(llm, private, 6) == expected["private"]
        # and this one shares all of it
        assert answer(llm, private, 6) == expected["private"]
        assert store.capture() == 0
    after = store.stats()
    assert after.misses == {**before.misses, "bypassed": 2}
    assert (after.hits, after.live_hits) == (before.hits, before.live_hits)
    assert after.snapshots_captured - before.snapshots_captured <= 1
    # the request before is stored, and continues where it was
    assert answer(llm, known, 6) == expected["known"]
    assert stored(store, known) >= 599
    assert store.last.source == "store"
    assert stored(store, private) <= 300
    # the next request is as any other
    assert answer(llm, private, 6) == expected["private"]
    assert stored(store, private) >= 599


def test_nothing_that_follows_bypassed_tokens_is_stored(llama, store):
    llm, tokens = attached(store, llama()), prompt(700)
    with store.bypass():
        llm.eval(tokens[:300])
    # the same sequence goes on outside of the block, without a lookup
    llm.eval(tokens[300:])
    assert store.capture() == 0
    assert stored(store, tokens) == 0
    assert store.stats().dropped == {"bypassed": 2}
    # a state that was saved meanwhile is not one of known tokens either
    state = llm.save_state()
    llm.reset()
    llm.load_state(state)
    llm.eval(prompt(300, seed=1))
    assert store.capture() == 0
    assert stored(store, tokens) == 0
    llm.reset()
    assert store.restore(tokens) == 0
    llm.eval(tokens)
    assert store.capture() > 0
    assert stored(store, tokens) == 700


def test_blocks_nest_and_end_with_exceptions(llama, store):
    llm, tokens = attached(store, llama()), prompt(300)

    def is_bypassed() -> bool:
        before = store.stats().misses.get("bypassed", 0)
        answer(llm, tokens, 1)
        return store.stats().misses.get("bypassed", 0) > before

    with store.bypass():
        with store.bypass():
            assert is_bypassed()
        assert is_bypassed()
        with pytest.raises(KeyError), store.bypass():
            raise KeyError
        assert is_bypassed()
    assert not is_bypassed()
    stream = llm(prompt(300, seed=4), max_tokens=5, stream=True)
    with store.bypass():
        next(stream)
    # the rest of a stream that was begun in the block leaves nothing either
    list(stream)
    assert stored(store, prompt(300, seed=4)) == 0
    assert not is_bypassed()


def test_a_block_is_that_of_its_thread_and_of_its_task(llama, store):
    llm = attached(store, llama())
    entered, done = threading.Event(), threading.Event()

    def elsewhere():
        with store.bypass():
            entered.set()
            done.wait(120)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert entered.wait(120)
    answer(llm, prompt(300), 1)
    done.set()
    thread.join()
    assert stored(store, prompt(300)) == 300

    async def bypassed(turn: asyncio.Event):
        with store.bypass():
            turn.set()
            await asyncio.sleep(0)
            await asyncio.to_thread(answer, llm, prompt(300, seed=1), 1)

    async def main():
        turn = asyncio.Event()
        task = asyncio.create_task(bypassed(turn))
        await turn.wait()
        answer(llm, prompt(300, seed=2), 1)
        await task

    asyncio.run(main())
    assert stored(store, prompt(300, seed=1)) == 0
    assert stored(store, prompt(300, seed=2)) == 300
