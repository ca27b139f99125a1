"""The real llama_cpp.server with a store, through the official client."""

from __future__ import annotations

import json

import pytest

from prefixstore import PrefixStore
from prefixstore.config import load_config
from prefixstore.maintenance.archive import Archive
from tests.support.python_server import MODEL_OPTIONS, STOCK, serving

SYSTEM = "You are an assistant who knows manual pages. " * 20


def messages(user, system=SYSTEM):
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def text_of(answer):
    return answer.choices[0].message.content


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.fixture(scope="module")
def cold(models):
    """Answers of the server without a store, each from an empty context."""
    with serving("--model", str(models("llama")), *MODEL_OPTIONS, module=STOCK) as server:
        known = {}

        def answer(given, **options):
            key = json.dumps([given, options], sort_keys=True)
            if key not in known:
                server.complete("x", max_tokens=1)
                known[key] = server.chat(given, **options)
            return known[key]

        yield answer


@pytest.fixture
def location(tmp_path):
    return f"lmdb://{tmp_path / 'store'}"


def start(models, location):
    return serving(location, "--model", str(models("llama")), "--", *MODEL_OPTIONS)


@pytest.mark.slow
def test_a_restarted_server_is_warm_and_answers_as_cold(models, location, cold):
    ask = [messages("What is ls?"), messages("What is cat?"), messages("What is ls?")]
    streamed = messages("Stream this.")
    with start(models, location) as server:
        first = [server.chat(one) for one in ask]
        for _ in range(2):
            chunks = list(server.chat(streamed, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(cold(streamed))
            assert chunks[-1].choices[0].finish_reason == "length"
        assert server.stop() == 0
    with start(models, location) as server:
        second = [server.chat(one) for one in ask]
        answer = server.chat(streamed)
        assert cached(answer) == answer.usage.prompt_tokens - 1
        asked = {"logprobs": True, "top_logprobs": 2}
        assert server.chat(ask[0], **asked).choices == cold(ask[0], **asked).choices
    for given, before, after in zip(ask, first, second, strict=True):
        expected = cold(given)
        assert text_of(before) == text_of(after) == text_of(expected)
        assert before.usage.total_tokens == after.usage.total_tokens == expected.usage.total_tokens
    n = first[0].usage.prompt_tokens
    assert cached(first[0]) == 0
    # the second has the system prompt in common with the first, which is live; the third is stored
    assert n - 16 < cached(first[1]) < n
    assert cached(first[2]) == n - 1
    assert [cached(one) for one in second] == [n - 1, first[1].usage.prompt_tokens - 1, n - 1]


@pytest.mark.attack
def test_a_server_that_is_killed_in_mid_stream_leaves_a_sound_store(models, location, cold):
    given = messages("Talk for a long time.")
    with start(models, location) as server:
        # what was stored before is there after the restart
        first = server.chat(given)
        with Archive(location, read_only=True) as archive:
            while not archive.used().entries:
                server.complete("x", max_tokens=1)
        with server.chat(messages("And now?"), stream=True, max_tokens=1000) as stream:
            next(iter(stream))
            server.process.kill()
            server.process.wait(120)
    with start(models, location) as server:
        answer = server.chat(given)
        assert text_of(answer) == text_of(first) == text_of(cold(given))
        assert cached(answer) > 0
        server.stop()
    with Archive(location, read_only=True) as archive:
        assert archive.check() == []


@pytest.mark.slow
def test_a_configuration_file_shared_with_warming_jobs(models, tmp_path, cold):
    file = tmp_path / "server.toml"
    file.write_text(
        f'[model]\npath = "{models("llama")}"\nn_ctx = 2048\nn_threads = 1\nn_threads_batch = 1\n'
        '[store]\nlocation = "kv"\n'
    )
    given = messages("Warm?")
    with serving("--config", str(file)) as server:
        answer = server.chat(given)
        assert text_of(answer) == text_of(cold(given))
        server.stop()
    config = load_config(file)
    llm = config.open_llama()
    with PrefixStore(str(tmp_path / "kv"), llm) as store:
        llm.set_cache(store)
        llm.create_chat_completion(given, max_tokens=1, temperature=0)
        assert store.stats().tokens_restored == answer.usage.prompt_tokens - 1
