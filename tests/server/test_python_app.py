"""The application with a store, in this process: faults, closing, switching, metrics, and the command's errors."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from llama_cpp.server import app as stock
from llama_cpp.server.settings import ModelSettings, ServerSettings

from prefixstore import ContextError, MisuseError, PrefixStore
from prefixstore.cli import main
from prefixstore.errors import InvalidParameterError
from prefixstore.llama.paged_memory import PagedMemory
from prefixstore.server import create_app
from prefixstore.server import python_server as module
from tests.support.models import load, prompt

TEXT = "The list of files is sorted. " * 20
PATH = "/v1/completions"


@pytest.fixture
def settings(models):
    def make(seed=0, **more):
        options = {"n_ctx": 2048, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **more}
        return ModelSettings(model=str(models("llama", seed=seed)), model_alias=f"model-{seed}", **options)

    return make


@pytest.fixture(autouse=True)
def no_application_is_left():
    yield
    assert stock._llama_proxy is None


@pytest.fixture
def client(tmp_path, settings):
    """Starts the application: ``client(models=[...], metrics=...)``."""
    clients = []

    def make(models=None, **options):
        app = create_app(tmp_path / "kv", model_settings=models or [settings()], **options)
        clients.append(TestClient(app).__enter__())
        return clients[-1]

    yield make
    for one in clients:
        one.__exit__(None, None, None)


def ask(client, text=TEXT, **more):
    answer = client.post(PATH, json={"prompt": text, "max_tokens": 6, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer):
    return answer["choices"][0]["text"]


def cached(answer):
    return answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens")


class Told:
    """Metrics that keep what they are told."""

    def __init__(self):
        self.seen = []

    def observe(self, endpoint, **facts):
        self.seen.append((endpoint, facts))

    def passed(self, endpoint, reason):
        self.seen.append((endpoint, reason))


def test_a_fault_of_the_store_or_of_the_metrics_does_not_reach_an_answer(client, monkeypatch, caplog):
    class Faulty:
        observe = passed = lambda *_, **__: 1 / 0

    made = client(metrics=Faulty())
    monkeypatch.setattr(PagedMemory, "take", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "prefixstore"):
        one, two = ask(made), ask(made)
    assert text_of(one) == text_of(two)
    assert cached(two) == two["usage"]["prompt_tokens"] - 1
    assert "could not be counted" in caplog.text


@pytest.mark.slow
def test_metrics_are_told_where_each_prompt_came_from(client, settings):
    told = Told()
    made = client([settings(0), settings(1)], metrics=told)
    n = ask(made)["usage"]["prompt_tokens"]
    first = ask(made)
    other = ask(made, model="model-1")
    assert text_of(ask(made)) == text_of(first) != text_of(other)
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    with warnings.catch_warnings():
        # the server leaves the end of a stream to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        made.post("/v1/chat/completions", json={**chat, "stream": True})
        gc.collect()
    facts = [seen for _, seen in told.seen]
    assert [endpoint for endpoint, _ in told.seen] == [PATH] * 4 + ["/v1/chat/completions"]
    counts = [(one["source"], one["live_tokens"], one["restored_tokens"], one["computed_tokens"]) for one in facts]
    assert counts[:4] == [("none", 0, 0, n), ("live", n - 1, 0, 1), ("none", 0, 0, n), ("store", 0, n - 1, 1)]
    assert [one["reason"] for one in facts[:4]] == ["not_found", None, "not_found", None]
    for one in facts:
        assert one["prompt_tokens"] == one["live_tokens"] + one["restored_tokens"] + one["computed_tokens"]
        assert one["lookup_seconds"] > 0
        assert (one["restore_seconds"] is not None) == (one["restored_tokens"] > 0)


def test_metrics_need_the_key_and_have_nothing_of_prompts(client):
    made = client(server_settings=ServerSettings(api_key="secret"))
    key = {"authorization": "Bearer secret"}
    body = {"prompt": TEXT, "max_tokens": 2, "temperature": 0}
    n = made.post(PATH, json=body, headers=key).json()["usage"]["prompt_tokens"]
    made.post(PATH, json=body, headers=key)
    # what is no completion, and what fails, is as the server has it
    assert made.get("/v1/models", headers=key).json()["data"][0]["id"] == "model-0"
    answer = made.post(PATH, json=body | {"prompt": TEXT * 100}, headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert made.get("/metrics").status_code == 401
    metrics = made.get("/metrics", headers=key)
    assert metrics.headers["content-type"].startswith("text/plain")
    lines = metrics.text.splitlines()
    assert f'prefixstore_request_live_tokens_total{{endpoint="{PATH}"}} {n - 1}.0' in lines
    assert f'prefixstore_request_computed_tokens_total{{endpoint="{PATH}"}} {n + 1}.0' in lines
    assert f"prefixstore_prompt_tokens_total {2 * n}.0" in lines
    assert TEXT[:10] not in metrics.text


def test_what_an_aborted_completion_has_computed_is_stored_before_the_model_is_closed(client, settings):
    made = client([settings(0), settings(1)])
    store = made.app.state.prefixstore
    proxy = stock._llama_proxy
    tokens = prompt(700)
    # as a client that has left in mid-stream
    next(proxy("model-0")._create_completion(tokens, max_tokens=100, stream=True, temperature=0))
    first = weakref.ref(proxy("model-0"))
    proxy("model-1")
    assert store.llm is proxy("model-1")
    proxy("model-0")
    # the tail too
    assert store.match(tokens).n_tokens == 700
    proxy("model-1")
    gc.collect()
    assert first() is None


def test_a_model_to_which_the_store_cannot_be_attached_is_served_without(client, settings, monkeypatch, caplog):
    made = client([settings(0, cache=True), settings(1)])
    store = made.app.state.prefixstore
    assert stock._llama_proxy().cache is store
    assert "cache=true" in caplog.text
    expected = text_of(ask(made, model="model-1"))
    ask(made, model="model-0")

    def refuse(*_):
        raise ContextError("it was replaced")

    with monkeypatch.context() as faulty:
        faulty.setattr(PrefixStore, "attach", refuse)
        answer = ask(made, model="model-1")
    assert text_of(answer) == expected
    assert cached(answer) is None
    assert "model-1 is served without the store: it was replaced" in caplog.text
    assert store.llm is None
    ask(made, model="model-0")
    assert cached(ask(made, model="model-1")) == answer["usage"]["prompt_tokens"] - 1


def test_a_handler_with_template_settings_still_shows_that_it_brings_images(client, settings, monkeypatch):
    def loaded(given):
        llm = load(given.model)
        llm.chat_handler = lambda **_: None  # as the server wraps it
        return llm

    from llama_cpp.server.model import LlamaProxy

    monkeypatch.setattr(LlamaProxy, "load_llama_from_model_settings", staticmethod(loaded))
    told = Told()
    made = client([settings(clip_model_path="clip.gguf")], metrics=told)
    answer = ask(made)
    assert cached(answer) is None
    assert told.seen == [(PATH, "multimodal")]
    assert made.app.state.prefixstore.stats().misses == {"multimodal": 1, "not_found": 1}


def test_one_application_a_process_and_another_after_it_is_closed(tmp_path, settings):
    app = create_app(tmp_path / "kv", model_settings=[settings()])
    with pytest.raises(MisuseError, match="close that one first"):
        create_app(tmp_path / "other", model_settings=[settings()])
    outer = FastAPI()
    with TestClient(app) as made:
        cold = ask(made)
    llm_closed = made.post(PATH, json={"prompt": "x"})
    assert llm_closed.status_code == 503
    # another application mounts it: its lifespan does not run, and its owner closes the store
    app = create_app(tmp_path / "kv", model_settings=[settings()])
    outer.mount("/llm", app)
    with TestClient(outer) as made:
        answer = made.post("/llm" + PATH, json={"prompt": TEXT, "max_tokens": 6, "temperature": 0}).json()
        assert text_of(answer) == text_of(cold)
        assert cached(answer) == answer["usage"]["prompt_tokens"] - 1
    stock._llama_proxy.close()
    stock._llama_proxy = None


def test_a_store_or_a_model_that_cannot_be_opened_is_an_error_at_the_start(tmp_path, settings):
    with pytest.raises(InvalidParameterError, match="codec"):
        create_app(tmp_path / "kv", model_settings=[settings()], codec="gzip")
    with pytest.raises(ValueError, match="does not exist"):
        create_app(tmp_path / "kv", model_settings=[ModelSettings(model="none.gguf")])
    with pytest.raises(InvalidParameterError, match="model_settings"):
        create_app(tmp_path / "kv", config=tmp_path / "x.toml", model_settings=[settings()])


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--model", "{none}"], 1, "Failed to load model"),
        (["--model", "{model}", "--max-bytes", "many"], 2, "max-bytes"),
        (["--model", "{model}", "--", "--n-ctx", "many"], 2, "--n_ctx"),
        (["--model", "missing.gguf"], 2, "prefixstore: model file not found: missing.gguf"),
        (["--model", "{none}", "--", "llama-server", "-m", "m.gguf"], 2, "leave out --model"),
        (["--model", "{none}", "--salt-from", "api-key"], 2, "--salt-from is for llama-server"),
        (["--model", "{none}", "--max-waiting", "3"], 2, "--max-waiting is for llama-server"),
        (["--model", "{none}", "--config", "{config}"], 2, "sets n_ctx in [model]: leave out --model"),
        (["--config", "none.toml"], 2, "none.toml"),
        (["--config", "{config}", "--", "--n-ctx", "8"], 2, "--n_ctx cannot be used with --config"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, models, capsys, options, status, message):
    (none := tmp_path / "none.gguf").write_bytes(b"nothing")
    (config := tmp_path / "one.toml").write_text(f'[model]\nn_ctx = 9\npath = "{models("llama")}"\n')
    options = [option.format(model=models("llama"), none=none, config=config) for option in options]
    assert main(["serve", str(tmp_path / "kv"), "--port", "0", *options]) == status
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("has_model", [True, False])
def test_the_command_serves_what_it_is_told_to(tmp_path, models, monkeypatch, has_model):
    served = []

    def listen(app, _):
        with TestClient(app) as made:
            settings = next(module.stock.get_server_settings())
            served.append((ask(made), settings, app.state.prefixstore.parameters, app.state.prefixstore.location))
        return 0

    monkeypatch.setattr(module, "_listen", listen)
    config = tmp_path / "server.toml"
    settings = "n_ctx = 1024\nn_threads = 1\nverbose = false\n"
    model = "" if has_model else f'[model]\npath = "{models("llama")}"\n{settings}'
    config.write_text(f'{model}[store]\nlocation = "kv"\nsalt = "a b"\npage_tokens = 128\nmax_bytes = "2GiB"\n')
    options = ["--config", str(config), "--port", "0", "--max-bytes", "1GiB"]
    if has_model:
        options += ["--model", str(models("llama")), "--", "--n-ctx=1024", "--verbose", "false"]
    assert main(["serve", *options]) == 0
    ((answer, settings, parameters, location),) = served
    assert cached(answer) == 0
    assert (settings.host, settings.port) == ("127.0.0.1", 0)
    assert (parameters.salt, parameters.page_tokens, parameters.budget.max_bytes) == ("a b", 128, 1 << 30)
    assert location == f"lmdb://{tmp_path}/kv"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["kv", "--model", "m.gguf", "--far", "s3://team/kv"], ["kv", "s3://team/kv"]),
        (["--config", "two.toml"], ["near", "valkey://cache/0"]),
        (["--config", "two.toml", "--far", "s3://team/kv"], ["near", "s3://team/kv"]),
        (["kv", "--config", "two.toml", "--far", "s3://team/kv"], ["kv", "s3://team/kv"]),
        (["kv", "--config", "two.toml"], "kv"),
    ],
)
def test_the_command_serves_from_the_locations_it_is_given(
    arguments: list[str], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[object] = []
    monkeypatch.setattr(module, "run_python_server", lambda location, *_, **__: seen.append(location))
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(b"GGUF")
    Path("two.toml").write_text(
        '[model]\npath = "m.gguf"\n[store]\nlocation = ["near", "valkey://cache/0"]\n', encoding="utf-8"
    )
    assert main(["serve", *arguments]) == 0
    (location,) = seen
    if isinstance(location, list):
        # a file's are beside the file
        location = [one if "://" in one else Path(one).name for one in location]
    assert location == expected
