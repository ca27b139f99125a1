"""One file for jobs and servers: which model, with which settings, and which store. So both use one namespace.

::

    [model]
    path = "model.gguf"        # beside this file, if it is not absolute
    n_ctx = 8192
    type_k = "q8_0"

    [store]
    location = "lmdb:///var/cache/kv"
    max_bytes = "20GiB"

    [warm]
    prompts = ["prompts.jsonl"]
    pin = true
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixstore.backends.location import is_url
from prefixstore.errors import InvalidParameterError, MissingExtraError
from prefixstore.format.namespace import Namespace
from prefixstore.store import PrefixStore

if TYPE_CHECKING:
    import os

    from llama_cpp import Llama

__all__ = ["Config", "explain", "load", "load_config"]

log = logging.getLogger("prefixstore")

# Parameters of Llama that can stand in a file. (Handlers, draft models and tokenizers are objects.)
MODEL_SETTINGS = frozenset(
    """
    n_gpu_layers split_mode main_gpu tensor_split use_mmap use_mlock kv_overrides seed n_ctx n_batch n_ubatch n_threads
    n_threads_batch rope_scaling_type pooling_type attention_type rope_freq_base rope_freq_scale yarn_ext_factor
    yarn_attn_factor yarn_beta_fast yarn_beta_slow yarn_orig_ctx logits_all offload_kqv flash_attn op_offload swa_full
    no_perf last_n_tokens_size lora_scale lora_path numa chat_format type_k type_v spm_infill verbose
    """.split()  # noqa: SIM905 - to be read at a glance
)
STORE_SETTINGS = frozenset(inspect.signature(PrefixStore).parameters) - {"llm"}
WARM_SETTINGS = frozenset({"prompts", "pin", "generation_prompt"})
PATHS = frozenset({"path", "lora_path"})
# settings that are numbers in llama.cpp: name of the setting to the prefix of its constants there
NAMED = {
    "type_k": "GGML_TYPE_",
    "type_v": "GGML_TYPE_",
    "rope_scaling_type": "LLAMA_ROPE_SCALING_TYPE_",
    "pooling_type": "LLAMA_POOLING_TYPE_",
    "attention_type": "LLAMA_ATTENTION_TYPE_",
    "flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_",
    "split_mode": "LLAMA_SPLIT_MODE_",
}


@dataclass(frozen=True)
class Config:
    """Settings of a model and of a store.

    Attributes
    ----------
    path
        Of the model.
    model
        Keyword arguments of `llama_cpp.Llama`; types of the KV cache and other enumerations may be names (``"q8_0"``).
    store
        Keyword arguments of `prefixstore.PrefixStore`, `location` included.
    warm
        Options of a warming job: `prompts`, `pin` and `generation_prompt`. Servers have no use for them.

    Raises
    ------
    InvalidParameterError
        If a setting is unknown; the message names the nearest one.
    """

    path: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, Any] = field(default_factory=dict)
    warm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("model", self.model, MODEL_SETTINGS)
        _check("store", self.store, STORE_SETTINGS)
        _check("warm", self.warm, WARM_SETTINGS)

    def override(
        self,
        path: str | None = None,
        model: Mapping[str, Any] | None = None,
        store: Mapping[str, Any] | None = None,
    ) -> Config:
        """These settings in the place of those here; None leaves one as it is."""
        return replace(
            self, path=path or self.path, model={**self.model, **_given(model)}, store={**self.store, **_given(store)}
        )

    def open_llama(self) -> Llama:
        """The model with its context.

        Raises
        ------
        InvalidParameterError
            If no model is named, its file cannot be loaded, or a setting has a name that llama.cpp does not know.
        MissingExtraError
            If llama-cpp-python is not installed.
        """
        llama_cpp = _llama_cpp()
        if self.path is None:
            raise InvalidParameterError('no model is named; write path = "model.gguf" into [model], or give --model')
        if not isinstance(self.path, str) or not Path(self.path).is_file():
            raise InvalidParameterError(f"model: {self.path} is no file")
        settings = {name: _number(llama_cpp, name, value) for name, value in self.model.items()}
        try:
            llm: Llama = llama_cpp.Llama(self.path, **{"verbose": False, **settings})
        except (ValueError, RuntimeError, TypeError) as error:
            raise InvalidParameterError(f"llama.cpp does not load {self.path} with these settings: {error}") from error
        return llm

    def open_store(self, llm: Llama | None, **more: Any) -> PrefixStore:
        """The store, attached to `llm`; `more` goes over the settings here."""
        settings = {**self.store, **more}
        return PrefixStore(settings.pop("location", None), llm, **settings)


def load_config(path: str | os.PathLike[str]) -> Config:
    """The settings in a TOML file; paths in it that are not absolute are meant from its folder.

    Raises
    ------
    InvalidParameterError
        If it cannot be read, or has something in it that is unknown.
    MissingExtraError
        On Python 3.10, if tomli is not installed.
    """
    file = Path(path)
    try:
        read = _toml().loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"config {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidParameterError(f"config {file} is no TOML: {error}") from error
    try:
        _check("", read, {"model", "store", "warm"})
        for name, table in read.items():
            if not isinstance(table, dict):
                raise InvalidParameterError(f"{name} is no table; write [{name}]")
        folder = file.resolve().parent
        model, store, warm = (dict(read.get(name, {})) for name in ("model", "store", "warm"))
        for name in PATHS & model.keys():
            model[name] = _beside(folder, model[name])
        if isinstance(location := store.get("location"), str) and not is_url(location):
            store["location"] = _beside(folder, location)
        if isinstance(prompts := warm.get("prompts"), list):
            warm["prompts"] = [_beside(folder, prompt) for prompt in prompts]
        return Config(model.pop("path", None), model, store, warm)
    except InvalidParameterError as error:
        raise InvalidParameterError(f"config {file}: {error}") from None


def load(path: str | os.PathLike[str]) -> tuple[Llama, PrefixStore]:
    """The model and the store of a TOML file, ready to serve: the store is attached, and is the model's cache.

    If the store has pages, but none for these settings, what differs is logged as a warning.

    Raises
    ------
    PrefixStoreError
        As `load_config`, `Config.open_llama` and `PrefixStore` do.

    Examples
    --------
    >>> llm, store = prefixstore.load("warm.toml")  # doctest: +SKIP
    """
    config = load_config(path)
    llm = config.open_llama()
    store = config.open_store(llm)
    for difference in explain(store.namespace, store.engine.namespaces()):
        log.warning("%s has nothing for these settings yet: %s", store.location, difference)
    llm.set_cache(store)  # type: ignore[arg-type]  # registered as a BaseLlamaCache
    return llm, store


# -- why two are not the same -----------------------------------------------------------------------------------------


def explain(namespace: Namespace, stored: Iterable[Namespace]) -> list[str]:
    """Why states in a store are of no use in a context, in words: ``"type_k is q8_0 here, f16 in the store"``.

    Parameters
    ----------
    namespace
        Of the context.
    stored
        Those in the store.

    Returns
    -------
    list of str
        What differs from the stored namespace that comes nearest, the model first; empty if `namespace` is among them,
        or if there is none.
    """
    others = list(stored)
    if not others or any(other.key == namespace.key for other in others):
        return []
    nearest = min((namespace.differences(other) for other in others), key=lambda found: ("model" in found, len(found)))
    if "model" in nearest and len(nearest) > 1:
        # settings of other models say nothing
        nearest = {"model": nearest["model"]}
    pairs = {name: (_shown(name, here), _shown(name, there)) for name, (here, there) in nearest.items()}
    return [f"{name} is {here} here, {there} in the store" for name, (here, there) in pairs.items()]


def _shown(name: str, value: object) -> str:
    """A setting in words, as far as llama.cpp has words for it."""
    if value is None:
        return "not set"
    if name in NAMED and isinstance(value, int):
        try:
            constants = vars(_llama_cpp())
        except MissingExtraError:
            return str(value)
        known = _names(name, constants)
        return next((word for word, number in known.items() if number == value), str(value))
    return str(value)


# -- reading ----------------------------------------------------------------------------------------------------------


def _check(table: str, settings: Mapping[str, Any], known: Collection[str]) -> None:
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *(["path"] if table == "model" else [])], 1)
            place = f"[{table}] has {name!r}" if table else f"it has {name!r}"
            hint = f"is {near[0]!r} meant?" if near else f"known are {', '.join(sorted(known))}"
            raise InvalidParameterError(f"{place}, which is unknown; {hint}")


def _given(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (settings or {}).items() if value is not None}


def _beside(folder: Path, path: object) -> object:
    return str(folder / path) if isinstance(path, str) and path != "-" else path


def _number(llama_cpp: Any, name: str, value: object) -> object:
    """The number that llama.cpp has for a name."""
    if name not in NAMED or not isinstance(value, str):
        return value
    known = _names(name, vars(llama_cpp))
    if value.lower() not in known:
        raise InvalidParameterError(f"{name}={value!r} is unknown to llama.cpp; known are {', '.join(sorted(known))}")
    return known[value.lower()]


def _names(setting: str, constants: Mapping[str, Any]) -> dict[str, int]:
    """What llama.cpp calls the values of a setting."""
    prefix = NAMED[setting]
    return {key.removeprefix(prefix).lower(): value for key, value in constants.items() if key.startswith(prefix)}


def _llama_cpp() -> Any:
    try:
        return importlib.import_module("llama_cpp")
    except ImportError as error:
        raise MissingExtraError('a model needs llama-cpp-python; pip install "prefixstore[llama]"') from error


def _toml() -> Any:
    try:
        return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise MissingExtraError('a configuration file needs tomli; pip install "prefixstore[cli]"') from error
