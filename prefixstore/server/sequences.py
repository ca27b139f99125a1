"""A ``SequenceCache`` for llama-cpp-python's example server: states of sequences, cut into the pages of a store.

What the scheduler of that server does with a request, and what happens here:

    lookup(tokens)                       how much of the prompt is stored, to the token where the memory allows it
    load(match)                          its pages, joined into the state of a sequence
    save(tokens, state, prompt_logits)   after the prompt: the pages that are not stored yet

If all of a prompt is found, the scheduler needs logits, which are not stored: so the last token is always computed.

Of a sliding window, llama.cpp writes only the rows that the last token sees. The scheduler may go back to any token of
a sequence later, so a page is stored only with all of its rows: as long as a conversation grows by less than a window
at a time. Pages that a ``Llama`` has stored have all rows: warm long prompts with ``prefixstore warm``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixstore.buffers import PooledBuffer, released_on_error
from prefixstore.engine.index import Page, Path
from prefixstore.engine.missing import missing_ranges
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import ContextError, CorruptError
from prefixstore.format.keys import PAGE, SNAPSHOT, Tokens, TokenSequence, as_tokens, page_key, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.llama.guard import Guard
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.shape import shape_of
from prefixstore.llama.state.view import Assembly, StateView
from prefixstore.server.example_model import ModelStates, parse_state, states_of
from prefixstore.store import PrefixStore

__all__ = ["Load", "Match", "StoredSequences", "sequence_cache"]

log = logging.getLogger("prefixstore")

# of a snapshot beside its rows: what a recurrent part may have
RECURRENT_SLACK = 1 << 16


@dataclass(frozen=True)
class Match:
    """What was found of a prompt, if the server has no class for it."""

    tokens: tuple[int, ...]
    has_prompt_logits: bool = False

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.tokens)


@dataclass
class Load:
    """The state of what was found, if the server has no class for it."""

    tokens: list[int]
    state_bytes: npt.NDArray[np.uint8]
    prompt_logits: npt.NDArray[np.float32] | None = None


def sequence_cache(store: PrefixStore, model: Any, *, settings: object = None, protocol: Any = None) -> StoredSequences:
    """A sequence cache for ``CompletionScheduler(model, sequence_cache=...)`` of the example server.

    Parameters
    ----------
    store
        An open store that is not attached to a ``Llama``. It stays the caller's to close, after the scheduler.
    model
        The ``Model`` of the server, before its first request: a few tokens are evaluated with it.
    settings
        What the ``Model`` was made with, such as ``config.model`` of the server's configuration file. With it, pages
        are shared with a ``Llama`` of the same settings whose store has the same `namespace` and `salt`; without it,
        with servers that compute the same.
    protocol
        Has the classes `Match` and `Load`; by default the ``SequenceCache`` of the module that defines `model`.

    Returns
    -------
    StoredSequences
        The cache. If the states of this model cannot be stored, one that never finds anything.

    Raises
    ------
    MisuseError
        If the model is in use, or has several LoRA adapters.

    Examples
    --------
    >>> store = PrefixStore("lmdb:///var/cache/kv", namespace="chat")  # doctest: +SKIP
    >>> cache = sequence_cache(store, model, settings=config.model)  # doctest: +SKIP
    >>> scheduler = CompletionScheduler(model, sequence_cache=cache)  # doctest: +SKIP
    """
    if protocol is None:
        protocol = getattr(sys.modules.get(type(model).__module__), "SequenceCache", None)
    states = None
    try:
        states = states_of(model, store.parameters, settings)
    except ContextError as error:
        log.warning("the sequence cache stores nothing: %s", error)
    return StoredSequences(store, states, getattr(protocol, "Match", Match), getattr(protocol, "Load", Load))


class StoredSequences:
    """States of sequences in a store. A fault of the store is a miss, counted and logged.

    Parameters
    ----------
    store
        The store.
    states
        How states are stored; None if they cannot be.
    match_type, load_type
        Classes of the results.
    """

    def __init__(
        self, store: PrefixStore, states: ModelStates | None, match_type: type[Any], load_type: type[Any]
    ) -> None:
        self._store = store
        self._states = states
        self._match_type = match_type
        self._load_type = load_type
        # a prompt that waits for its turn is looked up again and again, and is counted once
        self._asked: list[int] | None = None

    @property
    def namespace(self) -> Namespace | None:
        """Where states are stored; None if they cannot be."""
        return self._states.namespace if self._states is not None else None

    # -- the protocol -------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Sequence[int]) -> Any:
        """The longest stored prefix of a prompt from which the scheduler can continue; None for a miss."""
        engine, states = self._store.engine, self._states
        if states is None:
            return None
        with Guard(engine.counters, "miss:error", "miss:unavailable", states.namespace.key):
            is_new, self._asked = self._asked != tokens, list(tokens)
            n = self._path(states, self._restorable(states, tokens)).n_tokens
            if n >= max(self._store.min_tokens, 1):
                if is_new:
                    engine.counters.asked(states.namespace.key, len(tokens), n, "store")
                return self._match_type(tokens=tuple(tokens[:n]), has_prompt_logits=False)
            if is_new:
                engine.touch(states.namespace.key, (), len(tokens))
                reason = "short" if n else "not_found"
                engine.counters.count(f"miss:{reason}", namespace=states.namespace.key)
                engine.counters.asked(states.namespace.key, len(tokens), 0, reason)
        return None

    def load(self, match: Any) -> Any:
        """The state of a match; None if it is gone, or cannot be read."""
        engine, states = self._store.engine, self._states
        if states is None:
            return None
        started = time.perf_counter()
        with Guard(engine.counters, "miss:error", "miss:unavailable", states.namespace.key):
            tokens = as_tokens(match.tokens)
            path = self._path(states, tokens)
            state = self._joined(states, path) if path.n_tokens == len(tokens) else None
            if state is None:
                engine.counters.count("miss:unreadable", namespace=states.namespace.key)
                return None
            engine.touch(states.namespace.key, path.pages, len(tokens))
            engine.nudge()
            seconds = time.perf_counter() - started
            engine.counters.restored(len(tokens), seconds, namespace=states.namespace.key)
            return self._load_type(tokens=tokens.tolist(), state_bytes=np.frombuffer(state, np.uint8))
        return None

    def save(self, tokens: Sequence[int], state_bytes: npt.NDArray[np.uint8], prompt_logits: object) -> None:
        """Store the pages of a prompt that are missing. `prompt_logits` are not stored."""
        del prompt_logits
        store, states = self._store, self._states
        if states is None or store.read_only:
            return
        engine = store.engine
        started = time.perf_counter()
        with Guard(engine.counters, "dropped:error"):
            prompt = as_tokens(tokens)
            text = states.text_of(prompt)
            if len(text) < max(store.min_tokens, 1):
                return
            if not states.kind.has_snapshots:
                self._save_pages(states, text, state_bytes, tail=True)
            elif len(text) == len(prompt):
                # a snapshot is valid at its end only
                self._save_snapshot(states, text, state_bytes)
        engine.counters.time("capture", time.perf_counter() - started)

    # -- looking up ---------------------------------------------------------------------------------------------------

    def _restorable(self, states: ModelStates, tokens: TokenSequence) -> Tokens:
        """The part of a prompt that may be restored: not its last token, and nothing from an image on."""
        prompt = as_tokens(tokens)
        return states.text_of(prompt)[: max(len(prompt) - 1, 0)]

    def _path(self, states: ModelStates, tokens: Tokens) -> Path:
        engine, namespace = self._store.engine, states.namespace.key
        if states.kind.has_snapshots:
            return engine.match_snapshot(namespace, tokens, states.page_tokens, len(tokens))
        path = engine.match(namespace, tokens, states.page_tokens)
        return Path(path.pages[: -(-path.n_tokens // states.page_tokens)], path.n_tokens)

    # -- joining ------------------------------------------------------------------------------------------------------

    def _joined(self, states: ModelStates, path: Path) -> bytearray | None:
        """The state of a path; None if something of it is missing."""
        n = path.n_tokens
        pages = [page for page in path.pages if page.raw_bytes]
        with self._store.engine.fetching(pages, look=partial(_fits, states), admit=partial(_admits, states)) as fetched:
            pieces = [parse_sequence(state) for state in fetched]
            if not pieces or len(pieces) < len(pages):
                return None
            recurrent = pieces[-1].recurrent
            if (recurrent is not None) != states.kind.has_snapshots or (recurrent and recurrent.position != n - 1):
                raise CorruptError("the recurrent part is not that of this position")
            positions = [np.arange(n, dtype="<i4")] * len(pieces[0].sections)
            assembly = Assembly(
                pieces[0], positions, recurrent=recurrent.data if recurrent else b"", streams=states.streams
            )
            target = bytearray(assembly.size)
            cut = [piece.cut(page.start, min(page.end, n)) for page, piece in zip(pages, pieces, strict=True)]
            assembly.write(memoryview(target), cut)
            return target

    # -- cutting ------------------------------------------------------------------------------------------------------

    def _save_pages(
        self, states: ModelStates, tokens: Tokens, state: npt.NDArray[np.uint8], *, tail: bool
    ) -> StateView | None:
        """Store the missing pages; the parsed state, None if not all of them could be stored."""
        engine, step = self._store.engine, states.page_tokens
        keys = page_keys(states.namespace.key, tokens, step)
        wanted = missing_ranges(engine, states.namespace.key, keys, tokens, step, tail=tail)
        if not wanted and tail:
            return None
        parsed = self._parsed(states, state)
        parents = [states.namespace.key, *keys]
        for start, end in wanted:
            with self._rows(states, parsed, tokens[:end], start) as pieces:
                if not pieces:
                    # rows that have left a sliding window
                    engine.counters.count("dropped:incomplete")
                    return None
                buffer = self._page(pieces)
            if buffer is None:
                engine.counters.count("dropped:queue_full")
                return None
            self._submit(states, parents[start // step], start, tokens[start:end], buffer)
        return parsed

    @contextmanager
    def _rows(
        self, states: ModelStates, parsed: StateView, tokens: Tokens, start: int
    ) -> Iterator[Sequence[StateView]]:
        """All rows of the page from `start` to the end of `tokens`; none if some are neither there nor stored."""
        end = len(tokens)
        if parsed.holds(start, end):
            yield [parsed.cut(start, end)]
            return
        # the shorter page that was stored at the end of an earlier prompt has the rows that have left the window since
        path = self._path(states, tokens)
        n = path.n_tokens
        if not start < n < end or path.pages[-1].start != start or not parsed.holds(n, end):
            yield []
            return
        with self._store.engine.fetching(
            path.pages[-1:], look=partial(_fits, states), admit=partial(_admits, states)
        ) as fetched:
            yield [piece for state in fetched for piece in (parse_sequence(state).cut(start, n), parsed.cut(n, end))]

    def _page(self, pieces: Sequence[StateView]) -> PooledBuffer | None:
        """The state of a page, in a buffer of the queue; None if there is none."""
        columns = zip(*(piece.positions for piece in pieces), strict=True)
        positions = [np.concatenate(column) for column in columns]
        # a page of recurrent memory holds only tokens
        assembly = Assembly(pieces[0], positions) if positions else None
        buffer = self._store.engine.acquire(assembly.size if assembly is not None else 0)
        if buffer is not None and assembly is not None:
            with released_on_error(buffer):
                assembly.write(buffer.view, pieces)
        return buffer

    def _save_snapshot(self, states: ModelStates, tokens: Tokens, state: npt.NDArray[np.uint8]) -> None:
        """Store the state after all tokens, and the pages before it."""
        engine, step, n = self._store.engine, states.page_tokens, len(tokens)
        keys = page_keys(states.namespace.key, tokens, step)
        start = len(keys) * step
        parent = keys[-1] if keys else states.namespace.key
        if engine.needs_no_capture(page_key(parent, tokens[start:].tobytes(), SNAPSHOT)):
            return
        parsed = self._save_pages(states, tokens, state, tail=False)
        if parsed is None:
            return
        recurrent = parsed.recurrent
        if recurrent is None or recurrent.position != n - 1:
            raise CorruptError("the recurrent part is not that of the end of the prompt")
        rows = parsed.cut(start, n)
        assembly = Assembly(rows, rows.positions, recurrent=recurrent.data)
        buffer = engine.acquire(assembly.size)
        if buffer is None:
            engine.counters.count("dropped:queue_full")
            return
        with released_on_error(buffer):
            assembly.write(buffer.view, [rows])
        self._submit(states, parent, start, tokens[start:], buffer, SNAPSHOT)
        parameters = self._store.parameters
        if engine.thin(states.namespace.key, tokens, step, parameters.max_snapshots, parameters.snapshot_interval):
            engine.nudge()

    def _parsed(self, states: ModelStates, state: npt.NDArray[np.uint8]) -> StateView:
        parsed, streams = parse_state(np.ascontiguousarray(state, np.uint8).data)
        if streams != states.streams or shape_of(parsed) != states.shape:
            raise CorruptError("the state is not one of this model")
        return parsed

    def _submit(
        self,
        states: ModelStates,
        parent: bytes,
        start: int,
        tokens: Tokens,
        buffer: PooledBuffer,
        form: int = PAGE,
    ) -> None:
        engine, namespace = self._store.engine, states.namespace
        pending = PendingPage.of(namespace.key, namespace.canonical, parent, start, tokens.tobytes(), buffer, form=form)
        is_wanted = engine.submit(pending)
        engine.counters.count("pages_captured" if form == PAGE else "snapshots_captured", is_wanted)


def _fits(states: ModelStates, page: Page, state: memoryview) -> bool:
    """Whether the state of a page, or a snapshot, has the shape of this model's states."""
    if page.form == PAGE and states.shape.recurrent is None:
        return states.shape.fits(state, page.start, page.n_tokens)
    try:
        parsed = parse_sequence(state)
    except CorruptError:
        return False
    found, own = shape_of(parsed), states.shape
    if page.form == PAGE:
        return found.sections == own.sections and parsed.recurrent is None and parsed.holds(page.start, page.end)
    has_rows = page.n_tokens == 0 or not own.sections or found.sections == own.sections
    return found.recurrent == own.recurrent and has_rows and parsed.holds(page.start, page.end)


def _admits(states: ModelStates, page: Page) -> bool:
    """Whether a page claims no more bytes than it can have."""
    recurrent = states.recurrent_bytes + RECURRENT_SLACK if page.form == SNAPSHOT else 0
    return page.raw_bytes <= states.shape.size(page.n_tokens) + recurrent
