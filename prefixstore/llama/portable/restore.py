"""Joins stored pages, or takes a stored whole state, to a ``LlamaState`` that ``Llama.load_state`` accepts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LlamaState

from prefixstore.engine.engine import Engine
from prefixstore.engine.fetch import Deadline, Shifted
from prefixstore.engine.index import Page, Path
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import Tokens
from prefixstore.format.whole_state import WholeState
from prefixstore.last_prompt import PromptMeter
from prefixstore.llama.compute_rate import ComputeRate
from prefixstore.llama.portable.lookup import WholeMatch, match_whole
from prefixstore.llama.portable.target import PortableTarget
from prefixstore.llama.state.parse import parse_context, parse_sequence
from prefixstore.llama.state.view import Assembly, assemble

__all__ = ["StateBuilder"]

log = logging.getLogger("prefixstore")

# the logits of restored tokens are not stored: one zero stands for all the rows that ``load_state`` fills
NO_SCORES = np.zeros((1, 1), np.single)
# more than a stored whole state has beside its state and its scores
WHOLE_HEAD = 1 << 12
# padding after a state's tokens; matches no prompt
NO_TOKEN = -1


class NoState(Enum):
    """Why no state is built."""

    LIVE = "live"
    """The context holds as much already."""
    NOT_FOUND = "not_found"
    SHORT = "short"
    UNREADABLE = "unreadable"


class StateBuilder:
    """Looks prompts up, and builds states from what is stored.

    Parameters
    ----------
    engine
        Of the store.
    min_tokens
        Shorter prefixes are computed.
    max_delay
        What a restore of pages may take beyond computing; None for no limit.
    """

    def __init__(self, engine: Engine, min_tokens: int, max_delay: float | None = None) -> None:
        self._engine = engine
        self._min_tokens = min_tokens
        # nothing is evaluated here: it is only known what the pages took when they were captured
        self._rate = ComputeRate(max_delay)

    def build(
        self, target: PortableTarget, tokens: Tokens, live: int, seed: int, meter: PromptMeter
    ) -> LlamaState | None:
        """The state of the longest stored prefix of a prompt. Raises `StorageError`.

        Parameters
        ----------
        target
            Where states are looked up.
        tokens
            The part of the prompt that may be restored.
        live
            How much of it the context holds; a state that holds no more is not built.
        seed
            What ``load_state`` sets the seed of the ``Llama`` to.
        meter
            Called with the reason if there is none.
        """
        if target.n_ctx is not None:
            # the next token needs a place
            tokens = tokens[: target.n_ctx - 1]
        path = Path((), 0)
        if target.pages is not None:
            path = self._engine.match(target.pages.key, tokens, target.page_tokens)
        match = match_whole(self._engine, target.whole.key, tokens)
        n = max(path.n_tokens, match.n_shared)
        if n < self._min_tokens:
            self._miss(target, NoState.SHORT if n else NoState.NOT_FOUND, len(tokens), meter)
            return None
        built: LlamaState | NoState = NoState.NOT_FOUND
        if match.n_shared > path.n_tokens:
            built = self._from_whole(target, tokens, match, live, seed)
        if isinstance(built, NoState) and built is not NoState.LIVE and path.n_tokens >= self._min_tokens:
            built = self._from_pages(target, tokens, path, live, seed)
        if not isinstance(built, NoState):
            return built
        if built is NoState.LIVE:
            self._engine.counters.count("live_hits", namespace=target.key)
        else:
            self._miss(target, built, len(tokens), meter)
        return None

    def _miss(self, target: PortableTarget, reason: NoState, n_tokens: int, meter: PromptMeter) -> None:
        meter.miss = reason.value
        self._engine.touch(target.key, (), n_tokens)
        self._engine.counters.count(f"miss:{reason.value}", namespace=target.key)

    # -- pages --------------------------------------------------------------------------------------------------------

    def _from_pages(
        self, target: PortableTarget, tokens: Tokens, path: Path, live: int, seed: int
    ) -> LlamaState | NoState:
        """The state of as many pages as can be read."""
        assert target.pages is not None
        n = path.n_tokens
        pages = path.pages[: -(-n // target.page_tokens)]
        if n <= live:
            self._engine.touch(target.pages.key, pages, len(tokens))
            return NoState.LIVE
        # those that the context holds are joined, too, and are no gain
        held = sum(page.end <= live for page in pages)
        deadline = self._rate.deadline(pages[held:], live, n)
        data, used = self._join(target, pages, n, Shifted(deadline, -held) if deadline is not None else None)
        if len(used) < len(pages):
            # one is damaged or gone, or has not come in time: those before it make a shorter state
            n = used[-1].end if used else 0
            if n <= max(live, self._min_tokens - 1):
                return NoState.UNREADABLE
            data = assemble([parse_context(data).cut(0, n)], architecture=target.architecture)
        self._engine.touch(target.pages.key, used, len(tokens))
        return _state(tokens[:n], data, NO_SCORES, target.n_ctx or n, seed)

    def _join(
        self, target: PortableTarget, pages: Sequence[Page], n: int, deadline: Deadline | None
    ) -> tuple[bytearray, Sequence[Page]]:
        """The state of `n` tokens, and the pages it is made of; if these are not all, only their rows are filled."""
        assembly, data = None, bytearray()
        used = 0
        with self._engine.fetching(pages, admit=partial(_admits, target), deadline=deadline) as states:
            for page, state in zip(pages, states, strict=False):
                try:
                    if target.memory is not None and not target.memory.fits(state, page.start, page.n_tokens):
                        raise CorruptError("its shape does not match this context's pages")
                    parsed = parse_sequence(state)
                    if not parsed.holds(page.start, page.end):
                        raise CorruptError("its cells are not those of its tokens")
                    if assembly is None:
                        positions = [np.arange(n, dtype=np.int32)] * len(parsed.sections)
                        assembly = Assembly(parsed, positions, architecture=target.architecture)
                        data = bytearray(assembly.size)
                        assembly.open(memoryview(data))
                    assembly.add(parsed.cut(page.start, min(page.end, n)))
                except CorruptError as error:
                    log.warning("page %s cannot be joined: %s", page.key.hex(), error)
                    self._engine.counters.count("unreadable:shape")
                    break
                used += 1
        if assembly is not None and used == len(pages):
            assembly.close()
        return data, pages[:used]

    # -- whole states -------------------------------------------------------------------------------------------------

    def _from_whole(
        self, target: PortableTarget, tokens: Tokens, match: WholeMatch, live: int, seed: int
    ) -> LlamaState | NoState:
        """A part of the nearest state, or all of one that the prompt begins with."""
        candidates = [(page, page.end) for page in match.contained[-1:]]
        if match.nearest not in match.contained and match.nearest is not None and target.is_attention:
            candidates.insert(0, (match.nearest, match.n_shared))
        reason = NoState.NOT_FOUND
        for page, n in candidates:
            if n <= live:
                self._engine.touch(target.whole.key, (page,), len(tokens))
                return NoState.LIVE
            if n < self._min_tokens:
                return NoState.SHORT
            state = self._read_whole(target, tokens[:n], page, seed)
            if not isinstance(state, NoState):
                self._engine.touch(target.whole.key, (page,), len(tokens))
                return state
            reason = state
        return reason

    def _read_whole(self, target: PortableTarget, tokens: Tokens, page: Page, seed: int) -> LlamaState | NoState:
        with self._engine.fetching((page,), admit=partial(_admits, target)) as states:
            for stored in states:
                try:
                    whole = WholeState.read(stored)
                    data = _cut(target, whole, len(tokens), page.end)
                    scores = _scores(target, whole, len(tokens))
                except (CorruptError, IncompatibleError) as error:
                    log.warning("state %s cannot be used: %s", page.key.hex(), error)
                    self._engine.counters.count("unreadable:shape")
                    return NoState.UNREADABLE
                # a state that cannot be cut there does not help this prompt
                return _state(tokens, data, scores, target.n_ctx or whole.n_ctx, seed) if data else NoState.NOT_FOUND
        return NoState.UNREADABLE


def _admits(target: PortableTarget, page: Page) -> bool:
    """Whether a page, or a whole state, has a size that it can have; of a context that is not known, any size can."""
    if target.memory is None:
        return True
    if target.pages is not None and page.namespace == target.pages.key:
        return page.raw_bytes <= target.memory.largest(page.n_tokens)
    scores = page.end * target.n_vocab * np.dtype(np.single).itemsize
    return page.raw_bytes <= target.memory.largest(page.end) + scores + WHOLE_HEAD


def _cut(target: PortableTarget, whole: WholeState, n: int, end: int) -> bytearray | None:
    """The first `n` tokens of a state that covers `end`; None if it cannot be cut there."""
    if whole.n_tokens != end:
        raise CorruptError(f"it covers {whole.n_tokens} tokens, and its key {end}")
    try:
        parsed = parse_context(whole.state)
    except CorruptError:
        if not _is_accepted(target, whole):
            raise
        # a state of unknown layout cannot be cut
        return bytearray(whole.state) if n == end else None
    if target.architecture not in (None, parsed.architecture):
        raise CorruptError(f"it is the state of a model of the architecture {parsed.architecture!r}")
    if target.memory is not None and not target.memory.fits_whole(whole.state, parsed, end):
        raise CorruptError("its shape does not match this context's states")
    if parsed.recurrent is not None and parsed.recurrent.position != end - 1:
        raise CorruptError("its recurrent part is that of another position")
    if parsed.recurrent is not None and n < end:
        return None
    # where there is no space for more, and where there are no more rows: what the next token needs
    window_from = target.window_from(n) if target.overwrites_window or not parsed.holds(0, n) else 0
    if not parsed.holds(0, n, window_from=window_from):
        # outside a completion the namespace= label identifies the model, so the caller vouches for it
        return bytearray(whole.state) if n == end and target.architecture is None else None
    recurrent = parsed.recurrent.data if parsed.recurrent is not None else b""
    piece = parsed.cut(0, n, window_from=window_from)
    return assemble([piece], architecture=parsed.architecture, recurrent=recurrent)


def _is_accepted(target: PortableTarget, whole: WholeState) -> bool:
    """Whether llama.cpp accepts a state of unknown layout; a caller outside a completion has to find out."""
    if target.memory is None:
        return True
    # if the layout of this context's states is known, this one is forged
    is_known = target.memory.shape is not None or not target.is_attention
    return not is_known and target.memory.accepts_whole(whole.state, whole.n_tokens)


def _scores(target: PortableTarget, whole: WholeState, n: int) -> npt.NDArray[np.single]:
    if not target.n_vocab:
        return NO_SCORES
    if whole.scores is None or whole.scores.shape[1] != target.n_vocab:
        raise CorruptError("its scores are not those of this vocabulary")
    scores: npt.NDArray[np.single] = whole.scores[:n].copy()
    return scores


def _state(tokens: Tokens, data: bytearray, scores: npt.NDArray[np.single], n_ctx: int, seed: int) -> LlamaState:
    input_ids = np.full(max(n_ctx, len(tokens)), NO_TOKEN, np.intc)
    input_ids[: len(tokens)] = tokens
    # load_state copies the state from any buffer; as bytes it would be copied once more
    return LlamaState(input_ids, scores, len(tokens), cast("bytes", data), len(data), seed)
