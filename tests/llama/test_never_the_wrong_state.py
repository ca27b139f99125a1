"""A state that was computed under other conditions is a miss."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from types import SimpleNamespace

import llama_cpp
import numpy as np
import pytest

from prefixstore import PrefixStore
from prefixstore.backends.location import cache_directory
from prefixstore.llama.fingerprint import llama_cpp_build, namespace_of
from prefixstore.models.file import file_digest
from prefixstore.testing import models as synthetic
from tests.support import ROOT
from tests.support.models import SHAPES, answer, caching, forget, load, prompt, state_bytes, write_lora

TOKENS = prompt(600)


@pytest.fixture
def filled(models, tmp_path):
    """A location that holds the prompt, computed by the plain model."""
    location = tmp_path / "kv"
    llm = load(models("llama"))
    with caching(location, llm) as store:
        answer(llm, TOKENS, 1)
        assert store.match(TOKENS).n_tokens == 600
    return location


def found(location, llm, **options) -> int:
    with PrefixStore(location, llm, **options) as store:
        return store.match(TOKENS).n_tokens


def test_the_same_model_at_another_path_and_settings_of_speed_give_the_same_states(filled, models, tmp_path):
    copy = tmp_path / "renamed.gguf"
    shutil.copy(models("llama"), copy)
    assert found(filled, load(copy, n_batch=64, n_ctx=2048, n_threads=2, n_threads_batch=2)) == 600


def test_a_file_that_was_rewritten_in_place_is_read_again(models, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(models("llama"), path)
    before = file_digest(path)
    assert file_digest(path) == before
    changed = bytearray(path.read_bytes())
    changed[-5] ^= 1
    path.write_bytes(changed)
    assert file_digest(path) != before


def test_the_digest_is_sha256_and_no_digest_of_another_kind_is_taken_for_it(models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    shutil.copy(models("llama"), path)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert file_digest(path) == expected
    (memory,) = (cache_directory() / "digests").iterdir()
    known = memory.read_text()
    assert known.endswith(f" {expected}")
    forged = known.replace(expected, "0" * 64)
    for wrong in (known[:-1], known.replace(expected, "0" * 32), f"[1] {expected}", forged[1:], "", "\xff" * 1000):
        memory.write_bytes(wrong.encode("latin-1"))
        assert file_digest(path) == expected
        assert memory.read_text() == known
    memory.write_text(forged)
    assert file_digest(path) == "0" * 64
    memory.chmod(0o666)
    assert file_digest(path) == expected
    assert memory.read_text() == known


def test_a_digest_is_not_written_through_a_link_nor_missed_where_it_cannot_be_kept(models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = file_digest(models("llama"))
    (memory,) = (cache_directory() / "digests").iterdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    memory.unlink()
    memory.symlink_to(victim)
    assert file_digest(models("llama")) == expected
    assert victim.read_text() == "mine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(victim))
    assert file_digest(models("llama")) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"rope_freq_base": 20000.0},
        {"rope_freq_scale": 0.5},
        {"rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR, "rope_freq_scale": 0.5},
        {"yarn_orig_ctx": 1024},
        {"flash_attn": True},
        {"type_k": llama_cpp.GGML_TYPE_Q8_0},
        {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0},
        # what the tokenizer does changes no state
        {"kv_overrides": {"llama.rope.freq_base": 20000.0, "tokenizer.x": 5}},
        {"attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL},
    ],
    ids=",".join,
)
def test_another_setting_that_changes_the_state_is_a_miss(filled, models, options):
    assert found(filled, load(models("llama"), **options)) == 0


def test_a_lora_adapter_and_its_scale_are_part_of_the_namespace(filled, models, tmp_path):
    lora = tmp_path / "lora.gguf"
    write_lora(lora, 1.0)
    options = {"lora_path": str(lora), "lora_scale": 1.0}
    adapted = load(models("llama"), **options)
    assert found(filled, adapted) == 0
    with caching(filled, adapted):
        answer(adapted, TOKENS, 1)
    assert found(filled, load(models("llama"), **options)) == 600
    assert found(filled, load(models("llama"), **(options | {"lora_scale": 0.5}))) == 0
    other = tmp_path / "other.gguf"
    write_lora(other, 2.0)
    assert found(filled, load(models("llama"), **(options | {"lora_path": str(other)}))) == 0


def test_salt_namespace_and_page_size_separate(filled, models):
    llm = load(models("llama"))
    assert found(filled, llm, salt="tenant") == 0
    assert found(filled, llm, namespace="named") == 0
    assert found(filled, llm, page_tokens=128) == 0
    assert found(filled, llm) == 600


# -- RoPE factors that depend on the length of the context -------------------------------------------------------------

TRAINED = 1024
ORIGINAL = "llama.rope.scaling.original_context_length"
LONGROPE = {
    # what the file says about scaling, whether it has the tensors, and what overrides say
    "no original length": ({"llama.rope.scaling.type": "longrope"}, {}),
    "original length": ({"llama.rope.scaling.type": "longrope", ORIGINAL: 1024}, {}),
    "original length overridden": ({"llama.rope.scaling.type": "longrope", ORIGINAL: 1 << 20}, {ORIGINAL: 1024}),
    "training length overridden": ({"llama.rope.scaling.type": "longrope"}, {"llama.context_length": 1024}),
    "type overridden": ({}, {"llama.rope.scaling.type": "longrope"}),
}


@pytest.fixture
def longrope(tmp_path, monkeypatch):
    """Writes a llama with factors for long and for short contexts."""

    def write(facts, n_ctx_train):
        tensors, hyperparameters = synthetic._tensors, synthetic._write_hyperparameters

        def with_factors(*args):
            yield from tensors(*args)
            for name, factor in (("long", 4.0), ("short", 1.0)):
                yield f"rope_factors_{name}.weight", np.full(SHAPES["llama"].head_dim // 2, factor, np.float32)

        def with_facts(writer, shape):
            hyperparameters(writer, shape)
            for name, value in facts.items():
                (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)

        monkeypatch.setattr(synthetic, "_tensors", with_factors)
        monkeypatch.setattr(synthetic, "_write_hyperparameters", with_facts)
        return synthetic.write_model(tmp_path / "longrope.gguf", SHAPES["llama"], n_ctx_train=n_ctx_train)

    return write


@pytest.mark.parametrize("case", LONGROPE)
def test_contexts_whose_length_chooses_other_rope_factors_share_nothing(tmp_path, longrope, case):
    facts, overrides = LONGROPE[case]
    path = longrope(facts, 1 << 20 if "llama.context_length" in overrides else TRAINED)
    short, long = (load(path, n_ctx=n_ctx, kv_overrides=overrides or None) for n_ctx in (1024, 2048))
    for llm in (short, long):
        llm.eval(TOKENS)
    assert state_bytes(short) != state_bytes(long)
    with PrefixStore(tmp_path / "kv", short) as store:
        forget(short)
        short.set_cache(store)
        answer(short, TOKENS, 1)
        names = store.namespace
    with PrefixStore(tmp_path / "kv", long) as store:
        assert store.match(TOKENS).n_tokens == 0
        assert names.differences(store.namespace) == {"long_context": (False, True), "n_ctx": (1024, 2048)}
    other = load(path, n_ctx=1024, kv_overrides=overrides or None)
    with PrefixStore(tmp_path / "kv", other) as store:
        assert store.match(TOKENS).n_tokens == 600


def test_a_context_longer_than_the_training_is_another_one_even_where_the_model_does_not_speak_of_longrope(models):
    # some architectures load the factors whenever the file has them
    longer, shorter = (load(models("llama", n_ctx_train=1024), n_ctx=n_ctx) for n_ctx in (2048, 512))
    names = [namespace_of(llm, page_tokens=256, salt=None, label=None) for llm in (shorter, longer)]
    assert names[0].differences(names[1]) == {"long_context": (False, True)}


def test_the_build_of_llama_cpp_is_its_commit_as_llama_server_shows_it():
    build = llama_cpp_build()
    assert re.fullmatch("[0-9a-f]{7,40}", build)
    server = ROOT.parent / "shared" / "bin" / "llama-server"
    if server.exists() and llama_cpp.__version__ == "0.3.36":  # built from the same sources
        shown = subprocess.run([server, "--version"], capture_output=True, text=True, check=True, timeout=180)
        assert f"commit {build}" in shown.stdout + shown.stderr


@pytest.mark.parametrize(
    "answer", [b"unknown", b"", None, b"\xff", b"1234567-dirty"], ids=["unknown", "empty", "null", "bytes", "dirty"]
)
def test_without_a_commit_the_version_of_the_package_stands_for_the_build(monkeypatch, answer):
    def ggml_commit():
        return answer

    library = SimpleNamespace(ggml_commit=ggml_commit)
    monkeypatch.setattr(llama_cpp.llama_cpp, "_lib", library)
    version = f"llama-cpp-python {llama_cpp.__version__}"
    assert llama_cpp_build() == ("1234567" if answer == b"1234567-dirty" else version)
    monkeypatch.setattr(llama_cpp.llama_cpp, "_lib", SimpleNamespace())
    assert llama_cpp_build() == version
