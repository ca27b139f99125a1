"""The namespace is that of the model in memory: a file that is not the one that was loaded is refused."""

from __future__ import annotations

import shutil
from functools import partial
from types import SimpleNamespace

import gguf
import llama_cpp
import pytest

from prefixstore import ContextError, PrefixStore
from prefixstore.llama import fingerprint
from prefixstore.llama.fingerprint import namespace_of
from prefixstore.testing import models as synthetic
from tests.support.models import SHAPES, answer, load, prompt, write_lora

TOKENS = prompt(300)
# mapped, and copied: a LoRA adapter does the latter too
COPIED = {"use_mmap": False}
LOADS = pytest.mark.parametrize("options", [{}, COPIED], ids=["mapped", "copied"])


def name(llm):
    return namespace_of(llm, page_tokens=256, salt=None, label=None)


def replace(path, other):
    """As an update does: under another name first."""
    new = path.with_name("new")
    shutil.copy(other, new)
    new.replace(path)


@pytest.fixture
def model(models, tmp_path):
    path = tmp_path / "a" / "m.gguf"
    path.parent.mkdir()
    shutil.copy(models("llama"), path)
    return path


def assert_refused(llm, tmp_path):
    with pytest.raises(ContextError, match="not the file that was loaded"):
        PrefixStore(tmp_path / "kv", llm)


@LOADS
@pytest.mark.parametrize("arch", SHAPES)
def test_a_file_written_by_this_process_and_loaded_after_is_the_loaded_one(models, tmp_path, arch, options):
    path = tmp_path / "m.gguf"
    shutil.copy(models(arch), path)
    assert fingerprint.model_is_from(load(path, **options), path, is_first=True)


def overwritten(model, other):
    """In place: what was mapped follows."""
    with model.open("r+b") as file:
        file.write(other.read_bytes())
        file.truncate()


def switched(current, other):
    current.unlink()
    current.symlink_to(other)


