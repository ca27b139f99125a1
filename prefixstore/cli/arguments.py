"""Arguments and options that several commands share, and the objects made from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from prefixstore.config import Config, load_config, model_file
from prefixstore.errors import InvalidParameterError, MissingExtraError
from prefixstore.units import parse_bytes

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = [
    "CONFIG_VARIABLE",
    "OTHERWISE",
    "SERVER_KEY",
    "AsJson",
    "ConfigFile",
    "HighWater",
    "Location",
    "LowWater",
    "MaxBytes",
    "ModelFile",
    "NCtx",
    "NamespaceName",
    "PageKey",
    "Prefix",
    "Salt",
    "Text",
    "TokenizerFile",
    "configured",
    "max_bytes_of",
    "open_model",
    "server_key",
    "silence",
    "text_of_tokens",
    "tokens_of_prefix",
]

CONFIG_VARIABLE = "PREFIXSTORE_CONFIG"
SERVER_KEY = "PREFIXSTORE_SERVER_KEY"
# llama-server's own
OTHER_SERVER_KEY = "LLAMA_API_KEY"

# what stands for a location that is left out
OTHERWISE = "by default PREFIXSTORE_LOCATION, then that of --config, then ~/.cache/prefixstore/kv."
# `prefixstore.cli.place.located` makes it optional
Location = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION",
        show_default=False,
        help=f"lmdb:///path, sqlite:////path, …; {OTHERWISE}",
    ),
]
PageKey = Annotated[str, typer.Argument(metavar="HASH", help="The key of a page, or its first digits.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
MaxBytes = Annotated[
    str | None, typer.Option("--max-bytes", metavar="SIZE", help="Size limit of the store, such as 20GiB.")
]
HighWater = Annotated[
    float | None,
    typer.Option(
        "--high-water",
        metavar="SHARE",
        help="Free space when more than this share of the size limit is in use; by default 0.95.",
    ),
]
LowWater = Annotated[
    float | None,
    typer.Option(
        "--low-water",
        metavar="SHARE",
        help="Free space until at most this share of the size limit is in use; by default 0.9.",
    ),
]
NamespaceName = Annotated[
    str | None,
    typer.Option(
        "--namespace", metavar="NAME", help="Only pages of one namespace: its label, or the first digits of its key."
    ),
]
Prefix = Annotated[
    str | None,
    typer.Option(
        "--prefix", metavar="TEXT", help="Only sequences that begin with this text; needs --model or --tokenizer."
    ),
]
ModelFile = Annotated[Path | None, typer.Option("--model", metavar="FILE", help="Model file (GGUF).")]
TokenizerFile = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json, instead of a model.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        help="TOML file with [model], [store] and [warm], shared with servers; prefixstore init writes one.",
    ),
]
NCtx = Annotated[int | None, typer.Option("--n-ctx", metavar="N", help="Length of the context in tokens.")]
Salt = Annotated[
    str | None, typer.Option("--salt", metavar="TENANT", help="Tenant: pages are shared only within one tenant.")
]


class Text(Protocol):
    """A vocabulary."""

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text."""

    def tokens(self, text: str) -> list[int]:
        """The tokens of a prompt."""


class _Tokenizer:
    """The vocabulary in a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415 - the extra "demo"
        except ImportError as error:
            raise MissingExtraError("--tokenizer needs the package tokenizers; pip install tokenizers") from error
        if not path.is_file():
            raise InvalidParameterError(f"tokenizer file not found: {path}")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # it raises nothing narrower
            raise InvalidParameterError(f"{path} is not a valid tokenizer.json: {error}") from error

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


def text_of_tokens(model: Path | None, tokenizer: Path | None) -> Text | None:
    """The vocabulary of the given tokenizer or model; None if neither is given."""
    if tokenizer is not None:
        return _Tokenizer(tokenizer)
    if model is None:
        return None
    path = model_file(model)
    try:
        from prefixstore.warming.tokens import Vocabulary  # noqa: PLC0415 - the extra "llama"
    except ImportError as error:
        raise MissingExtraError('--model needs llama-cpp-python; pip install "prefixstore[llama]"') from error
    silence()
    return Vocabulary(Path(path))


def tokens_of_prefix(prefix: str | None, model: Path | None, tokenizer: Path | None) -> list[int] | None:
    """The tokens of ``--prefix``; None if it is not given."""
    if prefix is None:
        return None
    if not prefix:
        raise InvalidParameterError("--prefix is empty, and every text begins with it; leave it out")
    words = text_of_tokens(model, tokenizer)
    if words is None:
        raise InvalidParameterError("--prefix needs --model or --tokenizer, to convert the text to tokens")
    return words.tokens(prefix)


def server_key(given: str | None) -> str | None:
    """The key of a llama-server: as given, or from the environment."""
    return given or os.environ.get(SERVER_KEY) or os.environ.get(OTHER_SERVER_KEY)


def max_bytes_of(size: str | None) -> int | None:
    """The bytes of ``--max-bytes``; None if it is not given."""
    return parse_bytes(size, "--max-bytes") if size is not None else None


def configured(
    location: str, config: Path | None, model: Path | None, n_ctx: int | None = None, salt: str | None = None
) -> Config:
    """Settings of the given model, and of the store in this location; options override the file."""
    if config is None and model is None:
        raise InvalidParameterError("no model is given; pass --model FILE or --config FILE")
    settings = load_config(config) if config is not None else Config()
    return settings.override(str(model) if model else None, {"n_ctx": n_ctx}, {"location": location, "salt": salt})


def open_model(settings: Config, *, tokenizer_only: bool = False) -> Llama:
    """The model of a command; unless ``verbose`` is set for it, llama.cpp's log is discarded.

    Parameters
    ----------
    settings
        The model and its settings.
    tokenizer_only
        Whether to leave the weights out; see `Config.open_tokenizer`.
    """
    if not settings.model.get("verbose"):
        silence()
    return settings.open_tokenizer() if tokenizer_only else settings.open_llama()


def silence() -> None:
    """Discard the log of llama.cpp, if it is installed."""
    try:
        from prefixstore.llama.binding import silence  # noqa: PLC0415 - the extra "llama"
    except ImportError:
        return  # opening the model says which extra is missing
    silence()
