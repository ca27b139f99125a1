"""Prepares slots for requests: empties, saves and fills them before, saves them after.

The store and the server's slots are accessed in threads; decisions about slots are made in the event loop. Any failure
of the store or of a slot is a miss: the request is computed as if there were no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from prefixstore.format.keys import NO_TOKENS, Tokens
from prefixstore.server.answers import Usage
from prefixstore.server.held_slot import HeldSlot
from prefixstore.server.rates import Rates
from prefixstore.server.slot_pool import WORTH_A_SAVE, Choice, PoolSlot, SlotPool
from prefixstore.server.store_like import CopyLike, StoreLike
from prefixstore.server.turns import Turns

__all__ = ["WORTH_A_LOOKUP", "SlotManager", "SlotUnusableError", "Timing"]

log = logging.getLogger("prefixstore.server")

T = TypeVar("T")

# The store is asked only if so many tokens would have to be computed without it.
WORTH_A_LOOKUP = 32
MAX_FAILURES = 3
# Copies of slots that may wait to be stored, in memory; then the next one waits, too.
MAX_COPIES = 2
# While requests wait for a slot, one is copied before it goes only if computing that again would take so many times
# as long.
WORTH_WAITING = 8.0
UNKNOWN_PROMPT_SECONDS = 5.0
# How long a request waits for slots to be emptied, one after the other.
EMPTYING_SECONDS = 30.0
# How long the last saves wait for slots that are still held.
GIVEN_BACK_SECONDS = 5.0
# How long a prompt that has stopped for a copy waits until earlier ones are stored.
COPY_SECONDS = 0.5


@dataclass(frozen=True)
class Timing:
    """When slots are saved, in seconds.

    Attributes
    ----------
    debounce
        How long a slot must be idle.
    patience
        How long it waits for a moment at which the server does nothing else. After that it is saved while other
        slots answer, but never while a request waits.
    soon
        What takes no longer to compute is saved in idle time only: no request waits for that.
    """

    debounce: float = 0.25
    patience: float = 10.0
    soon: float = 0.25


class SlotManager:
    """Gives slots to requests, and saves them afterwards.

    Parameters
    ----------
    pool
        The slots.
    store
        The store of their contents; None: slots are only given out.
    erase
        Empties a slot of the server.
    timing
        When slots are saved.
    """

    def __init__(
        self, pool: SlotPool, store: StoreLike | None, erase: Callable[[int], object], timing: Timing | None = None
    ) -> None:
        self.pool, self.store = pool, store
        self.failures: dict[str, int] = {}
        self._erase = erase
        self._timing = timing or Timing()
        self._threads = ThreadPoolExecutor(len(pool.slots) + 2, thread_name_prefix="prefixstore-slots")
        self._wake = asyncio.Event()
        self._idle_since: dict[int, float] = {}
        self._dirty_since: dict[int, float] = {}
        # until when the prompts of running requests are probably being computed, by slot
        self._prefill_until: dict[int, float] = {}
        self._copies: set[asyncio.Task[None]] = set()
        # the idle slot that is being saved, and until when
        self._saving: tuple[PoolSlot, asyncio.Future[None]] | None = None
        # requests without a slot of their own
        self.n_elsewhere = 0
        self.n_saves = 0
        pool.when_free = self._wake.set
        pool.is_worth_a_wait = self._is_worth_a_wait

    @property
    def n_copies(self) -> int:
        """How many copies of slots wait to be stored."""
        return len(self._copies)

    @property
    def rates(self) -> Rates:
        """How long each kind of work takes."""
        return self.pool.rates

    # -- before the answer ---------------------------------------------------------------------------------------------

    async def acquire(
        self,
        tokens: Tokens | None,
        owner: str | None,
        wanted: int | None = None,
        *,
        ask: bool = True,
        trusts: bool = False,
    ) -> HeldSlot:
        """Hold a slot for a prompt, filled from the store if that is faster than computing.

        A slot that cannot be emptied is left to others. If that is so of each idle one, nothing of what is in it may be
        used (`HeldSlot.must_compute`).

        Parameters
        ----------
        tokens
            The prompt; None if it is not known.
        owner
            Its tenant.
        wanted
            The slot that the client wants.
        ask
            Whether the store is queried.
        trusts
            Whether the rows of a tainted slot will do, as for the same requests that have left them there.

        Raises
        ------
        PoolFullError
            If too many requests wait for a slot.
        """
        prompt = NO_TOKENS if tokens is None else tokens
        await self.pool.wait_for_slot(wanted)
        while wanted is None and (saving := self._saving_for(prompt, owner)) is not None:
            await asyncio.wait({saving})
            await self.pool.wait_for_slot()
        unusable: set[int] = set()
        until = asyncio.get_running_loop().time() + EMPTYING_SECONDS
        while (choice := self.pool.choose(prompt, owner, wanted=wanted, trusts=trusts, without=unusable)) is not None:
            held = HeldSlot(choice.slot, prompt, owner)
            preparing = asyncio.ensure_future(
                self._prepare(
                    held, choice, ask=ask and tokens is not None, wanted=wanted, trusts=trusts, without=unusable
                )
            )
            try:
                await asyncio.shield(preparing)
            except SlotUnusableError:
                unusable.add(held.slot.id)
                self.pool.release(held.slot)
                if asyncio.get_running_loop().time() > until:
                    break
            except asyncio.CancelledError:
                # what a thread does to the slot cannot be interrupted
                preparing.add_done_callback(partial(self._give_back, held))
                raise
            except BaseException:
                self.pool.release(held.slot)
                raise
            else:
                return held
        choice = self.pool.choose(prompt, owner, wanted=wanted)
        assert choice is not None, "a slot was idle"
        slot = choice.slot
        # it stays tainted: it is emptied before its next use, and not saved
        slot.doubt()
        slot.owner, slot.request = owner, None
        return HeldSlot(slot, prompt, owner, reason="error", must_compute=True)

    def _give_back(self, held: HeldSlot, prepared: asyncio.Future[None]) -> None:
        """Release a slot whose request has gone while it was prepared."""
        if not prepared.cancelled():
            prepared.exception()  # asked for, so that asyncio does not complain
        self.pool.release(held.slot)

    def _saving_for(self, prompt: Tokens, owner: str | None) -> asyncio.Future[None] | None:
        """The save of the slot that has the most of a prompt, if that ends before the prompt is computed elsewhere."""
        if self._saving is None:
            return None
        slot, saving = self._saving
        lead = self.pool.lead(slot, prompt, owner)
        is_worth_it = lead >= WORTH_A_LOOKUP and self.rates.is_faster(self.rates.saving(len(slot.tokens)), lead)
        return saving if is_worth_it else None

    @contextlib.asynccontextmanager
    async def all_slots(self, owner: str | None) -> AsyncIterator[None]:
        """Hold every slot for a request that may use any of them; they are emptied before their next use.

        Raises as `acquire`.
        """
        held_slots: list[HeldSlot] = []
        try:
            # in order: two such requests cannot wait for each other
            for slot in self.pool.slots:
                held_slots.append(await self.acquire(None, owner, slot.id))  # noqa: PERF401 - those held count if one fails
            yield
        finally:
            for held in held_slots:
                self.release(held, None, began=True, taints=True)

    def continued(self, path: str, turns: Turns | None, owner: str | None) -> HeldSlot | None:
        """Hold the slot of the conversation that this request continues; None if there is none."""
        slot = None if turns is None else self.pool.continued(path, turns, owner)
        if slot is None or slot.request is None:
            return None
        last, slot.request = slot.request, None
        return HeldSlot(slot, slot.tokens, owner, last.n_tokens)

    async def _prepare(
        self,
        held: HeldSlot,
        choice: Choice,
        *,
        ask: bool,
        wanted: int | None,
        trusts: bool,
        without: Collection[int],
    ) -> None:
        n_found = n_bytes = 0
        n_missing = len(held.tokens) - choice.n_usable
        if ask and len(held.tokens) >= held.slot.n_ctx:
            held.reason = "prompt_too_long"  # the server says so
        elif ask and self.store is not None and n_missing >= WORTH_A_LOOKUP:
            n_found, n_bytes, reason = await self._find(held)
            if n_found <= choice.n_usable:
                # every chat begins with the same few tokens: that is not yet a live prompt
                held.reason = held.reason or ((reason or "not_found") if choice.n_live < WORTH_A_LOOKUP else None)
            # another idle slot may cost less, now that it is known what the store has
            if wanted is None:
                held.slot = self.pool.swap(held.slot, held.tokens, held.owner, n_found, n_bytes, without=without)
        choice = self.pool.weigh(held.slot, held.tokens, held.owner, n_found, n_bytes, trusts=trusts)
        # Restoring may be slower only since the slot holds nearly as much: then there is nothing to learn from a try.
        is_slow = not self.rates.is_faster(self.rates.restoring(n_bytes), n_found)
        may_try = n_found > choice.n_usable and (choice.restore or is_slow)
        if may_try and self.rates.tries(is_faster=choice.restore) and not choice.restore:
            choice = self.pool.weigh(held.slot, held.tokens, held.owner, n_found, n_bytes, trusts=trusts, tries=True)
        slot = held.slot
        if choice.save_first:
            await self._save(slot)
        # also if its rows have come into doubt while it was saved
        if choice.erase_first or slot.must_empty(trusts=trusts):
            await self._empty(slot)
        if choice.restore:
            await self._restore(held)
        elif n_found > choice.n_usable:
            held.reason = "slow"
        # from here on it may hold tokens of this tenant, however the request ends
        slot.owner, slot.request = held.owner, None
        n_computed = len(held.tokens) - max(held.n_restored, choice.n_live)
        computing = self.rates.computing(n_computed) if len(held.tokens) else UNKNOWN_PROMPT_SECONDS
        self._prefill_until[slot.id] = asyncio.get_running_loop().time() + 1.5 * computing

    async def _find(self, held: HeldSlot) -> tuple[int, int, str | None]:
        began = time.perf_counter()
        found = await self._quietly("find", lambda: self._store.find(held.tokens, salt=held.owner))
        held.lookup_seconds = time.perf_counter() - began
        if found is None:
            held.reason = "unavailable"
            return 0, 0, None
        return found.n_tokens, found.n_bytes, found.reason

    async def _restore(self, held: HeldSlot) -> None:
        slot = held.slot
        began = time.perf_counter()
        done = await self._quietly("restore", lambda: self._store.restore(slot.id, held.tokens, salt=held.owner))
        held.restored_seconds = time.perf_counter() - began
        if not self.pool.is_current(slot):
            # it may have been filled in the server that was started meanwhile, which may have another model
            await self._empty(slot)
            return
        if done is not None and done.n_tokens == 0:
            held.reason = done.reason or "not_found"
            return
        # one that fails may have emptied the slot; whose it is stays until it was emptied for certain
        slot.tokens, slot.n_unsaved, slot.request = NO_TOKENS, 0, None
        if done is None:
            held.reason = "error"
            # it may hold a file that another process has changed, and that could not be erased
            slot.doubt()
            await self._empty(slot)
            return
        slot.tokens, slot.owner = held.tokens[: done.n_tokens], held.owner
        held.n_restored, held.saved_seconds, held.reason = done.n_tokens, done.saved_seconds, None
        self.rates.restored(done.n_tokens, done.n_bytes, held.restored_seconds)

    async def _empty(self, slot: PoolSlot) -> None:
        done = await self._quietly("erase", lambda: (self._erase(slot.id), True)[1])
        if done and self.pool.is_current(slot):
            slot.forget()
            slot.is_tainted = slot.is_unknown = False
        elif not done:
            slot.is_tainted = True
            raise SlotUnusableError

    async def empty_tainted(self) -> None:
        """Empty the idle slots with doubtful rows: the server may choose any of them for the next request."""
        if any(slot.is_tainted and not slot.is_held for slot in self.pool.slots):
            # what a thread does to a slot cannot be interrupted
            await asyncio.shield(asyncio.ensure_future(self._empty_tainted()))

    async def _empty_tainted(self) -> None:
        for slot in self.pool.slots:
            if slot.is_tainted and not slot.is_held:
                self.pool.hold(slot)
                try:
                    with contextlib.suppress(SlotUnusableError):
                        await self._empty(slot)
                finally:
                    self.pool.release(slot)

    # -- in the middle of a prompt -------------------------------------------------------------------------------------

    def may_save(self, slot: PoolSlot) -> bool:
        """Whether what a slot holds may be stored."""
        return self.store is not None and not slot.is_tainted and not self.pool.n_foreign

    async def shared(self, held: HeldSlot) -> int:
        """How many tokens of a prompt some stored prompt begins with, whether they can be restored or not."""
        return await self._quietly("find", lambda: self._store.shared(held.tokens, salt=held.owner)) or 0

    async def keep(self, held: HeldSlot, n: int) -> bool:
        """Have a slot copied that holds the first `n` tokens of its prompt; whether the next place is worth a try.

        A prompt waits for that only as long as copies are stored about as fast as they come.
        """
        slot = held.slot
        slot.tokens, slot.owner, slot.n_unsaved = held.tokens[:n], held.owner, n
        if len(self._copies) >= MAX_COPIES:
            await asyncio.wait(self._copies, timeout=COPY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if len(self._copies) >= MAX_COPIES or not self.may_save(slot):
            return False
        saving = asyncio.ensure_future(self._save(slot, held.tokens[:n]))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            # what a thread does to the slot cannot be interrupted
            await asyncio.wait({saving})
            raise
        return slot.n_unsaved == 0 and len(slot.tokens) == n

    # -- after the answer ----------------------------------------------------------------------------------------------

    def release(self, held: HeldSlot, usage: Usage | None, *, began: bool, taints: bool = False) -> None:
        """Give the slot back.

        Parameters
        ----------
        held
            The slot.
        usage
            What the answer says about the work; None if it did not come to its end.
        began
            Whether the server has begun to answer, so that the slot holds the prompt.
        taints
            Whether rows were computed that are not those of the tokens alone.
        """
        slot, now = held.slot, asyncio.get_running_loop().time()
        if began and self.pool.is_current(slot):
            slot.tokens = held.tokens
            slot.is_tainted |= taints
            slot.failures = 0
            n_new = WORTH_A_SAVE if usage is None else usage.computed_tokens + usage.generated_tokens
            # the end of a prompt that was worth stops is worth one more
            slot.n_unsaved += max(n_new, WORTH_A_SAVE) if held.n_ahead else n_new
            self._dirty_since.setdefault(slot.id, now)
        elif began:
            # it may have been computed in the server that was started meanwhile
            slot.doubt()
        self._idle_since[slot.id] = now
        self.answering(held)
        self.pool.release(slot)

    def answering(self, held: HeldSlot) -> None:
        """Note that the prompt is computed: the first byte of the response has arrived."""
        self._prefill_until.pop(held.slot.id, None)

    async def save_when_idle(self) -> None:
        """Save slots at the right moments, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (wait := self._until_next()) is not None:
                if wait > 0:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), wait)
                    self._wake.clear()
                elif (slot := self._ripe()) is not None:
                    await self._save_idle(slot)

    def _until_next(self) -> float | None:
        """Seconds until a slot may have to be saved; 0 if one is to be saved now, None if there is none."""
        if self.store is None:
            return None
        if self._ripe() is not None:
            return 0.0
        now = asyncio.get_running_loop().time()
        times = [self._ripe_at(slot) for slot in self._unsaved()]
        return max(min(times) - now, 0.01) if times else None

    def _unsaved(self) -> list[PoolSlot]:
        if self.pool.n_foreign:
            return []
        return [
            slot
            for slot in self.pool.slots
            if slot.is_worth_saving and not slot.is_held and slot.failures < MAX_FAILURES
        ]

    def _ripe_at(self, slot: PoolSlot) -> float:
        pause = self._timing.debounce * (1 + 4 * slot.failures)
        idle = self._idle_since.get(slot.id, 0.0) + pause
        if self.n_elsewhere == 0 and self.pool.n_held == 0:
            # between the answer of one conversation and the next question of another the server is not idle yet
            return max(self._idle_since.values(), default=0.0) + pause
        return max(idle, self._dirty_since.get(slot.id, 0.0) + self._timing.patience, *self._prefill_until.values())

    def _ripe(self) -> PoolSlot | None:
        """A slot to be saved now: never while a request waits for the server."""
        if self.store is None or self.pool.n_waiting:
            return None
        now = asyncio.get_running_loop().time()
        return min((slot for slot in self._unsaved() if self._ripe_at(slot) <= now), key=self._ripe_at, default=None)

    async def _save_idle(self, slot: PoolSlot) -> None:
        self.pool.hold(slot)
        saving = asyncio.ensure_future(self._save_and_release(slot))
        self._saving = slot, saving
        # what a thread does to the slot cannot be interrupted
        await asyncio.shield(saving)

    async def _save_and_release(self, slot: PoolSlot) -> None:
        try:
            await self._save(slot)
        finally:
            if self._saving is not None and self._saving[0] is slot:
                self._saving = None
            self.pool.release(slot)

    def _is_worth_a_wait(self, slot: PoolSlot) -> bool:
        """Whether a request waits until this slot is saved, which it will take for itself."""
        if self.store is None or self.pool.n_foreign or not slot.is_worth_saving or slot.failures >= MAX_FAILURES:
            return False
        computing, saving = self.rates.computing(slot.n_unsaved), self.rates.saving(len(slot.tokens))
        return computing > self._timing.soon and (not self.pool.n_waiting or computing >= WORTH_WAITING * saving)

    async def _save(self, slot: PoolSlot, expected: Tokens | None = None) -> None:
        """Copy what a slot that is held here holds; it is stored after that, while the slot is used again."""
        if self.store is None or slot.is_tainted or self.pool.n_foreign:
            return
        n_foreign_begun = self.pool.n_foreign_begun
        while len(self._copies) >= MAX_COPIES:
            await asyncio.wait(self._copies, return_when=asyncio.FIRST_COMPLETED)
        began, owner, n_unsaved = time.perf_counter(), slot.owner, slot.n_unsaved
        copied = await self._quietly("save", lambda: self._store.copy(slot.id, salt=owner, expected=expected))
        if self.pool.n_foreign_begun != n_foreign_begun:
            # a request has begun that may use any slot: the server may have given it this one before it was copied
            return
        if self.pool.is_current(slot):
            if copied is None:
                slot.failures += 1
            else:
                if not copied.has_media:
                    # of those with images it is known only what comes before them
                    slot.tokens = np.asarray(copied.tokens, np.int32)
                slot.n_unsaved = 0
                self._dirty_since.pop(slot.id, None)
                self.rates.saved(len(slot.tokens), copied.n_bytes, time.perf_counter() - began)
        if copied is not None:
            keeping = asyncio.ensure_future(self._keep(copied, slot, slot.tokens, n_unsaved))
            self._copies.add(keeping)
            keeping.add_done_callback(self._copies.discard)

    async def _keep(self, copied: CopyLike, slot: PoolSlot, tokens: Tokens, n_unsaved: int) -> None:
        """Store what was copied of a slot; if that fails, it is copied again later, if it is still there."""
        if await self._quietly("save", copied.store) is not None:
            self.n_saves += 1
            slot.failures = 0
        elif self.pool.is_current(slot) and slot.tokens is tokens:
            slot.n_unsaved += n_unsaved
            slot.failures += 1
            self._dirty_since.setdefault(slot.id, asyncio.get_running_loop().time())
            self._wake.set()

    async def save_all(self, seconds: float) -> None:
        """Save what is not stored yet, before the server stops."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._save_each(), seconds)

    async def _save_each(self) -> None:
        if self._saving is not None:
            # it was asked for while the server was idle, and the slot is held by that
            await asyncio.wait({self._saving[1]})
        # requests that were cut give their slots back just now
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_given_back(), GIVEN_BACK_SECONDS)
        for slot in self.pool.slots:
            if slot.is_dirty and not slot.is_held:
                await self._save_idle(slot)

    async def _all_given_back(self) -> None:
        while self.pool.n_held:
            self._wake.clear()
            await self._wake.wait()

    async def keep_copies(self, seconds: float) -> None:
        """Wait until all copies are stored."""
        if self._copies:
            await asyncio.wait(self._copies, timeout=seconds)

    def close(self, *, wait: bool = True) -> None:
        """End the threads, and wait for their work if requested."""
        self._threads.shutdown(wait=wait, cancel_futures=True)

    # -- threads -------------------------------------------------------------------------------------------------------

    @property
    def _store(self) -> StoreLike:
        assert self.store is not None
        return self.store

    async def _quietly(self, what: str, work: Callable[[], T]) -> T | None:
        """The result of work in a thread; None if it fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except Exception as error:  # noqa: BLE001 - a fault of the cache never breaks a completion
            self._failed(what, f"{type(error).__name__}: {error}")
        return None

    def _failed(self, what: str, why: str) -> None:
        n = self.failures[what] = self.failures.get(what, 0) + 1
        # the first of a series, then ever fewer
        if n & (n - 1) == 0:
            log.warning("%s of a slot failed, and the prompt is computed (%d so far): %s", what, n, why)


class SlotUnusableError(Exception):
    """A slot could not be emptied."""
