"""Restores stored snapshots into a context whose memory cannot step back."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import Enum

import numpy as np

from prefixstore.engine.index import Page, Path
from prefixstore.errors import CorruptError
from prefixstore.format.keys import Tokens
from prefixstore.llama.context import Context
from prefixstore.llama.snapshot_memory import SnapshotMemory
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.view import Assembly, StateView

__all__ = ["ATTEMPTS", "resume"]

log = logging.getLogger("prefixstore")

# if a snapshot is damaged, or one of its pages, try the previous one
ATTEMPTS = 3


class Unfit(Enum):
    """Why a snapshot cannot be restored."""

    SHAPE = "shape"
    """Its bytes are not a state of this context."""
    REFUSED = "refused"
    """llama.cpp refused it."""


def resume(
    context: Context[SnapshotMemory], tokens: Tokens, limit: int, live: int, *, always: bool, multiple_of: int
) -> bool:
    """Restore the deepest snapshot of a prompt, unless the context is as far already; see `Strategy.restore`.

    `live` is how much of the prompt the context holds and can continue from. Raises `StorageError`.
    """
    engine, lineage = context.engine, context.lineage
    engine.token_seconds = context.rate.token_seconds
    for _ in range(ATTEMPTS):
        path = engine.match_snapshot(lineage.namespace, tokens, lineage.page_tokens, limit, multiple_of)
        n = path.n_tokens
        if n < context.parameters.min_tokens:
            context.note_use((), len(tokens))
            context.count_miss("miss:short" if n else "miss:not_found")
            return False
        if n <= live:
            context.note_use(path.pages, len(tokens))
            context.count_lookup("live_hits")
            return True
        if not always and not context.is_worth(_with_bytes(path), n - live):
            context.count_miss("miss:slow")
            return False
        is_loaded = _load(context, tokens, live, path, waits=always)
        if is_loaded:
            context.note_use(path.pages, len(tokens))
            return True
        if is_loaded is None:
            # an earlier one would be another wait
            break
        limit, live = n - 1, min(live, context.llm.n_tokens)
    context.count_miss("miss:unreadable")
    return False


def _load(context: Context[SnapshotMemory], prompt: Tokens, live: int, path: Path, *, waits: bool) -> bool | None:
    """Whether the snapshot was loaded; None if it was given up because it was late."""
    started = time.perf_counter()
    pages = _with_bytes(path)
    n = path.n_tokens
    memory = context.memory
    is_far = context.engine.n_near(pages) < len(pages)
    # the pages of a snapshot are of no use without it
    deadline = None if waits else context.rate.deadline(path.pages, live, n, whole=len(pages))
    with context.engine.fetching(
        pages, admit=lambda page: page.raw_bytes <= memory.largest(page.end), deadline=deadline
    ) as fetched:
        states = list(fetched)
        if len(states) < len(pages):
            if deadline is not None and deadline.left(len(states)) <= 0:
                (context.far_rate if is_far else context.rate).late(pages, time.perf_counter() - started)
                return None
            return False
        try:
            unfit = _put(memory, states, n)
            if unfit is None:
                context.set_live(prompt[:n])
                memory.unverified = False
        finally:
            if memory.unverified:
                # interrupted between the two: the context holds other tokens than its Llama names
                memory.discard()
        if unfit is not None:
            log.warning("snapshot %s cannot be restored: %s", path.pages[-1].key.hex(), unfit.value)
            context.engine.counters.count(f"unreadable:{unfit.value}")
            # a context that was emptied names no tokens any more
            context.catch_up()
            return False
    # a snapshot's compute_us is the cost of losing it, not that of its tokens
    context.count_restore(len(pages), n - live, time.perf_counter() - started, path.pages[:-1], is_far=is_far)
    return True


def _put(memory: SnapshotMemory, states: Sequence[memoryview], n: int) -> Unfit | None:
    """Join a state of `n` tokens, and put it into the context; None if that worked, and else the reason."""
    try:
        pieces = [parse_sequence(state) for state in states]
        recurrent = pieces[-1].recurrent
        if recurrent is None or recurrent.position != n - 1:
            raise CorruptError("the recurrent part is not that of this position")
        if len(pieces) == 1:
            # a whole state: of recurrent memory, or shorter than a page
            if not _has_all_rows(pieces[0], n, memory.window):
                raise CorruptError("rows of a whole state are missing")
            return None if memory.put(states[0], n) else Unfit.REFUSED
        if len(pieces[0].sections) != 1:
            raise CorruptError("two kinds of attention cannot be joined")
        assembly = Assembly(pieces[0], [np.arange(n, dtype="<i4")], recurrent=recurrent.data)
        whole = memory.scratch.acquire(assembly.size)
        assert whole is not None  # this pool is unbounded
        try:
            assembly.write(whole.view, pieces)
            return None if memory.put(whole.view, n) else Unfit.REFUSED
        finally:
            whole.release()
    except CorruptError as error:
        log.warning("a snapshot does not fit: %s", error)
        return Unfit.SHAPE


def _has_all_rows(state: StateView, n: int, window: int) -> bool:
    """Whether no rows are missing, as they would be if the pages of a snapshot had been stored without rows."""
    firsts = (0, max(n - window, 0))
    return all(
        len(positions) >= n - first and np.array_equal(positions, np.arange(n - len(positions), n))
        for positions, first in zip(state.positions, firsts, strict=False)
    )


def _with_bytes(path: Path) -> list[Page]:
    """What must be read: the snapshot, and its pages, unless they hold only tokens."""
    return [page for page in path.pages[:-1] if page.raw_bytes] + [path.pages[-1]]
