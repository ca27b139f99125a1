"""`SlotStore`: the slots of a llama-server in a store; pages from a slot's file, and a slot's file from pages."""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from prefixstore.buffers import BufferPool
from prefixstore.engine.engine import Engine
from prefixstore.errors import (
    InvalidParameterError,
    ServerError,
    ServerRefusedError,
)
from prefixstore.format.keys import SNAPSHOT, Tokens, TokenSequence, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.llama.compute_rate import ComputeRate
from prefixstore.opening import Locations
from prefixstore.server.client import LlamaServer
from prefixstore.server.namespace import ServerIdentity, kind_of_layout
from prefixstore.server.slot_directory import wrong_directory
from prefixstore.server.slot_file import SlotFile, SlotLayout
from prefixstore.server.slot_files import SlotFiles
from prefixstore.server.slot_pages import Place, SlotPages
from prefixstore.server.slot_results import Found, Restored, Stored
from prefixstore.server.slot_snapshots import HIDDEN_ROWS, SlotSnapshots, SlotWindows
from prefixstore.stats import Counters, Kind
from prefixstore.store import PrefixStore
from prefixstore.units import shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SlotCopy", "SlotStore"]

log = logging.getLogger("prefixstore")

NO_TOKENS: Tokens = np.empty(0, "<i4")
ANY_TOKEN = np.zeros(1, "<i4")
# if a page is damaged, those before it are tried, and so on
ATTEMPTS = 3
# of tenants, whose number nothing bounds
MOST_PLACES = 1024


