"""The namespace of a llama-server: that of a `Llama` with the same settings, and of no other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from prefixstore.errors import (
    ContextError,
    InvalidParameterError,
    ServerRefusedError,
)
from prefixstore.llama.fingerprint import namespace_of
from prefixstore.llama.kv_memory import page_tokens_for
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.models.file import file_digest, read_metadata
from prefixstore.server import SlotStore
from prefixstore.server import identity as namespace_module
from prefixstore.server.arguments import FLAGS, KNOWN, OTHER_VARIABLES, REFUSED, VALUED, VARIABLES, parse_arguments
from prefixstore.server.client import Props
from prefixstore.server.find_process import RunningProcess
from prefixstore.server.identity import ServerIdentity
from prefixstore.server.model_settings import gains_from_full_window
from prefixstore.server.slot_file import SlotLayout
from tests.support.llama_server import Running, binary
from tests.support.models import finish, load, state_bytes, write

PROPS = Props("b1-0c1e570", "", 2, 4096)

SAME: dict[str, tuple[str, list[str], dict[str, str], dict[str, Any]]] = {
    "defaults": ("llama", [], {}, {"flash_attn": True}),
    "without flash attention": ("llama", ["-fa", "off"], {}, {}),
    "by the environment": ("llama", [], {"LLAMA_ARG_FLASH_ATTN": "0", "LLAMA_ARG_CACHE_TYPE_K": "q8_0"}, {"type_k": 8}),
    "types": ("llama", ["-ctk", "q8_0", "-ctv", "q4_0"], {}, {"flash_attn": True, "type_k": 8, "type_v": 2}),
    "rope": (
        "llama",
        ["--rope-scaling", "linear", "--rope-scale", "3", "--rope-freq-base", "12345.678"],
        {},
        {"flash_attn": True, "rope_scaling_type": 1, "rope_freq_scale": 1 / 3, "rope_freq_base": 12345.678},
    ),
    "yarn": (
        "llama",
        ["--rope-scaling", "yarn", "--yarn-ext-factor", "0.7", "--yarn-attn-factor", "1.3", "--yarn-beta-fast", "24"],
        {},
        {
            "flash_attn": True,
            "rope_scaling_type": 2,
            "yarn_ext_factor": 0.7,
            "yarn_attn_factor": 1.3,
            "yarn_beta_fast": 24,
        },
    ),
    "overrides": (
        "llama",
        ["--override-kv", "llama.rope.freq_base=float:5000,tokenizer.ggml.add_bos_token=bool:false"],
        {},
        {"flash_attn": True, "kv_overrides": {"llama.rope.freq_base": 5000.0, "tokenizer.ggml.add_bos_token": False}},
    ),
    "window": ("gemma3", [], {}, {"flash_attn": True, "swa_full": False}),
    "whole window": ("gemma3", ["--swa_full"], {}, {"flash_attn": True}),
    "recurrent": ("mamba", [], {}, {}),
    # what `warm --for-server` takes; without attention it has no effect
    "recurrent, as warmed": ("mamba", ["--flash-attn", "on"], {}, {"flash_attn": False}),
    "hybrid": ("lfm2", [], {}, {"flash_attn": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SAME)
def test_it_is_that_of_a_llama_with_the_same_settings(
    case: str, models: Callable[..., Path], llama_server: Callable[..., Running]
):
    arch, arguments, environment, options = SAME[case]
    model = models(arch)
    running = llama_server(model, *arguments, environment=environment)
    props = running.client.props()
    wanted = load(model, n_ctx=2048, **options)
    expected = namespace_of(wanted, page_tokens=page_tokens_for(wanted, 256), salt="a", label=None)
    for identity in (
        ServerIdentity.of_command(running.argv, {**os.environ, **environment}, props),
        ServerIdentity.of_process(running.url, props),
    ):
        with SlotStore("memory:", running.client, running.slots_dir, identity) as slots:
            found = slots.namespace("a")
        assert found is not None
        assert found.differences(expected) == {}
        assert found.key == expected.key


def layout_of(llm: Any) -> SlotLayout:
    llm.eval([5, 6, 7])
    return SlotLayout(parse_sequence(state_bytes(llm)).shape, 1, is_packed=True)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> SlotLayout:
    return layout_of(load(write(tmp_path_factory.mktemp("layout"), "llama"), flash_attn=True))


def key_of(layout: SlotLayout, model: Path, *arguments: str, **environment: str) -> bytes:
    props = Props(PROPS.build, str(model), 2, 4096)
    identity = ServerIdentity.of_command(["llama-server", *arguments], environment, props)
    assert identity.reason is None
    return identity.namespace(layout, page_tokens=256, salt=None).key


def test_all_that_changes_a_state_gives_another_namespace(layout: SlotLayout, models: Callable[..., Path]):
    model = models("llama")
    cases: list[tuple[list[str], dict[str, str]]] = [
        ([], {}),
        (["--rope-freq-base", "1000"], {}),
        (["--rope-freq-scale", "0.5"], {}),
        (["--rope-scaling", "none"], {}),
        (["--yarn-orig-ctx", "512"], {}),
        (["--override-kv", "llama.expert_used_count=int:1"], {}),
        (["--something-new"], {}),
        (["--something-new", "2"], {}),
        ([], {"LLAMA_ARG_SOMETHING_NEW": "1"}),
        ([], {"LLAMA_ATTN_ROT_DISABLE": "1"}),
        ([], {"LLAMA_ARG_ROPE_FREQ_BASE": "2000"}),
    ]
    keys = [key_of(layout, model, *arguments, **environment) for arguments, environment in cases]
    assert len(set(keys)) == len(keys)
    # the server does not show that a context is longer than the model was trained for; its factors may be others then
    trained = Props(PROPS.build, str(model), 2, 32768)
    of_length = [
        ServerIdentity.of_command(["llama-server", *arguments], {}, trained).settings["long_context"]
        for arguments in (
            [],
            ["-c", "32768"],
            ["-c", "65536", "-np", "2"],
            ["-c", "65536"],
            ["-c", "99999", "-np", "2"],
        )
    ]
    assert of_length == [False, False, False, True, True]
    assert key_of(layout, models("llama", seed=1)) != keys[0], "another model"
    harmless = ["-t", "4", "-np", "2", "--port", "1234", "-ngl", "99", "--jinja", "-b", "64", "--api-key", "secret"]
    assert key_of(layout, model, *harmless, LLAMA_ARG_HOST="::", LLAMA_ARG_NO_PERF="1") == keys[0]
    # a draft changes no row, so its server shares with those without
    drafting = (
        "-md draft.gguf --spec-type draft-simple --spec-draft-n-max 8",
        "--spec-type draft-mtp -ctkd q8_0 --no-spec-draft-backend-sampling",
        "--spec-default",
    )
    assert {key_of(layout, model, *arguments.split()) for arguments in drafting} == {keys[0]}
    drafts = {"LLAMA_ARG_SPEC_DRAFT_MODEL": "draft.gguf", "LLAMA_ARG_SPEC_TYPE": "ngram-mod"}
    assert key_of(layout, model, **drafts) == keys[0]
    # arguments go over the environment, and the last one counts
    assert key_of(layout, model, "--rope-freq-base", "1", "--rope-freq-base", "1000") == keys[1]
    assert key_of(layout, model, "--rope-freq-base", "1000", LLAMA_ARG_ROPE_FREQ_BASE="2000") == keys[1]
    assert key_of(layout, model, "--rope-scale", "2") == keys[2]
    assert key_of(layout, model, LLAMA_ARG_ROPE_SCALE="4", LLAMA_ARG_ROPE_FREQ_SCALE="0.5") == keys[2]
    # of an override, llama.cpp takes the first
    of_one = [f"--override-kv llama.expert_used_count=int:{i}".split() for i in (1, 2)]
    assert key_of(layout, model, *of_one[0], *of_one[1]) == keys[5]


def test_other_types_than_the_arguments_say_are_refused(layout: SlotLayout, models: Callable[..., Path]):
    with pytest.raises(ServerRefusedError, match="type_k"):
        key_of(layout, models("llama"), "-ctk", "q8_0")
    with pytest.raises(ServerRefusedError, match="type_v"):
        key_of(layout, models("llama"), "-ctv", "f32")


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (["--lora", "a.gguf"], {}, "lora"),
        (["--lora-scaled", "a.gguf:0.5"], {}, "lora"),
        (["--control-vector", "a.gguf"], {}, "control_vector"),
        (["--context-shift"], {}, "context_shift"),
        (["--context_shift"], {}, "context_shift"),
        ([], {"LLAMA_ARG_CONTEXT_SHIFT": "true"}, "context_shift"),
        (["--cache-reuse", "64"], {}, "cache_reuse"),
        ([], {"LLAMA_ARG_CACHE_REUSE": "64"}, "cache_reuse"),
        (["--gpt-oss-20b-default"], {}, "preset"),
        (["-fa", "perhaps"], {}, "arguments"),
        (["-ctk", "q99"], {}, "arguments"),
        # 10 for C, 10000 for Python
        (["--rope-freq-base", "10_000"], {}, "arguments"),
        (["--rope-scale", "1_0"], {}, "arguments"),
        (["--yarn-orig-ctx", "4_096"], {}, "arguments"),
        (["--override-kv", "llama.expert_used_count=int:1_0"], {}, "arguments"),
        (["--embedding"], {}, "embeddings"),
        (["--override-kv", "general.architecture=str:t5"], {}, "no_decoder"),
        (["--override-kv", "general.architecture=str:nomic-bert"], {}, "no_decoder"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_a_reason(
    arguments: list[str], environment: dict[str, str], reason: str, models: Callable[..., Path]
):
    props = Props(PROPS.build, str(models("llama")), 2, 4096)
    assert ServerIdentity.of_command(["llama-server", *arguments], environment, props).reason == reason


def test_a_configuration_file_is_refused(tmp_path: Path, models: Callable[..., Path]):
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "config.ini").write_text("cache-reuse = 64\n")
    props = Props(PROPS.build, str(models("llama")), 2, 4096)
    found = ServerIdentity.of_command(["llama-server"], {"XDG_CONFIG_HOME": str(tmp_path)}, props)
    assert found.reason == "config_file"


def test_switched_off_again_is_off():
    for environment in ({"LLAMA_ARG_NO_CONTEXT_SHIFT": "1", "LLAMA_ARG_CONTEXT_SHIFT": "1"}, {}):
        found = parse_arguments(["-kvu", "-no-kvu", "--jinja", "-c", "5"], environment)
        assert not found.is_on("context_shift")
        assert not found.is_on("kv_unified")
        assert (found.settings["n_ctx"], found.unknown) == ("5", [])


def test_the_options_that_are_known_are_those_of_the_server():
    """An option with a value that is taken for one without, or the other way round, would hide the next one."""
    text = subprocess.run([binary(), "--help"], check=True, capture_output=True, text=True, timeout=60).stdout
    n_values: dict[str, int] = {}
    variables: set[str] = set(re.findall(r"\(env: (\w+)\)", text))
    for entry in re.findall(r"^-{1,2}\w.*", text, re.MULTILINE):
        shown = entry[:40] if entry[38:40] == "  " else entry
        names = re.match(r"(-{1,2}[a-zA-Z][\w.-]*,?\s*)+", shown)
        assert names is not None
        has_value = bool(re.split(r"\s{2,}", shown[names.end() :].strip())[0])
        for name in re.findall(r"-{1,2}[a-zA-Z][\w.-]*", names[0]):
            n_values[name] = int(has_value)
    known = dict.fromkeys(VALUED, 1) | dict.fromkeys(FLAGS, 0) | {name: n for name, (_, n) in KNOWN.items()}
    wrong = {name: n for name, n in known.items() if n_values.get(name, n) != n}
    assert wrong == {}
    # what is not known is listed here, so that a new option is looked at
    unknown = {name for name in n_values if name not in known and not name.startswith(tuple(r for r, _ in REFUSED))}
    assert sorted(unknown) == sorted(unknown & NOT_KNOWN), "look at these: do they change a state?"
    prefix = "LLAMA_ARG_"
    named = {name for name in variables if name.startswith(prefix)}
    harmless = {prefix + name for name in OTHER_VARIABLES} | set(VARIABLES)
    assert harmless - named <= set(), "variables that the server does not have"


# options that end the server at once, have been removed, or make its answers useless, and of the router
NOT_KNOWN = set(
    """
