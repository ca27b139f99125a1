"""The model of a warming job, with a context that is as long as its prompts need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prefixstore.cli.model import open_model
from prefixstore.config import Config
from prefixstore.warming.context_size import as_tokens, fit, original_context
from prefixstore.warming.prompts import PromptLike, read

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Ready", "prepare"]


class Ready(NamedTuple):
    """A model with a context, and the prompts for it.

    Attributes
    ----------
    settings
        The settings of the model and the store.
    llm
        The model.
    prompts
        The problems, and the prompts as tokens.
    reason
        Why the context is as long as it is.
    notes
        What the user should know about its length.
    """

    settings: Config
    llm: Llama
    prompts: Sequence[PromptLike]
    reason: str
    notes: tuple[str, ...] = ()


def prepare(
    settings: Config, sources: list[str], *, generation_prompt: bool, stop: Callable[[], bool] = lambda: False
) -> Ready:
    """Open the model with the given context, or else with one that holds the longest prompt; 512 tokens without any."""
    if "n_ctx" in settings.model:
        llm = open_model(settings)
        found, _ = as_tokens(llm, read(sources), generation_prompt=generation_prompt, stop=stop)
        return Ready(settings, llm, found, "as given")
    tokenizer = open_model(settings, tokenizer_only=True)
    prompts, longest, n_ctx = fit(tokenizer, read(sources), generation_prompt=generation_prompt, stop=stop)
    original = original_context(tokenizer)
    tokenizer.close()
    reason = "no prompt can be used"
    if longest:
        reason = f"for the longest prompt, {longest:,} tokens; servers need as much"
    notes = () if original is None else (_long_context_note(n_ctx, original),)
    settings = settings.override(model={"n_ctx": n_ctx})
    return Ready(settings, open_model(settings), prompts, reason, notes)


def _long_context_note(n_ctx: int, original: int) -> str:
    same = f"above {original:,}" if n_ctx > original else f"of at most {original:,}"
    return (
        f"states of this model may differ in contexts longer than {original:,} tokens: pages for n_ctx={n_ctx:,} are "
        f"found only by servers with an n_ctx {same}; pass the --n-ctx of your servers"
    )
