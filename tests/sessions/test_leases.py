"""A lease lasts as long as somebody can end it: Ctrl-C, dropped sessions, closed loops, forks, detached stores."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest

from prefixstore import BusyError, MisuseError, StaleLeaseError
from prefixstore.sessions.session import Session
from tests.sessions.test_sessions import turn
from tests.support import outcome
from tests.support.models import forget, prompt
from tests.support.worker import in_fork


def held(sessions, name):
    with sessions.admit(name, timeout=150) as session:
        return session.tokens.tolist(), session.generation


def assert_free(llm, store, sessions):
    """Nobody has the Llama, and nothing is left of one who had it."""
    assert len(sessions.queue) == 0
    assert sessions.turn is None
    assert llm.cache is None
    assert store._hooks.current.reads
    assert store._hooks.current.writes
    assert not store.engine.wants_all


# -- Ctrl-C while a session is admitted -------------------------------------------------------------------------------


# -- dropped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_dropped_session_has_the_llama_no_longer(is_interrupted, llm, store, sessions, monkeypatch):
    if is_interrupted:
        monkeypatch.setattr(Session, "__del__", lambda _: None)
    turn(sessions, "alice", prompt(60))
    expected = held(sessions, "alice")[0]
    for is_used in (False, True):
        alice = sessions.admit("alice")
        if is_used:
            alice.eval([5])
        assert sessions.stats().waiting == 1
        del alice
        gc.collect()
        if is_used:
            # it is not known how far it came
            assert sessions.names() == ["alice-b"]
        else:
            sessions.fork("alice", "alice-b")
            assert held(sessions, "alice") == (expected, 0)
        assert_free(llm, store, sessions)
    assert sessions.stats().waiting == 0
    assert sessions.stats().discarded == 1
    assert held(sessions, "alice") == ([], 1)
    store.flush()
    assert sessions._table._saved() == ["alice-b"]


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
        alice = sessions.admit("alice")
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
            with pytest.raises(StaleLeaseError, match="is the parent's"):
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
