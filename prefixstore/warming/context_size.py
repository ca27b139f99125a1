"""How long a context a list of prompts needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prefixstore.warming.prompts import Problem, Prompt, PromptLike, tokenized

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["as_tokens", "fit", "original_context"]

# The default of llama-cpp-python; no context is made shorter.
SMALLEST = 512
# The limit of a model whose file does not say what it was trained with: more than any prompt has.
UNLIMITED = 1 << 31
# llama.cpp rounds the length of a context up to a multiple of this.
STEP = 256


def fit(
    tokenizer: Llama,
    prompts: Iterable[PromptLike],
    *,
    generation_prompt: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[PromptLike], int, int]:
    """Make tokens of prompts, and choose a context that holds the longest one.

    Returns the problems and the prompts as tokens, the tokens of the longest prompt (0 if none can be used), and the
    length of the context.

    The context is never longer than the one that the model was trained with: a prompt that needs more is a problem.

    Parameters
    ----------
    tokenizer
        The model; its weights are not needed.
    prompts, generation_prompt
        As for `prefixstore.warm`.
    stop
        Called after each prompt; return True to read no more.
    """
    trained = _number(tokenizer, "context_length")
    found, longest = as_tokens(
        tokenizer, prompts, generation_prompt=generation_prompt, trained=trained or UNLIMITED, stop=stop
    )
    n_ctx = max(SMALLEST, -(-(longest + 1) // STEP) * STEP)
    return found, longest, min(n_ctx, trained or n_ctx)


def as_tokens(
    llm: Llama,
    prompts: Iterable[PromptLike],
    *,
    generation_prompt: bool = False,
    trained: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[PromptLike], int]:
    """The problems, and the prompts as tokens; and how many the longest one has. As for `fit` and `encode`."""
    problems: list[Problem] = []
    found: list[Prompt] = []
    longest = 0
    for tokens, where in tokenized(llm, prompts, problems, generation_prompt=generation_prompt, trained=trained):
        longest = max(longest, len(tokens))
        found.append(Prompt(where, tokens))
        if stop():
            break
    return [*problems, *found], longest


def original_context(llm: Llama) -> int | None:
    """The context that the model had before its RoPE scaling; None if it was not scaled.

    Contexts longer than that may use other RoPE factors, so they have namespaces of their own.
    """
    return _number(llm, "rope.scaling.original_context_length")


def _number(llm: Llama, name: str) -> int | None:
    """A number in the metadata of a model."""
    value = llm.metadata.get(f"{llm.metadata.get('general.architecture', '')}.{name}", "")
    return int(value) if value.isdigit() and int(value) else None
