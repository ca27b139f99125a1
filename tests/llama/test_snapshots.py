"""Models whose memory cannot step back: recurrent (mamba) and hybrid (lfm2), with a store."""

from __future__ import annotations

from dataclasses import replace

import llama_cpp
import pytest

from prefixstore import PrefixStore
from prefixstore.errors import CorruptError
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import checksum
from prefixstore.llama import snapshot_strategy, strategy
from tests.support.models import answer, attached, caching, evaluated, forget, prompt, state_bytes

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
    return sorted(page.end for page in store.engine.lookups.pages() if page.form == 1)


def say(llm, messages, n: int = 8) -> str:
    answered = llm.create_chat_completion(messages, max_tokens=n, temperature=0)
    return answered["choices"][0]["message"]["content"]


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


def asked(question: str, document: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": document + question}]


def test_the_end_of_the_system_prompt_and_of_a_document_stay_when_a_conversation_grows(llama, arch):
    llm, document = llama(arch), "The names of temporary files are chosen at random. " * 20 + "\n\n"
    with caching("memory:", llm, snapshot_interval=128, max_snapshots=4) as store:
        messages = asked(QUESTIONS[0], document)
        for question in [*QUESTIONS, *QUESTIONS]:
            messages.append({"role": "assistant", "content": say(llm, messages, 2)})
            messages.append({"role": "user", "content": question * 22})
        assert len(stored(store)) <= 4
        forget(llm)
        written = f"{QUESTIONS[1]}<|im_end|>\n<|im_start|>assistant\n"
        new = len(llm.tokenize(written.encode(), add_bos=False, special=True))
        assert evaluated(store, lambda: say(llm, asked(QUESTIONS[1], document), 1)) == new


def test_ten_snapshots_of_a_hybrid_take_little_more_than_one_state(llama, arch):
    llm = llama(arch)
    with caching("memory:", llm, codec="raw") as store:
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

    monkeypatch.setattr(snapshot_strategy, "parse_sequence", refuse)
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
