"""One file for warming jobs and servers: a model, its settings and a store, so that both use the same namespace.

::

    [model]
    path = "model.gguf"        # relative to the folder of this file
    n_ctx = 8192
    type_k = "q8_0"

    [store]
    location = "lmdb:///var/cache/kv"  # unless PREFIXSTORE_LOCATION names another one
    max_bytes = "20GiB"

    [warm]
    prompts = ["prompts.jsonl"]
    pin = true
"""

from __future__ import annotations

import ctypes
import difflib
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixstore.backends.encryption_keys import ENVIRONMENT as KEY_VARIABLE
from prefixstore.backends.files import expanded
from prefixstore.backends.location import ENVIRONMENT, is_url, text_of
from prefixstore.errors import InvalidParameterError, MissingExtraError
from prefixstore.format.namespace import Namespace, model_digits
from prefixstore.models.file import CACHE_TYPES, is_gguf, setting_name, setting_text
from prefixstore.opening import locations_of
from prefixstore.store import PrefixStore
from prefixstore.units import shown

if TYPE_CHECKING:
    from llama_cpp import Llama

log = logging.getLogger("prefixstore")

# Parameters of Llama that a file can hold. (Handlers, draft models and tokenizers are objects.)
MODEL_SETTINGS = frozenset(
    """
    n_gpu_layers split_mode main_gpu tensor_split use_mmap use_mlock kv_overrides seed n_ctx n_batch n_ubatch n_threads
    n_threads_batch rope_scaling_type pooling_type attention_type rope_freq_base rope_freq_scale yarn_ext_factor
    yarn_attn_factor yarn_beta_fast yarn_beta_slow yarn_orig_ctx logits_all offload_kqv flash_attn op_offload swa_full
    no_perf last_n_tokens_size lora_scale lora_path numa chat_format type_k type_v spm_infill verbose
    """.split()  # noqa: SIM905 - to be read at a glance
)
# those of them that decide how text and messages become tokens
TOKENIZER_SETTINGS = frozenset({"chat_format", "kv_overrides", "spm_infill", "verbose"})
STORE_SETTINGS = frozenset(inspect.signature(PrefixStore).parameters) - {"llm"}
# a string in their place would be true, whatever it says
MODEL_FLAGS = frozenset(
    """
    use_mmap use_mlock logits_all offload_kqv flash_attn op_offload swa_full no_perf spm_infill verbose
    """.split()  # noqa: SIM905 - to be read at a glance
)
# the least of those that are numbers: 0 is the model's own n_ctx, and -1 all layers, or all threads
LEAST = {"n_ctx": 0, "n_batch": 1, "n_ubatch": 1}
# the most: of threads, GGML_MAX_N_THREADS
MOST = {"n_threads": 512, "n_threads_batch": 512}
WARM_SETTINGS = frozenset({"prompts", "pin", "generation_prompt"})
PATHS = frozenset({"path", "lora_path"})
# settings that are numbers in llama.cpp: the prefix of the names of their constants
NAMED = {
    "type_k": "GGML_TYPE_",
    "type_v": "GGML_TYPE_",
    "rope_scaling_type": "LLAMA_ROPE_SCALING_TYPE_",
    "pooling_type": "LLAMA_POOLING_TYPE_",
    "attention_type": "LLAMA_ATTENTION_TYPE_",
    "split_mode": "LLAMA_SPLIT_MODE_",
}
# a V of these types needs no flash attention: not set, f32, f16, bf16
FLOATS = (None, 0, 1, 30)


