"""A warming job: computes a list of prompts into a store, each shared prefix once.

The prompts are the leaves of a trie of tokens, which a job visits depth first, beginning anywhere. At a branch it cuts
the live context, or restores pages that another job has computed. Only the store records what is done: a job that was
killed is simply run again. Jobs on the same list begin at different prompts, skip what is stored, and move elsewhere
when they meet what another job has stored. What two of them need at the same moment is computed twice: a few prompts at
most.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prefixstore.engine.page import Path
from prefixstore.engine.pending import DropReason
from prefixstore.errors import MisuseError
from prefixstore.store import PrefixStore
from prefixstore.warming.prompt_list import Problem, PromptLike, PromptTrie, tokenized

if TYPE_CHECKING:
    from llama_cpp import Llama

# seconds between two looks at how many bytes the store holds
BYTES_SECONDS = 0.5
# A snapshot is taken at the end of an evaluation, which a signal does not interrupt: so it is no longer than this.
SNAPSHOT_BATCHES = 8
# What was computed is made durable, and pinned, each time after 1/SHARE of the tokens of the list, and at least FEWEST.
SHARE, FEWEST = 64, 256
# the reasons for which a full store drops pages
NO_SPACE = (DropReason.BUDGET, DropReason.QUOTA, DropReason.FULL)


@dataclass(frozen=True)
class Progress:
    """A job's progress.

    Attributes
    ----------
    phase
        ``"reading"`` prompts, or ``"evaluating"``.
    prompts
        Prompts read.
    unique_tokens, missing_tokens
        Tokens of the trie, and how many of them were not stored when the job began.
    done_tokens
        How many of the missing tokens are done, by any job.
    evaluated_tokens
        Tokens that this job has evaluated.
    walked_tokens
        Tokens of the finished prompts; shared tokens count once for each prompt.
    stored_bytes
        Growth of the store since the job began.
    seconds
        Time since the evaluation began.
    """

    phase: str = "reading"
    prompts: int = 0
    unique_tokens: int = 0
    missing_tokens: int = 0
    done_tokens: int = 0
    evaluated_tokens: int = 0
    walked_tokens: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Missing tokens done per second."""
        return self.done_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Expected time to the end at this rate; None while the rate is unknown."""
        left = self.missing_tokens - self.done_tokens
        return left / self.rate if self.rate else None if left else 0.0

    @property
    def hit_share(self) -> float:
        """The share of the finished prompts' tokens that did not have to be evaluated."""
        return max(0.0, 1 - self.evaluated_tokens / self.walked_tokens) if self.walked_tokens else 0.0


