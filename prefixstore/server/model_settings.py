"""The arguments of a llama-server about its model, as the settings of a ``Llama``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from prefixstore.errors import ContextError, ServerTooOldError
from prefixstore.llama.state.form import CHUNKED, OWN_FORMAT, Window
from prefixstore.models.file import (
    CACHE_TYPES,
    Metadata,
    file_digest,
    file_identity,
    model_parts,
    read_metadata,
    settings_of_model,
)
from prefixstore.server.arguments import Arguments
from prefixstore.server.client import Props
from prefixstore.server.slot_file import STATE_VERSION

Setting: TypeAlias = "str | int | float | bool | None"

ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2}
# llama_flash_attn_type, and how llama-server reads it
FLASH_AUTO = -1
FLASH_OFF = 0
FLASH_ON = 1
FLASH = {
    **dict.fromkeys(("on", "enabled", "true", "1"), FLASH_ON),
    **dict.fromkeys(("off", "disabled", "false", "0"), FLASH_OFF),
    **dict.fromkeys(("auto", "-1"), FLASH_AUTO),
}
# What -1 stands for, unless the model says something else: the defaults of llama.cpp, which a Llama passes as numbers.
YARN_DEFAULTS = {"yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
# these read YaRN's factors from the model, or have defaults of their own
OWN_YARN = ("grok", "mistral3")
# Numbers that C and Python read in the same way: 10_000 is 10 for one of them, 10000 for the other.
INTEGER = re.compile(r"[-+]?[0-9]+")
DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
# Those that generate no text: llama.cpp gives them no memory (`llama_model::create_memory`), or they have an encoder,
# which llama-server does not run.
NO_DECODERS = frozenset(
    """
bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert modern-bert gemma-embedding wavtokenizer-dec
dream llada llada-moe rnd1 t5 t5encoder
""".split()  # noqa: SIM905 - to be read beside the source of llama.cpp
)
# llama.cpp's own lengths of windows, where a model does not name one, and of the chunks of Llama 4, whatever it names
DEFAULT_WINDOWS = {"exaone-moe": 128, "exaone4": 4096, "gemma2": 4096, "smallthinker": 4096}
CHUNK = 8192
# what only models with recurrent layers have in their metadata
RECURRENT_KEYS = ("ssm", "shortconv", "kda", "wkv")
# contexts are as long as a multiple of this
CONTEXT_STEP = 256


def model_settings(
    arguments: Arguments, props: Props, path: Path
) -> tuple[dict[str, Setting], Window | None, dict[str, list[int]]] | None:
    """What the states of a server depend on, as far as its arguments and its model show.

    These are the settings, as in the namespace of a ``Llama``; what tokens see in the layers that do not see all, None
    if the model has none; and what the files of the model were. None if the model generates no text from its own state.

    Raises
    ------
    ValueError, KeyError, ZeroDivisionError
        If a value is not understood.
    ContextError
        If a file of the model cannot be read.
    """
    given = arguments.settings
    parts = model_parts(str(path))
    metadata = read_metadata(parts[0])
    try:
        files = {part: file_identity(Path(part).stat()) for part in parts}
    except OSError as error:
        raise ContextError(f"cannot read the model file {error.filename}: {error.strerror}") from error
    overrides = _overrides(given.get("override_kv", ""))
    model = {**metadata, **overrides}
    architecture = str(model.get("general.architecture", ""))
    scaling = ROPE_SCALINGS[given["rope_scaling"]] if "rope_scaling" in given else -1
    n_ctx = _n_ctx(arguments, props, int(model.get(f"{architecture}.context_length", 0)))
    settings: dict[str, Setting] = {
        "type_k": CACHE_TYPES[given.get("type_k", "f16")],
        "type_v": CACHE_TYPES[given.get("type_v", "f16")],
        "flash_attn_type": FLASH[given.get("flash_attn", "auto").lower()],
        "rope_scaling_type": scaling,
        "rope_freq_base": _float(given.get("rope_freq_base", "0")),
        "rope_freq_scale": _freq_scale(given),
        "yarn_ext_factor": _float(given.get("yarn_ext_factor", "-1")),
        **{name: yarn_factor(name, _float(given.get(name, "-1")), model) for name in YARN_DEFAULTS},
        "yarn_orig_ctx": _int(given.get("yarn_orig_ctx", "0")),
        "attention_type": -1,
        "model": "+".join(file_digest(part) for part in parts),
        "lora": None,
        "lora_scale": None,
        **settings_of_model(metadata, overrides, n_ctx),
        "llama_cpp": commit_of(props),
        "state_version": STATE_VERSION,
        "label": None,
    }
    if arguments.unknown:
        settings["arguments"] = json.dumps(arguments.unknown)
    return None if architecture in NO_DECODERS else (settings, _window(model, architecture), files)


def gains_from_full_window(arguments: Arguments, path: str | None) -> bool:
    """Whether llama-server can use what is restored only with ``--swa-full``, and it costs little or nothing.

    Without it, the server wants rows from before the window. There are none if the context is no longer than the
    window: then all rows are kept in any case. And it takes memory that cannot step back for memory without these rows,
    where only a few layers have a window.
    """
    if path is None or arguments.is_on("swa_full"):
        return False
    try:
        model = read_metadata(model_parts(path)[0])
        n_ctx = _asked_for(arguments, _int(arguments.settings.get("n_parallel", "1")))
    except (ContextError, ValueError):
        return False
    architecture = str(model.get("general.architecture", ""))
    window = _window(model, architecture)
    is_stuck = architecture in OWN_FORMAT or any(
        key.startswith(f"{architecture}.{name}.") for key in model for name in RECURRENT_KEYS
    )
    return window is not None and (is_stuck or 0 < n_ctx <= window.size)


def _window(model: Metadata, architecture: str) -> Window | None:
    """The window of a model, as llama.cpp reads it; it is used only if the states show that there is one."""
    given = model.get(f"{architecture}.attention.sliding_window")
    if given == 0 or (given is not None and not isinstance(given, int)):
        return None
    if architecture == CHUNKED:
        return Window(CHUNK, is_chunked=True)
    size = given or DEFAULT_WINDOWS.get(architecture, 0)
    return Window(int(size)) if size else None


def commit_of(props: Props) -> str:
    """The llama.cpp of a server. Raises `ServerTooOldError` if it does not say which."""
    if not props.commit:
        raise ServerTooOldError("the server does not say which llama.cpp it is")
    return props.commit


def _int(text: str) -> int:
    """Raises `ValueError` if llama.cpp may read another number."""
    return int(text if INTEGER.fullmatch(text) else _invalid(text))


def _decimal(text: str) -> float:
    """Raises `ValueError` if llama.cpp may read another number."""
    return float(text if DECIMAL.fullmatch(text) else _invalid(text))


def _float(text: str) -> float:
    """As llama.cpp has it: a C float."""
    return float(np.float32(_decimal(text)))


def _freq_scale(given: Mapping[str, str]) -> float:
    if "rope_scale" in given:
        return float(np.float32(1) / np.float32(_decimal(given["rope_scale"])))
    return _float(given.get("rope_freq_scale", "0"))


def yarn_factor(name: str, value: float, metadata: Mapping[str, object]) -> float:
    """A factor of YaRN as a ``Llama`` would pass it: -1 is llama.cpp's default, unless the model has factors."""
    is_default = metadata.get("general.architecture") not in OWN_YARN and not any(
        ".rope.scaling.yarn_" in key for key in metadata
    )
    return YARN_DEFAULTS[name] if value < 0 and is_default else value


def _overrides(text: str) -> Metadata:
    """``--override-kv KEY=TYPE:VALUE,...``. Of two values for a key, llama.cpp takes the first."""
    found: Metadata = {}
    for item in text.split(",") if text else ():
        key, _, typed = item.partition("=")
        if key in found:
            continue
        kind, _, value = typed.partition(":")
        if kind == "bool" and value in ("true", "false"):
            found[key] = value == "true"
        elif kind == "str" and '"' not in item:
            found[key] = value
        else:
            found[key] = {"int": _int, "float": _decimal}[kind](value) if kind in ("int", "float") else _invalid(item)
    return found


def _invalid(item: str) -> float:
    raise ValueError(item)


def _n_ctx(arguments: Arguments, props: Props, trained: int) -> int:
    """Tokens in one sequence. The server shows no more than the model was trained with: then the arguments tell."""
    return props.n_ctx if props.n_ctx < trained else max(props.n_ctx, _asked_for(arguments, props.n_slots))


def _asked_for(arguments: Arguments, n_slots: int) -> int:
    """Tokens in one sequence of the context that was asked for."""
    given = arguments.settings
    wanted = _padded(_int(given.get("n_ctx", "0")))
    is_unified = arguments.is_on("kv_unified") or _int(given.get("n_parallel", "-1")) < 0
    return wanted if is_unified or n_slots <= 1 else _padded(wanted // n_slots)


def _padded(n: int) -> int:
    return -(-n // CONTEXT_STEP) * CONTEXT_STEP