@dataclass(frozen=True)
class Config:
    """Settings of a model and of a store.

    Attributes
    ----------
    path
        Path of the model file.
    model
        Keyword arguments of `llama_cpp.Llama`; types of the KV cache and other enumerations may be names (``"q8_0"``).
    store
        Keyword arguments of `prefixstore.PrefixStore`, `location` included.
    warm
        Options of a warming job: `prompts`, `pin` and `generation_prompt`. Servers ignore them.

    Raises
    ------
    InvalidParameterError
        If a setting is unknown; the message suggests the most similar one.
    """

    path: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, Any] = field(default_factory=dict)
    warm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("model", self.model, MODEL_SETTINGS)
        _check("store", self.store, STORE_SETTINGS)
        _check("warm", self.warm, WARM_SETTINGS)
        for name, value in self.model.items():
            is_number = name.startswith("n_") or name in ("seed", "last_n_tokens_size")
            if is_number and (isinstance(value, bool) or not isinstance(value, (int, type(None)))):
                raise InvalidParameterError(f"[model] {name}={shown(value)} must be an integer")
            least, most = LEAST.get(name, -1), MOST.get(name, 2**31 - 1)
            if name.startswith("n_") and value is not None and not least <= value <= most:
                # llama.cpp takes it for another number, or ends the process
                raise InvalidParameterError(f"[model] {name}={shown(value)} must be from {least} to {most}")
            if name in MODEL_FLAGS and not isinstance(value, (bool, type(None))):
                raise InvalidParameterError(f"[model] {name}={shown(value)} must be true or false")
        for name, value in self.warm.items():
            if name != "prompts" and not isinstance(value, bool):
                raise InvalidParameterError(f"[warm] {name}={shown(value)} must be true or false")
        prompts = self.warm.get("prompts", [])
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidParameterError(
                f'[warm] prompts={shown(prompts)} must be a list of files, such as prompts = ["prompts.jsonl"]'
            )

    @property
    def locations(self) -> list[str]:
        """The location that is set, or else the default one; of two, the nearer one first.

        Raises
        ------
        InvalidParameterError
            If what is set is no location.
        """
        return [text_of(each) for each in locations_of(self.store.get("location"))]

    def override(
        self,
        path: str | None = None,
        model: Mapping[str, Any] | None = None,
        store: Mapping[str, Any] | None = None,
    ) -> Config:
        """A copy with these settings replaced; None keeps a setting."""
        return replace(
            self, path=path or self.path, model={**self.model, **_given(model)}, store={**self.store, **_given(store)}
        )

    def open_llama(self) -> Llama:
        """Load the model and create its context.

        Raises
        ------
        InvalidParameterError
            If no model is given, its file cannot be loaded, or llama.cpp does not know the value of a setting.
        MissingExtraError
            If llama-cpp-python is not installed.
        """
        return self._load(self.model)

    def open_tokenizer(self) -> Llama:
        """Load the model without its weights: it makes tokens of text and messages, and evaluates nothing.

        Raises
        ------
        InvalidParameterError, MissingExtraError
            As `open_llama` does.
        """
        settings = {name: value for name, value in self.model.items() if name in TOKENIZER_SETTINGS}
        return self._load(settings, vocab_only=True)

    def _load(self, settings: Mapping[str, Any], **more: Any) -> Llama:
        llama_cpp = import_llama_cpp()
        if self.path is None:
            raise InvalidParameterError('no model is given; set path = "model.gguf" in [model], or pass --model')
        if not isinstance(self.path, str):
            raise InvalidParameterError(
                f'[model] path={shown(self.path)} must be a string, such as path = "model.gguf"'
            )
        path = model_file(self.path)
        known = {name: _number(llama_cpp, name, value) for name, value in settings.items()}
        try:
            llm: Llama = llama_cpp.Llama(path, **{"verbose": False, **known, **more})
        except (ValueError, RuntimeError, TypeError, AttributeError, MemoryError, ctypes.ArgumentError) as error:
            hint = _hint(known) if "context" in str(error) else ""
            raise InvalidParameterError(f"llama.cpp cannot load {path} with these settings: {error}{hint}") from error
        return llm

    def open_store(self, llm: Llama | None, **more: Any) -> PrefixStore:
        """Open the store and attach it to `llm`; `more` overrides the settings here."""
        settings = {**self.store, **more}
        return PrefixStore(settings.pop("location", None), llm, **settings)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read the settings in a TOML file; relative paths in it are relative to its folder.

    The environment variables ``PREFIXSTORE_LOCATION`` and ``PREFIXSTORE_KEY`` override the location and the key in it.

    Raises
    ------
    InvalidParameterError
        If the file cannot be read, or has an unknown table or setting.
    MissingExtraError
        On Python 3.10, if tomli is not installed.
    """
    file = Path(path)
    try:
        # some editors begin a file with a BOM
        read = _toml().loads(file.read_text("utf-8-sig"))
    except FileNotFoundError as error:
        raise InvalidParameterError(f"config {file}: No such file or directory; prefixstore init writes one") from error
    except OSError as error:
        raise InvalidParameterError(f"config {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(f"config {file}: not valid TOML: {error}") from error
    try:
        _check("", read, {"model", "store", "warm"})
        for name, table in read.items():
            if not isinstance(table, dict):
                raise InvalidParameterError(f"{name} is not a table; write [{name}]")
        folder = file.resolve().parent
        model, store, warm = (dict(read.get(name, {})) for name in ("model", "store", "warm"))
        for name in PATHS & model.keys():
            model[name] = _beside(folder, model[name])
        store |= _store_beside(folder, store)
        if isinstance(prompts := warm.get("prompts"), list):
            warm["prompts"] = [_beside(folder, prompt) for prompt in prompts]
        return Config(model.pop("path", None), model, store, warm)
    except InvalidParameterError as error:
        raise InvalidParameterError(f"config {file}: {error}") from None


def load(path: str | os.PathLike[str]) -> tuple[Llama, PrefixStore]:
    """Open the model and the store of a TOML file, ready to serve: the store is attached, and is the model's cache.

    If the store has pages, but none for these settings, the differences are logged as a warning. So is a file without
    `n_ctx`: the context then has the 512 tokens that llama-cpp-python takes by default.

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
    if "n_ctx" not in config.model:
        log.warning("%s sets no n_ctx, so the context has %d tokens; set n_ctx in [model]", path, llm.n_ctx())
    store = config.open_store(llm)
    for difference in explain_settings(store.namespace, store.engine.upkeep.namespaces(), store.history().models):
        log.warning("%s has no pages for these settings yet: %s", store.location, difference)
    llm.set_cache(store)  # type: ignore[arg-type]  # registered as a BaseLlamaCache
    return llm, store


