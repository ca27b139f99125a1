"""What warming a list of prompts would take: tokens, bytes and seconds, from a trial on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixstore.store import PrefixStore
from prefixstore.warming.prompts import Problem, PromptLike, tokenized
from prefixstore.warming.trie import Plan
from prefixstore.warming.walk import Survey

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Estimate", "estimate"]

# Batches of a prompt that are tried; the first pays for what llama.cpp sets up.
TRIAL_BATCHES = 3


@dataclass(frozen=True)
class Estimate:
    """What a warming job is expected to do.

    Attributes
    ----------
    prompts, prompt_tokens, unique_tokens, missing_tokens
        As in `prefixstore.WarmReport`; `missing_tokens` is what would be evaluated.
    bytes
        What these tokens would take in the store.
    seconds
        What evaluating them would take. Tokens at the end of a long prompt take longer than those that were tried.
    problems
        What could not be used.
    """

    prompts: int
    prompt_tokens: int
    unique_tokens: int
    missing_tokens: int
    bytes: int
    seconds: float
    problems: tuple[Problem, ...] = ()


def estimate(
    llm: Llama, store: PrefixStore, prompts: Iterable[PromptLike], *, generation_prompt: bool = False
) -> Estimate:
    """What `prefixstore.warm` would do with the same arguments. Nothing is stored.

    Parameters
    ----------
    llm
        The model. A few batches of a prompt are evaluated; what its context holds is lost.
    store
        The store, attached to `llm`.
    prompts, generation_prompt
        As for `prefixstore.warm`.
    """
    problems: list[Problem] = []
    plan = Plan(tokenized(llm, prompts, problems, generation_prompt=generation_prompt), store.min_tokens)
    survey = Survey(store, plan)
    missing = survey.missing_tokens
    size, seconds = _trial(llm, store, plan, survey) if missing else (0.0, 0.0)
    return Estimate(
        plan.prompts,
        plan.prompt_tokens,
        plan.unique_tokens,
        missing,
        round(_stored_tokens(store, plan, survey) * size),
        missing * seconds,
        tuple(problems),
    )


def _stored_tokens(store: PrefixStore, plan: Plan, survey: Survey) -> int:
    """Tokens in the pages that would be written: a prompt that branches off inside a page has all of it once more."""
    page_tokens = int(str(store.namespace.settings["page_tokens"]))
    starts = ((i, plan.length(i) - missing) for i, missing in enumerate(survey.missing) if missing)
    return sum(plan.length(i) - start + start % page_tokens for i, start in starts)


def _trial(llm: Llama, store: PrefixStore, plan: Plan, survey: Survey) -> tuple[float, float]:
    """Stored bytes and seconds per token, of the longest prompt of which something is missing."""
    longest = max((i for i, missing in enumerate(survey.missing) if missing), key=plan.length)
    tokens = plan.tokens(longest)[: TRIAL_BATCHES * llm.n_batch].tolist()
    cache: object = llm.cache
    store.detach()
    try:
        llm.reset()
        taken: list[tuple[float, int]] = []
        for at in range(0, len(tokens), llm.n_batch):
            batch = tokens[at : at + llm.n_batch]
            started = time.perf_counter()
            llm.eval(batch)
            taken.append((time.perf_counter() - started, len(batch)))
        with PrefixStore("memory:", namespace="trial", max_bytes="64GiB", min_tokens=0) as scratch:
            scratch.capture(llm)
            scratch.flush()
            size = scratch.stats().bytes_stored / len(tokens)
    finally:
        llm.reset()
        store.attach(llm)
        if cache is store:
            llm.set_cache(store)  # type: ignore[arg-type]  # registered as a BaseLlamaCache
    # the batch that went best, leaving out a short one at the end if there is another
    full = [(seconds, n) for seconds, n in taken if n == len(tokens[: llm.n_batch])]
    return size, min(seconds / n for seconds, n in full)
