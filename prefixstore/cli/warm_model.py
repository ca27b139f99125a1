"""The prompts of a warming job as tokens, and its model, with a context that is as long as they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prefixstore.cli.model import open_model
from prefixstore.config import Config
from prefixstore.warming.prompts import Problem, Prompt, PromptLike, read, tokenized

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Ready", "prepare"]

# The default of llama-cpp-python; no context is made shorter.
SMALLEST = 512
# llama.cpp rounds the length of a context up to a multiple of this.
STEP = 256
# The limit of a model whose file does not say what it was trained with: more than any prompt has.
UNLIMITED = 1 << 31


class Ready(NamedTuple):
    """A model with a context, and the prompts for it: the problems, and the prompts as tokens.

    `reason` says why the context is as long as it is, and `notes` what the user should know about that.
    """

    settings: Config
    llm: Llama
    prompts: Sequence[PromptLike]
    reason: str
    notes: tuple[str, ...] = ()


def prepare(
    settings: Config, sources: list[str], *, generation_prompt: bool, stop: Callable[[], bool] = lambda: False
) -> Ready:
    """Open the model with the given context, or else with one that holds the longest prompt; 512 tokens without any.

    That is never longer than the one that the model was trained with: a prompt that needs more is a problem. `stop` is
    called after each prompt; if it returns True, no more are read.
    """
    is_given = "n_ctx" in settings.model
    llm = open_model(settings, tokenizer_only=not is_given)
    trained = None if is_given else _number(llm, "context_length") or UNLIMITED
    problems: list[Problem] = []
    found: list[Prompt] = []
    longest = 0
    for tokens, where in tokenized(llm, read(sources), problems, generation_prompt=generation_prompt, trained=trained):
        longest = max(longest, len(tokens))
        found.append(Prompt(where, tokens))
        if stop():
            break
    prompts: list[PromptLike] = [*problems, *found]
    if trained is None:
        return Ready(settings, llm, prompts, "as given")
    n_ctx = min(max(SMALLEST, -(-(longest + 1) // STEP) * STEP), trained)
    original = _number(llm, "rope.scaling.original_context_length")
    llm.close()
    reason = f"for the longest prompt, {longest:,} tokens; servers need as much" if longest else "no prompt can be used"
    # contexts longer than that may use other RoPE factors, so they have namespaces of their own
    notes = () if original is None else (_long_context_note(n_ctx, original),)
    settings = settings.override(model={"n_ctx": n_ctx})
    return Ready(settings, open_model(settings), prompts, reason, notes)


def _number(llm: Llama, name: str) -> int | None:
    """A number in the metadata of a model."""
    value = llm.metadata.get(f"{llm.metadata.get('general.architecture', '')}.{name}", "")
    return int(value) if value.isdigit() and int(value) else None


def _long_context_note(n_ctx: int, original: int) -> str:
    same = f"above {original:,}" if n_ctx > original else f"of at most {original:,}"
    return (
        f"states of this model may differ in contexts longer than {original:,} tokens: pages for n_ctx={n_ctx:,} are "
        f"found only by servers with an n_ctx {same}; pass the --n-ctx of your servers"
    )
