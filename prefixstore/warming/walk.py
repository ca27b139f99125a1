"""The walk of a warming job through the trie of its prompts.

To go back to a branch the live context is cut there, or pages are restored, if another job computed them. Nothing but
the store says what is done, so a job that was killed is just run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import xxhash

from prefixstore.engine.index import Page, Path
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import Tokens
from prefixstore.store import PrefixStore
from prefixstore.warming.leases import Leases
from prefixstore.warming.trie import Part, Plan

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Progress", "Survey", "Walk"]

# Between two looks whether another job has finished what this one waits for.
POLL_SECONDS = 0.2
# Between two looks at how much the store holds.
BYTES_SECONDS = 0.5
# Where snapshots are taken an evaluation ends with some, so it has as many batches as a signal can wait for.
SNAPSHOT_BATCHES = 8
# A page that a longer one has just replaced is gone when it is to be restored; then the longer one is found.
ATTEMPTS = 3


@dataclass(frozen=True)
class Progress:
    """How far a job is.

    Attributes
    ----------
    phase
        ``"reading"`` prompts, ``"evaluating"``, or ``"waiting"`` for another job.
    prompts
        How many were read.
    unique_tokens, missing_tokens
        Tokens of the trie, and those of them that were not stored when the job began.
    done_tokens
        Of the missing ones, how many are done, by whatever job.
    evaluated_tokens
        What this job has evaluated.
    walked_tokens
        Tokens of the prompts that are done, shared ones counted for each.
    stored_bytes
        By how much the store has grown.
    seconds
        Since the evaluation began.
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
        """Missing tokens that become stored, per second."""
        return self.done_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long it takes yet at this rate; None as long as it is not known."""
        left = self.missing_tokens - self.done_tokens
        return left / self.rate if self.rate else None if left else 0.0

    @property
    def hit_share(self) -> float:
        """Of the tokens of the prompts that are done, the share that did not have to be evaluated."""
        return max(0.0, 1 - self.evaluated_tokens / self.walked_tokens) if self.walked_tokens else 0.0


class Survey:
    """What a store has of the prompts of a plan.

    Attributes
    ----------
    pages
        The pages, by key.
    missing
        For each prompt, how many tokens are neither stored nor in the prompt before it.
    """

    def __init__(self, store: PrefixStore, plan: Plan) -> None:
        self.pages: dict[bytes, Page] = {}
        self.missing: list[int] = []
        match = matcher(store)
        for i in range(len(plan)):
            path = match(plan.tokens(i))
            self.pages |= {page.key: page for page in path.pages}
            self.missing.append(max(0, plan.length(i) - max(plan.shared[i], path.n_tokens)))

    @property
    def missing_tokens(self) -> int:
        """How many tokens a walk has to evaluate."""
        return sum(self.missing)


def matcher(store: PrefixStore) -> Callable[[Tokens], Path]:
    """What finds the stored pages of a prompt."""
    namespace = store.namespace
    page_tokens = namespace.settings["page_tokens"]
    if not isinstance(page_tokens, int):
        raise InvalidParameterError("the namespace of the store has no page_tokens")
    key, engine = namespace.key, store.engine
    if "snapshots" in store.kind:
        return lambda tokens: engine.match_snapshot(key, tokens, page_tokens, len(tokens))
    return lambda tokens: engine.match(key, tokens, page_tokens)


@dataclass
class Walk:
    """One job: the parts that it claims, and the prompts in them.

    Parameters
    ----------
    llm, store
        The model, and the store that is attached to it.
    plan
        The prompts.
    tell
        Is told how far the walk is.
    stop
        Asked after each batch.
    pin
        Whether to pin the prompts.

    Attributes
    ----------
    survey
        What was stored before.
    progress
        How far it is.
    interrupted
        Whether it was stopped.
    """

    llm: Llama
    store: PrefixStore
    plan: Plan
    tell: Callable[[Progress], object]
    stop: Callable[[], bool]
    pin: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        self._match = matcher(self.store)
        self._namespace = self.store.namespace.key
        self.survey = Survey(self.store, self.plan)
        # memory that cannot step back goes on from where it was kept, and from nowhere else
        self._stops = "snapshots" in self.store.kind
        # rows that leave a sliding window are overwritten: their pages are taken before that
        self._forgets = not self.llm.context_params.swa_full
        self._step = min(self.llm.n_batch, self.llm.context_params.n_ubatch) if self._forgets else self.llm.n_batch
        self._page_tokens = int(str(self.store.namespace.settings["page_tokens"]))
        if self._stops:
            self._forgets, self._step = False, self.llm.n_batch * SNAPSHOT_BATCHES
        self.interrupted = False
        self._finished = self._in_work = 0
        self._looked = 0.0
        self._bytes_before = self.store.engine.used()[1]
        self._started = time.perf_counter()
        self.progress = Progress(
            "evaluating",
            prompts=self.plan.prompts,
            unique_tokens=self.plan.unique_tokens,
            missing_tokens=self.survey.missing_tokens,
        )

    def run(self, lease_seconds: float) -> None:
        """Do all parts that no other job does; at the end all are done, or the job was interrupted."""
        parts = self.plan.parts()
        left = dict(enumerate(parts))
        last = -1
        self._tell()
        with Leases(self.store.engine, seconds=lease_seconds) as leases, ThreadPoolExecutor(1) as behind:
            keeping: Future[None] | None = None
            try:
                while left and not self._is_stopped():
                    found = len(left)
                    claimed = self._claim(left, last, leases)
                    if claimed is not None:
                        last = claimed
                        self._do(left.pop(claimed))
                        # others wait for the part, so it must not wait for more than one other
                        if keeping is not None:
                            keeping.result()
                        keeping = behind.submit(self._keep, parts[claimed], leases)
                    elif len(left) == found:
                        self._tell("waiting")
                        time.sleep(POLL_SECONDS)
            finally:
                # whatever ends it: what is computed is kept, and only then do others get the part
                self.store.capture()
                self.store.flush()
                if keeping is not None:
                    keeping.result()
        self._tell()

    def _is_stopped(self) -> bool:
        self.interrupted = self.interrupted or self.stop()
        return self.interrupted

    # -- which part is next -------------------------------------------------------------------------------------------

    def name(self, part: Part) -> bytes:
        """The name of the lease of a part."""
        return xxhash.xxh3_128_digest(self._namespace + part.name)

    def _claim(self, left: dict[int, Part], last: int, leases: Leases) -> int | None:
        """The next part that is this job's now; those that turn out to be stored are struck off the list."""
        for i in sorted(left, key=lambda i: (i < last, i)):
            part, name = left[i], self.name(left[i])
            if any(need in left for need in part.needs) or not leases.is_free(name):
                continue
            if not self._is_stored(part):
                if not leases.acquire(name):
                    continue
                # another job may have done it since
                if not self._is_stored(part):
                    return i
                leases.release(name)
            self._note_stored(left.pop(i))
        return None

    def _is_stored(self, part: Part) -> bool:
        if part.depth is not None:
            return self._match(self.plan.tokens(part.first)[: part.depth]).n_tokens == part.depth
        prompts = map(self.plan.tokens, range(part.first, part.end))
        return all(self._match(tokens).n_tokens == len(tokens) for tokens in prompts)

    def _note_stored(self, part: Part) -> None:
        if part.depth is None:
            for i in range(part.first, part.end):
                self._visit(i, self.plan.length(i))
                self._note_done(i)
            self._keep(part, None)

    # -- a part -------------------------------------------------------------------------------------------------------

    def _do(self, part: Part) -> None:
        if part.depth is not None:
            self._visit(part.first, part.depth)
            return
        for i in range(part.first, part.end):
            if self._is_stopped():
                return
            self._visit(i, self.plan.length(i))
            self._note_done(i)

    def _keep(self, part: Part, leases: Leases | None) -> None:
        """Have the part in the store, for good and for all to see, and then give back the lease."""
        self.store.flush()
        if self.pin and part.depth is None and not self.interrupted:
            for i in range(part.first, part.end):
                self.store.pin(self.plan.tokens(i))
        if leases is not None:
            leases.release(self.name(part))

    def _visit(self, i: int, depth: int) -> None:
        """Have the first `depth` tokens of a prompt stored."""
        tokens = self.plan.tokens(i)[:depth]
        path = self._match(tokens)
        if path.n_tokens == len(tokens):
            # as after a restore: whoever warms a prompt again wants it to stay
            self.store.engine.touch(self._namespace, path.pages)
            return
        at = self._restore(tokens, path.n_tokens)
        stops = self.plan.stops(i, at, depth) if self._stops else ()
        while at < len(tokens) and not self._is_stopped():
            end = self._end_of_batch(at, len(tokens), stops)
            self.llm.eval(tokens[at:end].tolist())
            self._in_work += end - at
            self.progress = replace(self.progress, evaluated_tokens=self.progress.evaluated_tokens + end - at)
            at = end
            if at in stops or (self._forgets and at % self._page_tokens == 0):
                self.store.capture()
            self._tell()
        self.store.capture()

    def _restore(self, tokens: Tokens, stored: int) -> int:
        """Go back to where the tokens leave what is known; how many of them are live."""
        live = 0
        for _ in range(ATTEMPTS):
            live = self.store.restore(tokens, always=True)
            if live >= min(stored, len(tokens) - 1):
                break
            stored = self._match(tokens).n_tokens
        return live

    def _end_of_batch(self, at: int, n: int, stops: tuple[int, ...]) -> int:
        end = min([at + self._step, n, *(stop for stop in stops if stop > at)])
        if self._forgets and end < n:
            aligned = end - end % self._page_tokens
            end = aligned if aligned > at else end
        return end

    # -- how far ------------------------------------------------------------------------------------------------------

    def _note_done(self, i: int) -> None:
        self._finished += self.survey.missing[i]
        self._in_work = 0
        self.progress = replace(self.progress, walked_tokens=self.progress.walked_tokens + self.plan.length(i))

    def _tell(self, phase: str = "evaluating") -> None:
        now, known = time.perf_counter(), self.progress
        done = min(known.missing_tokens, max(known.done_tokens, self._finished + self._in_work))
        stored = known.stored_bytes
        if now - self._looked > BYTES_SECONDS:
            self._looked = now
            stored = max(0, self.store.engine.used()[1] - self._bytes_before)
        self.progress = replace(known, phase=phase, done_tokens=done, stored_bytes=stored, seconds=now - self._started)
        self.tell(self.progress)
