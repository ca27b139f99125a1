"""`SlotStore`: the slots of a llama-server in a store; pages from a slot's file, and a slot's file from pages."""

from __future__ import annotations

import logging
import os
import time
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prefixstore.config import explain_of_model
from prefixstore.counters import Counters, Kind
from prefixstore.engine.compute_rate import ComputeRate
from prefixstore.engine.engine import Engine
from prefixstore.engine.miss import miss_reason
from prefixstore.engine.page import Path as PagePath
from prefixstore.errors import InvalidParameterError, PrefixStoreError, ServerRefusedError, UnknownVersionError
from prefixstore.format.keys import NO_TOKENS, SNAPSHOT, Tokens, TokenSequence, as_tokens, common_prefix
from prefixstore.format.namespace import Namespace
from prefixstore.llama.capture import Capture, Captured, Place
from prefixstore.llama.state.form import HIDDEN_ROWS
from prefixstore.opening import Locations
from prefixstore.server.arguments import values_of
from prefixstore.server.client import LlamaServer
from prefixstore.server.find_process import running_process
from prefixstore.server.identity import ServerIdentity, Way, kind_of_layout
from prefixstore.server.slot_file import SlotFile, SlotLayout, slot_assembly
from prefixstore.server.slot_files import Restored, SavedSlot, SlotBuffer, SlotCopy, SlotDirectory, wrong_directory
from prefixstore.store import PrefixStore
from prefixstore.units import shown

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("prefixstore")

