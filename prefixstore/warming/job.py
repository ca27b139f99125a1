"""Warming: a list of prompts into a store, each shared prefix computed once.

The prompts are the leaves of a trie of tokens (`trie`), which is walked depth first (`walk`). Jobs on the same list
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixstore.errors import MisuseError
from prefixstore.store import PrefixStore
from prefixstore.warming.leases import SECONDS
from prefixstore.warming.prompts import Problem, PromptLike, tokenized
from prefixstore.warming.trie import Plan
from prefixstore.warming.walk import Progress, Survey, Walk

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["WarmReport", "warm"]


@dataclass(frozen=True)
class WarmReport:
    """What a job has done.

    Attributes
    ----------
    prompts, prompt_tokens
        Prompts that could be used, duplicates included, and their tokens.
    unique_tokens, missing_tokens
        Tokens of their trie, and those of them that were not stored before.
    evaluated_tokens
        What this job evaluated.
    stored_bytes
        Stored bytes of the pages that hold the prompts now and were not there before.
    seconds
        From the first prompt read to the last page written.
    short
        Prompts of fewer tokens than the store keeps (`min_tokens`); they are left out.
    unstored
        Where prompts come from that are not wholly in the store, although the job went to its end: there was no room.
    problems
        What could not be used.
    interrupted
        Whether the job was stopped before its end.
    """

    prompts: int
    prompt_tokens: int
    unique_tokens: int
    missing_tokens: int
    evaluated_tokens: int
    stored_bytes: int
    seconds: float
    short: int = 0
    unstored: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    interrupted: bool = False


def warm(
    llm: Llama,
    store: PrefixStore,
    prompts: Iterable[PromptLike],
    *,
    progress: Callable[[Progress], object] | None = None,
    stop: Callable[[], bool] | None = None,
    generation_prompt: bool = False,
    pin: bool = False,
    lease_seconds: float = SECONDS,
) -> WarmReport:
    """Compute and store what is missing of a list of prompts.

    Parameters
    ----------
    llm
        The model. What its context holds is lost.
    store
        Where to. It is attached to `llm`, if it is not.
    prompts
        Texts, token ids, mappings with ``"prompt"``, ``"messages"`` (and ``"tools"``) or ``"tokens"``, paths of files
        and folders. They are read once, and their tokens kept in memory.
    progress
        Is told how far the job is, after each batch.
    stop
        Asked after each batch whether to stop: what is computed by then is kept, and the rest left to the next run.
    generation_prompt
        Whether messages end where the assistant answers, and not where a next user turn begins.
    pin
        Keep the pages of the prompts from eviction.
    lease_seconds
        How long other jobs on the same list leave a part of it to this one if it is not heard of any more.

    Raises
    ------
    MisuseError
        If the store is read-only, is attached to another Llama, or nothing can be stored of this model.
    StorageError
        If the location fails. What was computed by then is kept as far as it can be written.

    Examples
    --------
    >>> import prefixstore
    >>> report = prefixstore.warm(llm, store, ["You are a helpful assistant. ..."])  # doctest: +SKIP
    >>> report.unique_tokens, report.evaluated_tokens  # doctest: +SKIP
    """
    attached = store.llm
    if attached is None:
        store.attach(llm)
    elif attached is not llm:
        raise MisuseError("the store is attached to another Llama; give that one, or detach() the store")
    try:
        if store.kind.startswith("none"):
            raise MisuseError(f"nothing can be stored of this model: {store.kind.removeprefix('none: ')}")
        if store.read_only:
            raise MisuseError("warm() writes, and the store is open with read_only=True")
        started = time.perf_counter()
        tell = progress or (lambda _: None)
        tell(Progress())
        problems: list[Problem] = []
        asked = stop or (lambda: False)
        found = tokenized(llm, prompts, problems, generation_prompt=generation_prompt)
        plan = Plan(itertools.takewhile(lambda _: not asked(), found), store.min_tokens)
        walk = Walk(llm, store, plan, tell, asked, pin=pin)
        walk.run(lease_seconds)
        after = Survey(store, plan)
        new = after.pages.keys() - walk.survey.pages.keys()
        return WarmReport(
            plan.prompts,
            plan.prompt_tokens,
            plan.unique_tokens,
            walk.survey.missing_tokens,
            walk.progress.evaluated_tokens,
            sum(after.pages[key].stored_bytes for key in new),
            time.perf_counter() - started,
            plan.short,
            () if walk.interrupted else tuple(plan.where(i) for i, missing in enumerate(after.missing) if missing),
            tuple(problems),
            walk.interrupted,
        )
    finally:
        if attached is None:
            store.detach()