def model_file(path: str | os.PathLike[str], *, is_read: bool = True) -> str:
    """The path of a model, with ``~`` expanded.

    Parameters
    ----------
    path
        The file.
    is_read
        Whether to look into it.

    Raises
    ------
    InvalidParameterError
        If it is not a file, or not one in the format GGUF.
    """
    found = Path(expanded(path))
    if found.is_dir():
        raise InvalidParameterError(f"{path} is a folder; pass the model file (GGUF) in it")
    if not found.is_file():
        raise InvalidParameterError(f"model file not found: {path}")
    if not is_read:
        return str(found)
    try:
        if not is_gguf(found):
            raise InvalidParameterError(f"llama.cpp cannot load {path}: it is not a model file (GGUF)")
    except OSError as error:
        raise InvalidParameterError(f"{path} cannot be read: {error.strerror}") from error
    return str(found)


# -- why two namespaces differ ---------------------------------------------------------------------------------------


def explain_settings(namespace: Namespace, stored: Iterable[Namespace], names: Mapping[str, str]) -> list[str]:
    """Explain why a context cannot use the states in a store: ``"type_k is q8_0 here, f16 in the store"``.

    Parameters
    ----------
    namespace
        The namespace of the context.
    stored
        The namespaces in the store.
    names
        Names of models, by the digits of their digests; see `History`.

    Returns
    -------
    list of str
        The differences from the most similar stored namespace, the model first; empty if `namespace` is among them,
        or if the store has none.
    """
    return [
        f"{setting_name(name)} is {_shown(name, here, names)} here, {_shown(name, there, names)} in the store"
        for name, (here, there) in namespace.nearest_differences(stored).items()
    ]


def explain_of_model(namespace: Namespace, stored: Iterable[Namespace]) -> list[str]:
    """As `explain_settings`, of the pages of the same model only, of any tenant."""
    model = namespace.settings.get("model")
    same = (one for one in stored if model is not None and one.settings.get("model") == model)
    return explain_settings(namespace, [Namespace({**one.settings, "salt": namespace.salt}) for one in same], {})


