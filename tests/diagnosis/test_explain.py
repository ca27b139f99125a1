"""Why a prompt is not found, on a real model."""

import json
import sys
from functools import partial

import pytest

from prefixstore import PrefixStore
from prefixstore.diagnosis.explain import tokens_to_explain
from prefixstore.server import LlamaServer
from tests.support.models import caching, forget, load, prompt

RULES = (
    "You are a careful assistant of a large company. Answer in short sentences, name your sources, and say when you do "
    "not know something. Never invent a number. Ask if the question is not clear. Be friendly and be exact. "
) * 4


@pytest.fixture(scope="module")
def model(models):
    return models("llama")


@pytest.fixture
def llm(model):
    llm = load(model)
    yield llm
    llm.close()


@pytest.fixture
def store(llm, tmp_path):
    with caching(tmp_path / "kv", llm, page_tokens=32) as store:
        yield store


def ask(llm, content, n=1):
    """A request, as an application sends it."""
    if isinstance(content, str):
        llm(content, max_tokens=n, temperature=0)
    elif isinstance(content, dict):
        llm.create_chat_completion(max_tokens=n, temperature=0, **content)
    else:
        llm(list(content), max_tokens=n, temperature=0)


def chat(*turns, system=RULES, **more):
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages, **more}


def read(found):
    """What is said, without its line breaks."""
    return " ".join(str(found).split())


def test_the_fork_shows_both_texts_around_it(llm, store):
    ask(llm, f"{RULES} The capital of France is Paris.")
    found = store.explain(f"{RULES} The capital of Italy is Rome.")
    assert found.fork.at == found.n_shared
    assert found.fork.before.endswith("The capital of")
    assert found.fork.here.startswith(" Italy is Rome.")
    assert found.fork.there.startswith(" France is Paris.")


def test_what_is_too_short_to_be_restored_is_not_said_to_be_restored(llm, store):
    ask(llm, f"{RULES} The end.")
    for text, reason, words in (
        (RULES[:40] + " 0123456789" * 5, "fork", "Matches of fewer than min_tokens="),
        (RULES[:10], "short", "Prompts and matches of fewer than min_tokens="),
    ):
        found = store.explain(text)
        assert (found.reason, 0 < found.n_matched < found.min_tokens) == (reason, True)
        assert words in read(found)


def test_what_is_stored_completely_or_goes_on_is_no_fork(llm, store):
    text = f"{RULES} The end."
    assert store.explain(text).reason == "empty"
    ask(llm, text)
    found = store.explain(text)
    assert (found.reason, found.fork) == ("complete", None)
    assert "All of it that can be restored: only" in read(found)
    n = found.n_tokens
    # as if the answer had not been stored
    store.clear()
    forget(llm)
    llm.eval(tokens_to_explain(llm, text, generation_prompt=True).tolist())
    store.capture()
    found = store.explain(f"{text}\n\nOne more question, which is asked later?")
    assert (found.reason, found.n_shared, found.fork) == ("end", n, None)
    assert store.explain("Hi").reason == "short"


def test_explaining_changes_nothing(llm, store):
    ask(llm, RULES)
    store.flush()
    before, held = store.stats(), llm.input_ids[: llm.n_tokens].tolist()
    store.explain(RULES + "One more.")
    after = store.stats()
    assert (after.hits, after.misses, after.prompt_tokens, after.entries) == (
        *(before.hits, before.misses),
        *(before.prompt_tokens, before.entries),
    )
    assert llm.input_ids[: llm.n_tokens].tolist() == held


def test_the_setting_that_differs_is_named_and_other_tenants_are_not_looked_at(model, tmp_path):
    for n, options in enumerate(({"type_k": 8}, {})):
        llm = load(model, **options)
        with PrefixStore(tmp_path / "kv", llm) as store:
            if n == 0:
                llm.set_cache(store)
                ask(llm, RULES)
                continue
            found = store.explain(RULES)
            assert (found.reason, found.n_matched) == ("settings", 0)
            assert [one.differences for one in found.other_settings] == [("type_k is f16 here, q8_0 in the store",)]
            assert found.other_settings[0].n_tokens == found.n_tokens
        llm.close()
    llm = load(model)
    with caching(tmp_path / "tenants", llm, salt="one") as store:
        ask(llm, RULES)
    with PrefixStore(tmp_path / "tenants", llm, salt="two") as store:
        assert (store.explain(RULES).reason, store.explain(RULES).other_settings) == ("empty", ())
    with PrefixStore(tmp_path / "tenants", llm) as store:
        (other,) = store.explain(RULES).other_settings
        assert other.differences == ("salt is not set here, one in the store",)
    llm.close()