@dataclass(frozen=True)
class WarmReport:
    """The result of a job.

    Attributes
    ----------
    prompts, prompt_tokens
        Usable prompts, duplicates included, and their tokens.
    unique_tokens, missing_tokens
        Tokens of their trie, and how many of them were not stored before.
    evaluated_tokens
        Tokens that this job has evaluated.
    stored_bytes
        Growth of the store, in bytes of pages.
    seconds
        From the first prompt read to the last page written.
    short
        Prompts with fewer tokens than the store keeps (`min_tokens`); they are skipped.
    unstored
        Origins of prompts that are not completely stored, since there was no space; if the job was not interrupted.
    problems
        Prompts that could not be used.
    interrupted
        Whether the job was stopped before its end.
    full
        Whether it ended before its end because the store does not keep what it computed: it is full.
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
    full: bool = False


def warm(
    llm: Llama,
    store: PrefixStore,
    prompts: Iterable[PromptLike],
    *,
    progress: Callable[[Progress], object] | None = None,
    stop: Callable[[], bool] | None = None,
    generation_prompt: bool = False,
    pin: bool = False,
) -> WarmReport:
    """Compute and store the missing parts of a list of prompts.

    Parameters
    ----------
    llm
        The model, with a context longer than the longest prompt. What its context holds is lost.
    store
        The store to fill. It is attached to `llm` for the job if it is not attached yet.
    prompts
        Texts, token ids, mappings with ``"prompt"``, ``"messages"`` (and ``"tools"``) or ``"tokens"``, paths of files
        and folders. They are read once, and their tokens kept in memory.
    progress
        Called with the progress after each batch.
    stop
        Called after each batch; return True to stop. What was computed by then is kept, and the next run does the rest.
    generation_prompt
        Whether messages end where the assistant answers, instead of where the next user turn begins.
    pin
        Keep the pages of the prompts from eviction.

    Raises
    ------
    MisuseError
        If the store is read-only, another one is attached to the Llama, or states of this model cannot be stored.
    StorageError
        If the location fails. What was computed by then is kept as far as it can be written.

    Examples
    --------
    >>> import prefixstore
    >>> report = prefixstore.warm(llm, store, ["You are a helpful assistant. ..."])  # doctest: +SKIP
    >>> report.unique_tokens, report.evaluated_tokens  # doctest: +SKIP
    """
    was_attached = store.is_attached(llm)
    if not was_attached:
        store.attach(llm)
    try:
        kind = store.hook_of(llm).kind
        if not kind.is_stored:
            raise MisuseError(f"states of this model cannot be stored: {kind.reason}")
        if store.read_only:
            raise MisuseError("warm() writes to the store, which was opened with read_only=True")
        started = time.perf_counter()
        show = progress or (lambda _: None)
        show(Progress())
        problems: list[Problem] = []
        is_stopped = stop or (lambda: False)
        found = tokenized(llm, prompts, problems, generation_prompt=generation_prompt)
        trie = PromptTrie(itertools.takewhile(lambda _: not is_stopped(), found), store.min_tokens)
        job = Job(llm, store, trie, show, is_stopped, pin=pin)
        job.run()
        after = [] if job.interrupted else missing_tokens(store, trie, llm)
        return WarmReport(
            **_facts(trie, job.progress.missing_tokens, problems),
            evaluated_tokens=job.progress.evaluated_tokens,
            stored_bytes=job.progress.stored_bytes,
            seconds=time.perf_counter() - started,
            unstored=tuple(trie.where(i) for i, n_tokens in enumerate(after) if n_tokens),
            interrupted=job.interrupted,
            full=job.is_full,
        )
    finally:
        if not was_attached:
            store.detach(llm)


def estimate(llm: Llama, store: PrefixStore, prompts: Iterable[PromptLike]) -> dict[str, Any]:
    """What `warm` would find with the same arguments, by the names in its report. The store is attached."""
    problems: list[Problem] = []
    trie = PromptTrie(tokenized(llm, prompts, problems), store.min_tokens)
    return _facts(trie, sum(missing_tokens(store, trie, llm)), problems)


def _facts(trie: PromptTrie, n_missing: int, problems: Sequence[Problem]) -> dict[str, Any]:
    return {
        "prompts": trie.prompts,
        "prompt_tokens": trie.prompt_tokens,
        "unique_tokens": trie.unique_tokens,
        "missing_tokens": n_missing,
        "short": trie.short,
        "problems": tuple(problems),
    }


def missing_tokens(store: PrefixStore, trie: PromptTrie, llm: Llama | None = None) -> list[int]:
    """For each prompt, how many of its tokens are neither stored nor shared with the previous prompt."""
    stored = (store.path(trie.tokens(i), llm).n_tokens for i in range(len(trie)))
    # a match shorter than that is not restored
    usable = (n if n >= store.min_tokens else 0 for n in stored)
    return [max(0, trie.length(i) - max(trie.shared[i], n)) for i, n in enumerate(usable)]


@dataclass
class Job:
    """A job. The store is attached to the model; `show` and `stop` are called after each batch.

    `is_full` says whether it ended early because the store does not keep what it has computed.
    """

    llm: Llama
    store: PrefixStore
    trie: PromptTrie
    show: Callable[[Progress], object]
    stop: Callable[[], bool]
    pin: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        hook = self.store.hook_of(self.llm)
        self._namespace = hook.context.namespace.key
        self._missing = missing_tokens(self.store, self.trie, self.llm)
        # recurrent memory can be resumed only at the positions of its snapshots
        self._stops = hook.kind.has_snapshots
        self._step = self.llm.n_batch * (SNAPSHOT_BATCHES if self._stops else 1)
        self.interrupted = self.is_full = False
        self._n_lost = self._lost()
        self._finished = self._in_work = 0
        self._asked_at = 0.0
        self._bytes_before = self.store.engine.upkeep.used()[1]
        self._started = time.perf_counter()
        self.progress = Progress(
            "evaluating",
            prompts=self.trie.prompts,
            unique_tokens=self.trie.unique_tokens,
            missing_tokens=sum(self._missing),
        )

    def run(self) -> None:
        """Visit all prompts. After that all are stored, or the job was interrupted, or the store is full."""
        self._show()
        engine = self.store.engine
        with engine.counters.not_serving(), engine.write_queue.storing_all():
            try:
                self._walk()
            finally:
                # however the job ends
                self.store.capture(self.llm)
                self.store.flush()
        self._asked_at = 0.0
        self._show()

    def _walk(self) -> None:
        left, done = list(range(len(self.trie))), list[int]()
        size, n_kept, n_evaluated = max(FEWEST, self.trie.unique_tokens // SHARE), 0, 0
        at = random.randrange(len(left) or 1)
        while left and not self.is_full and not self._is_stopped():
            # popping a prompt moves the next one into its place
            at %= len(left)
            i = left.pop(at)
            was_stored = self._visit(i)
            if self.interrupted:
                return
            done.append(i)
            self._note_done(i)
            if was_stored and self._missing[i]:
                # another job has stored it, and goes on from here
                at = random.randrange(len(left) or 1)
            if not left or self.progress.evaluated_tokens >= n_evaluated + size:
                self._keep(done[n_kept:])
                n_kept, n_evaluated = len(done), self.progress.evaluated_tokens
                self.is_full = self._loses(done)

    def _is_stopped(self) -> bool:
        self.interrupted = self.interrupted or self.stop()
        return self.interrupted

    def _loses(self, done: list[int]) -> bool:
        """Whether one of these prompts is not stored, because there was no space for it."""
        before, self._n_lost = self._n_lost, self._lost()
        return self._n_lost > before and not all(self._path(i).n_tokens == self.trie.length(i) for i in done)

    def _lost(self) -> int:
        """How many pages were evicted or dropped for lack of space."""
        counters = self.store.engine.counters
        dropped = counters.group("dropped")
        return counters["evictions"] + sum(dropped.get(reason.value, 0) for reason in NO_SPACE)

    def _path(self, i: int) -> Path:
        return self.store.path(self.trie.tokens(i), self.llm)

    def _keep(self, done: list[int]) -> None:
        """Make what was computed durable, and pin it."""
        self.store.flush()
        for i in done if self.pin else ():
            self.store.pin(self.trie.tokens(i), self.llm)

    def _visit(self, i: int) -> bool:
        """Compute and capture a prompt; returns whether it was stored already."""
        tokens, path = self.trie.tokens(i), self._path(i)
        if path.n_tokens == len(tokens):
            # a use, like a restore: it renews the time to live
            self.store.engine.touch(self._namespace, path.pages, len(tokens))
            return True
        at = self.store.restore(tokens, self.llm, always=True)
        stops = self.trie.stops(i, at) if self._stops else ()
        while at < len(tokens) and not self._is_stopped():
            end = min([at + self._step, len(tokens), *(stop for stop in stops if stop > at)])
            self.llm.eval(tokens[at:end].tolist())
            self._in_work += end - at
            self.progress = replace(self.progress, evaluated_tokens=self.progress.evaluated_tokens + end - at)
            at = end
            if at in stops:
                self.store.capture(self.llm)
            self._show()
        self.store.capture(self.llm)
        return False

    # -- progress -----------------------------------------------------------------------------------------------------

    def _note_done(self, i: int) -> None:
        self._finished += self._missing[i]
        self._in_work = 0
        self.progress = replace(self.progress, walked_tokens=self.progress.walked_tokens + self.trie.length(i))

    def _show(self) -> None:
        now, known = time.perf_counter(), self.progress
        done = min(known.missing_tokens, max(known.done_tokens, self._finished + self._in_work))
        stored = known.stored_bytes
        if now - self._asked_at > BYTES_SECONDS:
            self._asked_at = now
            stored = max(0, self.store.engine.upkeep.used()[1] - self._bytes_before)
        self.progress = replace(known, done_tokens=done, stored_bytes=stored, seconds=now - self._started)
        self.show(self.progress)
