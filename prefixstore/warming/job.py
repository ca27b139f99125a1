"""A warming job: computes a list of prompts into a store, each shared prefix once.

The prompts are the leaves of a trie of tokens, which a job visits depth first. To return to a branch, the live context
is cut there, or pages are restored if another job computed them. Jobs on the same list divide it into the same parts
and claim them by leases. Nothing but the store records what is done, so a job that was killed is simply run again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from prefixstore.engine.pending import DropReason
from prefixstore.errors import MisuseError
from prefixstore.format.keys import Tokens
from prefixstore.store import PrefixStore
from prefixstore.warming.leases import SECONDS, Leases
from prefixstore.warming.prompt_trie import Part, PromptTrie
from prefixstore.warming.prompts import Problem, PromptLike, tokenized
from prefixstore.warming.report import Progress, WarmReport

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Job", "missing_tokens", "warm"]

# How often a job checks whether another one has finished the part it waits for.
POLL_SECONDS = 0.2
# How often it asks how many bytes the store holds.
BYTES_SECONDS = 0.5
# A snapshot is taken at the end of an evaluation, so its length bounds the delay of a signal.
SNAPSHOT_BATCHES = 8
# why pages are left out in a store that is full
NO_SPACE = (DropReason.BUDGET, DropReason.QUOTA, DropReason.FULL)


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
    lease_seconds
        How long other jobs on the same list wait for a part that this job has claimed once it stops renewing its lease.

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
        job.run(lease_seconds)
        after = [] if job.interrupted else missing_tokens(store, trie, llm)
        return WarmReport(
            prompts=trie.prompts,
            prompt_tokens=trie.prompt_tokens,
            unique_tokens=trie.unique_tokens,
            missing_tokens=job.progress.missing_tokens,
            evaluated_tokens=job.progress.evaluated_tokens,
            stored_bytes=job.progress.stored_bytes,
            seconds=time.perf_counter() - started,
            short=trie.short,
            unstored=tuple(trie.where(i) for i, n_tokens in enumerate(after) if n_tokens),
            problems=tuple(problems),
            interrupted=job.interrupted,
            full=job.is_full,
        )
    finally:
        if not was_attached:
            store.detach(llm)


def missing_tokens(store: PrefixStore, trie: PromptTrie, llm: Llama | None = None) -> list[int]:
    """For each prompt, how many of its tokens are neither stored nor shared with the prompt before it."""
    stored = (store.path(trie.tokens(i), llm).n_tokens for i in range(len(trie)))
    return [max(0, trie.length(i) - max(trie.shared[i], n)) for i, n in enumerate(stored)]


@dataclass
class Job:
    """One job: the parts of a trie that it claims, and the prompts in them.

    Parameters
    ----------
    llm, store
        The model, and the store that is attached to it.
    trie
        The prompts.
    show
        Called with the progress after each batch.
    stop
        Called after each batch; True stops the job.
    pin
        Whether to pin the prompts.

    Attributes
    ----------
    progress
        How far the job is.
    interrupted
        Whether it was stopped.
    is_full
        Whether it ended since the store does not keep what it has computed.
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

    def run(self, lease_seconds: float) -> None:
        """Do every part that no other job does; afterwards all parts are done, or the job was interrupted."""
        parts = self.trie.parts()
        left = dict(enumerate(parts))
        last, done = -1, list[Part]()
        self._show()
        engine = self.store.engine
        with (
            engine.counters.not_serving(),
            engine.captures.storing_all(),
            Leases(engine.upkeep, seconds=lease_seconds) as leases,
        ):
            try:
                while left and not self.is_full and not self._is_stopped():
                    found = len(left)
                    claimed = self._claim(left, last, leases)
                    if claimed is not None:
                        last = claimed
                        self._do(left.pop(claimed))
                        self._keep(parts[claimed], leases)
                        done.append(parts[claimed])
                        self.is_full = not self.interrupted and self._loses(done)
                    elif len(left) == found:
                        self._show("waiting")
                        time.sleep(POLL_SECONDS)
            finally:
                # whatever ends the job: what was computed is stored before other jobs may claim the part
                self.store.capture(self.llm)
                self.store.flush()
        self._asked_at = 0.0
        self._show()

    def _is_stopped(self) -> bool:
        self.interrupted = self.interrupted or self.stop()
        return self.interrupted

    def _loses(self, done: list[Part]) -> bool:
        """Whether something of these parts is not stored any more, or was never, because there was no space."""
        before, self._n_lost = self._n_lost, self._lost()
        return self._n_lost > before and not all(map(self._is_stored, done))

    def _lost(self) -> int:
        """How many pages were evicted, or left out, for space."""
        counters = self.store.engine.counters
        dropped = counters.group("dropped")
        return counters["evictions"] + sum(dropped.get(reason.value, 0) for reason in NO_SPACE)

    # -- which part is next -------------------------------------------------------------------------------------------

    def name(self, part: Part) -> bytes:
        """The name of the lease of a part."""
        return blake2b(self._namespace + part.name, digest_size=16).digest()

    def _claim(self, left: dict[int, Part], last: int, leases: Leases) -> int | None:
        """Claim the next free part; parts that turn out to be stored are removed from `left`."""
        for i in sorted(left, key=lambda i: (i < last, i)):
            part, name = left[i], self.name(left[i])
            # the part before this one stores what both share at its beginning
            if (i - 1 in left and not self._has_shared(part.first)) or not leases.is_free(name):
                continue
            if self._is_stored(part):
                self._note_stored(left.pop(i))
            elif leases.acquire(name):
                return i
        return None

    def _has_shared(self, i: int) -> bool:
        """Whether what a prompt shares with the one before it is stored, or too short for that."""
        shared = self.trie.shared[i]
        return shared < self.store.min_tokens or self._has(self.trie.tokens(i)[:shared])

    def _has(self, tokens: Tokens) -> bool:
        return self.store.path(tokens, self.llm).n_tokens == len(tokens)

    def _is_stored(self, part: Part) -> bool:
        return all(self._has(self.trie.tokens(i)) for i in range(part.first, part.end))

    def _note_stored(self, part: Part) -> None:
        for i in range(part.first, part.end):
            self._visit(i, self.trie.length(i))
            self._note_done(i)
        self._keep(part, None)

    # -- a part -------------------------------------------------------------------------------------------------------

    def _do(self, part: Part) -> None:
        if part.end < len(self.trie) and not self._has_shared(part.end):
            # first what the next part needs, which other jobs may begin then
            self._visit(part.end - 1, self.trie.shared[part.end])
            self.store.flush()
        for i in range(part.first, part.end):
            if self._is_stopped():
                return
            self._visit(i, self.trie.length(i))
            self._note_done(i)

    def _keep(self, part: Part, leases: Leases | None) -> None:
        """Write the part durably, so that other jobs see it, and then release its lease."""
        self.store.flush()
        if self.pin and not self.interrupted:
            for i in range(part.first, part.end):
                self.store.pin(self.trie.tokens(i), self.llm)
        if leases is not None:
            leases.release(self.name(part))

    def _visit(self, i: int, depth: int) -> None:
        """Store the first `depth` tokens of a prompt."""
        tokens = self.trie.tokens(i)[:depth]
        path = self.store.path(tokens, self.llm)
        if path.n_tokens == len(tokens):
            # warming a stored prompt again counts as a use, like a restore, and extends its time to live
            self.store.engine.touch(self._namespace, path.pages, len(tokens))
            return
        at = self.store.restore(tokens, self.llm, always=True)
        stops = self.trie.stops(i, at, depth) if self._stops else ()
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

    # -- progress -----------------------------------------------------------------------------------------------------

    def _note_done(self, i: int) -> None:
        self._finished += self._missing[i]
        self._in_work = 0
        self.progress = replace(self.progress, walked_tokens=self.progress.walked_tokens + self.trie.length(i))

    def _show(self, phase: str = "evaluating") -> None:
        now, known = time.perf_counter(), self.progress
        done = min(known.missing_tokens, max(known.done_tokens, self._finished + self._in_work))
        stored = known.stored_bytes
        if now - self._asked_at > BYTES_SECONDS:
            self._asked_at = now
            stored = max(0, self.store.engine.upkeep.used()[1] - self._bytes_before)
        self.progress = replace(known, phase=phase, done_tokens=done, stored_bytes=stored, seconds=now - self._started)
        self.show(self.progress)
