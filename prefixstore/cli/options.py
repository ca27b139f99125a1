"""Options that name a model, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from prefixstore.config import Config, load_config
from prefixstore.errors import ContextError, InvalidParameterError, MissingExtraError

__all__ = ["ConfigFile", "ModelFile", "NCtx", "Salt", "Text", "TokenizerFile", "configured", "text_of_tokens"]

ModelFile = Annotated[Path | None, typer.Option("--model", metavar="FILE", help="A GGUF file.")]
TokenizerFile = Annotated[Path | None, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json, instead.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file with [model] and [store], as servers use.")
]
NCtx = Annotated[int | None, typer.Option("--n-ctx", metavar="N", help="Length of the context, in tokens.")]
Salt = Annotated[str | None, typer.Option("--salt", help="The tenant.")]


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
            raise ContextError(f"{path} is no file")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # it raises nothing narrower
            raise ContextError(f"{path} is no tokenizer: {error}") from error

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


def text_of_tokens(model: Path | None, tokenizer: Path | None) -> Text | None:
    """The vocabulary that is given, if one is."""
    if tokenizer is not None:
        return _Tokenizer(tokenizer)
    if model is None:
        return None
    if not model.is_file():
        raise ContextError(f"{model} is no file; give a GGUF file")
    try:
        from prefixstore.llama.prompt import Vocabulary  # noqa: PLC0415 - the extra "llama"
    except ImportError as error:
        raise MissingExtraError('--model needs llama-cpp-python; pip install "prefixstore[llama]"') from error
    return Vocabulary(model)


def configured(
    location: str, config: Path | None, model: Path | None, n_ctx: int | None = None, salt: str | None = None
) -> Config:
    """Settings of a model, and of the store in this location."""
    if config is None and model is None:
        raise InvalidParameterError("no model is given; give --model FILE, or --config FILE")
    settings = load_config(config) if config is not None else Config()
    return settings.override(str(model) if model else None, {"n_ctx": n_ctx}, {"location": location, "salt": salt})
