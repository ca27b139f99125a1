"""A lease lasts as long as somebody can end it: Ctrl-C, dropped sessions, closed loops, forks, detached stores."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest
from llama_cpp import LogitsProcessorList

from prefixstore import BusyError, MisuseError, StaleLeaseError
from prefixstore.engine.bookmarks import Bookmarks
from prefixstore.sessions.session import Session
from prefixstore.sessions.table import Table
from tests.sessions.conftest import SMALL, turn
from tests.support import in_fork, outcome
from tests.support.models import answer, forget, prompt


def held(sessions, name):
    with sessions.admit(name, timeout=150) as session:
        return session.tokens.tolist(), session.generation


def assert_free(llm, store, sessions):
    """Nobody has the Llama, and nothing is left of one who had it."""
    assert len(sessions.queue) == 0
    assert sessions.turn is None
    assert llm.cache is None
    assert not store.engine.write_queue.wants_all


# -- Ctrl-C while a session is admitted -------------------------------------------------------------------------------


@pytest.mark.parametrize(("owner", "step"), [(Bookmarks, "read"), (Table, "forget"), (Session, "resume")])
def test_ctrl_c_before_the_block_changes_no_session(owner, step, llm, store, monkeypatch):
    sessions = store.sessions()
    turn(sessions, "alice", prompt(60))
    expected, original = held(sessions, "alice"), getattr(owner, step)

    def interrupted(*arguments, **options):
        original(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            sessions.admit("alice")
    assert_free(llm, store, sessions)
    assert held(sessions, "alice") == expected


# -- dropped ----------------------------------------------------------------------------------------------------------


def test_those_who_wait_pass_over_a_session_that_was_dropped(sessions, monkeypatch):
    """Nobody tells them: they look now and then."""
    monkeypatch.setattr("prefixstore.sessions.llama_queue.LOOK", 0.001)
    leased = [sessions.admit("alice")]
    threading.Timer(0.05, leased.clear).start()
    assert outcome(lambda: held(sessions, "bob")) == ([], 0)


def test_a_stream_keeps_its_lease(sessions):
    stream = sessions.admit("alice").generate(prompt(30), temp=0)
    gc.collect()
    next(stream)
    with pytest.raises(BusyError):
        raise outcome(lambda: sessions.admit("bob", timeout=0))
    del stream
    gc.collect()
    assert outcome(lambda: held(sessions, "bob")) == ([], 0)


# -- one queue for a Llama --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "detach"])
def test_a_store_is_attached_after_a_call_that_its_predecessor_has_left(
    end, llama, llm, store, sessions, open_store, tmp_path
):
    """llama.cpp is not to be touched by another thread meanwhile."""
    expected = answer(llama(**SMALL), prompt(40), 4)
    begun, go, said, others = threading.Event(), threading.Event(), [], []

    def processor(_, scores):
        begun.set()
        go.wait()
        return scores

    def complete():
        options = {"max_tokens": 4, "temperature": 0, "logits_processor": LogitsProcessorList([processor])}
        with sessions.admit("alice") as alice:
            said.append(alice.create_completion(prompt(40), **options)["choices"][0]["text"])

    threads = [
        threading.Thread(target=complete, daemon=True),
        threading.Thread(target=lambda: others.append(open_store(llm, tmp_path / "other")), daemon=True),
    ]
    threads[0].start()
    begun.wait()
    settled = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store._current.context), "settle", lambda _: settled.append(1))
        getattr(store, end)()
    assert settled == []
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    go.set()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive()
    assert said == [expected]
    assert turn(others[0].sessions(), "bob", prompt(50))[0] == "cold"
    others[0].flush()
    assert others[0].stats().entries > 0


# -- event loops that are closed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_loop_that_is_closed_gives_the_llama_up(is_kept, llm, store, sessions):
    async def block():
        async with sessions.aadmit("alice") as alice:
            await asyncio.to_thread(alice.eval, prompt(40))
            entered.set()
            await asyncio.sleep(3600)

    loop = asyncio.new_event_loop()
    entered = asyncio.Event()
    task = loop.create_task(block())
    loop.run_until_complete(entered.wait())
    loop.close()
    if not is_kept:
        del task
        gc.collect()
    assert outcome(lambda: held(sessions, "bob")) == ([], 0)
    assert held(sessions, "alice") == ([], 1)
    assert_free(llm, store, sessions)


# -- who would wait for himself ---------------------------------------------------------------------------------------


def test_what_waits_for_itself_is_refused(sessions):
    async def asked(name="bob"):
        async with sessions.aadmit(name):
            pass

    async def admitted():
        with sessions.admit("alice"), pytest.raises(MisuseError, match="would wait for itself"):
            await asked()

    asyncio.run(admitted())
    # the block ends after the loop
    with sessions.admit("alice"), pytest.raises(MisuseError, match="would wait for itself"):
        asyncio.run(asked())

    async def asynchronous():
        async with sessions.aadmit("alice"):
            with pytest.raises(MisuseError, match="would wait for itself"):
                await asked()
            with pytest.raises(MisuseError, match="use aadmit"):
                sessions.admit("bob")

    asyncio.run(asynchronous())
    # what another task, or thread, can end is waited for

    async def released():
        alice = await asyncio.to_thread(sessions.admit, "alice")
        tasks = [asyncio.create_task(asked(name)) for name in ("bob", "carol")]
        await asyncio.sleep(0)
        sessions.release(alice)
        await asyncio.gather(*tasks)

    asyncio.run(released())
    assert sessions.stats().discarded == 0


# -- forks of the process ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_is_refused_at_once_what_its_parent_has(llm, store, sessions):
    tokens = turn(sessions, "alice", prompt(60))[4]
    store.flush()

    def child(alice, stream):
        uses = (lambda: alice.eval([5]), lambda: next(stream), lambda: alice.tokens, alice.__enter__)
        for use in uses:
            with pytest.raises(StaleLeaseError, match="a parent process"):
                use()
        assert llm.cache is None
        # leaving it there is no use
        alice.__exit__(None, None, None)
        assert sessions.stats().discarded == 0
        forget(llm)
        assert held(sessions, "alice") == (tokens, 0)

    with sessions.admit("alice", timeout=0) as alice:
        stream = alice.generate([*tokens, 5], temp=0)
        next(stream)
        in_fork(lambda: child(alice, stream))
        next(stream)
    assert len(held(sessions, "alice")[0]) == len(tokens) + 2
