"""Pages of slots: cuts a slot's state into those that are missing, and joins stored ones to a file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from prefixstore.buffers import BufferPool, PooledBuffer, released_on_error
from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page
from prefixstore.engine.missing import missing_ranges
from prefixstore.engine.pending import PendingPage
from prefixstore.format.keys import PAGE, Tokens, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.llama.compute_rate import ComputeRate
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.view import Assembly, StateView
from prefixstore.server.slot_file import SlotFile, SlotLayout, slot_assembly

__all__ = ["Joined", "Place", "SlotPages", "joined_page", "submit_page"]

log = logging.getLogger("prefixstore")


@dataclass(frozen=True)
class Place:
    """Where the pages of a tenant are.

    Attributes
    ----------
    namespace
        Their namespace.
    page_tokens
        Their length.
    """

    namespace: Namespace
    page_tokens: int

    def of_ends(self) -> Place:
        """Where snapshots are, whose pages have no rows of the window."""
        return Place(Namespace({**self.namespace.settings, "window": "at the end"}), self.page_tokens)


@dataclass(frozen=True)
class Joined:
    """A slot's file that was joined from pages.

    Attributes
    ----------
    data
        The file of the first `n_good` tokens; None if there is none.
    n_good
        How many tokens the pages hold before the first one that could not be used.
    """

    data: memoryview | None
    n_good: int


class SlotPages:
    """Stores slots whose state can be cut anywhere.

    Parameters
    ----------
    engine
        Of the store.
    layout
        Of the server's own slot files.
    rate
        How fast the server computes.
    seen
        How many rows of a sliding window a slot is given; None for all.
    """

    def __init__(self, engine: Engine, layout: SlotLayout, rate: ComputeRate, seen: int | None = None) -> None:
        self._engine = engine
        self._layout = layout
        self._rate = rate
        self._seen = seen
        # one token, for the layout of the rows
        self._like = parse_sequence(layout.shape.example(0))

    # -- out of the store ---------------------------------------------------------------------------------------------

    def find(self, place: Place, prompt: Tokens, limit: int) -> tuple[int, tuple[Page, ...]]:
        """How many of the first `limit` tokens of a prompt are stored, and the pages that hold them.

        Raises
        ------
        StorageError
            If the location cannot be asked.
        """
        path = self._engine.match(place.namespace.key, prompt, place.page_tokens)
        n = min(path.n_tokens, limit)
        if self._seen is not None and n < self._seen:
            # the server would compute it all again
            n = 0
        return n, path.pages[: -(-n // place.page_tokens)]

    @contextmanager
    def joined(
        self, place: Place, prompt: Tokens, pages: Sequence[Page], slot: int, buffers: BufferPool
    ) -> Iterator[Joined]:
        """The slot's file of a prompt, which its pages hold. It is valid until the block is left.

        If a page is damaged or late, it is the file of the pages before that one; with a sliding window there is none.

        Raises
        ------
        StorageError
            If the location cannot be read.
        """
        n = len(prompt)
        window_from = 0 if self._seen is None else n - self._seen
        firsts = (0, window_from)[: len(self._like.sections)]
        positions = [np.arange(first, n, dtype="<i4") for first in firsts]
        assembly = slot_assembly(self._layout, self._like, positions, prompt, slot)
        buffer = buffers.acquire(assembly.size)
        assert buffer is not None  # this pool is unbounded
        try:
            assembly.open(buffer.view)
            n_good = self._fill(assembly, pages, n, window_from)
            if n_good >= n:
                assembly.close()
                yield Joined(buffer.view, n)
            elif n_good and self._seen is None:
                with self._shorter(assembly, prompt[:n_good], slot, buffers) as view:
                    yield Joined(view, n_good)
            else:
                yield Joined(None, n_good)
        finally:
            buffer.release()

    @contextmanager
    def _shorter(self, assembly: Assembly, prompt: Tokens, slot: int, buffers: BufferPool) -> Iterator[memoryview]:
        """The file of a shorter prompt, from what was joined for a longer one: reading it again could be late again."""
        positions = [np.arange(len(prompt), dtype="<i4")] * len(self._like.sections)
        shorter = slot_assembly(self._layout, self._like, positions, prompt, slot)
        buffer = buffers.acquire(shorter.size)
        assert buffer is not None  # this pool is unbounded
        try:
            shorter.write(buffer.view, [assembly.added().cut(0, len(prompt))])
            yield buffer.view
        finally:
            buffer.release()

    def _fill(self, assembly: Assembly, pages: Sequence[Page], n: int, window_from: int) -> int:
        """Add pages; how many tokens are there, and verified."""
        deadline = self._rate.deadline(pages, 0, n)
        with self._engine.fetching(
            pages, streamed=True, look=self._fits, admit=self._admits, deadline=deadline
        ) as states:
            for page, state in zip(pages, states, strict=False):
                # some are verified while they are copied: the file is complete only if all of them are good
                assembly.add(parse_sequence(state).cut(page.start, min(page.end, n), window_from=window_from))
            n_good = states.verified()
        return min(pages[n_good - 1].end, n) if n_good else 0

    def _admits(self, page: Page) -> bool:
        size = self._layout.shape.size(page.n_tokens)
        if page.raw_bytes > size:
            self._engine.condemn(page, self._layout.shape.fits, size)
        return page.raw_bytes <= size

    def _fits(self, page: Page, state: memoryview) -> bool:
        fits = self._layout.shape.fits(state, page.start, page.n_tokens)
        if not fits:
            self._engine.condemn(page, self._layout.shape.fits)
        return fits

    # -- into the store -----------------------------------------------------------------------------------------------

    def store(self, place: Place, file: SlotFile) -> tuple[int, int, str | None]:
        """Submit the pages of a slot that are not stored; how many, their bytes, and why not more.

        Raises
        ------
        StorageError
            If the location cannot be asked.
        """
        tokens, view, step, key = file.tokens, file.view, place.page_tokens, place.namespace.key
        if not view.holds(0, len(tokens)) or any(len(found) != len(tokens) for found in view.positions):
            return 0, 0, "incomplete"
        # so that the index has what is stored
        self._engine.match(key, tokens, step)
        keys = page_keys(key, tokens, step)
        n_new = n_bytes = 0
        for start, end in missing_ranges(self._engine, key, keys, tokens, step, tail=True):
            buffer = joined_page(self._engine, view.cut(start, end))
            if buffer is None:
                return n_new, n_bytes, "queue_full"
            size = len(buffer.view)
            parent = keys[start // step - 1] if start else key
            if submit_page(self._engine, self._rate, place, parent, tokens, (start, end), buffer):
                n_new, n_bytes = n_new + 1, n_bytes + size
        return n_new, n_bytes, None


def submit_page(
    engine: Engine,
    rate: ComputeRate,
    place: Place,
    parent: bytes,
    tokens: Tokens,
    span: tuple[int, int],
    buffer: PooledBuffer,
    form: int = PAGE,
) -> bool:
    """Have the page of a span of tokens written, after `parent`; whether it is wanted. The buffer is handed over."""
    start, end = span
    with released_on_error(buffer):
        # losing a snapshot costs computing what it resumes
        n_tokens = end - start if form == PAGE else end
        page = PendingPage.of(
            place.namespace.key,
            place.namespace.canonical,
            parent,
            start,
            tokens[start:end].tobytes(),
            buffer,
            rate.compute_us(n_tokens),
            form,
        )
    is_wanted = engine.submit(page)
    engine.counters.count("pages_captured" if form == PAGE else "snapshots_captured", is_wanted)
    return is_wanted


def joined_page(engine: Engine, piece: StateView, recurrent: memoryview | bytes = b"") -> PooledBuffer | None:
    """A state in a buffer of the queue; None if the queue has no room for it."""
    assembly = Assembly(piece, piece.positions, recurrent=recurrent)
    buffer = engine.acquire(assembly.size, wait=True)
    if buffer is not None:
        with released_on_error(buffer):
            assembly.write(buffer.view, [piece])
    return buffer