class SlotStore:
    """The store of one llama-server. May be used from many threads, by one of them for each slot.

    Parameters
    ----------
    location
        As that of `PrefixStore`.
    server
        The server.
    slots_dir
        The directory that the server was started with as ``--slot-save-path``; best on tmpfs.
    identity
        What fixes the namespace.
    **store_options
        Parameters of `PrefixStore`: ``max_bytes``, ``codec``, ``page_tokens``, ...

    Attributes
    ----------
    store
        The store. Its `engine` is that of the slots.
    rate
        How fast the server computes; report that with ``rate.computed(n_tokens, seconds)``.
    reason
        Why nothing is stored of this server; None if something is. That of the identity, or ``"layout"`` (its states
        have an unknown layout), ``"window"`` (the length of its sliding window is not known).

    Raises
    ------
    InvalidParameterError
        If a parameter is not valid, or the server uses another directory.
    StorageError
        If the location cannot be opened.

    Notes
    -----
    A slot's file of this server tells what its states look like. So one is saved when the store is opened, or, if the
    server does not answer then, by `connect` or by the first `save` or `restore`. Until then `find` finds nothing.
    """

    def __init__(
        self,
        location: Locations,
        server: LlamaServer,
        slots_dir: str | os.PathLike[str],
        identity: ServerIdentity,
        **store_options: Any,
    ) -> None:
        self.server = server
        self.identity = identity
        self._files = SlotFiles(slots_dir)
        self.directory = self._files.directory
        if identity.slots_dir is not None and not identity.slots_dir.samefile(self.directory.path):
            # before the server writes files there that are never deleted
            raise wrong_directory(self.directory.path)
        self.reason = identity.reason
        self._connecting = threading.Lock()
        self._layout: SlotLayout | None = None
        self._pages: SlotPages | SlotSnapshots | SlotWindows | None = None
        self._places: dict[str | None, Place] = {}
        self._names: dict[str, str | None] = {}
        # files are built in memory and written with one call: a full tmpfs is then an error, not a signal
        self._buffers = BufferPool(limit=None)
        # the label has no effect here: the identity has the namespace
        self.store = PrefixStore(location, namespace="server", **store_options)
        self.rate = ComputeRate(self.store.parameters.max_delay)
        try:
            self.connect()
        except ServerError as error:
            log.info("the slots of %s are not known yet: %s", server.url, error)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"SlotStore({self.store.location!r}, {self.server!r})"

    def close(self) -> None:
        """Write what is queued, and release the location. A second call does nothing. Raises `StorageError`."""
        self.directory.remove_late()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self.store.engine

    @property
    def counters(self) -> Counters:
        """Its counters."""
        return self.store.engine.counters

    @property
    def is_connected(self) -> bool:
        """Whether the layout of the server's states is known."""
        return self._pages is not None or self.reason is not None

    @property
    def kind(self) -> Kind:
        """What is stored of the slots; unbound as long as the layout of the server's states is not known."""
        return Kind.UNBOUND if self._layout is None or self.reason is not None else kind_of_layout(self._layout)

    @property
    def can_cut(self) -> bool:
        """Whether a slot can be used up to any of its tokens."""
        return self._pages is None or isinstance(self._pages, SlotPages)

    def namespace(self, salt: str | None = None) -> Namespace | None:
        """The namespace of a tenant's pages; None as long as the layout of the server's states is not known."""
        place = self._place(salt)
        return place.namespace if place is not None else None

    # -- connecting ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Learn the layout of the server's states from one of its slots. A second call does nothing.

        If no slot holds anything, a free one evaluates two tokens for it, and is erased.

        Raises
        ------
        ServerError
            If the server cannot be asked, or if it has another layout than its arguments say.
        InvalidParameterError
            If the server uses another directory.
        StorageError
            If the slot's file cannot be read.
        """
        if self.is_connected:
            return
        with self._connecting:
            if not self.is_connected:
                self._learn(self._files.any_layout(self.server))

    def _learn(self, layout: SlotLayout | None) -> None:
        if layout is None:
            self.reason = "layout"
            return
        self.server.bytes_per_token = layout.shape.size(2) - layout.shape.size(1)
        self._layout = layout
        self._places.clear()
        self._pages = self._form(layout)

    def _form(self, layout: SlotLayout) -> SlotPages | SlotSnapshots | SlotWindows:
        """How slots of this server are stored."""
        identity, engine, rate = self.identity, self.engine, self.rate
        n_sections = len(layout.shape.sections)
        if layout.shape.recurrent is not None:
            if n_sections > 1:
                self.reason = "layout"
            return SlotSnapshots(engine, layout, rate)
        if n_sections < 2 or identity.swa_full:
            # with --swa-full, the server would step back to where rows of the window are missing: all or none
            return SlotPages(engine, layout, rate)
        if not identity.window:
            self.reason = "window"
            return SlotPages(engine, layout, rate)
        snapshots = SlotSnapshots(engine, layout, rate, identity.window)
        return SlotWindows(SlotPages(engine, layout, rate, identity.window + HIDDEN_ROWS), snapshots)

    def _place(self, salt: str | None) -> Place | None:
        layout = self._layout
        if layout is None or self.reason is not None:
            return None
        place = self._places.get(salt)
        if place is None:
            page_tokens = self.identity.page_tokens(layout, self.store.page_tokens)
            place = Place(self.identity.namespace(layout, page_tokens=page_tokens, salt=salt), page_tokens)
            if len(self._places) >= MOST_PLACES:
                # made again in a moment; threads may be looking into the old one
                self._places = {}
            self._places[salt] = place
            self._names = self._names or self.identity.names(place.namespace)
            for one in (place, place.of_ends()):
                self.engine.describe(one.namespace, self._names)
        return place

    # -- finding ------------------------------------------------------------------------------------------------------

    def find(self, tokens: TokenSequence, *, salt: str | None = None) -> Found:
        """How much of a prompt is stored. The server is not queried.

        Raises
        ------
        StorageError
            If the location cannot be asked.
        """
        prompt, place, pages = as_tokens(tokens), self._place(salt), self._pages
        if place is None or pages is None:
            return Found()
        n, used = pages.find(place, prompt, self._limit(prompt))
        return Found(n, sum(page.raw_bytes for page in used), len(used)) if n else Found()

    def deepest(self, *, salt: str | None = None) -> Tokens:
        """The longest stored prompt that fits into a slot; empty if there is none.

        All that is stored is looked at. Raises `StorageError`.
        """
        place = self._place(salt)
        if place is None:
            return NO_TOKENS
        # what can be cut ends at any page, and everything else at a snapshot
        cut, ends = place.namespace.key, place.of_ends().namespace.key
        has_pages = not isinstance(self._pages, SlotSnapshots)
        self.engine.load_all()
        pages = [
            page
            for page in self.engine.pages()
            if page.end < self.identity.props.n_ctx
            and ((has_pages and page.namespace == cut) or (page.namespace in (cut, ends) and page.form == SNAPSHOT))
        ]
        if not pages:
            return NO_TOKENS
        deepest = max(pages, key=lambda page: (page.end, page.last_used))
        return np.frombuffer(b"".join(page.tokens for page in self.engine.path(deepest)), "<i4")

    def restore_deepest(self, slot: int, *, salt: str | None = None) -> Restored:
        """Restore the longest stored prompt into a slot, in place of its contents; see `restore`."""
        self.connect()
        # as for a prompt that continues: if a state cannot be cut, its end could not be used otherwise
        return self.restore(slot, np.append(self.deepest(salt=salt), ANY_TOKEN), salt=salt)

    def _limit(self, prompt: Tokens) -> int:
        return min(len(prompt), self.identity.props.n_ctx or len(prompt))

    # -- restoring ----------------------------------------------------------------------------------------------------

    def restore(self, slot: int, tokens: TokenSequence, *, salt: str | None = None) -> Restored:
        """Restore the longest stored prefix of a prompt into a slot, in place of its contents.

        Raises
        ------
        StorageError
            If the location cannot be asked, or the slot's file cannot be written (`FullError`).
        ServerError
            If the server cannot be asked, or refuses the file. The slot may be empty then.
        """
        started = time.perf_counter()
        prompt = as_tokens(tokens)
        self._check_slot(slot)
        self.connect()
        place, pages = self._place(salt), self._pages
        if place is None or pages is None:
            return Restored(reason=self.reason)
        self.identity.check(self.server)
        limit, counters = self._limit(prompt), self.counters
        self.engine.token_seconds = self.rate.token_seconds
        reason = "not_found"
        for _ in range(ATTEMPTS):
            n, used = pages.find(place, prompt, limit)
            if n < max(self.store.min_tokens, 1):
                self.engine.touch(place.namespace.key, (), len(prompt))
                reason = "short" if n and reason == "not_found" else reason
                counters.count(f"miss:{reason}", namespace=place.namespace.key)
                return Restored(reason=reason)
            with pages.joined(place, prompt[:n], used, slot, self._buffers) as file:
                if file.data is not None and file.n_good >= max(self.store.min_tokens, 1):
                    if file.n_good < n:
                        n, used = file.n_good, used[: -(-file.n_good // place.page_tokens)]
                    self._files.load(self.server, slot, n, file.data)
                    seconds = time.perf_counter() - started
                    self.engine.touch(place.namespace.key, used, len(prompt))
                    self.engine.nudge()
                    return Restored(n, len(file.data), seconds, self._count(place, used, n, seconds))
            reason, limit = "unreadable", file.n_good
        counters.count("miss:unreadable", namespace=place.namespace.key)
        return Restored(reason="unreadable")

    def _count(self, place: Place, used: Any, n: int, seconds: float) -> float:
        """Count a restore; the seconds that it saved."""
        self.rate.restored(len(used), seconds)
        timed = [page for page in used if page.form != SNAPSHOT]
        if timed:
            share = min(n / sum(page.n_tokens for page in timed), 1.0)
            computing = sum(page.compute_us for page in timed) * share
        else:
            # a snapshot's compute_us is the cost of losing it, not that of its tokens
            computing = self.rate.compute_us(n)
        saved: float = computing / 1e6 - seconds
        self.counters.restored(n, seconds, saved, namespace=place.namespace.key)
        return saved

    def _check_slot(self, slot: int) -> None:
        """The server takes any number, and counts around: another slot would be meant."""
        n_slots = self.identity.props.n_slots
        if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < n_slots:
            raise InvalidParameterError(
                f"slot={shown(slot)}: {self.server.url} has the slots {', '.join(map(str, range(n_slots)))}"
            )

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, slot: int, *, salt: str | None = None, expected: TokenSequence | None = None) -> Stored:
        """Store what a slot holds and the store lacks. The slot keeps it.

        Parameters
        ----------
        slot
            The slot.
        salt
            The tenant whose prompt it holds.
        expected
            Tokens that the slot must begin with, or nothing is stored: it may hold the prompt of another tenant.

        Raises
        ------
        ServerError
            If the server cannot be asked.
        StorageError
            If the slot's file cannot be read, or is not what it should be.
        """
        return self.copy(slot, salt=salt, expected=expected).store()

    def copy(self, slot: int, *, salt: str | None = None, expected: TokenSequence | None = None) -> SlotCopy:
        """Copy what a slot holds out of the server, to be stored later; as `save`.

        It is held in memory until `SlotCopy.store` is called. The slot can be used for another prompt meanwhile.
        """
        started = time.perf_counter()
        self._check_slot(slot)
        self.connect()
        if self.reason is not None:
            return SlotCopy(self, None, None, started, self.reason)
        self.identity.check(self.server)
        with self._files.saved(self.server, slot) as (_, file):
            reason: str | None = None
            if file.layout is None:
                reason = "media" if file.has_media else "empty"
            elif file.layout != self._layout:
                raise ServerRefusedError(
                    f"the states of {self.server.url} have changed: it was restarted with other settings; "
                    "open the store again"
                )
            elif expected is not None and not _begins_with(file.tokens, as_tokens(expected)):
                reason = "other_tokens"
            elif len(file.tokens) < self.store.min_tokens:
                reason = "short"
            return SlotCopy(self, self._place(salt), file, started, reason)

    def _store(self, place: Place, file: SlotFile) -> tuple[int, int, str | None]:
        assert self._pages is not None  # connected
        return self._pages.store(place, file)


class SlotCopy:
    """What a slot held when it was copied.

    Attributes
    ----------
    tokens
        Its tokens.
    n_bytes
        Bytes of its file.
    """

    def __init__(
        self, store: SlotStore, place: Place | None, file: SlotFile | None, started: float, reason: str | None
    ) -> None:
        self.tokens = file.tokens if file is not None else NO_TOKENS
        self.n_bytes = file.n_bytes if file is not None else 0
        self._store, self._place, self._file, self._reason = store, place, file, reason
        self._seconds = time.perf_counter() - started

    def store(self) -> Stored:
        """Store what the store lacks of it; as `SlotStore.save`. Can be called once.

        Raises
        ------
        StorageError
            If the location cannot be asked.
        """
        started = time.perf_counter()
        file, self._file = self._file, None
        n_new, n_bytes, reason = 0, 0, self._reason
        if reason is None:
            assert file is not None  # not stored before
            assert self._place is not None  # connected
            n_new, n_bytes, reason = self._store._store(self._place, file)  # noqa: SLF001 - two halves of one thing
        seconds = self._seconds + time.perf_counter() - started
        counters = self._store.counters
        counters.time("capture", seconds)
        if file is not None and reason is not None and reason not in ("short", "empty"):
            counters.count(f"dropped:{reason}")
        return Stored(self.tokens, n_new, n_bytes, seconds, reason)


def _begins_with(tokens: Tokens, expected: Tokens) -> bool:
    return len(tokens) >= len(expected) and np.array_equal(tokens[: len(expected)], expected)
