"""Stored pages, or a stored whole state, to a ``LlamaState`` that ``Llama.load_state`` accepts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LlamaState

from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page, Path
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import Tokens
from prefixstore.llama.parse import parse_context, parse_sequence
from prefixstore.llama.portable_target import Place
from prefixstore.llama.state import Assembly, assemble
from prefixstore.llama.whole_state import Found, WholeState, find
from prefixstore.stats import Counters

__all__ = ["StateBuilder"]

log = logging.getLogger("prefixstore")

# the logits of restored tokens are not stored: one zero stands for all the rows that ``load_state`` fills
NO_SCORES = np.zeros((1, 1), np.single)
# why nothing is built, beside the reasons of a miss: the context holds as much
LIVE = "live"
# behind the tokens of a state: no prompt goes on with it
NO_TOKEN = -1


class StateBuilder:
    """Looks prompts up, and makes states of what it finds.

    Parameters
    ----------
    engine, counters
        Of the store.
    min_tokens
        Shorter prefixes are computed.
    """

    def __init__(self, engine: Engine, counters: Counters, min_tokens: int) -> None:
        self._engine = engine
        self._counters = counters
        self._min_tokens = min_tokens

    def build(self, place: Place, tokens: Tokens, live: int, seed: int) -> LlamaState | None:
        """The state of as much of a prompt as is stored.

        Parameters
        ----------
        place
            Where to look.
        tokens
            As much of the prompt as is wanted.
        live
            How much of it the context holds; a state that holds no more is not built.
        seed
            What ``load_state`` sets the seed of the ``Llama`` to.
        """
        tokens = tokens[: place.n_ctx]
        path = Path((), 0)
        if place.pages is not None:
            path = self._engine.match(place.pages.key, tokens, place.page_tokens)
        found = find(self._engine, place.whole.key, tokens)
        n = max(path.n_tokens, found.n_shared)
        if n < self._min_tokens:
            self._miss(place, "short" if n else "not_found")
            return None
        outcome: LlamaState | str = "not_found"
        if found.n_shared > path.n_tokens:
            outcome = self._from_whole(place, tokens, found, live, seed)
        if isinstance(outcome, str) and outcome != LIVE and path.n_tokens >= self._min_tokens:
            outcome = self._from_pages(place, tokens, path, live, seed)
        if isinstance(outcome, LlamaState):
            return outcome
        if outcome == LIVE:
            self._counters.count("live_hits")
        else:
            self._miss(place, outcome)
        return None

    def _miss(self, place: Place, reason: str) -> None:
        self._engine.touch((place.pages or place.whole).key, ())
        self._counters.count(f"miss:{reason}")

    # -- pages --------------------------------------------------------------------------------------------------------

    def _from_pages(self, place: Place, tokens: Tokens, path: Path, live: int, seed: int) -> LlamaState | str:
        """The state of as many pages as can be had, or why there is none."""
        assert place.pages is not None
        n = path.n_tokens
        pages = path.pages[: -(-n // place.page_tokens)]
        if n <= live:
            self._engine.touch(place.pages.key, pages)
            return LIVE
        data, used = self._join(place, pages, n)
        if len(used) < len(pages):
            # one is damaged or gone: what is before it makes a shorter state
            n = used[-1].end if used else 0
            if n <= max(live, self._min_tokens - 1):
                return "unreadable"
            return self._from_pages(place, tokens, Path(tuple(used), n), live, seed)
        self._engine.touch(place.pages.key, used)
        return _state(tokens[:n], data, NO_SCORES, place.n_ctx or n, seed)

    def _join(self, place: Place, pages: Sequence[Page], n: int) -> tuple[bytearray, Sequence[Page]]:
        """The state of `n` tokens, and the pages it is made of; if these are not all, it is not complete."""
        assembly, data = None, bytearray()
        used = 0
        with self._engine.fetching(pages) as states:
            for page, state in zip(pages, states, strict=False):
                try:
                    if place.memory is not None and not place.memory.fits(state, page.start, page.n_tokens):
                        raise CorruptError("it has another shape than this context's pages")
                    blob = parse_sequence(state)
                    if not blob.holds(page.start, page.end):
                        raise CorruptError("it holds other cells than its tokens")
                    if assembly is None:
                        positions = [np.arange(n, dtype=np.int32)] * len(blob.sections)
                        assembly = Assembly(blob, positions, architecture=place.architecture)
                        data = bytearray(assembly.size)
                        assembly.open(memoryview(data))
                    assembly.add(blob.cut(page.start, min(page.end, n)))
                except CorruptError as error:
                    log.warning("page %s cannot be joined: %s", page.key.hex(), error)
                    self._counters.count("unreadable:shape")
                    break
                used += 1
        if assembly is not None and used == len(pages):
            assembly.close()
        return data, pages[:used]

    # -- whole states -------------------------------------------------------------------------------------------------

    def _from_whole(self, place: Place, tokens: Tokens, found: Found, live: int, seed: int) -> LlamaState | str:
        """A part of the nearest state, or all of one that the prompt begins with, or why there is none."""
        candidates = [(page, page.end) for page in found.contained[-1:]]
        if found.nearest not in found.contained and found.nearest is not None and place.is_attention:
            candidates.insert(0, (found.nearest, found.n_shared))
        reason = "not_found"
        for page, n in candidates:
            if n <= live:
                self._engine.touch(place.whole.key, (page,))
                return LIVE
            if n < self._min_tokens:
                return "short"
            state = self._read_whole(place, tokens[:n], page, seed)
            if isinstance(state, LlamaState):
                self._engine.touch(place.whole.key, (page,))
                return state
            reason = state
        return reason

    def _read_whole(self, place: Place, tokens: Tokens, page: Page, seed: int) -> LlamaState | str:
        with self._engine.fetching((page,)) as states:
            for stored in states:
                try:
                    whole = WholeState.read(stored)
                    data = _cut(place, whole, len(tokens), page.end)
                    scores = _scores(place, whole, len(tokens))
                except (CorruptError, IncompatibleError) as error:
                    log.warning("state %s cannot be used: %s", page.key.hex(), error)
                    self._counters.count("unreadable:shape")
                    return "unreadable"
                # a state that cannot be cut there is of no use to this prompt
                return _state(tokens, data, scores, place.n_ctx or whole.n_ctx, seed) if data else "not_found"
        return "unreadable"


def _cut(place: Place, whole: WholeState, n: int, end: int) -> bytearray | None:
    """The first `n` tokens of a state that covers `end`; None if it cannot be cut there."""
    if whole.n_tokens != end:
        raise CorruptError(f"it covers {whole.n_tokens} tokens, its key {end}")
    try:
        blob = parse_context(whole.state)
    except CorruptError:
        if not _is_taken(place, whole):
            raise
        # nobody knows how to cut it
        return bytearray(whole.state) if n == end else None
    if place.architecture not in (None, blob.architecture):
        raise CorruptError(f"it is the state of a model of the architecture {blob.architecture!r}")
    if place.memory is not None and not place.memory.fits_whole(whole.state, blob, end):
        raise CorruptError("it has another shape than this context's")
    if blob.recurrent is not None and blob.recurrent.position != end - 1:
        raise CorruptError("its recurrent part is that of another position")
    if blob.recurrent is not None and n < end:
        return None
    # where there is no room for more, and where more is not there: what the next token needs
    window_from = place.window_from(n) if place.forgets or not blob.holds(0, n) else 0
    if not blob.holds(0, n, window_from=window_from):
        # who asks outside a completion knows what the name of the store stands for
        return bytearray(whole.state) if n == end and place.architecture is None else None
    recurrent = blob.recurrent.data if blob.recurrent is not None else b""
    piece = blob.cut(0, n, window_from=window_from)
    return assemble([piece], architecture=blob.architecture, recurrent=recurrent)


def _is_taken(place: Place, whole: WholeState) -> bool:
    """Whether llama.cpp takes a state that is not understood; who asks outside a completion finds out."""
    if place.memory is None:
        return True
    # if others of this context are understood, this one is forged
    understood = place.memory.shape is not None or not place.is_attention
    return not understood and place.memory.takes_whole(whole.state, whole.n_tokens)


def _scores(place: Place, whole: WholeState, n: int) -> npt.NDArray[np.single]:
    if not place.n_vocab:
        return NO_SCORES
    if whole.scores is None or whole.scores.shape[1] != place.n_vocab:
        raise CorruptError("its scores are not those of this vocabulary")
    scores: npt.NDArray[np.single] = whole.scores[:n].copy()
    return scores


def _state(tokens: Tokens, data: bytearray, scores: npt.NDArray[np.single], n_ctx: int, seed: int) -> LlamaState:
    input_ids = np.full(max(n_ctx, len(tokens)), NO_TOKEN, np.intc)
    input_ids[: len(tokens)] = tokens
    # load_state copies it from any buffer; as bytes it would be copied once more
    return LlamaState(input_ids, scores, len(tokens), cast("bytes", data), len(data), seed)
