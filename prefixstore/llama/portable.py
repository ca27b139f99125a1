"""A store without a ``Llama`` of its own: it works on the ``LlamaState`` objects of llama-cpp-python.

    state = self.cache[prompt]                lookup: pages are joined into a state that ``load_state`` accepts
    self.load_state(state)
    self.cache[prompt + completion] = state   save: the state is cut into pages, and what is new of them is stored

Which ``Llama`` asks is seen in the calling frame. So the namespace is the one that an attached store of the same name
and salt has for this ``Llama``, the pages are the same bytes, and both kinds of stores share them.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

import llama_cpp
import numpy as np
from llama_cpp.llama import LlamaState

from prefixstore.engine.engine import Engine
from prefixstore.engine.engine import Engine as Writer
from prefixstore.engine.pending import PendingPage as NewPage
from prefixstore.errors import CorruptError, InvalidParameterError, PrefixStoreError, StorageError
from prefixstore.format.keys import Tokens, TokenSequence, as_tokens, common_prefix, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.llama.hook import MEDIA_ATTRIBUTES
from prefixstore.llama.memory import Memory, kind_of
from prefixstore.llama.parse import parse_context
from prefixstore.llama.portable_restore import StateBuilder
from prefixstore.llama.portable_target import Place, nameless_place, place_of
from prefixstore.llama.shape import shape_of
from prefixstore.llama.state import Assembly, Blob
from prefixstore.llama.whole_state import ENDLESS, WholeState, find
from prefixstore.stats import Counters

__all__ = ["PortableHook"]

log = logging.getLogger("prefixstore")


class PortableHook:
    """What a store does that is not attached to a ``Llama``.

    Parameters
    ----------
    engine, writer, counters
        Of the store.
    label, salt
        Names that separate its states from others.
    page_tokens
        Tokens in a page. A model with a shorter sliding window gets shorter pages.
    min_tokens
        Sequences shorter than this are neither stored nor restored.
    read_only
        Whether nothing is stored.
    """

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        counters: Counters,
        *,
        label: str | None,
        salt: str | None,
        page_tokens: int,
        min_tokens: int,
        read_only: bool,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._counters = counters
        self._label = label
        self._salt = salt
        self._page_tokens = page_tokens
        self._min_tokens = min_tokens
        self._read_only = read_only
        self._builder = StateBuilder(engine, counters, min_tokens)
        self._places: weakref.WeakKeyDictionary[llama_cpp.Llama, Place] = weakref.WeakKeyDictionary()
        self._nameless = nameless_place(page_tokens=page_tokens, salt=salt, label=label)
        self._last = self._nameless

    @property
    def kind(self) -> str:
        """``"portable"``, and how the states of the ``Llama`` that asked last are stored."""
        if self._last is self._nameless:
            return "portable"
        return "portable: pages" if self._last.pages is not None else "portable: whole states"

    @property
    def namespace(self) -> Namespace:
        """Of the ``Llama`` that asked last; before any has, of the states that were stored without one."""
        return self._last.pages or self._last.whole

    @property
    def page_tokens(self) -> int:
        """Length of a page in `namespace`."""
        return self._last.page_tokens if self._last.pages is not None else ENDLESS

    @property
    def namespaces(self) -> list[Namespace]:
        """All in which this hook may have stored something in this process."""
        places = [self._nameless, self._last, *self._places.values()]
        found = [namespace for place in places for namespace in (place.pages, place.whole) if namespace is not None]
        return list({namespace.key: namespace for namespace in found}.values())

    # -- as llama-cpp-python calls a cache ----------------------------------------------------------------------------

    def lookup(self, prompt: TokenSequence, completion: FrameType | None) -> LlamaState | None:
        """The longest stored state of a prompt.

        Parameters
        ----------
        prompt
            The tokens.
        completion
            The frame of the completion that asks, if one does. Without it, what was stored without one is found, or
            what the ``Llama`` that asked last has stored.

        Returns
        -------
        LlamaState or None
            None if nothing is stored, or no more than the context holds already.
        """
        tokens = as_tokens(prompt)
        llm = completion.f_locals["self"] if completion is not None else None
        started = time.perf_counter()
        try:
            if llm is None:
                live, state = 0, self._lookup_nameless(tokens)
            elif (excuse := _excuse(llm)) is not None:
                self._counters.count(f"miss:{excuse}")
                return None
            else:
                self._last = self._place(llm)
                live = _live_prefix(llm, tokens, self._last)
                # the last token is evaluated in any case; the seed stays as it is
                state = self._builder.build(self._last, tokens[:-1], live, llm._seed)
            self._writer.nudge()
        except StorageError as error:
            log.warning("a lookup failed: %s", error)
            self._counters.count("miss:unavailable")
            return None
        except Exception as error:  # noqa: BLE001 - a fault of the store never breaks a completion
            self._report("miss:error", error)
            return None
        if state is not None:
            self._counters.count("hits")
            self._counters.count("tokens_restored", state.n_tokens - live)
            self._counters.time("restore", time.perf_counter() - started)
        return state

    def _lookup_nameless(self, tokens: Tokens) -> LlamaState | None:
        seed = int(llama_cpp.LLAMA_DEFAULT_SEED)
        place = self._nameless
        if self._last is not place and not find(self._engine, place.whole.key, tokens).n_shared:
            place = self._last
        return self._builder.build(place, tokens, 0, seed)

    def save(self, state: LlamaState, completion: FrameType | None) -> None:
        """Store a state. It says itself what it covers; the key has tokens as well that were never evaluated.

        Parameters
        ----------
        state
            As ``Llama.save_state`` made it.
        completion
            The frame of the completion that saves, if one does. Without it, the name of the store stands for the model.

        Raises
        ------
        InvalidParameterError
            If it is no state.
        """
        if not isinstance(state, LlamaState):
            raise InvalidParameterError(f"a store keeps what llm.save_state() returns, not {type(state).__name__}")
        llm = completion.f_locals["self"] if completion is not None else None
        if self._read_only or (llm is not None and _excuse(llm) is not None):
            return
        started = time.perf_counter()
        try:
            place = self._nameless
            if llm is not None:
                place = self._last = self._place(llm)
            self._save(place, state)
        except Exception as error:  # noqa: BLE001 - a fault of the store never breaks a completion
            self._report("dropped:error", error)
        self._counters.time("capture", time.perf_counter() - started)

    def _place(self, llm: llama_cpp.Llama) -> Place:
        place = self._places.get(llm)
        if place is None:
            place = place_of(llm, page_tokens=self._page_tokens, salt=self._salt, label=self._label)
            self._places[llm] = place
        return place

    def _report(self, name: str, error: Exception) -> None:
        self._counters.count(name)
        log.warning(
            "the completion goes on without the store: %s", error, exc_info=not isinstance(error, PrefixStoreError)
        )

    # -- storing ------------------------------------------------------------------------------------------------------

    def _save(self, place: Place, state: LlamaState) -> None:
        tokens = np.asarray(state.input_ids[: state.n_tokens], "<i4")
        # a token below 0 is none: an image, or something that was never evaluated
        if len(tokens) < max(self._min_tokens, 1) or (tokens < 0).any():
            return
        if state.llama_state_size != len(state.llama_state):
            raise CorruptError(f"a state of {len(state.llama_state)} bytes claims {state.llama_state_size}")
        blob = _parse(state.llama_state)
        if blob is not None and place.memory is not None:
            place.memory.shape = shape_of(blob)
        if blob is not None and not _covers(blob, place, len(tokens)):
            self._counters.count("dropped:incomplete")
            return
        if blob is not None and place.pages is not None and blob.architecture == place.architecture:
            wanted = self._wanted(place.pages.key, place.page_tokens, tokens)
            # where a window has let rows of a page go, the state as a whole still has what its next token needs
            if all(blob.holds(start, end) for start, end in wanted):
                self._save_pages(place.pages, place.page_tokens, tokens, blob, wanted)
                return
        self._save_whole(place, tokens, state)

    def _wanted(self, namespace: bytes, page_tokens: int, tokens: Tokens) -> list[tuple[int, int]]:
        """First position and boundary of each page that is not stored."""
        keys = page_keys(namespace, tokens, page_tokens)
        missing = self._engine.missing(keys)
        wanted = [(i * page_tokens, (i + 1) * page_tokens) for i in missing]
        start = len(keys) * page_tokens
        tail = tokens[start:].tobytes()
        # behind a page that is taken now there is nothing that could cover the tail
        if tail and (missing or self._engine.wants(namespace, [namespace, *keys][-1], tail)):
            wanted.append((start, len(tokens)))
        return wanted

    def _save_pages(
        self, namespace: Namespace, page_tokens: int, tokens: Tokens, blob: Blob, wanted: Sequence[tuple[int, int]]
    ) -> None:
        parents = [namespace.key, *page_keys(namespace.key, tokens, page_tokens)]
        for start, end in wanted:
            piece = blob.cut(start, end)
            assembly = Assembly(piece, piece.positions)
            page = parents[start // page_tokens], start, tokens[start:end].tobytes()
            if not self._submit(namespace, page, assembly.size, partial(assembly.write, pieces=[piece])):
                return

    def _save_whole(self, place: Place, tokens: Tokens, state: LlamaState) -> None:
        scores = None
        if place.n_vocab:
            scores = state.scores
            if scores.shape != (len(tokens), place.n_vocab):
                raise CorruptError(f"scores of shape {scores.shape} are not those of {len(tokens)} tokens")
        namespace = place.whole
        found = find(self._engine, namespace.key, tokens)
        if found.contained and found.contained[-1].end == len(tokens):
            return
        parent, start = (found.parent.key, found.parent.end) if found.parent else (namespace.key, 0)
        own = tokens[start:].tobytes()
        if self._engine.wants(namespace.key, parent, own):
            whole = WholeState(len(tokens), len(state.input_ids), memoryview(state.llama_state), scores)
            self._submit(namespace, (parent, start, own), whole.size, whole.write)

    def _submit(
        self, namespace: Namespace, page: tuple[bytes, int, bytes], size: int, write: Callable[[memoryview], None]
    ) -> bool:
        """Have a page written: its parent, its start and its tokens; false if there is no room for what waits."""
        buffer = self._writer.acquire(size)
        if buffer is None:
            self._counters.count("dropped:queue_full")
            return False
        try:
            write(buffer.view)
        except BaseException:
            buffer.release()
            raise
        new = NewPage.of(namespace.key, namespace.canonical, *page, buffer)
        self._counters.count("pages_captured", self._writer.submit(new))
        return True


def _parse(state: bytes) -> Blob | None:
    try:
        return parse_context(state)
    except CorruptError:
        return None


def _covers(blob: Blob, place: Place, n: int) -> bool:
    """Whether a state holds what `n` tokens leave behind."""
    if blob.recurrent is not None and blob.recurrent.position != n - 1:
        return False
    # outside a completion nobody knows what a window has let go
    return blob.holds(0, n, window_from=place.window_from(n)) or place.architecture is None


def _excuse(llm: llama_cpp.Llama) -> str | None:
    """Why nothing is done for a ``Llama`` now."""
    if any(hasattr(llm.chat_handler, name) for name in MEDIA_ATTRIBUTES):
        return "multimodal"
    kind = kind_of(llm)
    return kind if kind in ("encoder", "no_memory") else None


def _live_prefix(llm: llama_cpp.Llama, tokens: Tokens, place: Place) -> int:
    """How much of a prompt the context holds, and can go on from."""
    live = common_prefix(np.asarray(llm.input_ids[: llm.n_tokens], "<i4"), tokens)
    if 0 < live < llm.n_tokens and not (place.is_attention and Memory(llm).holds(live)):
        # a window has lost rows, and llama-cpp-python would go on without them; a recurrent state cannot go back, and
        # llama-cpp-python would reset it too, but only after it has refused a shorter stored one
        llm.reset()
        return 0
    return live
