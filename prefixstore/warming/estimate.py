"""The expected cost of warming a list of prompts in tokens, bytes and seconds, from a trial on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixstore.format.keys import PAGE, SNAPSHOT, common_prefix
from prefixstore.store import PrefixStore
from prefixstore.warming.job import warm
from prefixstore.warming.prompt_trie import PromptTrie
from prefixstore.warming.prompts import Problem, PromptLike, tokenized
from prefixstore.warming.survey import Survey

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Estimate", "estimate", "expected_bytes"]

# Batches of a prompt in the trial; the first one is slow since llama.cpp allocates its buffers.
TRIAL_BATCHES = 3
# Prompts in the trial, beside each other in the trie, for what each one costs apart from its tokens.
TRIAL_PROMPTS = 12
# Tokens of the trial that only measures bytes: more than a page of a hybrid model has.
SHORT_TRIAL = 96


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
    survey = Survey(store, trie, llm)
    missing = survey.missing_tokens
    if not missing:
        return Estimate(trie.prompts, trie.prompt_tokens, trie.unique_tokens, 0, 0, 0.0, tuple(problems))
    trial = _Trial(llm, store, trie, survey)
    with trial.scratch():
        size, seconds = trial.bytes(), trial.seconds()
    return Estimate(trie.prompts, trie.prompt_tokens, trie.unique_tokens, missing, size, seconds, tuple(problems))


def expected_bytes(llm: Llama, store: PrefixStore, prompts: Iterable[PromptLike], enough: int) -> int:
    """As `Estimate.bytes`, from a trial that is as short as can be, for prompts that are tokens already.

    Nothing is evaluated, and 0 is returned, where it cannot be more than `enough`.
    """
    from prefixstore.llama.kv_memory import size_limit  # noqa: PLC0415 - the extra "llama"

    trie = PromptTrie(tokenized(llm, prompts, []), store.min_tokens)
    survey = Survey(store, trie, llm)
    n_prompts = sum(missing > 0 for missing in survey.missing)
    (fixed, per_token), hook = size_limit(llm), store.hook_of(llm)
    most = per_token * (survey.missing_tokens + n_prompts * hook.page_tokens) + fixed * n_prompts
    if not n_prompts or most <= enough or not hook.kind.is_stored:
        return 0
    trial = _Trial(llm, store, trie, survey, SHORT_TRIAL)
    with trial.scratch():
        return trial.bytes()


class _Trial:
    """Some tokens of the longest prompt that is not completely stored, and some prompts beside it."""

    def __init__(
        self, llm: Llama, store: PrefixStore, trie: PromptTrie, survey: Survey, n_tokens: int | None = None
    ) -> None:
        self._llm, self._store, self._trie, self._survey = llm, store, trie, survey
        self._missing = [i for i, missing in enumerate(survey.missing) if missing]
        self._longest = max(self._missing, key=trie.length)
        self._page_tokens = store.hook_of(llm).page_tokens
        tokens = trie.tokens(self._longest)[: n_tokens or TRIAL_BATCHES * llm.n_batch]
        self._tokens: list[int] = tokens.tolist()

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Attach a store in memory for the trial, and evaluate its first prompt; the store is attached afterwards."""
        llm, store = self._llm, self._store
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
            ) as self._scratch:
                self._taken = self._evaluate()
                yield
        finally:
            llm.reset()
            store.attach(llm)
            if cache is store:
                llm.set_cache(store)  # type: ignore[arg-type]  # registered as a BaseLlamaCache

    def _evaluate(self) -> list[float]:
        """Evaluate and store the tokens; the seconds of each batch."""
        n_batch, taken = self._llm.n_batch, []
        for at in range(0, len(self._tokens), n_batch):
            started = time.perf_counter()
            self._llm.eval(self._tokens[at : at + n_batch])
            taken.append(time.perf_counter() - started)
        self._scratch.capture()
        self._scratch.flush()
        return taken

    def bytes(self) -> int:
        """What the missing tokens take in the store."""
        found = self._scratch.path(self._tokens).pages
        pages = [page for page in found if page.form == PAGE]
        snapshots = [page for page in found if page.form == SNAPSHOT]
        n_prompts, snapshot = len(self._missing), sum(page.stored_bytes for page in snapshots)
        if not pages:
            # recurrent memory: one snapshot at the end of each prompt
            return snapshot * n_prompts
        for_a_token = sum(page.stored_bytes for page in pages) / sum(page.n_tokens for page in pages)
        # hybrid memory has the tokens after the last page in the snapshot
        snapshot -= round(for_a_token * sum(page.n_tokens for page in snapshots))
        page_tokens = max(page.n_tokens for page in pages) if snapshots else self._page_tokens
        tokens = _stored_tokens(page_tokens, self._trie, self._survey)
        return round(tokens * for_a_token) + max(0, snapshot) * n_prompts

    def seconds(self) -> float:
        """What evaluating the missing tokens takes: so much for each token, and so much for each prompt."""
        n_batch = self._llm.n_batch
        lengths = [min(n_batch, len(self._tokens) - at) for at in range(0, len(self._tokens), n_batch)]
        taken = list(zip(self._taken, lengths, strict=True))
        # llama.cpp allocates its buffers in the first one
        taken = taken[1:] if len(taken) > 1 else taken
        for_a_token = sum(seconds for seconds, _ in taken) / sum(n for _, n in taken)
        beside = self._beside()
        if not beside:
            return for_a_token * self._survey.missing_tokens
        started = time.perf_counter()
        report = warm(self._llm, self._scratch, beside)
        seconds = time.perf_counter() - started
        for_a_prompt = max(0.0, seconds - for_a_token * report.evaluated_tokens) / len(beside)
        return for_a_token * self._survey.missing_tokens + for_a_prompt * len(self._missing)

    def _beside(self) -> list[list[int]]:
        """Prompts that continue what the trial has evaluated, next to its prompt in the list, and no longer than it."""
        room = TRIAL_BATCHES * self._llm.n_batch
        found: list[list[int]] = []
        for i in sorted(self._missing, key=lambda i: abs(i - self._longest))[1 : TRIAL_PROMPTS + 1]:
            tokens = self._trie.tokens(i)
            shared = common_prefix(tokens, self._trie.tokens(self._longest))
            # what comes before is left out where it is more than was evaluated
            start = max(0, shared - len(self._tokens))
            end = min(len(tokens), shared + self._llm.n_batch)
            room -= end - shared
            if room < 0:
                break
            found.append(self._tokens[: shared - start] + tokens[shared:end].tolist())
        return found


def _stored_tokens(page_tokens: int, trie: PromptTrie, survey: Survey) -> int:
    """Tokens in the pages that would be written: a prompt that branches off inside a page stores that page again."""
    starts = ((i, trie.length(i) - missing) for i, missing in enumerate(survey.missing) if missing)
    return sum(trie.length(i) - start + start % page_tokens for i, start in starts)