@pytest.mark.parametrize(
    ("change", "only_metadata", "options"),
    [
        *((replace, False, options) for options in ({}, COPIED)),
        *((switched, False, options) for options in ({}, COPIED)),
        *((overwritten, True, options) for options in ({}, COPIED)),
        (overwritten, False, COPIED),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_path_that_leads_to_another_file_after_the_load_is_refused(
    model, models, tmp_path, change, only_metadata, options
):
    path = model
    if change is switched:
        path = tmp_path / "current.gguf"
        path.symlink_to(model)
    llm = load(path, **options)
    facts = {"rope_freq_base": 20000.0} if only_metadata else {"seed": 1}
    other = synthetic.write_model(tmp_path / "other.gguf", SHAPES["llama"], **facts)
    change(path, other)
    # a mapping of the new file is there too; it is not that of this model
    new = load(path, **options)
    assert_refused(llm, tmp_path)
    assert name(new) == name(load(other))


def test_a_model_that_is_mapped_in_part_and_was_overwritten_in_place_is_refused(model, models, tmp_path, monkeypatch):
    """As with layers on a GPU: what is mapped follows the file, what was copied does not."""
    llm = load(model, n_ctx=256, use_mmap=False)
    with model.open("r+b") as file:
        file.write(models("llama", seed=1).read_bytes())
    asked, real = [], fingerprint._reader_of

    def reader(tensor, call):
        asked.append(tensor)
        buffer, read = real(tensor, call)
        return "CPU_Mapped" if len(asked) == 1 else buffer, read

    monkeypatch.setattr(fingerprint, "_reader_of", reader)
    # a driver maps what was copied as well
    monkeypatch.setattr(fingerprint, "_file_at", lambda *place: "x")
    assert_refused(llm, tmp_path)
    assert len(asked) > 1


def test_a_model_that_was_copied_to_memory_which_a_driver_has_mapped_is_the_loaded_one(model, models, monkeypatch):
    llm = load(model, n_ctx=256, use_mmap=False)
    own = iter(["the file"])
    monkeypatch.setattr(fingerprint, "_file_at", lambda *place: next(own, "/dev/nvidia0"))
    assert name(llm) == name(load(models("llama")))


@LOADS
def test_a_relative_path_in_another_directory_is_refused(model, models, tmp_path, monkeypatch, options):
    (tmp_path / "b").mkdir()
    shutil.copy(models("llama", seed=1), tmp_path / "b" / "m.gguf")
    monkeypatch.chdir(model.parent)
    llm = load("m.gguf", **options)
    monkeypatch.chdir(tmp_path / "b")
    assert_refused(llm, tmp_path)
    monkeypatch.chdir(tmp_path)
    for read in (partial(PrefixStore, tmp_path / "kv", llm), partial(fingerprint._digest_of_loaded, "a\0b", None)):
        with pytest.raises(ContextError, match="cannot read the model file"):
            read()
    monkeypatch.chdir(model.parent)
    assert name(llm) == name(load(models("llama")))


def test_the_files_are_those_of_the_first_time(model, models, tmp_path):
    current = tmp_path / "current.gguf"
    current.symlink_to(model)
    llm = load(current)
    with PrefixStore(tmp_path / "kv", namespace="n") as store:
        llm.eval(TOKENS)
        assert store.capture(llm)
        current.unlink()
        current.symlink_to(models("llama", seed=1))
        others = prompt(300, 1)
        llm.reset()
        llm.eval(others)
        assert store.capture(llm)
        assert store.restore([*others, 7], load(current), always=True) == 0
        assert store.restore([*others, 7], load(model), always=True) == len(others)


def test_a_store_that_cannot_attach_by_itself_serves_nothing_and_breaks_no_completion(model, models, tmp_path):
    llm = load(model)
    expected = answer(load(models("llama")), TOKENS)
    with PrefixStore(tmp_path / "kv", namespace="n") as store:
        llm.set_cache(store)
        replace(model, models("llama", seed=1))
        assert answer(llm, TOKENS) == expected
        store.flush()
        stats = store.stats()
    assert stats.misses == {"not_attached": 1}
    assert stats.entries == 0


@pytest.mark.parametrize("change", [{"scale": 2.0}, {"scale": 1.0, "alpha": 4.0}], ids=["tensors", "alpha"])
def test_a_lora_adapter_that_was_replaced_is_refused(model, models, tmp_path, change):
    lora, other = tmp_path / "lora.gguf", tmp_path / "other.gguf"
    write_lora(lora, 1.0)
    write_lora(other, **change)
    llm = load(model, lora_path=str(lora))
    content = lora.read_bytes()
    replace(lora, other)
    assert_refused(llm, tmp_path)
    lora.write_bytes(content)
    assert name(llm) == name(load(models("llama"), lora_path=str(lora)))


def split_model(directory, monkeypatch, seed):
    """A model in several files; the first one."""

    class InParts(gguf.GGUFWriter):
        def __init__(self, path, arch):
            path.touch()  # is renamed to the model's name
            super().__init__(directory / "m.gguf", arch, split_max_tensors=20)

    directory.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", InParts)
        synthetic.write_model(directory / "unused", SHAPES["llama"], seed=seed)
    return sorted(directory.glob("m-*.gguf"))


@LOADS
def test_each_file_of_a_split_model_is_compared(tmp_path, monkeypatch, options):
    parts, others = (split_model(tmp_path / str(seed), monkeypatch, seed) for seed in (0, 1))
    assert len(parts) > 1
    whole = name(load(parts[0], **options))
    assert len(str(whole.settings["model"]).split("+")) == len(parts)
    llm = load(parts[0], **options)
    replace(parts[-1], others[-1])
    assert_refused(llm, tmp_path)
    assert list(whole.differences(name(load(parts[0], **options)))) == ["model"]


@LOADS
def test_a_quantized_model_is_the_loaded_one(model, models, tmp_path, options):
    """llama.cpp packs some of its tensors anew, depending on the processor; these cannot be read."""
    paths = [tmp_path / f"q{seed}.gguf" for seed in (0, 1)]
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    for seed, path in enumerate(paths):
        source = models("llama", n_embd=256, **({"seed": seed} if seed else {}))
        assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), parameters) == 0
    llm = load(paths[0], **options)
    assert name(llm)
    llm = load(paths[0], **options)
    replace(paths[0], paths[1])
    assert_refused(llm, tmp_path)


# -- a llama.cpp that does not show what it has loaded -----------------------------------------------------------------


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(fingerprint, "_functions", lambda: None)


@pytest.mark.usefixtures("silent")
def test_without_a_proof_a_file_that_is_older_than_the_process_is_accepted(model, monkeypatch):
    monkeypatch.setattr(fingerprint, "changed_since_import", lambda _: False)
    assert name(load(model))


@pytest.mark.usefixtures("silent")
def test_without_a_proof_a_file_that_is_newer_than_the_process_is_refused(model, tmp_path):
    with pytest.raises(ContextError, match="changed after prefixstore was imported"):
        PrefixStore(tmp_path / "kv", load(model))


def test_a_build_without_the_functions_is_no_error(monkeypatch):
    monkeypatch.setattr(llama_cpp.llama_cpp, "_lib", SimpleNamespace())
    fingerprint._functions.cache_clear()
    try:
        assert fingerprint._functions() is None
    finally:
        fingerprint._functions.cache_clear()
