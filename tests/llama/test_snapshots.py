"""Models whose memory cannot step back: recurrent (mamba) and hybrid (lfm2), with a store."""

from __future__ import annotations

from dataclasses import replace

import llama_cpp
import numpy as np
import pytest

from prefixstore import PrefixStore
from prefixstore.errors import CorruptError, InvalidParameterError
from prefixstore.format.keys import as_tokens, common_prefix
from prefixstore.format.record import checksum
from prefixstore.llama import snapshots, strategy
from prefixstore.llama.binding import token_kinds
from prefixstore.models.boundaries import message_starts
from prefixstore.warming.tokens import chat_tokens
from tests.support.models import answer, attached, evaluated, forget, logits, prompt, state_bytes

KINDS = {"mamba": "snapshots", "lfm2": "pages and snapshots"}
SYSTEM = {"role": "system", "content": "You answer questions about the standard library. " * 30}
QUESTIONS = [
    "What does the module shutil do with a directory tree?",
    "And what does it do with one that is already there?",
    "How are the names of temporary files chosen?",
    "Is there anything that has to be closed afterwards?",
]

pytestmark = pytest.mark.parametrize("arch", KINDS)


@pytest.fixture
def store():
    """A store in memory, not attached."""
    with PrefixStore("memory:", snapshot_interval=256) as store:
        yield store
        assert store.check() == []


def stored(store) -> list[int]:
    """The positions of all snapshots."""
    store.flush()
    return sorted(page.end for page in store.engine.pages() if page.form == 1)


def say(llm, messages, n: int = 8) -> str:
    answered = llm.create_chat_completion(messages, max_tokens=n, temperature=0)
    return answered["choices"][0]["message"]["content"]