def test_models_that_resume_from_snapshots_say_how_much_is_the_same(models, tmp_path):
    llm = load(models("mamba"))
    tokens = prompt(400, 1)
    with caching(tmp_path / "kv", llm, page_tokens=32, snapshot_interval=128) as store:
        ask(llm, tokens)
        found = store.explain(tokens[:300] + prompt(100, 2))
        assert found.reason == "fork"
        assert found.n_matched < found.n_shared == 300
        assert "resumes only at its snapshots" in read(found)
        assert store.explain(tokens[:200]).reason in ("snapshot", "complete")
    # a snapshot goes on after the last page
    with caching(tmp_path / "short", llm, page_tokens=32) as store:
        ask(llm, tokens[:20])
        found = store.explain(tokens[:25])
        assert (found.n_shared, found.n_matched, found.reason) == (20, 20, "end")
    llm.close()


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(run):
    return partial(run, "explain")


def test_the_command_explains_a_prompt_with_the_vocabulary_alone(model, llm, store, tmp_path, run):
    ask(llm, chat("Who are you?", system=f"Now: 2026-11-22 09:48:01. {RULES}"))
    store.flush()
    request = tmp_path / "request.json"
    request.write_text(json.dumps(chat("Who are you?", system=f"Now: 2026-11-22 09:51:37. {RULES}")))
    code, out, err = run(store.location, "--model", model, "--messages", request)
    assert (code, err) == (1, "")
    assert """here    "51:37. You are""" in out
    assert "pass --config for those of your server" in out
    code, out, _ = run(store.location, "--model", model, "--messages", request, "--json")
    found = json.loads(out)
    assert (code, found["reason"]) == (1, "fork")
    request.write_text(json.dumps(chat("Who are you?", system=f"Now: 2026-11-22 09:48:01. {RULES}")["messages"]))
    code, out, _ = run(store.location, "--model", model, "--messages", request)
    assert (code, "All of it that can be restored: only" in out) == (0, True)


def test_the_name_of_a_file_as_a_prompt_is_text_and_the_command_says_so(model, store, tmp_path, run):
    file = tmp_path / "prompt.txt"
    file.write_text(RULES)
    assert "pass --prompt-file" in run(store.location, "--model", model, file)[2]
    assert "note" not in run(store.location, "--model", model, "--prompt-file", file)[2]


def test_where_llama_cpp_python_is_missing_a_server_makes_the_tokens(llm, store, model, tmp_path, run, monkeypatch):
    ask(llm, f"{RULES} The capital of France is Paris.")
    store.flush()
    tokens = llm.tokenize(f"{RULES} The capital of Italy is Rome.".encode())
    (tmp_path / "request.json").write_text(json.dumps(chat("Hello", tools=[{"a": 1}])))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    given = (store.location, "--model", model, "--messages", tmp_path / "request.json", "--json")
    assert "llama_cpp" in run(*given)[2]
    monkeypatch.setattr(LlamaServer, "apply_template", lambda _, messages, tools: f"{messages[-1]['content']} {tools}")
    monkeypatch.setattr(LlamaServer, "tokenize", lambda _, text: tokens if text == "Hello [{'a': 1}]" else [])
    code, out, err = run(*given, "--server", "http://127.0.0.1:1")
    assert (code, err) == (1, "")
    assert json.loads(out)["fork"]["here"].startswith(" Italy is Rome.")
    # the proxy does not ask for so short a prompt
    del tokens[20:]
    assert json.loads(run(*given, "--server", "http://127.0.0.1:1")[1])["reason"] == "short"
