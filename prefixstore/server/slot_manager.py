"""All that is done with the slots of a server: taken by requests, saved, emptied and filled before, saved after.

``docs/servers.md`` draws the states of a slot. Its record is changed in the event loop only, which serves as the lock;
the store and the server's slots are accessed in threads. A slot is *busy* from before anything is done to it for a
request until the answer has ended. Requests get a slot about in the order in which they came. Any failure of the store
or of a slot is a miss: the request is computed as if there were no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from prefixstore.format.keys import NO_TOKENS, Tokens
from prefixstore.server.rates import RequestUsage
from prefixstore.server.refused import RefusedError
from prefixstore.server.slot_files import Restored, SlotCopy
from prefixstore.server.slot_pool import NOT_ASKED, WORTH_A_SAVE, Claim, PoolSlot, Rows, SlotPool

if TYPE_CHECKING:
    from prefixstore.server.slot_store import SlotStore

log = logging.getLogger("prefixstore.server")

T = TypeVar("T")

# The store is asked only if this many tokens would have to be computed without it.
WORTH_A_LOOKUP = 32
# Copies of slots that may wait to be stored, in memory; then the next one waits, too.
MAX_COPIES = 2
# Names of the work, for the log.
WORK = {"find": "a lookup", "restore": "restoring a slot", "save": "saving a slot", "erase": "emptying a slot"}
# Each thread does one thing to one slot, or asks the store; threads are started as they are needed.
MOST_THREADS = 32
# How long the last saves wait for slots that are still busy.
GIVEN_BACK_SECONDS = 5.0
# How long these saves may take, and storing what was copied.
STOP_SECONDS = 60.0
# How long a prompt that has stopped for a copy waits until earlier ones are stored.
COPY_SECONDS = 0.5


class SlotManager:
    """Gives the slots of a server to requests, and saves them afterwards, from the start of the server to its end.

    Without a store, slots are only given out. `erase` empties a slot of the server. `copies` of slots wait to be
    stored.
    """

    def __init__(self, pool: SlotPool, erase: Callable[[int], object], *, max_waiting: int) -> None:
        self.pool, self.rates = pool, pool.rates
        # set when a slot may be taken, or may have to be saved
        self._changed, self._max_waiting, self._is_closed = asyncio.Event(), max_waiting, False
        self.failures: dict[str, int] = {}
        self.n_saves = 0
        self._store: SlotStore | None = None
        self._erase = erase
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="prefixstore-slots")
        self._saver: asyncio.Task[None] | None = None
        self.copies: set[asyncio.Task[None]] = set()
        self._noting: set[asyncio.Task[None]] = set()
        # the next copy of a slot goes on where the last one ends
        self._storing = asyncio.Lock()

    def use(self, store: SlotStore | None) -> None:
        """Use this store from now on; None: slots are only given out."""
        self._store, self.pool.has_store = store, store is not None and not self._is_closed
        self.pool.can_cut = store is None or store.can_cut
        self.pool.is_unified = store is not None and store.is_unified
        self._changed.set()

    def start(self) -> None:
        """Save slots when they are idle."""
        self._saver = asyncio.create_task(self.save_when_idle())

    def forget(self) -> None:
        """Note that the server has unloaded its model: slots that no request has are empty now."""
        for slot in self.pool.idle():
            slot.emptied()

    def close(self) -> None:
        """Note that the server has ended: nobody gets a slot any more, and nothing is saved."""
        self._is_closed, self.pool.has_store = True, False
        self._changed.set()

    async def given_back(self) -> None:
        """Wait until no slot is in use."""
        while self.pool.n_busy:
            self._changed.clear()
            await self._changed.wait()

    async def end(self, *, saves: bool = False) -> None:
        """End what is under way, and store what was copied; with `saves`, first what is not saved yet."""
        if self._saver is not None:
            self._saver.cancel()
            # a save that was begun ends before that
            await asyncio.wait({self._saver})
        if saves:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._save_each(), STOP_SECONDS)
        if self.copies:
            await asyncio.wait(self.copies, timeout=STOP_SECONDS)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    # -- before the answer ---------------------------------------------------------------------------------------------

    async def acquire(
        self,
        tokens: Tokens | None,
        owner: str | None,
        wanted: int | None = None,
        *,
        asks: bool = True,
        trusts: bool = False,
    ) -> Claim:
        """Take a slot for a prompt, filled from the store if that is faster than computing.

        If it cannot be emptied, nothing in it may be used (`Claim.must_compute`). The parameters are those of `Claim`;
        `tokens` is None if they are not known.

        Raises
        ------
        RefusedError
            If too many requests wait for a slot, or the server has ended.
        """
        prompt = NO_TOKENS if tokens is None else tokens
        claim = Claim(prompt, owner, wanted, asks=asks and tokens is not None, trusts=trusts)
        if usable := self.pool.idle(wanted):
            # a request that has to wait asks when it has its slot: by then the store may have more
            await self._find(claim, usable)
        await self._wait_for_slot(claim)
        slot = claim.slot = self.pool.cheapest(claim)
        slot.is_busy, slot.n_computing = True, len(prompt)
        try:
            is_usable = await _to_its_end(self._prepare(claim))
        except BaseException:
            self._free(slot)
            raise
        if not is_usable:
            # it is emptied before its next use, and not saved
            slot.doubt()
            claim.reason, claim.must_compute = "error", True
        # it may hold tokens of this tenant, however the request ends
        slot.owner = owner
        return claim

    async def _wait_for_slot(self, claim: Claim) -> None:
        """Wait until there is a slot for a request. Raises `RefusedError`."""
        pool = self.pool
        if not pool.idle(claim.wanted):
            if pool.n_waiting >= self._max_waiting:
                raise RefusedError("too many requests wait for a slot", 503)
            # the store is asked again when it has its slot
            claim.found = NOT_ASKED
            pool.n_waiting += 1
            try:
                # the one that has waited longest is woken first
                while not (self._is_closed or pool.idle(claim.wanted)):
                    self._changed.clear()
                    await self._changed.wait()
            finally:
                pool.n_waiting -= 1
                if not pool.n_waiting:
                    # nothing was saved meanwhile
                    self._changed.set()
        if self._is_closed:
            raise RefusedError("the server has ended", 503)

    def _free(self, slot: PoolSlot) -> None:
        """Let the next request have a slot."""
        slot.is_busy, slot.n_computing = False, 0
        self._changed.set()

    @contextlib.asynccontextmanager
    async def all_slots(
        self, owner: str | None, tokens: Tokens | None = None, *, asks: bool = True, leaves: Rows = Rows.CLEAN
    ) -> AsyncIterator[list[Claim]]:
        """Take every slot for a request that may use any of them; what other tenants had in them is gone.

        The first claim is that of the slot that has most of the prompt, if that is known. One that is taken out of the
        list is not given back here. Whose rows the slots have after that may still be changed in each claim.

        Raises
        ------
        RefusedError
            If too many requests wait for a slot, or the server has ended.
        """
        slots, best = self.pool.slots, None
        if tokens is not None:
            claim = Claim(tokens, owner)
            # of slots without any of it, the server takes the one used longest ago
            best = max(slots, key=lambda slot: (self.pool.live(slot, claim), -slot.used))
        claims: list[Claim] = []
        try:
            # in order: two such requests cannot wait for each other
            for slot in slots:
                prompt = tokens if slot is best else None
                claims.insert(0 if slot is best else len(claims), await self.acquire(prompt, owner, slot.id, asks=asks))
            for claim in claims:
                claim.leaves = leaves
            yield claims
        finally:
            for claim in claims:
                if claim.leaves is Rows.CLEAN:
                    # if the server has used it all the same, it compares tokens itself
                    self._free(claim.slot)
                else:
                    self.release(claim, None, began=True)

    async def _find(self, claim: Claim, slots: Sequence[PoolSlot]) -> None:
        """Ask the store for a prompt, once, unless one of these slots has it."""
        pool, n_tokens = self.pool, len(claim.tokens)
        is_asked = claim.found is not NOT_ASKED
        if is_asked or not claim.asks or not pool.has_store or n_tokens >= max(slot.n_ctx for slot in pool.slots):
            return
        if n_tokens - max((pool.weigh(slot, claim).n_usable for slot in slots), default=0) < WORTH_A_LOOKUP:
            return
        began = time.perf_counter()
        found = await self._ask_store("find", lambda store: store.find(claim.tokens, salt=claim.owner))
        claim.lookup_seconds = time.perf_counter() - began
        claim.found = found or Restored(reason="unavailable")

    async def _prepare(self, claim: Claim) -> bool:
        """Save, empty and fill a slot for a request, as needed; whether what it holds may be used."""
        slot, claim.reason = claim.slot, None
        await _saved(slot)
        await self._make_room(claim)
        # the slot may be none of those that were idle before
        await self._find(claim, [slot])
        plan, found = self.pool.weigh(slot, claim), claim.found
        if claim.asks and len(claim.tokens) >= slot.n_ctx:
            claim.reason = "prompt_too_long"  # the server says so
        elif claim.asks and len(claim.tokens) < WORTH_A_LOOKUP:
            claim.reason = "short"
        elif found.reason == "unavailable" or (found.n_tokens <= plan.n_usable and plan.n_live < WORTH_A_LOOKUP):
            # every chat begins with the same few tokens: that is not yet a live prompt
            claim.reason = found.reason or (None if found is NOT_ASKED else "not_found")
        if plan.save_first:
            await self._save(slot)
        if plan.erase_first and not await self._empty(slot):
            return False
        if plan.restore:
            if not await self._restore(claim):
                return False
        elif found.n_tokens > plan.n_usable:
            claim.reason = "slow"
            self.rates.left_out()
        claim.n_reused = max(min(self.pool.weigh(slot, claim).n_usable, len(claim.tokens) - 1), 0)
        return True

    async def _make_room(self, claim: Claim) -> None:
        """Empty idle slots that a prompt has no room beside: the server would do that itself, and not say so."""
        while (slot := self.pool.in_the_way(claim)) is not None and await self._clear(slot):
            pass

    async def _clear(self, slot: PoolSlot) -> bool:
        """Empty an idle slot, and save it before if that is worth it; whether it was emptied."""
        slot.is_busy = True
        try:
            await _saved(slot)
            if self.pool.would_save(slot):
                await self._save(slot)
            return await _to_its_end(self._empty(slot))
        finally:
            self._free(slot)

    async def _restore(self, claim: Claim) -> bool:
        """Fill a slot for a request; whether what it holds after that may be used."""
        slot, began = claim.slot, time.perf_counter()
        done = await self._ask_store("restore", lambda store: store.restore(slot.id, claim.tokens, salt=claim.owner))
        claim.restored_seconds = time.perf_counter() - began
        if done is None:
            claim.reason = "error"
            slot.lost()
            return await self._empty(slot)
        if done.n_tokens == 0:
            claim.reason = done.reason or "not_found"
        else:
            slot.filled(claim.tokens[: done.n_tokens], claim.owner)
            claim.n_restored, claim.saved_seconds, claim.reason = done.n_tokens, done.saved_seconds, None
            self.rates.restored(done.n_tokens, done.n_bytes, claim.restored_seconds)
        return True

    async def _empty(self, slot: PoolSlot) -> bool:
        """Empty a slot; whether that was done."""
        if await self._quietly("erase", lambda: (self._erase(slot.id), True)[1]):
            slot.emptied()
            return True
        slot.doubt(Rows.ALTERED)
        return False

    async def empty_tainted(self) -> None:
        """Empty the idle slots with doubtful rows: the server may choose any of them for the next request."""
        for slot in self.pool.idle():
            if not slot.is_clean and not slot.is_busy:
                await self._clear(slot)

    # -- in the middle of a prompt -------------------------------------------------------------------------------------

    async def shared(self, claim: Claim) -> int:
        """How many tokens of a prompt some stored prompt begins with, whether they can be restored or not."""
        return await self._ask_store("find", lambda store: store.shared(claim.tokens, claim.owner)) or 0

    async def keep(self, claim: Claim, n: int) -> bool:
        """Have a slot copied that holds the first `n` tokens of its prompt; whether the next place is worth a try.

        A prompt waits for that only as long as copies are stored about as fast as they come.
        """
        slot, tokens = claim.slot, claim.tokens[:n]
        slot.computed(tokens, n - slot.n_unsaved)
        if len(self.copies) >= MAX_COPIES:
            await asyncio.wait(self.copies, timeout=COPY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if len(self.copies) >= MAX_COPIES or not self.pool.may_save(slot):
            return False
        return await _to_its_end(self._save(slot, tokens)) and len(slot.tokens) == n

    # -- after the answer ----------------------------------------------------------------------------------------------

    def release(self, claim: Claim, usage: RequestUsage | None, *, began: bool, has_failed: bool = False) -> None:
        """Give the slot of a request back.

        `usage` is what the answer says about the work, None if it did not come to its end. `began` is whether the
        server has begun to answer, so that the slot holds the prompt, unless it `has_failed` to compute it.
        """
        slot = claim.slot
        if has_failed:
            slot.lost()
        elif began:
            n_new = WORTH_A_SAVE if usage is None else usage.computed_tokens + usage.generated_tokens
            # the last token is computed with the next one
            n_answer = WORTH_A_SAVE if usage is None else max(usage.generated_tokens - 1, 0)
            # a prompt in which the server has stopped to be copied is worth a save at its end, too
            slot.computed(claim.tokens, max(n_new, WORTH_A_SAVE) if claim.n_ahead else n_new, n_answer)
            slot.doubt(claim.leaves)
            self.pool.outgrown(slot)
        slot.used = time.monotonic()
        self._free(slot)

    def note_use(self, claim: Claim) -> None:
        """Have the store note that a prompt was asked for, unless a restore has done that."""
        if claim.restored_seconds is None:
            noting = asyncio.ensure_future(self._ask_store("find", lambda store: store.use(claim.tokens, claim.owner)))
            self._noting.add(noting)
            noting.add_done_callback(self._noting.discard)

    async def save_when_idle(self) -> None:
        """Save slots at the right moments, until cancelled."""
        while True:
            self._changed.clear()
            due = self.pool.next_save()
            wait = None if due is None else due[0] - time.monotonic()
            if due is not None and wait is not None and wait <= 0:
                if len(self.copies) < MAX_COPIES:
                    await self._save_idle(due[1])
                else:
                    # meanwhile requests may have the slot
                    await asyncio.wait(self.copies, return_when=asyncio.FIRST_COMPLETED)
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)

    async def _save_idle(self, slot: PoolSlot) -> None:
        """Save a slot that no request has; one that takes it meanwhile waits for that."""
        slot.saving = asyncio.ensure_future(self._save(slot))
        try:
            await _to_its_end(slot.saving)
        finally:
            slot.saving = None
            self._changed.set()

    async def _save(self, slot: PoolSlot, expected: Tokens | None = None) -> bool:
        """Copy what a slot holds; it is stored after that, while the slot is used again. Whether it was copied."""
        if not self.pool.may_save(slot):
            return False
        while len(self.copies) >= MAX_COPIES:
            await asyncio.wait(self.copies, return_when=asyncio.FIRST_COMPLETED)
        began, owner = time.perf_counter(), slot.owner
        copied = await self._ask_store("save", lambda store: store.copy(slot.id, salt=owner, expected=expected))
        if copied is None:
            slot.not_saved()
            return False
        # of a slot with images, only the tokens before the first one are known
        tokens = slot.tokens if copied.has_media else np.asarray(copied.tokens, np.int32)
        slot.filled(tokens, owner)
        self.rates.saved(len(tokens), copied.n_bytes, time.perf_counter() - began)
        keeping = asyncio.ensure_future(self._keep(copied))
        self.copies.add(keeping)
        keeping.add_done_callback(self.copies.discard)
        return True

    async def _keep(self, copied: SlotCopy) -> None:
        """Store what was copied of a slot."""
        async with self._storing:
            if await self._quietly("save", copied.store) is not None:
                self.n_saves += 1

    async def _save_each(self) -> None:
        # requests that were cut off may be about to give their slots back
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.given_back(), GIVEN_BACK_SECONDS)
        for slot in self.pool.slots:
            if slot.is_dirty and not slot.is_busy:
                await self._save_idle(slot)

    # -- threads -------------------------------------------------------------------------------------------------------

    async def _ask_store(self, what: str, work: Callable[[SlotStore], T]) -> T | None:
        """What the store answers; None if it fails, or is no longer used."""
        store = self._store
        return None if store is None else await self._quietly(what, lambda: work(store))

    async def _quietly(self, what: str, work: Callable[[], T]) -> T | None:
        """The result of work in a thread; None if it fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except Exception as error:  # noqa: BLE001 - a fault of the cache never breaks a completion
            n = self.failures[what] = self.failures.get(what, 0) + 1
            # the first of a series, then ever fewer
            if n & (n - 1) == 0:
                why = f"{type(error).__name__}: {error}"
                log.warning("%s has failed, which costs time only (%d so far): %s", WORK[what], n, why)
        return None


async def _saved(slot: PoolSlot) -> None:
    """Wait for the save of a slot that was begun before a request had it."""
    if slot.saving is not None:
        await asyncio.wait({slot.saving})


async def _to_its_end(work: Awaitable[T]) -> T:
    """Wait for work that a thread does to a slot, which cannot be interrupted: also if this task is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # asked for, so that asyncio does not complain
        raise
