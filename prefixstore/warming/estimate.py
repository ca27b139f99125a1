"""The expected cost of warming a list of prompts in tokens, bytes and seconds, from a trial on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixstore.store import PrefixStore
from prefixstore.warming.prompt_trie import PromptTrie
from prefixstore.warming.prompts import Problem, PromptLike, tokenized
from prefixstore.warming.survey import Survey

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Estimate", "estimate"]

# Batches of a prompt in the trial; the first one is slow since llama.cpp allocates its buffers.
TRIAL_BATCHES = 3


@dataclass(frozen=True)
class Estimate:
    """The expected cost of a warming job.

    Attributes
    ----------
    prompts, prompt_tokens, unique_tokens, missing_tokens
        As in `prefixstore.WarmReport`; `missing_tokens` would be evaluated.
    bytes
        Size of these tokens in the store.
    seconds
        Time to evaluate them. Tokens at the end of a long prompt take longer than those of the trial.
    problems
        Prompts that could not be used.
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
    """Estimate what `prefixstore.warm` would do with the same arguments, without storing anything.

    Parameters
    ----------
    llm
        The model. A few batches of a prompt are evaluated, and what its context holds is lost.
    store
        The store, attached to `llm`.
    prompts, generation_prompt
        As for `prefixstore.warm`.
    """
    problems: list[Problem] = []
    trie = PromptTrie(tokenized(llm, prompts, problems, generation_prompt=generation_prompt), store.min_tokens)
    survey = Survey(store, trie)
    missing = survey.missing_tokens
    size, seconds = _trial(llm, store, trie, survey) if missing else (0.0, 0.0)
    return Estimate(
        trie.prompts,
        trie.prompt_tokens,
        trie.unique_tokens,
        missing,
        round(_stored_tokens(store, trie, survey) * size),
        missing * seconds,
        tuple(problems),
    )


def _stored_tokens(store: PrefixStore, trie: PromptTrie, survey: Survey) -> int:
    """Tokens in the pages that would be written: a prompt that branches off inside a page stores that page again."""
    page_tokens = store.page_tokens
    starts = ((i, trie.length(i) - missing) for i, missing in enumerate(survey.missing) if missing)
    return sum(trie.length(i) - start + start % page_tokens for i, start in starts)


def _trial(llm: Llama, store: PrefixStore, trie: PromptTrie, survey: Survey) -> tuple[float, float]:
    """Stored bytes and seconds per token, measured on the longest prompt that is not completely stored."""
    longest = max((i for i, missing in enumerate(survey.missing) if missing), key=trie.length)
    tokens = trie.tokens(longest)[: TRIAL_BATCHES * llm.n_batch].tolist()
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
    # the fastest batch; a short one at the end counts only if there is no other
    full = [(seconds, n) for seconds, n in taken if n == len(tokens[: llm.n_batch])]
    return size, min(seconds / n for seconds, n in full)
