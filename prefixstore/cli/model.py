"""The model of a command, and the vocabulary with which it shows texts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from prefixstore.config import Config, load_config, model_file
from prefixstore.errors import InvalidParameterError
from prefixstore.models.vocabulary import Vocabulary, Words

if TYPE_CHECKING:
    from llama_cpp import Llama


def configured(
    location: str, config: Path | None, model: Path | None, n_ctx: int | None = None, salt: str | None = None
) -> Config:
    """Settings of the given model, and of the store in this location; options override the file."""
    settings = load_config(config) if config is not None else Config()
    if model is None and settings.path is None:
        raise InvalidParameterError("no model is given; pass --model FILE, or --config FILE with path in [model]")
    return settings.override(str(model) if model else None, {"n_ctx": n_ctx}, {"location": location, "salt": salt})


def open_model(settings: Config, *, tokenizer_only: bool = False) -> Llama:
    """The model of a command, or its tokenizer; unless ``verbose`` is set for it, llama.cpp's log is discarded."""
    if not settings.model.get("verbose"):
        silence_llama()
    return settings.open_tokenizer() if tokenizer_only else settings.open_llama()


def silence_llama() -> None:
    """Discard the log of llama.cpp, if it is installed."""
    try:
        from prefixstore.llama.binding import silence  # noqa: PLC0415 - the extra "llama"
    except ImportError:
        return  # opening the model says which extra is missing
    silence()


# -- texts ------------------------------------------------------------------------------------------------------------

NO_SUCH_TEXT = "no page begins with this text as this model reads it; pages of other models are not searched"


def text_of_tokens(model: Path | None) -> Words | None:
    """The text of tokens, by the vocabulary of a model; None without one."""
    return None if model is None else Vocabulary(model_file(model)).text


def tokens_of_prefix(prefix: str | None, model: Path | None) -> list[int] | None:
    """The tokens of ``--prefix``; None if it is not given."""
    if prefix is None:
        return None
    if not prefix:
        raise InvalidParameterError("--prefix is empty, and every text begins with it; leave it out")
    if model is None:
        raise InvalidParameterError("--prefix needs --model, to convert the text to tokens")
    with closing(open_model(Config().override(str(model)), tokenizer_only=True)) as llm:
        return llm.tokenize(prefix.encode(), add_bos=True, special=True)
