"""The expected cost of warming a list of prompts in tokens, bytes and seconds, from a trial on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefixstore.format.keys import PAGE, SNAPSHOT
from prefixstore.store import PrefixStore
from prefixstore.warming.job import missing_tokens
from prefixstore.warming.prompt_trie import PromptTrie
from prefixstore.warming.prompts import Problem, PromptLike, tokenized

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Estimate", "estimate"]

# Batches of a prompt in the trial; the first one is slow since llama.cpp allocates its buffers.
TRIAL_BATCHES = 3


@dataclass(frozen=True)
class Estimate:
    """The expected cost of a warming job, by the names of `prefixstore.WarmReport`.

    `missing_tokens` would be evaluated. `bytes` is their size in the store (recurrent memory may get more snapshots, up
    to three times as many), and `seconds` the time to evaluate them. Tokens at the end of a long prompt take longer
    than those of the trial.
    """

    prompts: int
    prompt_tokens: int
    unique_tokens: int
    missing_tokens: int
    bytes: int = 0
    seconds: float = 0.0
    short: int = 0
    problems: tuple[Problem, ...] = ()


def estimate(llm: Llama, store: PrefixStore, prompts: Iterable[PromptLike]) -> Estimate:
    """Estimate what `prefixstore.warm` would do with the same arguments, without storing anything.

    The store is attached to `llm`. A few batches of a prompt are evaluated, and what the context holds is lost.
    """
    problems: list[Problem] = []
    trie = PromptTrie(tokenized(llm, prompts, problems), store.min_tokens)
    missing = missing_tokens(store, trie, llm)
    found = Estimate(
        trie.prompts,
        trie.prompt_tokens,
        trie.unique_tokens,
        sum(missing),
        short=trie.short,
        problems=tuple(problems),
    )
    if not any(missing) or not store.hook_of(llm).kind.is_stored:
        return found
    n_bytes, seconds = _trial(llm, store, trie, missing)
    return replace(found, bytes=n_bytes, seconds=seconds)


def _trial(llm: Llama, store: PrefixStore, trie: PromptTrie, missing: list[int]) -> tuple[int, float]:
    """What the missing tokens take, in bytes and in seconds, by the first tokens of the longest of their prompts."""
    prompts = [i for i, n in enumerate(missing) if n]
    tokens = trie.tokens(max(prompts, key=trie.length))[: TRIAL_BATCHES * llm.n_batch].tolist()
    with _scratch(llm, store) as scratch:
        batches = [tokens[at : at + llm.n_batch] for at in range(0, len(tokens), llm.n_batch)]
        taken = []
        for batch in batches:
            started = time.perf_counter()
            llm.eval(batch)
            taken.append((time.perf_counter() - started, len(batch)))
        scratch.capture()
        scratch.flush()
        found = scratch.path(tokens).pages
    # llama.cpp allocates its buffers in the first one
    timed = taken[1:] or taken
    seconds = sum(missing) * sum(took for took, _ in timed) / sum(n for _, n in timed)
    pages = [page for page in found if page.form == PAGE]
    snapshots = [page for page in found if page.form == SNAPSHOT]
    for_a_token = sum(page.stored_bytes for page in pages) / max(sum(page.n_tokens for page in pages), 1)
    page_tokens = max((page.n_tokens for page in pages), default=1)
    # a prompt that branches off inside a page stores that page again
    n_stored = sum(missing[i] + (trie.length(i) - missing[i]) % page_tokens for i in prompts)
    # recurrent and hybrid memory: a snapshot at the end of each prompt, and where others branch off
    snapshot = sum(page.stored_bytes for page in snapshots)
    ends = [(i, trie.length(i)) for i in prompts]
    n_snapshots = sum(1 + len(trie.stops(i, end - missing[i])) for i, end in ends) if snapshots else 0
    return round(n_stored * for_a_token) + snapshot * n_snapshots, seconds


@contextmanager
def _scratch(llm: Llama, store: PrefixStore) -> Iterator[PrefixStore]:
    """A store in memory that is attached instead."""
    cache: object = llm.cache
    store.detach(llm)
    try:
        llm.reset()
        parameters = store.parameters
        with PrefixStore(
            "memory:",
            llm,
            max_bytes="64GiB",
            min_tokens=0,
            page_tokens=parameters.page_tokens,
            snapshot_interval=parameters.snapshot_interval,
            max_snapshots=parameters.max_snapshots,
        ) as scratch:
            yield scratch
    finally:
        llm.reset()
        store.attach(llm)
        if cache is store:
            llm.set_cache(store)  # type: ignore[arg-type]  # registered as a BaseLlamaCache
