"""How a context is captured and restored: what the strategies for all kinds of memory have in common."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from prefixstore.counters import Kind
from prefixstore.engine.miss import miss_reason
from prefixstore.engine.page import Page, Path
from prefixstore.format.keys import Tokens
from prefixstore.llama.capture import Place
from prefixstore.llama.context import Context
from prefixstore.llama.lineage import Unknown
from prefixstore.llama.restore import Restore, of_sequence
from prefixstore.llama.state.form import Form

log = logging.getLogger("prefixstore")

# how many snapshots are tried, the deepest first, if one of them or of their pages is damaged
ATTEMPTS = 3


class Strategy(ABC):
    """Captures a context into the engine, and restores it from there."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.place = Place(context.namespace, context.lineage.page_tokens)

    # -- capture ------------------------------------------------------------------------------------------------------

    def stops(self, tokens: Sequence[int]) -> list[int]:
        """Positions at which to stop while these tokens are evaluated."""
        del tokens
        return []

    @abstractmethod
    def is_due(self, before: int, stops: Sequence[int]) -> bool:
        """Whether to capture after a batch that began at position `before`."""

    @abstractmethod
    def capture(self, *, tail: bool, wait: bool = False) -> int:
        """Capture what is not stored of a known context; returns how many pages and snapshots will be written.

        With `tail`, at the end of a turn, everything that remains is captured. With `wait`, it waits while the write
        queue is full instead of skipping pages.
        """

    def prompt_evaluated(self) -> None:  # noqa: B027 - pages need nothing
        """Called after a prompt was evaluated."""

    @abstractmethod
    def before_leaving(self) -> None:
        """Called before the context moves to other tokens."""

    # -- restore ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def restore(self, tokens: Tokens, limit: int, *, always: bool = False, multiple_of: int = 1) -> bool:
        """Restore the longest stored prefix of a prompt, at most `limit` tokens, up to a multiple of `multiple_of`.

        With `always`, even if computing is faster. Returns True if something was restored, or if the context already
        held as much of the prompt as the store has. Raises `StorageError` if the location cannot be read.
        """

    @abstractmethod
    def path(self, tokens: Tokens, limit: int) -> Path:
        """What the store has of the first `limit` tokens of a prompt. Raises `StorageError`."""

    def stored(self, tokens: Tokens, limit: int) -> int:
        """How many of the first `limit` tokens of a prompt the store has. Raises `StorageError`."""
        return min(self.path(tokens, limit).n_tokens, limit)

    def place_of(self, tokens: Tokens) -> tuple[Place, Kind]:
        """Where most of a prompt is stored, and in which form. Raises `StorageError`."""
        del tokens
        return self.place, self.context.kind

    @abstractmethod
    def live_prefix(self, tokens: Tokens) -> int:
        """How much of a prompt the context holds and can continue from."""

    def keeps(self, unknown: Unknown, tokens: Tokens, limit: int) -> bool:
        """Whether the contents of an unknown context are kept for this prompt; if not, it is emptied.

        They are kept if user code has prepared the context since the last completion, and it has more of the prompt
        than the store: llama-cpp-python then continues from it, as it does without a store. That is for one prompt
        only, since nothing that is computed after it can be stored. What cannot be computed again is always kept.
        """
        context, llm, lineage = self.context, self.context.llm, self.context.lineage
        is_fresh, lineage.is_fresh = lineage.is_fresh, False
        if context.has_placeholders(tokens):
            return True
        live = context.live_prefix(tokens)
        is_prepared = {
            # the prompt may continue it from its middle
            Unknown.LOADED_STATE: live >= context.parameters.min_tokens,
            # a context that a chat handler has prepared is continued from its end
            Unknown.CHANGED: 0 < live == llm.n_tokens == context.memory.end(),
        }
        if (
            is_fresh
            and is_prepared.get(unknown, False)
            and context.memory.holds(live)
            and live > self.stored(tokens, limit)
        ):
            return True
        context.empty()
        return False

    def _without_restore(
        self, place: Place, tokens: Tokens, limit: int, n_matched: int, n: int, used: Sequence[Page], live: int
    ) -> bool | None:
        """The result of a lookup that has nothing to restore; None if something is to be restored.

        Of the prompt, `n_matched` tokens are stored, `n` of them can be restored, from the pages `used`, and `live` are
        in the context.
        """
        context = self.context
        engine, key, least = context.engine, place.namespace.key, context.parameters.min_tokens
        if n < least:
            context.note_use(place, (), len(tokens))
            step = place.page_tokens
            reason = miss_reason(engine, key, tokens[:limit], step, n_matched=n_matched, min_tokens=least)
            context.count_miss(reason)
            return False
        if n <= live:
            context.note_use(place, used, len(tokens))
            engine.counters.count(context.lookup("live_hits"), namespace=context.lineage.namespace)
            return True
        return None

    def _restore_of(self, form: Form | None) -> Restore:
        """A `Restore` of states of this form; with None, the form is read from the stored states."""
        context, memory = self.context, self.context.memory
        largest = None if form is not None else lambda page: memory.largest(page.end)
        form = form or Form(window=memory.seen)
        return Restore(context.engine, form, context.rate, memory.scratch, largest=largest)

    def _resume(
        self, place: Place, form: Form | None, tokens: Tokens, limit: int, live: int, *, always: bool, multiple_of: int
    ) -> bool:
        """Restore the deepest snapshot of a prompt, unless the context holds as much; see `restore`.

        The `form` of its states is None if it is not known. The context can continue after `live` tokens of the prompt.
        """
        context, restore = self.context, self._restore_of(form)
        for i in range(ATTEMPTS):
            found = restore.find(place, tokens, limit, multiple_of)
            n, pages = found.n_tokens, found.to_read
            if i and n < context.parameters.min_tokens:
                break
            settled = self._without_restore(place, tokens, limit, n, n, found.pages, live)
            if settled is not None:
                return settled
            rate = context.rate_of(pages)
            if not always and not rate.is_worth(n - live, len(pages)):
                context.count_miss("slow")
                return False
            started = time.perf_counter()
            with restore.joined(tokens, found, of_sequence, live=live, waits=always) as joined:
                if joined.is_late:
                    rate.late(pages, time.perf_counter() - started)
                    # do not wait again for an earlier one
                    break
                is_loaded = joined.data is not None and self._put(tokens[:n], joined.data)
            if is_loaded:
                seconds = time.perf_counter() - started
                rate.restored(len(pages), seconds)
                # a snapshot's compute_us is the cost of losing it, not that of its tokens
                context.count_restore(n - live, seconds, found.pages[:-1])
                context.note_use(place, found.pages, len(tokens))
                return True
            limit, live = n - 1, min(live, context.llm.n_tokens)
        context.count_miss("unreadable")
        return False

    def _put(self, prompt: Tokens, state: memoryview) -> bool:
        """Replace what the context holds by a state of this prompt; returns whether llama.cpp accepted it."""
        context = self.context
        with context.loading():
            is_loaded = context.memory.put(state, len(prompt))
            if is_loaded:
                context.set_live(prompt)
        if not is_loaded:
            log.warning("llama.cpp refused a snapshot of %s tokens", f"{len(prompt):,}")
            context.engine.counters.count("unreadable:refused")
            # the context is empty now
            context.catch_up()
        return is_loaded
