"""One file for jobs and servers, and why two namespaces differ."""

from __future__ import annotations

import inspect
from dataclasses import replace

import llama_cpp
import pytest

import prefixstore
from prefixstore import Namespace, PrefixStore
from prefixstore.config import MODEL_SETTINGS, Config, explain, load, load_config
from prefixstore.errors import InvalidParameterError, MissingExtraError
from tests.support.models import ONE_THREAD, prompt

FILE = """
[model]
path = "{model}"
n_ctx = 1024
n_threads = 1
n_threads_batch = 1
type_k = "q8_0"

[store]
location = "kv"
salt = "tenant"
max_bytes = "50MB"

[warm]
prompts = ["prompts.jsonl", "-", "/absolute"]
pin = true
"""


@pytest.fixture
def file(models, tmp_path):
    path = tmp_path / "warm.toml"
    path.write_text(FILE.format(model=models("llama")))
    return path


def test_relative_paths_are_relative_to_the_folder_of_the_file(tmp_path):
    path = tmp_path / "warm.toml"
    path.write_text(
        '[model]\npath = "m.gguf"\nlora_path = "/l.gguf"\n[store]\nlocation = "kv"\n[warm]\nprompts=["a","-"]'
    )
    config = load_config(path)
    assert config.path == str(tmp_path / "m.gguf")
    assert config.model == {"lora_path": "/l.gguf"}
    assert config.store == {"location": str(tmp_path / "kv")}
    assert config.warm == {"prompts": [str(tmp_path / "a"), "-"]}
    for location in ("lmdb:///var/cache/kv", "memory:", "postgresql+psycopg://me@host/db"):
        path.write_text(f'[store]\nlocation = "{location}"')
        assert load_config(path).store == {"location": location}


def test_a_server_opens_what_a_job_has_warmed(file, models, tmp_path):
    llm, store = load(file)
    with store:
        assert (llm.n_ctx(), llm.context_params.type_k) == (1024, llama_cpp.GGML_TYPE_Q8_0)
        assert llm.cache is store
        assert store.namespace.salt == "tenant"
        assert store.location.endswith(str(tmp_path / "kv"))
        llm(prompt(100), max_tokens=1)
    config = load_config(file)
    other = config.open_llama()
    with config.open_store(other) as store:
        assert store.match(prompt(100)).n_tokens == 100
        assert other.cache is None


def test_a_server_whose_settings_differ_from_the_stores_logs_the_difference(file, caplog):
    llm, store = load(file)
    with store:
        llm(prompt(100), max_tokens=1)
    assert caplog.messages == []
    file.write_text(file.read_text().replace("q8_0", "f16"))
    _, store = load(file)
    store.close()
    (message,) = caplog.messages
    assert message.endswith("has nothing for these settings yet: type_k is f16 here, q8_0 in the store")


def test_options_override_the_file_unless_they_are_none(file):
    config = load_config(file).override(None, {"n_ctx": 2048, "type_k": None}, {"salt": "other", "ttl": None})
    assert (config.model["n_ctx"], config.model["type_k"]) == (2048, "q8_0")
    assert config.store["salt"] == "other"
    assert "ttl" not in config.store
    assert config.path == load_config(file).path
    assert config.override("else.gguf").path == "else.gguf"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nn_cxt = 5", r"\[model\] has 'n_cxt', which is unknown; is 'n_ctx' meant\?"),
        ("[model]\npaht = 'm'", "is 'path' meant"),
        ("[store]\nmax_byte = 5", "is 'max_bytes' meant"),
        ("[store]\nllm = 5", r"\[store\] has 'llm', which is unknown"),
        ("[warm]\npinned = true", "is 'pin' meant"),
        ("[warm]\nqqqqqqq = true", "known are generation_prompt, pin, prompts"),
        ("[stoer]\nmax_bytes = 5", "is 'store' meant"),
        ("model = 'm.gguf'", "model is no table"),
        ("[model", "is no TOML"),
    ],
)
def test_an_unknown_setting_is_refused_and_the_nearest_is_suggested(tmp_path, text, message):
    path = tmp_path / "warm.toml"
    path.write_text(text)
    with pytest.raises(InvalidParameterError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_a_misuse(tmp_path):
    with pytest.raises(InvalidParameterError, match="No such file"):
        load_config(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(), "no model is named"),
        (Config("nowhere.gguf"), "is no file"),
    ],
)
def test_a_model_that_cannot_be_opened_is_a_misuse(config, message):
    with pytest.raises(InvalidParameterError, match=message):
        config.open_llama()


