"""The model of a warming job, with a context that is as long as its prompts need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefixstore.cli.files import STANDARD
from prefixstore.cli.model import open_model
from prefixstore.config import Config
from prefixstore.warming.context_size import fit, original_context
from prefixstore.warming.prompts import Problem, Prompt, PromptLike, read, tokenized

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Ready", "as_tokens", "prepare", "prepare_check"]


@dataclass
class Ready:
    """A model with a context, and the prompts for it.

    Attributes
    ----------
    settings
        The settings of the model and the store.
    llm
        The model.
    n_ctx
        Length of its context; known when the model is closed, too.
    prompts
        The prompts: tokens if the context was sized by them, otherwise read as they are needed.
    reason
        Why the context is as long as it is.
    notes
        What the user should know about its length.
    """

    settings: Config
    llm: Llama
    n_ctx: int = field(init=False)
    prompts: Iterable[PromptLike]
    reason: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.n_ctx = self.llm.n_ctx()


def prepare(
    settings: Config, sources: list[str], *, generation_prompt: bool, stop: Callable[[], bool] = lambda: False
) -> Ready:
    """Open the model with the given context, or else with one that holds the longest prompt."""
    if "n_ctx" in settings.model:
        return Ready(settings, open_model(settings), read(sources), "as given")
    tokenizer = open_model(settings, tokenizer_only=True)
    fitted = fit(tokenizer, read(sources), generation_prompt=generation_prompt, stop=stop)
    original = original_context(tokenizer)
    tokenizer.close()
    reason = "no prompt can be used"
    if fitted.longest:
        reason = f"for the longest prompt, {fitted.longest:,} tokens; servers need as much"
    notes = () if original is None else (_long_context_note(fitted.n_ctx, original),)
    settings = settings.override(model={"n_ctx": fitted.n_ctx})
    return Ready(settings, open_model(settings), fitted.prompts(), reason, notes)


def as_tokens(ready: Ready, *, generation_prompt: bool, stop: Callable[[], bool]) -> list[PromptLike]:
    """The prompts as tokens, and the problems."""
    problems: list[Problem] = []
    found: list[PromptLike] = []
    for tokens, where in tokenized(ready.llm, ready.prompts, problems, generation_prompt=generation_prompt):
        found.append(Prompt(where, tokens))
        if stop():
            break
    return [*problems, *found]


def prepare_check(settings: Config, sources: list[str], *, generation_prompt: bool) -> Ready:
    """Open the model for ``--check``: prompts are read only if the namespace depends on the length of the context."""
    if "n_ctx" in settings.model:
        return Ready(settings, open_model(settings), (), "as given")
    tokenizer = open_model(settings, tokenizer_only=True)
    original = original_context(tokenizer)
    tokenizer.close()
    if original is not None and sources and STANDARD not in sources:
        return prepare(settings, sources, generation_prompt=generation_prompt)
    llm = open_model(settings)
    notes = () if original is None else (_long_context_note(llm.n_ctx(), original),)
    return Ready(settings, llm, (), "by default", notes)


def _long_context_note(n_ctx: int, original: int) -> str:
    same = f"above {original:,}" if n_ctx > original else f"of at most {original:,}"
    return (
        f"states of this model may differ in contexts longer than {original:,} tokens: pages for n_ctx={n_ctx:,} are "
        f"found only by servers with an n_ctx {same}; pass the --n-ctx of your servers"
    )