# what to do where `SlotStore.differences` are some
ADVICE = (
    "Start the server with the settings of the pages, or compute pages for its own: prefixstore warm --for-server, "
    "with the same settings."
)
# how many tenants' places are kept: nothing bounds the number of tenants
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
    store, rate
        The store; how fast the server computes, to be reported with ``rate.computed(n_tokens, seconds)``.
    reason, why
        Why nothing is stored of this server: the reason of the identity, or ``"version"`` (its slot files have an
        unknown version); None if something is stored. And an explanation for users; may be empty.

    Raises
    ------
    InvalidParameterError
        If a parameter is not valid, or the server uses another directory.
    StorageError
        If the location cannot be opened, or a slot's file cannot be read.
    ServerError
        If the server cannot be asked, or if it has another layout than its arguments say.

    Notes
    -----
    A slot's file tells what the states of this server look like, so one is saved when the store is opened. If no slot
    holds anything, a free one evaluates two tokens for it, and is erased.
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
        self.directory = SlotDirectory(slots_dir)
        theirs = _slots_dir_of(server)
        if theirs is not None and not theirs.samefile(self.directory.path):
            # before the server writes files there that are never deleted
            raise wrong_directory(self.directory.path)
        self.reason, self.why = identity.reason, ""
        # what its slot files have in common; None if nothing is stored
        self.layout: SlotLayout | None = None
        # in what ways its slots may be stored: all are searched, and the last one is written
        self.ways: tuple[Way, ...] = ()
        # where the pages of a tenant are
        self.place = lru_cache(MOST_PLACES)(self._place)
        # the label has no effect here: the identity has the namespace
        self.store = PrefixStore(location, namespace="server", **store_options)
        self.rate = ComputeRate(self.store.parameters.max_delay)
        try:
            self._learn()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"SlotStore({self.store.location!r}, {self.server!r})"

    def close(self) -> None:
        """Write what is queued, and release the location. A second call does nothing. Raises `StorageError`."""
        self.directory.close()
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
    def kind(self) -> Kind:
        """What is stored of the slots; unbound if nothing is."""
        return Kind.UNBOUND if self.layout is None else kind_of_layout(self.layout)

    @property
    def can_cut(self) -> bool:
        """Whether a slot can be used up to any of its tokens."""
        return not any(way.form.has_snapshots for way in self.ways)

    @property
    def is_unified(self) -> bool:
        """Whether its slots share one memory, in which each may take all of the room."""
        layout, arguments = self.layout, str(self.identity.settings.get("arguments"))
        if layout is None or layout.shape is None or not layout.shape.sections:
            return False
        # with --kv-unified-per-slot, all have room
        return layout.streams == 1 and "unified" not in arguments.lower()

    @property
    def shortest(self) -> int:
        """How many tokens a slot must hold for it to be stored."""
        form = self.ways[-1].form
        window = form.window if form.shape is not None and form.shape.recurrent is None else None
        # the server computes all again if no token has left the window
        return max(self.store.min_tokens, window.size + HIDDEN_ROWS if window is not None else 1)

    def namespace(self, salt: str | None = None) -> Namespace | None:
        """The namespace of a tenant's pages; None if nothing is stored."""
        return self.place(salt).namespace if self.ways else None

    def differences(self) -> list[str]:
        """Why the server cannot use the pages of its model that are stored; empty if it can, or if there are none."""
        try:
            stored = self.engine.upkeep.namespaces()
            found = (explain_of_model(way.place(self.place(None)).namespace, stored) for way in self.ways)
            return min(found, key=len, default=[])
        except PrefixStoreError:
            return []  # a fault of the cache is told elsewhere

    def _place(self, salt: str | None) -> Place:
        assert self.layout is not None, "something is stored"
        page_tokens = self.identity.page_tokens(self.layout, self.store.page_tokens)
        return Place(self.identity.namespace(self.layout, page_tokens=page_tokens, salt=salt), page_tokens)

    def _learn(self) -> None:
        """Learn the layout of the server's states from one of its slots."""
        if self.reason is not None:
            return
        try:
            file = self.directory.any(self.server)
        except UnknownVersionError as error:
            self.reason, self.why = "version", str(error)
            self.counters.count("dropped:version")
            log.warning("nothing is stored or restored of %s: %s", self.server.url, error)
            return
        assert file.layout is not None, "a file with tokens has a layout"
        self.ways = self.identity.ways(file, self.engine, self.rate, self.directory)
        self.layout = file.layout
        if self.layout.shape is None:
            log.warning(
                "the states of %s have a layout that is not known: each is stored whole, and is of use only to prompts "
                "that continue it",
                self.server.url,
            )
        # the settings that belong to it are consistent
        self.engine.describe(self.place(None).namespace, self.identity.model_name())

    # -- finding ------------------------------------------------------------------------------------------------------

    def find(self, tokens: TokenSequence, *, salt: str | None = None) -> Restored:
        """What would be restored for a prompt, without the time that it takes. The server is not queried.

        Raises
        ------
        StorageError
            If the location cannot be asked.
        """
        prompt = as_tokens(tokens)
        if not self.ways:
            return Restored()
        found, _ = self._found(prompt, salt)
        if found.n_tokens < max(self.store.min_tokens, 1):
            return Restored(reason=self._missed(self.place(salt), prompt, found.n_tokens))
        return Restored(found.n_tokens, sum(page.raw_bytes for page in found.pages))

    def _found(self, prompt: Tokens, salt: str | None) -> tuple[PagePath, Way]:
        """The most that is stored of a prompt, and in which way: of equals the last."""
        limit = min(len(prompt), self.identity.props.n_ctx)

        def found(way: Way) -> PagePath:
            # the server steps back by one token only if it finds rows there
            at_most = min(limit, len(prompt) - 1) if way.form.has_snapshots and way.form.window is None else limit
            return way.restore.find(way.place(self.place(salt)), prompt, at_most)

        return max(((found(way), way) for way in reversed(self.ways)), key=lambda each: each[0].n_tokens)

    def shared(self, tokens: Tokens, salt: str | None) -> int:
        """How many tokens a prompt has in common with a stored one, whether they can be restored or not."""
        place = self.ways[-1].place(self.place(salt))
        return self.engine.match(place.namespace.key, tokens, place.page_tokens).n_tokens

    def use(self, tokens: Tokens, salt: str | None) -> None:
        """Note that a prompt was asked for of which nothing was restored: a slot held it, or it is not stored."""
        found, way = self._found(tokens, salt)
        self.engine.touch(way.place(self.place(salt)).namespace.key, found.pages, len(tokens))

    def _missed(self, place: Place, prompt: Tokens, n: int) -> str:
        namespace, tokens, least = place.namespace.key, prompt[: self.identity.props.n_ctx], self.store.min_tokens
        return miss_reason(self.engine, namespace, tokens, place.page_tokens, n_matched=n, min_tokens=least)

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
        if not self.ways:
            return Restored(reason=self.reason)
        place = self.place(salt)
        self.identity.check(self.server)
        self.engine.token_seconds = self.rate.token_seconds
        found, way = self._found(prompt, salt)
        n, used, least = found.n_tokens, found.pages, max(self.store.min_tokens, 1)
        if n < least:
            self.engine.touch(place.namespace.key, (), len(prompt))
            return self._not_restored(self._missed(place, prompt, n), place)
        layout = self.layout
        assert layout is not None, "something is stored"
        with way.restore.joined(
            prompt,
            found,
            lambda shape, positions, n_tokens, recurrent: slot_assembly(
                layout, shape, positions, prompt[:n_tokens], slot, recurrent
            ),
        ) as file:
            if file.data is None or file.n_good < least:
                return self._not_restored("unreadable", place)
            if file.n_good < n:
                n, used = file.n_good, used[: -(-file.n_good // place.page_tokens)]
            assert isinstance(file.buffer, SlotBuffer), "it is put together in the memory of a file"
            self.directory.load(self.server, slot, n, file.buffer)
            seconds = time.perf_counter() - started
            self.engine.touch(way.place(place).namespace.key, used, len(prompt))
            self.engine.write_queue.nudge()
            return Restored(n, len(file.data), seconds, self._count(place, used, n, seconds))

    def _not_restored(self, reason: str, place: Place) -> Restored:
        self.counters.count(f"miss:{reason}", namespace=place.namespace.key)
        return Restored(reason=reason)

    def _count(self, place: Place, used: Any, n: int, seconds: float) -> float:
        """Count a restore; the seconds that it saved."""
        timed = [page for page in used if page.form != SNAPSHOT]
        # a snapshot's compute_us is the cost of losing it, not that of its tokens
        computing: float = self.rate.compute_us(n)
        if timed:
            share = min(n / sum(page.n_tokens for page in timed), 1.0)
            computing = sum(page.compute_us for page in timed) * share
        saved: float = computing / 1e6 - seconds
        self.counters.restored(n, seconds, saved, namespace=place.namespace.key)
        return saved

    def _check_slot(self, slot: int) -> None:
        """The server takes any number modulo its slots, so a wrong one would mean another slot."""
        n_slots = self.identity.props.n_slots
        if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < n_slots:
            raise InvalidParameterError(
                f"slot={shown(slot)}: {self.server.url} has the slots {', '.join(map(str, range(n_slots)))}"
            )

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, slot: int, *, salt: str | None = None, expected: TokenSequence | None = None) -> SavedSlot:
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
        if self.layout is None:
            return SlotCopy(NO_TOKENS, 0, False, lambda: SavedSlot(NO_TOKENS, reason=self.reason))
        self.identity.check(self.server)
        file = self.directory.saved(self.server, slot, whole=self.layout.shape is None)
        reason = None
        if file.has_media and (file.layout is None or not self.can_cut):
            reason = "media"
        elif file.layout is None:
            reason = "empty"
        elif file.layout != self.layout:
            raise ServerRefusedError(
                f"the states of {self.server.url} have changed: it was restarted with other settings; "
                "open the store again"
            )
        elif expected is not None and common_prefix(file.tokens, as_tokens(expected)) < len(expected):
            reason = "other_tokens"
        work = partial(self._stored, file, salt, reason, time.perf_counter() - started)
        return SlotCopy(file.tokens, file.n_bytes, file.has_media, work)

    def _stored(self, file: SlotFile, salt: str | None, reason: str | None, copying: float) -> SavedSlot:
        """Store what the store lacks of a slot's file, which took this many seconds to copy."""
        started = time.perf_counter()
        done = self._captured(file, salt) if reason is None else Captured(reason=reason)
        seconds = copying + time.perf_counter() - started
        self.counters.time("capture", seconds)
        if done.reason not in (None, "short", "empty", "media"):
            self.counters.count(f"dropped:{done.reason}")
        return SavedSlot(file.tokens, done.n, done.n_bytes, seconds, done.reason)

    def _captured(self, file: SlotFile, salt: str | None) -> Captured:
        way, n = self.ways[-1], len(file.tokens)
        if n < self.shortest:
            return Captured(reason="short")
        if file.view is not None and not way.form.is_complete(file.view, n):
            return Captured(reason="incomplete")
        place, parameters = way.place(self.place(salt)), self.store.parameters
        to = Capture(self.engine, place, way.form, self.rate.compute_us, parameters)
        return to.store(file.tokens, file.view, file.memory)


def _slots_dir_of(server: LlamaServer) -> Path | None:
    """Where a server on this machine saves its slots, as this process sees it; None if that is not known."""
    found = running_process(server.pid)
    given = values_of(found.argv, ("--slot-save-path",)) if found is not None else []
    return found.path(given[-1]) if found is not None and given else None