def _shown(name: str, value: object, names: Mapping[str, str]) -> str:
    """A setting as text: the name that it has here, or in llama.cpp, if that is loaded."""
    if name == "model" and (digits := model_digits({name: value})):
        return f"{names[digits]} ({digits})" if digits in names else digits
    text = setting_text(name, value)
    if name in NAMED and text == str(value) and (llama_cpp := sys.modules.get("llama_cpp")) is not None:
        known = _names(name, vars(llama_cpp))
        return next((word for word, number in known.items() if number == value), text)
    return text


# -- reading ----------------------------------------------------------------------------------------------------------


def _check(table: str, settings: Mapping[str, Any], known: Collection[str]) -> None:
    for name in settings:
        if not isinstance(name, str):
            raise InvalidParameterError(f"{shown(name)} is not the name of a setting; names are strings")
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *(["path"] if table == "model" else [])], 1)
            place = f"[{table}] has {name!r}" if table else f"it has {name!r}"
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            if name == "ram_bytes":
                hint = 'memory in front of a location is location = ["memory:", LOCATION]'
            raise InvalidParameterError(f"{place}, which is unknown; {hint}")


def _given(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (settings or {}).items() if value is not None}


def _beside(folder: Path, path: object) -> object:
    return str(folder / expanded(path)) if isinstance(path, str) and path != "-" else path


def _store_beside(folder: Path, store: Mapping[str, Any]) -> dict[str, object]:
    """The location and the key, where they are given."""
    location = os.environ.get(ENVIRONMENT) or _location_beside(folder, store.get("location"))
    key = os.environ.get(KEY_VARIABLE) or _key_beside(folder, store.get("key"))
    return {name: value for name, value in (("location", location), ("key", key)) if value is not None}


def _location_beside(folder: Path, location: object) -> object:
    if isinstance(location, list):
        return [_location_beside(folder, each) for each in location]
    return location if isinstance(location, str) and is_url(location) else _beside(folder, location)


def _key_beside(folder: Path, key: object) -> object:
    if isinstance(key, list):
        return [_key_beside(folder, each) for each in key]
    if not isinstance(key, str) or not key.startswith("file:"):
        return key
    return f"file:{_beside(folder, key.removeprefix('file:'))}"


def _number(llama_cpp: Any, name: str, value: object) -> object:
    """The number of a value that is given by name, or by number: llama.cpp ends the process for some that it lacks."""
    if name not in NAMED or not isinstance(value, (str, int)):
        return value
    # most other types of K and V end the process
    known = CACHE_TYPES if name in ("type_k", "type_v") else _names(name, vars(llama_cpp))
    if not isinstance(value, str):
        known = {str(number): number for number in known.values()}
        value = str(value)
    if value.lower() not in known:
        raise InvalidParameterError(
            f"{name}={value!r} is not a value known to llama.cpp; known are {', '.join(sorted(known))}"
        )
    return known[value.lower()]


def _names(setting: str, constants: Mapping[str, Any]) -> dict[str, int]:
    """The values of a setting by the names that llama.cpp has for them."""
    prefix = NAMED[setting]
    found = {key.removeprefix(prefix).lower(): value for key, value in constants.items() if key.startswith(prefix)}
    # GGML_TYPE_COUNT is how many types there are
    found.pop("count", None)
    return found


def _hint(settings: Mapping[str, Any]) -> str:
    """What to change if a context with these settings cannot be created, where that is known."""
    is_quantized = settings.get("type_v") not in FLOATS
    if is_quantized and not settings.get("flash_attn"):
        return "; a quantized type_v needs flash_attn = true (--flash-attn)"
    return ""


def import_llama_cpp() -> Any:
    """The package llama_cpp. Raises `MissingExtraError`."""
    try:
        return importlib.import_module("llama_cpp")
    except ImportError as error:
        raise MissingExtraError(f'a model needs {error.name}; pip install "prefixstore[llama]"') from error


def _toml() -> Any:
    try:
        return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise MissingExtraError('a configuration file needs tomli; pip install "prefixstore[cli]"') from error
