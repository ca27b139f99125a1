"""Idle sessions whose rows wait in the context: whose they are, when they go, and what cannot wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from itertools import islice

import llama_cpp
import numpy as np
import pytest

from prefixstore import BusyError, ContextError, InvalidParameterError, MisuseError, PrefixStore
from tests.sessions.conftest import OPTIONS
from tests.sessions.test_sessions import computed, fail_in_a_block, turn
from tests.support.models import forget, load, logits, prompt
from tests.support.trust import CLOSE, Injected, failing

SMALL = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64}
KINDS = {
    "plain": {},
    "flash attention": {"flash_attn": True},
    "quantized": {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0},
}


@pytest.fixture
def llm(llama):
    return llama(**SMALL)


@pytest.fixture
def alone(llama):
    return llama(**SMALL)


@pytest.fixture
def sessions(store):
    return store.sessions(max_sessions=8, max_resident=3)


def tagged(llm):
    """The first and the last position of each sequence of a context beside the live one."""
    memory = llama_cpp.llama_get_memory(vars(llm._ctx)["ctx"])
    ends = {
        sequence: (
            llama_cpp.llama_memory_seq_pos_min(memory, sequence),
            llama_cpp.llama_memory_seq_pos_max(memory, sequence),
        )
        for sequence in range(1, llama_cpp.llama_max_parallel_sequences())
    }
    return {sequence: found for sequence, found in ends.items() if found[1] >= 0}


def assert_greedy(alone, tokens, generated):
    """A context of its own would have said the same, but for rounding: the cells of a sum may be in another order."""
    alone.reset()
    alone.eval(tokens)
    for token in generated:
        found = logits(alone)
        assert found[token] > found.max() - CLOSE
        alone.eval([token])


def turned(sessions, alone, name, tokens, n=6):
    """A turn with the right answer."""
    result = turn(sessions, name, tokens, n)
    assert result[4][: len(tokens)] == tokens
    assert_greedy(alone, tokens, result[4][len(tokens) :])
    return result


def talk(sessions, names, n=60):
    """A turn of each, and what they hold."""
    return {name: turn(sessions, name, prompt(n, seed=sum(name.encode())))[4] for name in names}


def parked(sessions):
    return [name for name in sessions.stats().live_cells if name in sessions._parking.cells]


# -- whose rows they are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_beside_the_live_one_work_in_a_stock_llama(kind, llama):
    llm, other = (llama(**SMALL, **KINDS[kind]) for _ in range(2))
    assert llama_cpp.llama_n_seq_max(vars(llm._ctx)["ctx"]) == 1
    with PrefixStore("memory://", llm, **OPTIONS) as store:
        sessions = store.sessions(max_resident=3)
        held = talk(sessions, ["alice", "bob", "carol"])
        assert tagged(llm) == {2: (0, 64), 3: (0, 64)}
        for k in range(3):
            for name in held:
                tokens = held[name] + prompt(8, seed=k)
                source, n_live, n_restored, _, after = turned(sessions, other, name, tokens)
                assert (source, n_live, n_restored) == ("parked", len(held[name]), 0)
                held[name] = after
        counts = sessions.stats()
        assert (counts.parked, counts.store, counts.cold) == (9, 0, 3)
        assert counts.residents == 2
        assert counts.live_cells == {name: len(tokens) for name, tokens in held.items()}
        assert counts.parked_cells == sum(len(held[name]) for name in ("alice", "bob"))
        assert store.stats().dropped == {}
        assert store.check() == []
        store.detach()
        # they go with the next call
        assert tagged(llm) != {}
        llm.reset()
        assert tagged(llm) == {}
        assert "eval" not in vars(llm)
        # what was captured meanwhile is right, for whoever restores it
        forget(other)
        store.attach(other)
        for name, tokens in held.items():
            assert store.restore([*tokens, 5]) == len(tokens), name
            other.eval([5])
            llm.reset()
            llm.eval([*tokens, 5])
            assert np.abs(logits(other) - logits(llm)).max() < CLOSE


def test_without_parking_nothing_waits(llm, store):
    sessions = store.sessions()
    talk(sessions, ["alice", "bob"])
    assert tagged(llm) == {}
    assert sessions.stats().residents == 0


def test_the_least_recently_used_one_leaves_first(store, llm):
    sessions = store.sessions(max_resident=2)
    held = talk(sessions, ["alice", "bob", "carol", "dave"], 40)
    assert sorted(parked(sessions)) == ["bob", "carol"]
    assert turn(sessions, "carol", held["carol"])[0] == "parked"
    assert sorted(parked(sessions)) == ["bob", "dave"]
    assert turn(sessions, "alice", held["alice"])[0] == "store"
    assert sorted(parked(sessions)) == ["carol", "dave"]
    assert len(tagged(llm)) == 2


def test_a_session_that_has_the_llama_does_not_wait_beside_itself(llm, sessions):
    held = talk(sessions, ["alice"])["alice"]
    for _ in range(3):
        held = turn(sessions, "alice", held)[4]
        assert tagged(llm) == {}


def test_reuse_says_whether_waiting_rows_may_be_used(store, sessions):
    held = talk(sessions, ["alice", "bob"])
    assert turn(sessions, "alice", held["alice"], reuse="live")[:3] == ("parked", 65, 0)
    assert turn(sessions, "bob", held["bob"], reuse="store")[:3] == ("store", 0, 65)
    assert computed(store, lambda: turn(sessions, "alice", held["alice"], n=1, reuse="none")) == 65
    assert "alice" not in parked(sessions)


def test_a_fork_takes_the_rows_of_what_it_was_forked_from_and_leaves_them(alone, store, sessions):
    held = talk(sessions, ["alice", "bob"])
    sessions.fork("alice", "alice-b")
    source, n_live, *_ = turned(sessions, alone, "alice-b", held["alice"] + prompt(9, seed=1))
    assert (source, n_live) == ("parked", 65)
    assert sorted(parked(sessions)) == ["alice", "bob"]
    # what they share is live
    assert turned(sessions, alone, "alice", held["alice"] + prompt(9, seed=2))[:2] == ("live", 65)
    # alice-b waits now, sharing cells with alice
    assert sorted(parked(sessions)) == ["alice-b", "bob"]
    assert turn(sessions, "alice-b", held["alice"])[0] == "parked"
    assert store.stats().dropped == {}
    assert store.check() == []


def test_an_edit_of_what_waits_is_computed_from_there(alone, store, sessions):
    held = talk(sessions, ["alice", "bob"])
    tokens = held["alice"][:40] + prompt(10, seed=3)
    assert computed(store, lambda: turn(sessions, "alice", tokens, n=1)) == 10
    turned(sessions, alone, "alice", tokens)


def test_one_that_another_process_continues_is_not_taken_from_what_waits(llm, llama, tmp_path, open_store, alone):
    sessions = open_store(llm).sessions(max_resident=2)
    other_llm = llama(**SMALL)
    other = open_store(other_llm)
    held = talk(sessions, ["alice", "bob"])
    sessions._store.flush()
    longer = held["alice"][:50] + prompt(30, seed=4)
    longer = turn(other.sessions(), "alice", longer)[4]
    other.flush()
    with sessions.admit("alice") as alice:
        assert alice.tokens.tolist() == longer
        # the store has more of it than what waits
        assert (alice.source, alice.n_live + alice.n_restored) == ("store", len(longer))
    turned(sessions, alone, "alice", longer)


# -- when they go -----------------------------------------------------------------------------------------------------


def test_residents_go_before_a_decode_fails_for_want_of_cells(llm, alone, store, sessions):
    held = talk(sessions, ["alice", "bob", "carol"], 150)
    tokens = prompt(400, seed=9)
    turned(sessions, alone, "dave", tokens)
    assert len(tagged(llm)) == 0
    for name in held:
        turned(sessions, alone, name, held[name])
    assert sessions.stats().discarded == 0
    assert store.stats().dropped == {}
    assert store.check() == []


def test_as_few_go_as_are_in_the_way(llm, alone, sessions, capfd):
    talk(sessions, ["alice", "bob", "carol"], 100)
    tokens = prompt(250, seed=9)
    turned(sessions, alone, "dave", tokens)
    assert sorted(parked(sessions)) == ["bob", "carol"]
    # llama.cpp was not asked for more than it has
    assert "slot" not in capfd.readouterr().err


def test_beginnings_that_are_shared_count_once(llm, alone, store, capfd):
    """More tokens than the context has cells."""
    sessions = store.sessions(max_sessions=20, max_resident=12)
    held = talk(sessions, ["alice"], 200)["alice"]
    for i in range(8):
        sessions.fork("alice", f"fork {i}")
        assert turned(sessions, alone, f"fork {i}", held + prompt(10, seed=i))[:2] == ("live", 205)
    assert sum(sessions.stats().live_cells.values()) > 3 * 512
    assert len(parked(sessions)) == 8
    assert "slot" not in capfd.readouterr().err
    turned(sessions, alone, "other", prompt(300, seed=99))
    assert len(parked(sessions)) == 0


def test_beginnings_that_were_computed_twice_are_two(llm, alone, store):
    """The tokens could share cells, and do not."""
    sessions = store.sessions(max_sessions=20, max_resident=12)
    for i in range(6):
        # as what is live is emptied, the same beginning is computed again
        turned_cold = turn(sessions, f"session {i}", prompt(100) + prompt(10, seed=i), reuse="none")
        assert turned_cold[0] == "cold"
        assert_greedy(alone, prompt(100) + prompt(10, seed=i), turned_cold[4][110:])
    assert 1 <= len(parked(sessions)) <= 4


def test_residents_go_before_a_restore_fails_for_want_of_cells(llm, alone, store, sessions):
    held = talk(sessions, ["dave"], 350)
    talk(sessions, ["alice", "bob", "carol"], 120)
    assert "dave" not in parked(sessions)
    source, n_live, n_restored, *_ = turned(sessions, alone, "dave", held["dave"])
    assert (source, n_live + n_restored) == ("store", len(held["dave"]))
    assert store.stats().unreadable == {}
    assert store.check() == []


def test_a_generation_goes_on_while_residents_go(llm, alone, sessions):
    talk(sessions, ["alice", "bob", "carol"], 140)
    tokens = prompt(60, seed=9)
    turned(sessions, alone, "dave", tokens, n=120)
    assert len(parked(sessions)) < 3


def test_an_error_that_is_not_want_of_cells_is_raised_and_nothing_goes(llm, sessions, monkeypatch):
    talk(sessions, ["alice", "bob"])
    monkeypatch.setattr(type(llm._ctx), "decode", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        turn(sessions, "bob", prompt(90, seed=9))
    assert parked(sessions) == ["alice"]


def test_what_is_left_with_an_exception_does_not_wait(alone, sessions):
    held = talk(sessions, ["alice", "bob"])
    with pytest.raises(ZeroDivisionError):
        fail_in_a_block(sessions, "bob")
    turned(sessions, alone, "carol", held["bob"])
    assert parked(sessions) == ["alice"]
    with sessions.admit("bob") as bob:
        assert (bob.generation, len(bob.tokens)) == (1, 0)


def test_what_is_evicted_does_not_wait_also_while_another_has_the_llama(llm, sessions):
    held = talk(sessions, ["alice", "bob", "carol"])
    with sessions.admit("dave") as dave:
        thread = threading.Thread(target=sessions.evict, args=("alice",))
        thread.start()
        thread.join()
        assert sorted(parked(sessions)) == ["bob", "carol"]
        dave.eval(prompt(20))
    with sessions.admit("alice") as alice:
        assert len(alice.tokens) == 0
    sessions.evict_all()
    assert parked(sessions) == []
    assert turn(sessions, "bob", held["bob"])[0] == "cold"
    assert tagged(llm) == {}


def test_one_that_is_evicted_while_it_is_parked_does_not_wait(sessions, monkeypatch):
    talk(sessions, ["alice"])
    park = type(sessions._parking).park

    def evicted_meanwhile(self, name, *args, **options):
        done = park(self, name, *args, **options)
        sessions.evict(name)
        return done

    monkeypatch.setattr(type(sessions._parking), "park", evicted_meanwhile)
    talk(sessions, ["bob"])
    assert parked(sessions) == []


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_fault_at_any_call_of_llama_cpp_leaves_no_wrong_rows(after, alone, store):
    sessions = store.sessions(max_sessions=8, max_resident=2)
    expected = {name: prompt(40, seed=i) for i, name in enumerate(("alice", "bob", "carol"))}

    def round_of_turns():
        for name, tokens in expected.items():
            turn(sessions, name, tokens, 2)

    round_of_turns()
    with failing(-1, after=after) as steps:
        round_of_turns()
    assert sessions.stats().parked > 0
    for k in range(0, steps.made, 4):
        with contextlib.suppress(Injected), failing(k, after=after):
            round_of_turns()
        name = list(expected)[k % 3]
        with sessions.admit(name) as session:
            generated = list(islice(session.generate(expected[name], temp=0), 2))
        assert_greedy(alone, expected[name], generated)
    for name, tokens in expected.items():
        turned(sessions, alone, name, tokens, 2)
    assert store.check() == []
    assert len(sessions._queue) == 0


# -- whoever else reaches the context ---------------------------------------------------------------------------------

REACHES = {
    "reset": lambda llm: llm.reset(),
    "clear": lambda llm: llm._ctx.kv_cache_clear(),
    "truncate": lambda llm: llm._ctx.kv_cache_seq_rm(-1, 3, -1),
    "another prompt": lambda llm: (llm.reset(), llm.eval(prompt(50, seed=7))),
    "save and load": lambda llm: llm.load_state(llm.save_state()),
    "pointer": lambda llm: llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True),
    "forget": forget,
}


@pytest.mark.parametrize("how", REACHES)
def test_whatever_is_done_to_the_context_between_two_blocks_nobody_gets_wrong_rows(how, llm, alone, store, sessions):
    held = talk(sessions, ["alice", "bob", "carol"])
    REACHES[how](llm)
    for name in ("bob", "carol", "alice"):
        turned(sessions, alone, name, held[name])
    assert store.check() == []


@pytest.mark.parametrize("how", REACHES)
def test_whatever_is_done_to_the_context_inside_a_block_nobody_gets_wrong_rows(how, llm, alone, store, sessions):
    held = talk(sessions, ["alice", "bob", "carol"])
    with sessions.admit("dave") as dave:
        dave.eval(prompt(20, seed=8))
        REACHES[how](llm)
    for name in ("bob", "carol", "alice"):
        turned(sessions, alone, name, held[name])
    assert store.check() == []


def test_a_saved_state_has_no_cells_of_residents(llm, alone, sessions):
    talk(sessions, ["alice", "bob", "carol"])
    llm.reset()
    llm.eval(prompt(30, seed=5))
    state = llm.save_state()
    alone.eval(prompt(30, seed=5))
    assert state.llama_state_size == alone.save_state().llama_state_size
    assert tagged(llm) == {}
    llm.load_state(state)
    # all cells but these can be used
    llm.eval(prompt(480, seed=6))


def test_past_the_store_residents_stay_and_give_way(llm, alone, store, sessions):
    held = talk(sessions, ["alice", "bob", "carol"], 100)
    with store.bypass():
        for n, n_parked in ((80, 2), (480, 0)):
            llm(prompt(n, seed=6), max_tokens=6, temperature=0)
            assert_greedy(alone, prompt(n, seed=6), llm.input_ids[n : llm.n_tokens].tolist())
            assert len(parked(sessions)) == n_parked
    for name in held:
        turned(sessions, alone, name, held[name])


def test_a_stream_beyond_the_context_moves_nobody_else(llm, alone, store, sessions):
    held = talk(sessions, ["alice", "bob"])
    sessions.fork("alice", "carol")
    with sessions.admit("carol") as carol:
        assert carol.source == "parked"
        tokens = held["alice"] + prompt(30, seed=5)
        assert len(list(carol.stream(tokens, sink=4, window=100, max_tokens=120, temp=0))) == 120
    for name in ("alice", "bob"):
        turned(sessions, alone, name, held[name])
    assert store.check() == []


def test_another_store_finds_no_residents(llm, store, sessions, open_store, tmp_path):
    talk(sessions, ["alice", "bob"])
    store.close()
    again = open_store(llm, tmp_path / "other")
    assert tagged(llm) == {}
    assert again.sessions(max_resident=2).stats().residents == 0


def test_residents_of_a_store_that_was_dropped_do_not_stay(llama, tmp_path):
    llm = llama(**SMALL)
    store = PrefixStore(tmp_path / "kv", llm, **OPTIONS)
    talk(store.sessions(max_resident=2), ["alice", "bob"])
    assert tagged(llm)
    del store
    gc.collect()
    # as many as there are cells
    llm.eval(prompt(511, seed=3)[llm.n_tokens :])
    assert tagged(llm) == {}


def test_sessions_that_were_dropped_leave_their_cells_to_the_next_ones(llm, store, alone):
    held = talk(store.sessions(max_resident=3), ["alice", "bob", "carol"], 100)
    gc.collect()
    sessions = store.sessions(max_resident=3)
    assert sessions.stats().residents == 0
    for name in held:
        turned(sessions, alone, name, held[name])
    assert len(tagged(llm)) <= 3


def test_a_store_is_closed_while_a_session_computes(llm, store, sessions):
    """As a server does at Ctrl-C: nothing is done to a context that another thread uses."""
    talk(sessions, ["alice", "bob", "carol"], 100)
    begun, go, ended = threading.Event(), threading.Event(), []

    def processor(_, scores):
        begun.set()
        go.wait()
        return scores

    def compute():
        with sessions.admit("alice") as alice:
            processors = llama_cpp.LogitsProcessorList([processor])
            alice.create_completion(prompt(90, seed=5), max_tokens=4, temperature=0, logits_processor=processors)
        ended.append(tagged(llm))

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    before = tagged(llm)
    assert len(before) == 2
    store.close()
    assert tagged(llm) == before
    go.set()
    thread.join()
    assert len(ended) == 1
    llm.reset()
    assert tagged(llm) == {}
    llm.eval(prompt(511))


# -- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_threads_have_their_own_conversations_while_others_evict_and_fork(alone, store):
    sessions = store.sessions(max_sessions=12, max_resident=4)
    said, failures, is_over = {}, [], threading.Event()

    def converse(i):
        try:
            tokens = prompt(60, seed=i)
            for k in range(5):
                after = turn(sessions, f"session {i}", tokens, 4)[4]
                assert after[: len(tokens)] == tokens
                said[i, k] = tokens, after[len(tokens) :]
                tokens = after + prompt(10, seed=100 * i + k)
        except BaseException as error:
            failures.append(error)
            raise

    def disturb():
        chance = random.Random(1)
        while not is_over.wait(0.002):
            name = f"session {chance.randrange(6)}"
            with contextlib.suppress(BusyError, InvalidParameterError):
                sessions.evict(name) if chance.random() < 0.5 else sessions.fork(name, f"{name}+")
            sessions.names()
            counts = sessions.stats()
            assert counts.residents <= 5
            assert str(store.stats())

    threads = [threading.Thread(target=converse, args=(i,)) for i in range(6)]
    other = threading.Thread(target=disturb)
    for thread in (*threads, other):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    other.join()
    assert failures == []
    for tokens, answer in said.values():
        assert_greedy(alone, tokens, answer)
    assert store.check() == []


@pytest.mark.parametrize("seed", range(2))
def test_tasks_are_cancelled_at_any_step(seed, alone, store):
    sessions = store.sessions(max_sessions=12, max_resident=2)
    chance = random.Random(seed)

    async def converse(i):
        async with sessions.aadmit(f"session {i % 4}", reuse=chance.choice(["both", "live", "store"])) as session:
            await asyncio.to_thread(session.create_completion, prompt(50, seed=i % 4), max_tokens=3, temperature=0)
            return session.tokens.tolist()

    async def main():
        found = []
        for _ in range(4):
            tasks = [asyncio.create_task(converse(i)) for i in range(6)]
            for task in chance.sample(tasks, 3):
                for _ in range(chance.randrange(40)):
                    await asyncio.sleep(0)
                task.cancel()
            found += await asyncio.gather(*tasks, return_exceptions=True)
        return found

    results = asyncio.run(main())
    held = [found for found in results if isinstance(found, list)]
    assert len(held) >= 12
    assert all(isinstance(found, (list, asyncio.CancelledError)) for found in results)
    for tokens in held:
        assert_greedy(alone, tokens[:50], tokens[50:])
    assert len(sessions._queue) == 0
    assert store.check() == []


# -- what cannot wait -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "options", "says"),
    [
        ("gemma3", {"swa_full": False}, "sliding window"),
        ("gemma3", {"swa_full": True}, "sliding window"),
        ("mamba", {}, "recurrent"),
        ("lfm2", {}, "recurrent"),
    ],
)
def test_contexts_in_which_nothing_can_wait_say_why(arch, options, says, llama, open_store):
    llm = llama(arch, **SMALL, **options)
    store = open_store(llm)
    with pytest.raises(ContextError, match=says):
        store.sessions(max_resident=1)
    assert store.sessions(max_resident=0).stats().residents == 0


def test_llama_cpp_overwrites_the_window_of_a_sequence_although_there_are_free_cells(llama, monkeypatch):
    """Why a window cannot be parked with ``swa_full=True`` either."""
    llm = llama("gemma3", swa_full=True, **SMALL)
    memory = llama_cpp.llama_get_memory(vars(llm._ctx)["ctx"])
    rm = type(llm._ctx).kv_cache_seq_rm
    monkeypatch.setattr(type(llm._ctx), "kv_cache_seq_rm", lambda self, _, p0, p1: rm(self, 0, p0, p1))
    llm.eval(prompt(150))
    llama_cpp.llama_memory_seq_cp(memory, 0, 2, -1, -1)
    llm.reset()
    llm.eval(prompt(300))
    llama_cpp.llama_memory_seq_rm(memory, 2, -1, -1)
    for _ in range(5):
        llm.eval(prompt(30))
    assert llama_cpp.llama_memory_seq_pos_min(memory, 0) == 0
    llm.eval(prompt(30))
    # 480 tokens, 512 cells, and one sequence
    assert llama_cpp.llama_memory_seq_pos_min(memory, 0) == 30


@pytest.mark.parametrize("value", [-1, 254, True, 1.5, "2", None])
def test_bad_numbers_are_refused(value, store):
    with pytest.raises(InvalidParameterError, match=r"max_resident=.* must be an integer from 0 to 253"):
        store.sessions(max_resident=value)


def test_there_is_one_number_for_each_store(store):
    sessions = store.sessions(max_resident=2)
    with pytest.raises(MisuseError, match="max_resident=2"):
        store.sessions(max_resident=3)
    assert store.sessions(max_resident=2) is sessions


# -- at random --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_cells_are_never_lost(seed, models, tmp_path):
    """After any turns, dropping all residents leaves the live cells only."""
    chance = random.Random(seed)
    llm = load(models("llama"), **SMALL)
    with PrefixStore(tmp_path / "kv", llm, **OPTIONS) as store:
        sessions = store.sessions(max_sessions=6, max_resident=chance.randint(1, 5))
        for _ in range(40):
            name = f"session {chance.randrange(9)}"
            act = chance.choice(["turn", "turn", "turn", "evict", "fork", "fail"])
            if act == "evict":
                sessions.evict(name)
            elif act == "fork" and name in sessions and f"{name}+" not in sessions:
                sessions.fork(name, f"{name}+")
            elif act == "fail":
                with pytest.raises(ZeroDivisionError):
                    fail_in_a_block(sessions, name)
            else:
                turn(sessions, name, prompt(chance.randint(1, 200), seed=chance.randrange(4)), n=4)
            assert len(tagged(llm)) <= sessions.max_resident + 1
        sessions._hook.context.memory.drop_residents()
        assert tagged(llm) == {}
        llm.reset()
        llm.eval(prompt(511))
        assert store.check() == []