def test_settings_that_llama_cpp_refuses_are_a_misuse(models, capfd, tmp_path):
    with pytest.raises(InvalidParameterError, match=r"type_k='q9' is unknown to llama.cpp; known are .*q8_0"):
        Config(str(models("llama")), {"type_k": "q9"}).open_llama()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"nothing")
    with pytest.raises(InvalidParameterError, match="does not load"):
        Config(str(broken)).open_llama()


def test_every_setting_of_a_model_is_one_that_llama_takes():
    taken = set(inspect.signature(llama_cpp.Llama).parameters)
    assert taken >= MODEL_SETTINGS
    # what is left out is an object, a path of its own, or has no place in a store
    assert taken - MODEL_SETTINGS == {
        "model_path",
        "vocab_only",
        "embedding",
        "lora_base",
        "chat_handler",
        "draft_model",
        "tokenizer",
        "kwargs",
    }


def test_without_the_package_for_toml_its_extra_is_named(file, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("prefixstore.config.importlib.import_module", missing)
    with pytest.raises(MissingExtraError, match=r"prefixstore\[cli\]"):
        load_config(file)
    with pytest.raises(MissingExtraError, match=r"prefixstore\[llama\]"):
        Config("m.gguf").open_llama()


# -- why a namespace differs ------------------------------------------------------------------------------------------


def namespace(models, arch="llama", **settings) -> Namespace:
    salt = settings.pop("salt", None)
    llm = Config(str(models(arch)), {"n_ctx": 512, **ONE_THREAD, **settings}).open_llama()
    with PrefixStore("memory:", llm, salt=salt) as store:
        return store.namespace


def test_a_difference_is_named_in_words(models):
    here = namespace(models, type_k="q8_0")
    assert explain(here, [namespace(models)]) == ["type_k is q8_0 here, f16 in the store"]
    assert explain(here, [namespace(models, salt="t", rope_scaling_type="linear")]) == [
        "rope_scaling_type is unspecified here, linear in the store",
        "salt is not set here, t in the store",
        "type_k is q8_0 here, f16 in the store",
    ]
    assert explain(here, [namespace(models, type_k="q8_0", flash_attn=True)]) == [
        "flash_attn_type is disabled here, enabled in the store"
    ]


def test_the_nearest_namespace_is_explained_and_the_same_model_first(models):
    here = namespace(models)
    near, far = namespace(models, salt="a"), namespace(models, salt="a", type_k="q8_0")
    assert explain(here, [far, near]) == ["salt is not set here, a in the store"]
    other = namespace(models, "gemma3")
    assert explain(here, [other, far]) == explain(here, [far])
    (line,) = explain(here, [other])
    assert line.startswith("model is ")


def test_equal_namespaces_have_no_differences(models):
    here = namespace(models)
    assert explain(here, []) == []
    assert explain(here, [namespace(models, type_k="q8_0"), here]) == []


def test_without_llama_cpp_numbers_stay_numbers(models, monkeypatch):
    here = namespace(models)
    there = replace(here, settings={**here.settings, "type_k": 8})

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("prefixstore.config.importlib.import_module", missing)
    assert explain(here, [there]) == ["type_k is 1 here, 8 in the store"]


def test_load_is_public():
    assert prefixstore.load is load