-h --help --usage --version -cl --cache-list --completion-bash --list-devices --kv-unified-per-slot --pooling
--spec-synth-len --spec-synth-rates --draft --draft-n --draft-max --draft-min --draft-n-min --spec-ngram-size-n
--spec-ngram-size-m --spec-ngram-min-hits --no-models-autoload
""".split()  # noqa: SIM905 - to be read beside the help of llama-server
)


def test_a_process_that_is_not_found_is_not_used():
    with pytest.raises(InvalidParameterError, match="is not found on this machine"):
        ServerIdentity.of_process("http://127.0.0.1:9", PROPS)
    with pytest.raises(InvalidParameterError, match="is not found on this machine"):
        ServerIdentity.of_process("http://models.example.org", PROPS)


def test_a_process_that_chooses_among_servers_is_not_used(monkeypatch: pytest.MonkeyPatch):
    swapping = RunningProcess(1, ["/usr/bin/llama-swap", "-config", "models.yaml"], {}, Path("/"), 0)
    monkeypatch.setattr(namespace_module, "running_process", lambda _: swapping)
    with pytest.raises(InvalidParameterError, match="llama-swap listens"):
        ServerIdentity.of_process("http://127.0.0.1:9", PROPS)


def test_a_model_that_changed_since_the_server_was_started_is_refused(
    models: Callable[..., Path], llama_server: Callable[..., Running], tmp_path: Path
):
    model = tmp_path / "model.gguf"
    model.write_bytes(models("llama").read_bytes())
    running = llama_server(model)
    props = running.client.props()
    assert ServerIdentity.of_process(running.url, props).reason is None
    os.utime(model)
    with pytest.raises(ContextError, match="restart the server"):
        ServerIdentity.of_process(running.url, props)


def test_a_part_of_a_model_that_is_gone_is_named(models: Callable[..., Path], tmp_path: Path):
    shutil.copy(models("llama"), tmp_path / "m-00001-of-00002.gguf")
    props = replace(PROPS, model_path=str(tmp_path / "m-00001-of-00002.gguf"))
    with pytest.raises(ContextError, match=r"m-00002-of-00002\.gguf: No such file"):
        ServerIdentity.of_command(["llama-server"], {}, props)


def test_the_metadata_is_that_which_the_file_has(models: Callable[..., Path], tmp_path: Path):
    path = models("gemma3")
    found = read_metadata(path)
    reader = gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and field.types[0] is not gguf.GGUFValueType.ARRAY:
            assert found[name] == field.contents(), name
    assert found["gemma3.attention.sliding_window"] == 256
    data = path.read_bytes()
    for n in (0, 3, 20, 1000):
        (tmp_path / "cut.gguf").write_bytes(data[:n])
        with pytest.raises(ContextError, match="cannot read the metadata"):
            read_metadata(tmp_path / "cut.gguf")


@pytest.mark.parametrize("alignment", ["32", 0, -1, 32.5, float("nan")])
def test_an_alignment_that_is_no_number_of_bytes_is_named(tmp_path: Path, alignment: object):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    add = {str: writer.add_string, int: writer.add_int32, float: writer.add_float32}[type(alignment)]
    add("general.alignment", alignment)
    finish(writer)
    with pytest.raises(ContextError, match="alignment"):
        read_metadata(tmp_path / "odd.gguf")


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", "a\0b", tmp_path / "none"):
        with pytest.raises(ContextError, match="fingerprint"):
            file_digest(path)


def test_the_full_window_is_asked_for_only_where_it_costs_nothing_and_nothing_else_helps(models: Callable[..., Path]):
    def gains(arch: str, *arguments: str) -> bool:
        return gains_from_full_window(parse_arguments(arguments, {}), str(models(arch)))

    # the window has 256 tokens
    assert gains("gemma3", "-c", "256")
    assert gains("gemma3", "-c", "512", "-np", "2")
    assert not gains("gemma3", "-c", "512", "-np", "2", "-kvu")
    assert not gains("gemma3", "-c", "2048")
    assert not gains("gemma3")
    assert not gains("gemma3", "-c", "256", "--swa-full")
    assert not gains("llama", "-c", "256")
    assert not gains("lfm2", "-c", "256")
    assert not gains_from_full_window(parse_arguments(["-c", "256"], {}), "no/such.gguf")
    assert not gains_from_full_window(parse_arguments(["-c", "256"], {}), None)
