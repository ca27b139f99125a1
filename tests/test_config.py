"""One file for jobs and servers, and explanations why two namespaces differ."""

import inspect

import llama_cpp
import pytest

from prefixstore import Namespace
from prefixstore.config import MODEL_SETTINGS, Config, explain_of_model, load, load_config
from prefixstore.errors import InvalidParameterError
from tests.support.models import prompt

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


def test_a_server_with_other_settings_than_the_store_or_no_n_ctx_logs_that(file, caplog):
    llm, store = load(file)
    with store:
        llm(prompt(100), max_tokens=1)
    assert caplog.messages == []
    file.write_text(file.read_text().replace("q8_0", "f16"))
    file.write_text(file.read_text().replace("n_ctx = 1024", ""))
    _, store = load(file)
    store.close()
    length, difference = caplog.messages
    assert length == f"{file} sets no n_ctx, so the context has 512 tokens; set n_ctx in [model]"
    assert difference.endswith("has no pages for these settings yet: type_k is f16 here, q8_0 in the store")


def test_options_override_the_file_and_none_keeps_it(file):
    config = load_config(file).override(None, {"n_ctx": 2048, "type_k": None}, {"salt": "other", "ttl": None})
    assert (config.model["n_ctx"], config.model["type_k"]) == (2048, "q8_0")
    assert config.store["salt"] == "other"
    assert "ttl" not in config.store
    assert config.path == load_config(file).path
    assert config.override("else.gguf").path == "else.gguf"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nn_cxt = 5", r"\[model\] has 'n_cxt', which is unknown; did you mean 'n_ctx'\?"),
        ("[model]\npaht = 'm'", "did you mean 'path'"),
        ("[store]\nllm = 5", r"\[store\] has 'llm', which is unknown"),
        ("[store]\nram_bytes = 5", r'location = \["memory:", LOCATION\]'),
        ("[warm]\npinned = true", "did you mean 'pin'"),
        ("[warm]\nqqqqqqq = true", "known are generation_prompt, pin, prompts"),
        ("[stoer]\nmax_bytes = 5", "did you mean 'store'"),
        ("model = 'm.gguf'", "model is not a table"),
        ('[warm]\nprompts = "prompts.jsonl"', "must be a list of files"),
        ("[warm]\npin = 'no'", "must be true or false"),
        ("[model]\nn_ctx = '8192'", "must be an integer"),
        ("[model]\nlast_n_tokens_size = 1.5", "must be an integer"),
        ("[model]\nn_batch = -1", "n_batch=-1 must be from 1 to 2147483647"),
        ("[model]\nn_ctx = 99999999999999999999", "must be from 0 to 2147483647"),
        ("[model]\nn_gpu_layers = -2", "must be from -1"),
        ("[model]\nn_threads_batch = 513", "must be from -1 to 512"),
        ("[model]\nflash_attn = 'false'", "flash_attn='false' must be true or false"),
        ("[model", "not valid TOML"),
    ],
)
def test_unknown_settings_are_refused_with_the_most_similar_name(tmp_path, text, message):
    path = tmp_path / "warm.toml"
    path.write_text(text)
    with pytest.raises(InvalidParameterError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


UNUSABLE = {
    "a quantized type_v needs flash_attn = true": [{"n_ctx": 64, "type_v": "q8_0"}],
    r"known are bf16, f16, f32.*q8_0": [{"type_k": "q9"}],
    r"is not a value known to llama\.cpp": [{"type_k": -1}, {"type_v": "q4_k"}, {"split_mode": 9}],
    "cannot load": [{"lora_path": [1]}, {"kv_overrides": "x"}, {"numa": "x"}],
}


def test_a_model_or_settings_that_llama_cpp_refuses_are_a_misuse(models, capfd, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"nothing")
    wrong = [(says, Config(str(models("llama")), given)) for says in UNUSABLE for given in UNUSABLE[says]]
    wrong += [("no model is given", Config()), ("model file not found", Config("nowhere.gguf"))]
    for says, config in [*wrong, ("cannot load", Config(str(broken)))]:
        with pytest.raises(InvalidParameterError, match=says) as caught:
            config.open_llama()
        assert "count" not in str(caught.value)


def test_every_model_setting_is_a_parameter_of_llama():
    taken = set(inspect.signature(llama_cpp.Llama).parameters)
    assert taken >= MODEL_SETTINGS
    # the other parameters are objects, paths set elsewhere, or of no use with a store
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


def test_of_a_model_only_its_own_pages_are_explained_and_those_of_any_tenant():
    here, other = ({"model": name, "salt": None, "type_k": 1} for name in ("a", "b"))
    differs = ["type_k is q8_0 here, f16 in the store"]
    assert explain_of_model(Namespace(here | {"type_k": 8}), map(Namespace, (other, here))) == differs
    assert explain_of_model(Namespace(here | {"type_k": 8}), [Namespace(other)]) == []
    assert explain_of_model(Namespace(here), [Namespace(here | {"salt": "ann"}), Namespace(here | {"type_k": 8})]) == []
    # a name stands for a model that is not known
    assert explain_of_model(Namespace({"server": "x"}), [Namespace({"server": "y"})]) == []
