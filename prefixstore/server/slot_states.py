"""How the slots of one server are stored: what of a slot file goes into pages, what into snapshots, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from prefixstore.engine.compute_rate import ComputeRate
from prefixstore.format.keys import NO_TOKENS, SNAPSHOT, Tokens
from prefixstore.format.record import Buffer
from prefixstore.llama.capture import Capture, Captured, Place
from prefixstore.llama.restore import Found, Frame, Positions, Restore
from prefixstore.llama.state.form import HIDDEN_ROWS, Form
from prefixstore.llama.state.shape import StateShape
from prefixstore.llama.state.view import Assembly
from prefixstore.server.namespace import ServerIdentity, has_window
from prefixstore.server.slot_file import SlotFile, slot_assembly
from prefixstore.server.slot_files import SlotDirectory
from prefixstore.store import PrefixStore

__all__ = ["SlotStates", "Way"]

# of tenants, whose number nothing bounds
MOST_PLACES = 1024


@dataclass(frozen=True)
class Way:
    """One way in which the slots of a server are stored.

    Attributes
    ----------
    form
        What goes into pages, and what into snapshots.
    restore
        Joins them.
    place
        Where they are, for the place of a tenant.
    """

    form: Form
    restore: Restore
    place: Callable[[Place], Place] = lambda place: place


class SlotStates:
    """How the slots of a server are stored.

    Parameters
    ----------
    file
        Any slot file of the server, with tokens.
    identity
        What fixes the namespace.
    store
        Where they are stored.
    directory
        Where files are made.
    rate
        How fast the server computes.

    Attributes
    ----------
    layout
        Of its slot files.
    ways
        How slots are found; they are written in the last way.
    reason
        Why nothing can be stored: ``"window"``, if the length of the sliding window is not known; None if it can.
    place
        Where the pages of a tenant are.
    """

    def __init__(
        self,
        file: SlotFile,
        identity: ServerIdentity,
        store: PrefixStore,
        directory: SlotDirectory,
        rate: ComputeRate,
    ) -> None:
        assert file.layout is not None, "a file with tokens has a layout"
        self.layout = file.layout
        self.reason: str | None = None
        self._identity, self._store, self._rate = identity, store, rate
        self._directory = directory
        self.ways = self._ways_of(file)
        self._names: dict[str, str | None] = {}
        self.place = lru_cache(MOST_PLACES)(self._place)

    def _ways_of(self, file: SlotFile) -> tuple[Way, ...]:
        identity, engine, rate, buffers = self._identity, self._store.engine, self._rate, self._directory
        shape = self.layout.shape
        if file.view is None or shape is None:
            return (Way(Form(), Restore(engine, Form(), rate, buffers)),)
        window = identity.window if has_window(self.layout, identity.window) else None
        if shape.recurrent is not None:
            form = Form.ends(file.view, window)
            return (Way(form, Restore(engine, form, rate, buffers, hides=True)),)
        rows = Form.rows(shape)
        if window is None or identity.swa_full:
            # with --swa-full, the server would step back to where rows of the window are missing: all or none
            if identity.is_named and len(shape.sections) > 1:
                self.reason = "window"
            return (Way(rows, Restore(engine, rows, rate, buffers)),)
        # pages of a Llama have all rows of the window; what the server computes has only those that are still seen
        ends = Form.ends(file.view, window)
        seen = Restore(engine, rows, rate, buffers, seen=window.size + HIDDEN_ROWS)
        return (Way(rows, seen), Way(ends, Restore(engine, ends, rate, buffers, hides=True), Place.of_ends))

    def _place(self, salt: str | None) -> Place:
        page_tokens = self._identity.page_tokens(self.layout, self._store.page_tokens)
        place = Place(self._identity.namespace(self.layout, page_tokens=page_tokens, salt=salt), page_tokens)
        self._names = self._names or self._identity.names(place.namespace)
        for way in self.ways:
            self._store.engine.describe(way.place(place).namespace, self._names)
        return place

    @property
    def can_cut(self) -> bool:
        """Whether a slot can be used up to any of its tokens."""
        return not any(way.form.has_snapshots for way in self.ways)

    @property
    def shortest(self) -> int:
        """How many tokens a slot must hold for it to be stored."""
        form = self.ways[-1].form
        window = form.window if form.shape is not None and form.shape.recurrent is None else None
        # of a window that has not been left, the server would compute all again
        return max(self._store.min_tokens, window.size + HIDDEN_ROWS if window is not None else 1)

    def find(self, prompt: Tokens, limit: int, salt: str | None) -> tuple[Found, Way]:
        """The most that is stored of a prompt, and in which way."""
        best = Found(), self.ways[-1]
        for way in self.ways:
            # the server steps back by one token only if it finds rows there
            at_most = min(limit, len(prompt) - 1) if way.form.has_snapshots and way.form.window is None else limit
            found = way.restore.find(way.place(self.place(salt)), prompt, at_most)
            if found.n_tokens >= best[0].n_tokens:
                best = found, way
        return best

    def shared(self, prompt: Tokens, salt: str | None) -> int:
        """How many tokens a prompt has in common with a stored one, whether they can be restored or not."""
        place = self.ways[-1].place(self.place(salt))
        return self._store.engine.match(place.namespace.key, prompt, place.page_tokens).n_tokens

    def deepest(self, salt: str | None) -> Tokens:
        """The longest stored prompt that fits into a slot; empty if there is none."""
        # what can be cut ends at any page, and everything else at a snapshot
        ends = {way.place(self.place(salt)).namespace.key: way.form.has_snapshots for way in self.ways}
        pages = [
            page
            for page in self._store.engine.pages()
            if page.end < self._identity.props.n_ctx
            and page.namespace in ends
            and (page.form == SNAPSHOT or not ends[page.namespace])
        ]
        if not pages:
            return NO_TOKENS
        deepest = max(pages, key=lambda page: (page.end, page.last_used))
        return np.frombuffer(b"".join(page.tokens for page in self._store.engine.path(deepest)), "<i4")

    def frame(self, prompt: Tokens, slot: int) -> Frame:
        """Makes files of this slot, of the first tokens of a prompt."""

        def frame(shape: StateShape, positions: Positions, n_tokens: int, recurrent: Buffer) -> Assembly:
            return slot_assembly(self.layout, shape, positions, prompt[:n_tokens], slot, recurrent)

        return frame

    def store(self, file: SlotFile, salt: str | None) -> Captured:
        """Store what the store lacks of a slot."""
        way, n = self.ways[-1], len(file.tokens)
        if n < self.shortest:
            return Captured(reason="short")
        if file.view is not None and not way.form.is_complete(file.view, n):
            return Captured(reason="incomplete")
        place, parameters = way.place(self.place(salt)), self._store.parameters
        to = Capture(self._store.engine, place, way.form, self._rate.compute_us, parameters)
        return to.store(file.tokens, file.view, file.memory)