def test_the_same_prompt_evaluates_one_token_the_second_time(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(700)
    assert store.kind == store.stats().kind == KINDS[arch]
    first = answer(llm, tokens, 8)
    assert answer(llama(arch), tokens, 8) == first
    # whether the context holds the prompt, or nothing
    assert evaluated(store, lambda: answer(llm, tokens, 1)) == 1
    forget(llm)
    assert evaluated(store, lambda: answer(llm, tokens, 1)) == 1
    forget(llm)
    assert answer(llm, tokens, 8) == first
    assert store.stats().misses == {"not_found": 1}
    assert store.stats().hits == 3


@pytest.mark.parametrize("n", [15, 16, 17, 63, 64, 65, 128, 255, 256, 257, 511, 512, 513])
def test_prompts_around_the_boundaries(llama, store, arch, n):
    llm = attached(store, llama(arch))
    cold = answer(llama(arch), prompt(n), 6)
    assert answer(llm, prompt(n), 6) == cold
    forget(llm)
    again = evaluated(store, lambda: answer(llm, prompt(n), 1))
    assert again == (1 if n > 16 else n)
    forget(llm)
    assert answer(llm, prompt(n), 6) == cold


def test_a_conversation_continues_live_and_after_a_restart(llama, store, arch):
    plain, llm = llama(arch), attached(store, llama(arch))
    messages = [SYSTEM]
    for turn, question in enumerate(QUESTIONS):
        messages = [*messages, {"role": "user", "content": question}]
        plain.reset()
        expected = say(plain, messages)
        if turn % 2:
            forget(llm)
        before = store.stats().tokens_computed
        assert say(llm, messages) == expected
        if turn:
            written = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            new = llm.tokenize(written.encode(), add_bos=False, special=True)
            # the token before it was sampled, and never evaluated; the same goes for the last of the 8 that come now
            assert store.stats().tokens_computed - before == 1 + len(new) + 7
        messages.append({"role": "assistant", "content": expected})
    assert (store.stats().hits, store.stats().live_hits) == (2, 1)
    assert store.stats().misses == {"not_found": 1}
    assert store.stats().dropped == {}


def test_an_edited_question_evaluates_nothing_before_its_message(llama, store, arch):
    llm, messages = attached(store, llama(arch)), [SYSTEM]
    for question in QUESTIONS[:3]:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": say(llm, messages)})
    edited = [*messages[:-2], {"role": "user", "content": "Something else, please."}]
    plain = llama(arch)
    expected = say(plain, edited)
    tokens = plain.input_ids[: plain.n_tokens]
    last = message_starts(list(map(token_kinds(plain), tokens)))[-2]
    new = evaluated(store, lambda: say(llm, edited, 1))
    # but for the end of the answer before, "<|im_end|>" and a line break
    assert new == len(tokens) - 7 - last + 3
    assert say(llm, edited) == expected
    # and another conversation with the same system prompt evaluates none of that
    other = [SYSTEM, {"role": "user", "content": "Who are you?"}]
    plain.reset()
    expected = say(plain, other)
    first = message_starts(list(map(token_kinds(plain), plain.input_ids[: plain.n_tokens].tolist())))[0]
    forget(llm)
    assert evaluated(store, lambda: say(llm, other, 1)) == plain.n_tokens - 7 - first
    assert say(llm, other) == expected


@pytest.mark.slow
def test_a_restored_context_has_the_bytes_and_the_next_logits_of_a_computed_one(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(1500, seed=3)
    answer(llm, tokens, 1)
    cuts = stored(store)
    assert cuts == [256, 512, 768, 1024, 1280, 1499, 1500]
    cold = llama(arch)
    for cut in reversed(cuts[:-1]):
        forget(llm)
        assert store.restore([*tokens[:cut], 7]) == cut
        cold.reset()
        for start, end in zip([0, *cuts], cuts, strict=False):
            if end <= cut:
                cold.eval(tokens[start:end])
        assert state_bytes(llm) == state_bytes(cold)
        for context in (llm, cold):
            context.eval([7])
        assert np.array_equal(logits(llm), logits(cold))
        # nor did it matter here how the batches were split
        cold.reset()
        cold.eval(tokens[:cut])
        cold.eval([7])
        assert np.allclose(logits(llm), logits(cold), atol=0.05)


def test_the_deepest_snapshot_that_is_in_the_prompt_is_taken(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(1500)
    answer(llm, tokens, 1)
    for n, position in [(255, 0), (256, 0), (257, 256), (1279, 1024), (1400, 1280), (1500, 1499), (1499, 1280)]:
        forget(llm)
        assert store.restore(tokens[:n]) == position
        assert llm.n_tokens == position
        assert store.match(tokens[:n]).n_tokens == max(cut for cut in [0, *stored(store)] if cut <= n)


def test_a_context_that_is_past_the_prompt_is_restored_to_it(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(1500)
    expected = answer(llama(arch), tokens[:1400], 8)
    answer(llm, tokens, 4)
    assert evaluated(store, lambda: answer(llm, tokens[:1400], 1)) == 1400 - 1280
    answer(llm, tokens, 4)
    assert answer(llm, tokens[:1400], 8) == expected


@pytest.mark.slow
def test_snapshots_are_thinned(llama, arch):
    llm = llama(arch)
    with PrefixStore("memory:", llm, snapshot_interval=64, max_snapshots=6) as store:
        llm.set_cache(store)
        tokens = prompt(300)
        for turn in range(8):
            answer(llm, tokens, 1)
            assert len(stored(store)) <= 6
            tokens = tokens + prompt(200, seed=turn)
        left = stored(store)
        assert left[-1] == len(tokens) - 200
        assert left[0] < 1000
        assert store.check() == []
        forget(llm)
        assert answer(llm, tokens, 8) == answer(llama(arch), tokens, 8)


def asked(question: str, document: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": document + question}]


def test_another_question_about_a_document_evaluates_only_the_question(llama, store, arch):
    document = "The names of temporary files are chosen at random, and nobody else may open them. " * 20 + "\n\n"
    say(attached(store, llm := llama(arch)), asked(QUESTIONS[0], document), 1)
    plain = llama(arch)
    for question in QUESTIONS[1:3]:
        plain.reset()
        expected = say(plain, asked(question, document))
        forget(llm)
        written = f"{question}<|im_end|>\n<|im_start|>assistant\n"
        new = len(llm.tokenize(written.encode(), add_bos=False, special=True))
        assert evaluated(store, lambda question=question: say(llm, asked(question, document), 1)) == new
        assert say(llm, asked(question, document)) == expected


def test_where_two_prompts_part_the_third_one_is_resumed(llama, store, arch):
    llm, parts = attached(store, llama(arch)), [[*prompt(700), *prompt(200, seed=seed)] for seed in (1, 2, 3)]
    answer(llm, parts[0], 1)
    assert evaluated(store, lambda: answer(llm, parts[1], 1)) > 300
    assert evaluated(store, lambda: answer(llm, parts[2], 1)) == 200
    assert answer(llm, parts[2], 8) == answer(llama(arch), parts[2], 8)


@pytest.mark.parametrize("form", ["a number", "tokens", "messages"])
def test_a_prompt_is_resumed_at_a_boundary_that_the_caller_names(llama, store, arch, form):
    document = "The names of temporary files are chosen at random, and nobody else may open them. " * 20
    llm, (first, other) = attached(store, llama(arch)), [asked(question, document) for question in QUESTIONS[:2]]
    tokens = chat_tokens(llm, first, {}, generation_prompt=True)
    n = common_prefix(tokens, chat_tokens(llm, asked("", document), {}, generation_prompt=False))
    prefix = {"a number": n, "tokens": tokens[:n], "messages": {"messages": asked("", document)}}[form]
    with store.boundary(prefix):
        say(llm, first, 1)
    assert n in stored(store)
    say(llm, [SYSTEM], 1)
    plain = llama(arch)
    expected = say(plain, other)
    forget(llm)
    assert evaluated(store, lambda: say(llm, other, 1)) == plain.n_tokens - 7 - n
    assert say(llm, other) == expected


def test_a_boundary_applies_to_prompts_that_begin_with_it_inside_its_block(llama, store, arch):
    llm = attached(store, llama(arch))
    with store.boundary(prompt(300), 100), store.boundary(200):
        answer(llm, prompt(400, seed=1), 1)
    answer(llm, prompt(400), 1)
    assert {100, 200} < set(stored(store))
    assert 300 not in stored(store)
    for wrong in (0, True):
        with pytest.raises(InvalidParameterError, match="at least 1"):
            store.boundary(wrong)


def test_the_end_of_the_system_prompt_and_of_a_document_stay_when_a_conversation_grows(llama, arch):
    llm, document = llama(arch), "The names of temporary files are chosen at random. " * 20 + "\n\n"
    with PrefixStore("memory:", llm, snapshot_interval=128, max_snapshots=4) as store:
        llm.set_cache(store)
        messages = asked(QUESTIONS[0], document)
        for question in [*QUESTIONS, *QUESTIONS]:
            messages.append({"role": "assistant", "content": say(llm, messages, 2)})
            messages.append({"role": "user", "content": question * 22})
        assert len(stored(store)) <= 4
        forget(llm)
        written = f"{QUESTIONS[1]}<|im_end|>\n<|im_start|>assistant\n"
        new = len(llm.tokenize(written.encode(), add_bos=False, special=True))
        assert evaluated(store, lambda: say(llm, asked(QUESTIONS[1], document), 1)) == new


def test_the_snapshot_at_which_conversations_fork_stays(llama, arch):
    llm = llama(arch)
    with PrefixStore("memory:", llm, snapshot_interval=128, max_snapshots=5) as store:
        llm.set_cache(store)
        for seed in range(3):
            # the system prompt ends at 391
            tokens = [*prompt(390), 2, *prompt(80, seed=50), 2, 1, *prompt(900, seed=seed)]
            answer(llm, tokens, 1)
        assert 473 - 1 in stored(store)
        forget(llm)
        other = [*prompt(390), 2, *prompt(80, seed=50), 2, 1, *prompt(100, seed=9)]
        assert evaluated(store, lambda: answer(llm, other, 1)) <= 102


def test_ten_snapshots_of_a_hybrid_take_little_more_than_one_state(llama, arch):
    llm = llama(arch)
    with PrefixStore("memory:", llm, codec="raw") as store:
        llm.set_cache(store)
        tokens = prompt(300)
        for turn in range(5):
            answer(llm, tokens, 2)
            tokens = tokens + prompt(400, seed=turn)
        assert len(stored(store)) >= 10
        kept = store.stats().bytes_stored
        one = len(state_bytes(llm))
        if arch == "lfm2":
            assert kept <= 1.3 * one
        else:
            assert kept == len(stored(store)) * one


def test_a_snapshot_that_waits_for_its_rows_is_dropped_when_the_context_has_moved_on(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(600)
    answer(llm, tokens, 1)
    before = stored(store)
    # few tokens after many: their rows would be copied at the end of the turn
    live = llm.n_tokens
    llm.eval(prompt(100, seed=1))
    waiting = store._hooks.current.strategy.waiting
    assert len(waiting) == (arch == "lfm2")
    llm._ctx.kv_cache_clear()
    llm.n_tokens = 0
    llm.eval(prompt(200, seed=2))
    store.capture()
    assert all(cut <= live for cut in before)
    extra = set(stored(store)) - set(before)
    assert extra == ({199, 200} if arch == "lfm2" else {199, 200, live + 99})
    assert store.stats().dropped == ({"moved_on": 1} if arch == "lfm2" else {})
    forget(llm)
    wanted = prompt(200, seed=2) + prompt(50, seed=3)
    assert answer(llm, wanted, 8) == answer(llama(arch), wanted, 8)


def test_a_reset_first_copies_the_rows_of_waiting_snapshots(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(600)
    llm.eval(tokens)
    llm.eval(prompt(100, seed=1))
    llm.reset()
    assert store.match(tokens + prompt(100, seed=1)).n_tokens == 699
    assert store.stats().dropped == {}


def test_an_aborted_stream_keeps_the_prompt(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(1024)
    stream = llm(tokens, max_tokens=50, temperature=0, stream=True)
    next(stream)
    stream.close()
    assert store.match(tokens).n_tokens == 1023


def test_generation_stops_for_snapshots_as_well(llama, store, arch):
    llm = attached(store, llama(arch))
    text = answer(llm, prompt(500), 40)
    assert text == answer(llama(arch), prompt(500), 40)
    assert stored(store) == [256, 499, 512, 539]


def test_a_damaged_snapshot_is_removed_and_the_one_before_it_used(llama, arch, tmp_path):
    tokens = prompt(700, seed=8)
    llm = llama(arch)
    with PrefixStore(tmp_path, llm, snapshot_interval=256, codec="raw") as store:
        llm.set_cache(store)
        answer(llm, tokens, 1)
        store.flush()
        deepest = store._engine.match_snapshot(store.namespace.key, as_tokens(tokens), store.page_tokens, 699).pages[-1]
        with store._engine._backend.view() as view:
            payload = bytes(view.payload(deepest.key))
    data = tmp_path / "data.mdb"
    content = bytearray(data.read_bytes())
    # its rows alone may be in another snapshot of the same page as well
    content[content.index(payload) + 200] ^= 1
    data.write_bytes(content)
    llm = llama(arch)
    with PrefixStore(tmp_path, llm, snapshot_interval=256) as store:
        llm.set_cache(store)
        assert answer(llm, tokens, 8) == answer(llama(arch), tokens, 8)
        assert store.stats().unreadable == {"corrupt": 1}
        assert store.stats().tokens_restored == 512
        store.flush()
        assert store.stats().corrupt == 1
        assert store.check() == []
        assert store.match(tokens).n_tokens in (699, 700)


def test_a_state_that_llama_cpp_refuses_is_a_miss_and_is_computed(llama, store, arch, monkeypatch):
    llm, tokens = attached(store, llama(arch)), prompt(700)
    expected = answer(llm, tokens, 8)
    forget(llm)
    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", lambda *a: 0)
    assert answer(llm, tokens, 8) == expected
    assert store.stats().unreadable["refused"] == strategy.ATTEMPTS
    assert store.stats().misses["unreadable"] == 1


def test_a_state_that_cannot_be_cut_is_stored_whole(llama, store, arch, monkeypatch):
    def refuse(state):
        raise CorruptError("another layout")

    monkeypatch.setattr(snapshots, "parse_sequence", refuse)
    llm, tokens = attached(store, llama(arch)), prompt(700)
    answer(llm, tokens, 8)
    assert store.kind == "snapshots"
    tokens = tokens + prompt(300, seed=1)
    expected = answer(llama(arch), tokens, 8)
    assert answer(llm, tokens, 8) == expected
    forget(llm)
    assert evaluated(store, lambda: answer(llm, tokens, 1)) == 1
    forget(llm)
    assert answer(llm, tokens, 8) == expected
    assert set(store.stats().dropped) <= {"uncut"}


@pytest.mark.slow
def test_logprobs_are_the_same_as_without_a_store(llama, store, arch):
    options = {"max_tokens": 4, "temperature": 0, "logprobs": 3}
    tokens = prompt(1300)
    plain = llama(arch, logits_all=True)(tokens, **options)["choices"][0]
    llm = attached(store, llama(arch, logits_all=True))
    for _ in range(3):
        got = llm(tokens, **options)["choices"][0]
        forget(llm)
        assert got["text"] == plain["text"]
        assert got["logprobs"]["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    assert store.stats().hits == 2
    assert store.stats().tokens_restored == 2 * 1024


def test_restore_and_capture_take_a_llama_that_is_not_attached(llama, store, arch):
    llm, tokens = llama(arch), prompt(500)
    llm.eval(tokens)
    assert store.capture(llm) == 1 + 500 // (256 if arch == "mamba" else 64)
    store.flush()
    other = llama(arch)
    assert store.restore([*tokens, 7], other) == 500
    assert store.restore(tokens, other) == 0  # one token less is needed, and it cannot step back
    assert other.n_tokens == 0
    assert "eval" not in vars(other)


def test_a_users_save_state_and_load_state_behave_as_they_did(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(700)
    llm.eval(tokens)
    state, bytes_then = llm.save_state(), state_bytes(llm)
    llm.reset()
    llm.eval(prompt(300, seed=5))
    llm.load_state(state)
    assert state_bytes(llm) == bytes_then
    llm.eval(prompt(100, seed=6))
    store.capture()
    assert store.match(tokens + prompt(100, seed=6)).n_tokens == 800
    # nothing is stored after a state from elsewhere
    other = llama(arch)
    other.eval(prompt(400, seed=7))
    llm.load_state(other.save_state())
    llm.eval(prompt(100, seed=8))
    assert store.capture() == 0
    assert store.match(prompt(400, seed=7)).n_tokens == 0


def test_a_read_only_store_restores_and_stops_nowhere(llama, arch, tmp_path):
    llm = llama(arch)
    with PrefixStore(tmp_path, llm) as store:
        llm.set_cache(store)
        answer(llm, prompt(600), 1)
    before = (tmp_path / "data.mdb").read_bytes()
    other, batches = llama(arch), []
    own = type(other).eval
    other.eval = lambda tokens: batches.append(len(tokens)) or own(other, tokens)
    with PrefixStore(tmp_path, other, read_only=True) as store:
        other.set_cache(store)
        answer(other, prompt(600) + prompt(300, seed=2), 1)
    assert batches == [300]
    assert (tmp_path / "data.mdb").read_bytes() == before


@pytest.mark.slow
def test_eviction_takes_snapshots_before_the_pages_that_they_need(llama, arch, tmp_path):
    llm = llama(arch)
    with PrefixStore(tmp_path, llm, max_bytes="700kB", snapshot_interval=256) as store:
        llm.set_cache(store)
        for seed in range(6):
            tokens = prompt(800, seed=seed)
            text = answer(llm, tokens, 4)
            store.flush()
            assert store.check() == []
            forget(llm)
            assert answer(llm, tokens, 4) == text
            forget(llm)
        assert store.stats().evictions > 0
        assert store.stats().bytes_used <= 700_000


def test_a_full_queue_drops_snapshots_and_counts_them(llama, arch):
    llm = llama(arch)
    with PrefixStore("memory:", llm, queue_bytes=1) as store:
        llm.set_cache(store)
        held = store.engine.acquire(1)
        answer(llm, prompt(1000), 1)
        assert store.stats().dropped["queue_full"] > 0
        assert store.match(prompt(1000)).n_tokens == 0
        held.release()
        assert store.capture() > 0
        assert store.match(prompt(1000)).n_tokens == 1000
        assert store.check() == []


def test_pin_and_clear_include_snapshots(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(700)
    answer(llm, tokens, 1)
    assert store.pin(tokens) == store.match(tokens).n_tokens
    assert {page.pinned for page in store.engine.pages() if page.form == 1 and page.end == 700} == {True}
    assert store.clear() == store.stats().pages_captured + store.stats().snapshots_captured
    assert store.match(tokens).n_tokens == 0


def test_a_snapshot_whose_pages_have_no_rows_is_refused(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(700)
    expected = answer(llm, tokens, 8)
    path = store._engine.match_snapshot(store.namespace.key, as_tokens(tokens), store.page_tokens, 699)
    store.flush()
    # as another version would have stored them, that could not cut
    with store._engine._backend.update() as transaction:
        for page in path.pages[:-1]:
            record, usage = transaction.record(page.key), transaction.usage(page.key)
            bare = replace(record, raw_bytes=0, stored_bytes=0, codec=0, checksum=checksum(b""))
            transaction.put(page.key, bare, usage, b"")
    forget(llm)
    assert answer(llm, tokens, 8) == expected
    assert store.stats().unreadable.get("shape", 0) == (strategy.ATTEMPTS if arch == "lfm2" else 0)


def test_a_context_that_was_cleared_without_the_store_is_not_stored(llama, store, arch):
    llm, tokens = attached(store, llama(arch)), prompt(300)
    llm.eval(tokens)
    llm._ctx.kv_cache_clear()
    assert store.capture() == 0
    assert store.match(tokens).n_tokens == 299
