"""Parts of the proxy by themselves: what a request asks for, which slot it gets, what an answer says."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from prefixstore.backends import open_backend
from prefixstore.errors import ClosedError, CorruptError, InvalidParameterError, UnavailableError
from prefixstore.server import slot_pool
from prefixstore.server.child import ServerCommand, private_directory
from prefixstore.server.exchange import BodyBudget, Exchange
from prefixstore.server.identity import ServerIdentity
from prefixstore.server.own_endpoints import OwnEndpoints
from prefixstore.server.prompts import (
    CACHE_SALT,
    MAX_PARTS,
    Ask,
    parse,
    pinned,
    unknown_field,
)
from prefixstore.server.rates import Rates, Report, RequestUsage
from prefixstore.server.refused import RefusedError
from prefixstore.server.server_session import OnDamage, ServerSession, opened
from prefixstore.server.serving import ServeSettings, failure_of
from prefixstore.server.slot_files import Restored
from prefixstore.server.slot_manager import SlotManager
from prefixstore.server.slot_pool import Claim, Plan, PoolSlot, Rows, SlotPool
from prefixstore.server.tenants import Admission, TenantSource
from prefixstore.server.upstream import Upstream, end_to_end

T = TypeVar("T")

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch):
    """A slot that is idle is saved at once."""
    monkeypatch.setattr(slot_pool, "DEBOUNCE", 0.0)
    monkeypatch.setattr(slot_pool, "PATIENCE", 0.0)


def tokens(*values: int) -> Any:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("path", "body", "reason", "can_pin", "taints"),
    [
        ("/completion", {"prompt": "a"}, None, True, False),
        ("/completion", {"prompt": [1, 2, "a"]}, None, True, False),
        ("/completion", {"prompt": ["a"]}, None, True, False),
        ("/completion", {"prompt": ["a", "b"]}, "several_prompts", False, False),
        ("/completion", {"prompt": "a", "n": 2, "lora": [{"id": 0}]}, "lora", False, True),
        # n_cache_reuse is overridden in whatever is passed on
        ("/completion", {"prompt": "a", "n": 2, "n_cache_reuse": 1}, "several_answers", False, False),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["AA=="]}}, None, True, False),
        ("/completion", {"prompt": "a", "id_slot": None, "control_vector": None}, None, True, False),
        ("/completion", {"prompt": "a", "control_vector": "x"}, "unknown_field", True, True),
        ("/completion", {"prompt": {"prompt_string": "a"}}, None, True, False),
        ("/completion", {"prompt": {"prompt_string": "a", "embeddings": []}}, "unknown_field", True, True),
        ("/completion", {"prompt": "a", "cache_prompt": False, "steering": 1}, "cache_prompt", True, True),
        ("/completion", {"prompt": ["a", "b"], "steering": 1}, "several_prompts", False, True),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "steering": 1}, "infill", True, True),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "infill", True, False),
        (CHAT, {"messages": []}, None, True, False),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, None, True, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, "media", False, False),
        ("/v1/responses", {"input": [{"role": "user", "content": [IMAGE]}]}, "media", True, False),
        (CHAT, {"messages": [], "cache_prompt": False}, "cache_prompt", True, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, None, False, False),
        ("/v1/responses", {"input": "a"}, None, True, False),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "thinking": {}, "speed": "fast"}, None, False, False),
        ("/v1/messages", {"messages": [], "steering": 1}, "unknown_field", False, True),
        ("/v1/responses", {"input": "a", "steering": 1}, "unknown_field", True, True),
    ],
)
def test_a_request_says_why_it_is_passed_on(path: str, body: Any, reason: str | None, can_pin: bool, taints: bool):
    ask = parse(path, json.dumps(body).encode())
    assert (ask.reason, ask.can_pin, ask.taints) == (reason, can_pin, taints)


def test_the_fields_of_llama_server_and_of_official_clients_are_known():
    ours = "prompt n_predict temperature top_k samplers grammar json_schema id_slot seed stop logit_bias dry_multiplier"
    theirs = "model messages tools tool_choice response_format stream_options store metadata safety_identifier thinking"
    assert unknown_field(dict.fromkeys((ours + " " + theirs).split(), 1)) is None
    assert unknown_field({"prompt": "a", "steering": 0}) == "steering"
    assert unknown_field({"prompt": "a", "steering": 0}, {"steering"}) is None
    assert parse("/completion", b'{"prompt": "a", "steering": 1}', {"steering"}).reason is None
    # what SillyTavern always sends, and what a server that has guidance would do
    assert unknown_field({"prompt": "a", "guidance_scale": 1, "negative_prompt": ""}) is None
    assert unknown_field({"prompt": "a", "guidance_scale": 1.5, "negative_prompt": ""}) == "guidance_scale"
    assert unknown_field({"prompt": "a", "negative_prompt": "b"}) == "negative_prompt"
    assert unknown_field({"prompt": "a", "typ_p": 1, "max_tokens_second": 0, "client_metadata": {}}) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/completion", body) for body in (b"", b"[]", b"{", b'{"a": 1}'.decode().encode("utf-16"), b"[" * 100_000)),
        ("/completion", b'{"prompt": 3}'),
        ("/completion", b'{"prompt": [[1], [2]], "id_slot": 1.0}'),
        ("/v1/responses", b'{"input": 3}'),
        # what the server may read otherwise, or alone
        ("/completion", b'{"prompt": "x"}\0'),
        ("/completion", b'\xef\xbb\xbf{"prompt": "x"}'),
        ("/completion", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"),
        ("/completion", b'{"prompt": "x", "unused": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
        ("/completion", b'{"prompt": "x", "unused": [' + b"[]," * MAX_PARTS + b"[]]}"),
        ("/completion", b'{"prompt": "x", "cache_salt": 7}'),
    ],
)
def test_what_cannot_be_read_is_refused(path: str, body: bytes):
    with pytest.raises(RefusedError):
        parse(path, body, {CACHE_SALT})


def test_a_request_that_is_nested_too_deeply_to_be_written_is_refused():
    def is_refused(n: int) -> bool:
        nested = b"[" * n + b"]" * n
        body = b'{"input": "a", "tools": [{"type": "function", "parameters": %s}]}' % nested
        try:
            return parse("/v1/responses", body).reason is not None
        except RefusedError:
            return True

    # where the limit is depends on the caller, and on the version of Python
    limit = bisect_left(range(20_000), True, key=is_refused)
    assert {is_refused(n) for n in range(limit - 50, limit + 50)} == {False, True}


def test_brackets_in_a_text_are_no_parts():
    text = '[{"\\' * MAX_PARTS
    assert parse("/completion", json.dumps({"prompt": text}).encode()) == Ask(prompt=text)


def test_fields_are_added_at_the_end_and_win():
    assert json.loads(pinned(b'{"id_slot": 3, "x": "}"} \n', id_slot=1, n_cache_reuse=0)) == {
        "id_slot": 1,
        "x": "}",
        "n_cache_reuse": 0,
    }
    assert json.loads(pinned(b"{ }", id_slot=1)) == {"id_slot": 1}


SAID = {"cache_n": 1, "prompt_n": 2}
STARTED = {"message": {"usage": {"cache_read_input_tokens": 3, "input_tokens": 4, "output_tokens": 0}}}


@pytest.mark.parametrize(
    ("parts", "usage"),
    [
        # what a model says is escaped
        ([{"content": '"timings":{"cache_n":9,"prompt_n":9}', "timings": SAID}], RequestUsage(1, 2)),
        ([{"timings": SAID, "probabilities": ["a long list"] * 2000}], RequestUsage(1, 2)),
        ([STARTED, *[{"delta": "a long answer"}] * 2000, {"usage": {"output_tokens": 2000}}], RequestUsage(3, 4, 2000)),
        # the end of one that is cut may be half a number
        ([{"cached_tokens": 3}, '"prompt_tokens":1'], None),
        ([{"cached_tokens": 3, "prompt_tokens": 1e99}], None),
        # a stream that has begun has an error in place of its end
        ([{"content": '{"code":500}'}, {"error": {"code": 500, "message": "no room"}}], None),
        ([{"error": {"code": 501, "message": '"timings":{"cache_n":9,"prompt_n":9}'}}], None),
        ([STARTED, 'event: error\ndata: {"code":500,"message":"no room"}'], RequestUsage(3, 4)),
        ([{"content": [{"type": "tool_use", "input": {"code": 500}}], "timings": SAID}], RequestUsage(1, 2)),
    ],
)
def test_what_the_server_says_of_a_prompt_is_found_wherever_it_stands(parts: list[Any], usage: RequestUsage | None):
    said = "".join(part if isinstance(part, str) else f"{json.dumps(part)}\n\n" for part in parts).encode()
    report = Report()
    for i in range(0, len(said), 7):
        report.feed(said[i : i + 7])
    assert report.usage() == usage
    assert report.has_failed == ("no room" in str(parts[-1]))


# -- slots ------------------------------------------------------------------------------------------------------------


class Store:
    """A store in which `n_tokens` of each prompt are found, and whose copy of a slot ends when it is told to."""

    n_bytes = 1
    reason: str | None = None
    can_cut, is_unified = True, False
    has_media = False
    saved_seconds = 0.0

    def __init__(self, n_tokens: int = 0, held: Any = None):
        self.n_tokens, self.tokens, self.n_finds, self.n_restores, self.n_stored = n_tokens, held, 0, 0, 0
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.fault: Exception | None = None

    def find(self, prompt: Any, *, salt: str | None = None) -> Any:
        self.n_finds += 1
        return self

    def restore(self, slot: int, prompt: Any, *, salt: str | None = None) -> Any:
        self.n_restores += 1
        if self.fault is not None:
            raise self.fault
        return self

    def copy(self, slot: int, *, salt: str | None = None, expected: Any = None) -> Any:
        self.begun.set()
        assert self.may_end.wait(60)
        return self

    def store(self) -> object:
        self.n_stored += 1
        return True


class Erase:
    """Empties slots, but for some."""

    def __init__(self, *stuck: int):
        self.stuck, self.asked = set(stuck), list[int]()

    def __call__(self, slot: int) -> None:
        self.asked.append(slot)
        if slot in self.stuck:
            raise UnavailableError("it does not answer")


def with_slots(
    n: int,
    scene: Callable[[SlotManager], Awaitable[T]],
    store: Any = None,
    erase: Callable[[int], object] | None = None,
    rates: Rates | None = None,
    *,
    separated: bool = False,
    max_waiting: int = 10,
) -> T:
    """What a scene returns that uses `n` slots of 500 tokens."""

    async def run() -> T:
        pool = SlotPool([(i, 500) for i in range(n)], rates, separated=separated)
        manager = SlotManager(pool, erase or Erase(), max_waiting=max_waiting)
        manager.use(store)
        try:
            return await scene(manager)
        finally:
            await manager.end()

    return asyncio.run(asyncio.wait_for(run(), 120))


P60 = tokens(*range(60))


def weigh(pool: SlotPool, slot: PoolSlot, prompt: Any, found: tuple[int, int] = (0, 0)) -> Plan:
    return pool.weigh(slot, Claim(prompt, None, found=Restored(*found)))


def test_the_slot_that_holds_most_of_the_prompt_is_chosen_then_the_one_used_longest_ago():
    pool = SlotPool([(0, 100), (1, 100)], Rates())
    pool.slots[1].tokens = tokens(*range(50))
    plan = weigh(pool, pool.slots[1], P60)
    assert (plan.n_live, plan.restore) == (50, False)
    chosen = [pool.cheapest(Claim(prompt, None)) for prompt in (P60, tokens(9, 9))]
    assert chosen == [pool.slots[1], pool.slots[0]]


def test_of_memory_that_cannot_be_cut_only_what_ends_where_the_prompt_goes_on_is_usable():
    pool = SlotPool([(0, 100)], Rates(token_seconds=1e-3, restore_seconds=1e-9))
    slot = pool.slots[0]
    slot.tokens = tokens(*range(40), 99)
    assert not weigh(pool, slot, P60, found=(30, 1000)).restore
    pool.can_cut = False
    assert weigh(pool, slot, P60, found=(30, 1000)).restore
    slot.tokens = tokens(*range(40))
    assert not weigh(pool, slot, P60, found=(30, 1000)).restore


def test_what_is_found_is_restored_if_that_is_faster_than_computing_it():
    pool = SlotPool([(0, 100)], Rates(token_seconds=1e-3, restore_seconds=1e-6))
    assert weigh(pool, pool.slots[0], P60, found=(40, 10_000)).restore
    assert not weigh(pool, pool.slots[0], P60, found=(40, 50_000)).restore


def test_a_restore_that_was_slow_by_chance_is_not_the_last_one():
    """What it has taken says that computing is faster; nothing else is measured unless one is tried again."""
    store, rates = Store(60), Rates(token_seconds=1e-3)
    store.n_bytes = 1 << 20
    rates.restored(60, 1 << 20, 0.3)

    async def scene(manager: SlotManager) -> list[str | None]:
        reasons: list[str | None] = []
        for i in range(200):
            held = await manager.acquire(tokens(*range(i, i + 60)), None)
            manager.release(held, None, began=False)
            held.slot.emptied()
            reasons.append(held.reason)
            if store.n_restores == 1:
                # it was fast this time
                rates.restore_seconds = 1e-9
        return reasons

    reasons = with_slots(1, scene, store, rates=rates)
    n_left_out = reasons.count("slow")
    assert 20 < n_left_out < 180
    assert reasons == ["slow"] * n_left_out + [None] * (200 - n_left_out)


@pytest.mark.parametrize(
    ("n", "held", "found", "told", "source"),
    [
        (20, 0, None, "restored=0 of 20; computed=20; reason=short", ("none", "short")),
        (20, 20, None, "restored=0 of 20; computed=1; reason=short", ("live", "short")),
        (60, 60, None, "restored=0 of 60; computed=1; reason=live", ("live", None)),
        (60, 0, "not_found", "restored=0 of 60; computed=60; reason=not_found", ("none", "not_found")),
        # it would have to step back
        (60, 41, "diverged", "restored=0 of 60; computed=60; reason=diverged", ("none", "diverged")),
    ],
)
def test_what_a_client_is_told_is_what_is_counted(
    n: int, held: int, found: str | None, told: str, source: tuple[str, str | None]
):
    store = Store()
    store.reason, store.can_cut = found, False

    async def scene(manager: SlotManager) -> tuple[str, tuple[str, str | None]]:
        slot = manager.pool.slots[0]
        slot.tokens = tokens(*range(held)) if held in (0, n) else tokens(*range(held - 1), 99)
        claim = await manager.acquire(tokens(*range(n)), None)
        return claim.told, claim.outcome(RequestUsage(claim.n_reused, n - claim.n_reused))

    assert with_slots(1, scene, store) == (told, source)


def test_slots_that_share_one_memory_leave_room_for_a_prompt_and_what_its_answer_has_displaced_is_doubted():
    erase, store = Erase(), Store()
    store.is_unified = True

    async def scene(manager: SlotManager) -> tuple[list[int], list[bool]]:
        for i, n_answer in enumerate((51, 51, 201)):
            claim = await manager.acquire(tokens(*range(1000 * i, 1000 * i + 150)), None)
            manager.release(claim, RequestUsage(0, 150, n_answer), began=True)
        found = erase.asked.copy(), [slot.is_clean for slot in manager.pool.slots]
        # one that never has room displaces none
        claim = await manager.acquire(tokens(*range(5000, 5600)), None)
        manager.release(claim, None, began=False)
        assert set(erase.asked[1:]) <= {claim.slot.id}
        return found

    # of 500 tokens in all, two have 200 each; the first one goes before the third prompt, the second one by its answer
    assert with_slots(3, scene, store, erase) == ([0], [True, False, True])


# -- when slots are saved ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0, 60])
def test_a_prompt_whose_slot_is_just_being_saved_waits_for_that_unless_another_slot_has_as_much(others: int):
    store = Store(held=P60)

    async def scene(manager: SlotManager) -> bool:
        first = await manager.acquire(P60, None)
        manager.release(first, RequestUsage(0, 60), began=True)
        manager.pool.slots[1 - first.slot.id].tokens = P60[:others]
        manager.start()
        await asyncio.to_thread(store.begun.wait, 60)
        second = asyncio.create_task(manager.acquire(P60, None))
        # nothing ends a wait for the save before it has ended
        done, _ = await asyncio.wait({second}, timeout=60 if others else 0.2)
        assert bool(done) == (others > 0)
        store.may_end.set()
        return (await second).slot is first.slot

    assert with_slots(2, scene, store, rates=Rates(token_seconds=1.0)) == (others == 0)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_save_that_was_begun_and_the_slot_of_a_request_that_is_cut_are_stored_before_the_server_stops(is_cut: bool):
    store = Store(held=P60)

    async def scene(manager: SlotManager) -> None:
        held = await manager.acquire(P60, None)
        loop = asyncio.get_running_loop()
        if is_cut:
            # its task has just been cancelled, and takes some steps to end
            loop.call_later(0.05, lambda: manager.release(held, None, began=True))
        else:
            manager.release(held, RequestUsage(0, 60), began=True)
            manager.start()
            await asyncio.to_thread(store.begun.wait, 60)
        loop.call_later(0.05, store.may_end.set)
        await manager.end(saves=True)

    with_slots(1, scene, store)
    assert store.n_stored == 1


def test_a_slot_can_be_had_while_its_copy_would_wait_for_those_of_others():
    class Slow(Store):
        def copy(self, *_: Any, **__: Any) -> Any:
            return self

        def store(self) -> object:
            return self.may_end.wait(60)

    store = Slow(held=P60)

    async def scene(manager: SlotManager) -> None:
        for i in range(3):
            held = await manager.acquire(tokens(*range(100 * i, 100 * i + 60)), None)
            manager.release(held, RequestUsage(0, 60), began=True)
        manager.start()
        while len(manager.copies) < 2:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        (left,) = [slot for slot in manager.pool.slots if slot.is_dirty]
        again = asyncio.create_task(manager.acquire(left.tokens, None))
        done, _ = await asyncio.wait({again}, timeout=30)
        store.may_end.set()
        assert done
        assert (await again).slot is left

    with_slots(3, scene, store, rates=Rates(token_seconds=1.0))


def test_a_slot_is_not_believed_to_hold_a_prompt_that_the_server_has_failed_to_compute_nor_more_new_tokens_than_all():
    erase = Erase()

    async def scene(manager: SlotManager) -> None:
        slot = manager.pool.slots[0]
        for n in (60, 50):
            manager.release(await manager.acquire(P60[:n], None), RequestUsage(0, n, 10), began=True)
            assert slot.n_unsaved == slot.n_held == n + 9
        manager.release(await manager.acquire(P60, None), None, began=True, has_failed=True)
        assert (slot.n_held, slot.is_dirty, erase.asked) == (0, False, [])
        claim = await manager.acquire(P60, None)
        assert (claim.n_reused, claim.must_compute, erase.asked) == (0, False, [0])

    with_slots(1, scene, Store(), erase)


def test_a_save_that_fails_is_tried_again_after_a_while_and_at_the_end():
    pool = SlotPool([(0, 1000)])
    slot, pool.has_store = pool.slots[0], True
    slot.computed(P60, 60)
    first = pool.next_save()
    slot.not_saved()
    later = pool.next_save()
    assert first is not None
    assert later is not None
    assert later[0] > max(first[0], time.monotonic())
    assert slot.is_worth_saving
    assert not pool.would_save(slot)


# -- slots that hold what a request must not find ---------------------------------------------------------------------


@pytest.mark.parametrize(("stuck", "wanted", "slot"), [((), None, 0), ((0,), None, 0), ((0,), 1, 1), ((1,), 1, 1)])
def test_of_a_slot_that_cannot_be_emptied_nothing_is_used(stuck: tuple[int, ...], wanted: int | None, slot: int):
    erase = Erase(*stuck)

    async def scene(manager: SlotManager) -> None:
        for i, one in enumerate(manager.pool.slots):
            one.rows, one.used = Rows.ALTERED, i
        held = await manager.acquire(P60, None, wanted)
        # else it is not saved, and emptied before its next use
        is_emptied = slot not in stuck
        assert (held.slot.id, held.slot.is_clean, held.must_compute) == (slot, is_emptied, not is_emptied)
        assert erase.asked == [slot]
        assert [one for one in manager.pool.slots if one.is_busy] == [held.slot]
        manager.release(held, RequestUsage(0, 60), began=True)
        assert held.slot.is_dirty is is_emptied
        assert manager.pool.n_busy == 0

    with_slots(3, scene, erase=erase)


def test_a_request_that_leaves_while_no_slot_can_be_emptied_gives_its_slot_back():
    begun, may_end = threading.Event(), threading.Event()

    def erase(_: int) -> None:
        begun.set()
        assert may_end.wait(60)
        raise UnavailableError("it does not answer")

    async def scene(manager: SlotManager) -> int:
        manager.pool.slots[0].rows = Rows.ALTERED
        asking = asyncio.create_task(manager.acquire(P60, None))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(3):
            asking.cancel()
            await asyncio.sleep(0)
        assert manager.pool.n_busy == 1
        may_end.set()
        await asyncio.gather(asking, return_exceptions=True)
        return manager.pool.n_busy

    assert with_slots(1, scene, erase=erase) == 0


@pytest.mark.parametrize("stuck", [(), (0,)])
def test_nothing_is_computed_from_a_slot_whose_restore_has_failed(stuck: tuple[int, ...]):
    """The erasing of what the server has read may have failed as well."""
    store, erase = Store(60), Erase(*stuck)
    store.fault = CorruptError("as a test wants it")

    async def scene(manager: SlotManager) -> None:
        held = await manager.acquire(P60, None)
        assert (held.slot.id, held.must_compute, held.n_restored, erase.asked) == (0, bool(stuck), 0, [0])
        assert [one.id for one in manager.pool.slots if one.must_empty(trusts=True)] == list(stuck)

    with_slots(2, scene, store, erase)


def test_a_request_gets_no_rows_that_may_be_those_of_another_tenant_even_if_it_would_trust_its_own():
    """A slot that could not be emptied, and that its next request has not computed anything in."""
    erase = Erase(0)

    async def scene(manager: SlotManager) -> None:
        manager.release(await manager.acquire(P60, "ann"), RequestUsage(0, 60), began=True)
        held = await manager.acquire(P60, "bob")
        assert held.must_compute
        # the server has refused it
        manager.release(held, None, began=False)
        erase.stuck.clear()
        held = await manager.acquire(P60, "bob", asks=False, trusts=True)
        assert (held.must_compute, erase.asked[-1], len(erase.asked)) == (False, 0, 2)
        assert held.slot.rows is Rows.CLEAN
        manager.release(held, None, began=False)
        # a request that may use any slot, as of embeddings, has left the rows of anyone
        async with manager.all_slots(None, leaves=Rows.UNKNOWN) as claims:
            assert [claim.slot for claim in claims] == manager.pool.slots
            n_asked = len(erase.asked)
        await manager.acquire(P60, "bob", asks=False, trusts=True)
        assert len(erase.asked) == n_asked + 1

    with_slots(1, scene, erase=erase, separated=True)


# -- requests that wait for a slot ------------------------------------------------------------------------------------


def test_a_request_that_waits_for_a_slot_finds_what_was_stored_meanwhile_and_asks_once():
    store = Store()

    async def scene(manager: SlotManager) -> tuple[int, int]:
        held = await manager.acquire(tokens(*range(300)), None)
        waiting = asyncio.create_task(manager.acquire(tokens(*range(200), *range(300, 400)), None))
        await asyncio.sleep(0.01)
        with pytest.raises(RefusedError):
            await manager.acquire(tokens(*range(400, 500)), None)
        n_finds, store.n_tokens = store.n_finds, 200
        manager.release(held, None, began=False)
        return (await waiting).found.n_tokens, store.n_finds - n_finds

    assert with_slots(1, scene, store, rates=Rates(token_seconds=1.0), max_waiting=1) == (200, 1)


def test_requests_wait_in_order_and_one_that_gives_up_wakes_the_next():
    async def scene(manager: SlotManager) -> list[str]:
        done = list[str]()
        held = await manager.acquire(None, None)

        async def request(name: str) -> None:
            claim = await manager.acquire(None, None)
            done.append(name)
            await asyncio.sleep(0)
            manager.release(claim, None, began=False)

        tasks = [asyncio.create_task(request(name)) for name in "abc"]
        await asyncio.sleep(0)
        manager.release(held, None, began=False)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert manager.pool.n_waiting == 0
        return done

    assert with_slots(1, scene) == ["b", "c"]


def test_when_the_server_has_ended_nobody_waits_for_its_slots_and_nothing_of_them_is_saved():
    async def scene(manager: SlotManager) -> None:
        held = await manager.acquire(P60, None)
        waiting = asyncio.create_task(manager.acquire(P60, None))
        await asyncio.sleep(0)
        manager.close()
        for request in (waiting, manager.acquire(P60, None)):
            with pytest.raises(RefusedError, match="has ended"):
                await request
        given_back = asyncio.create_task(manager.given_back())
        await asyncio.sleep(0)
        assert not given_back.done()
        manager.release(held, RequestUsage(0, 60), began=True)
        await given_back
        assert manager.pool.next_save() is None

    with_slots(1, scene, Store())


def test_headers_of_one_connection_stay_there():
    given = {"Connection": "close, X-Hop", "X-Hop": "1", "Transfer-Encoding": "chunked", "X-Kept": "2", "X-Own": "3"}
    assert end_to_end(given, ["x-own"]) == {"X-Kept": "2"}
    # without its last letter it could be another key
    assert end_to_end({"Authorization": "Bearer key\udce9"}) == {"Authorization": "Bearer key\xe9"}


def test_tenants_come_from_keys_or_headers_and_keys_are_not_kept():
    source = TenantSource.parse("api-key")
    assert source.salt({"authorization": "Bearer secret"}) == source.salt({"x-api-key": "secret"})
    assert "secret" not in source.salt({"x-api-key": "secret"})
    # the last one is not UTF-8
    for name, tenant in (("ann", ":ann"), ("societ\u5185\t", ":societ\u5185"), ("societ\udce0", "/latin-1:societ\xe0")):
        assert TenantSource.parse("header:X-Tenant").salt({"x-tenant": name}) == f"x-tenant{tenant}"
    for one in (source, TenantSource.parse("header:X-Tenant")):
        with pytest.raises(RefusedError):
            one.salt({})
    with pytest.raises(RefusedError):
        TenantSource.parse("header:X-Tenant").salt(CIMultiDict([("x-tenant", "bob"), ("x-tenant", "ann")]))
    for text in ("", "header", "header:", "header:a b", "ip", "header:Authorization", "header:X-Api-Key"):
        with pytest.raises(InvalidParameterError):
            TenantSource.parse(text)


def test_the_private_directory_is_private_and_what_a_killed_process_left_is_removed(tmp_path: Path):
    left = tmp_path / "prefixstore-left"
    left.mkdir()
    (left / "lock").touch()
    foreign = tmp_path / "prefixstore-other"
    foreign.mkdir()
    with private_directory(tmp_path) as private, private_directory(tmp_path) as second:
        assert private.stat().st_mode & 0o777 == 0o700
        assert private.exists()
        assert second.exists()
        assert not left.exists()
    assert list(tmp_path.iterdir()) == [foreign]


def test_the_command_has_what_the_store_needs(tmp_path: Path):
    command = ServerCommand(["llama-server", "-m", "x"], {}, tmp_path)
    argv = command.argv()
    assert argv[-2:] == ["--cache-ram", "0"]
    assert argv[argv.index("--host") + 1] == str(tmp_path / "server.sock")
    assert "LLAMA_API_KEY" not in command.environ
    # llama-server warns of two options for keys: one would be ignored, it says
    given = ["llama-server", "--api_key", "theirs", "--api-key-file", "file"]
    command = ServerCommand(given, {"LLAMA_API_KEY": "one,other"}, tmp_path)
    assert command.environ["LLAMA_API_KEY"] == f"{command.key},theirs,one,other"
    assert command.argv()[:4] == ["llama-server", "--api-key-file", "file", "--host"]
    assert command.key not in command.argv()


def test_no_connection_to_the_server_is_used_twice(tmp_path: Path):
    """llama-server closes some after a streamed answer, without having said so: the next request would fail."""
    served: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        await reader.read()  # open until the other side closes it
        writer.close()
        await writer.wait_closed()

    async def ask() -> None:
        async with await asyncio.start_unix_server(answer, tmp_path / "socket"):
            upstream = Upstream(tmp_path / "socket", timeout=60)
            for _ in range(3):
                async with upstream.send("GET", b"/v1/models", {}, None) as response:
                    assert await response.read() == b"ok"
            await upstream.close()
            await asyncio.gather(*(task for task in served if task is not None))

    asyncio.run(ask())
    assert len(served) == 3


@pytest.mark.parametrize(
    ("argv", "variable"),
    [
        *((argv, "") for argv in (["--port", "1"], ["--context_shift"], ["--cache-reuse", "64"], ["--no-slots"])),
        (["-cram", "0", "--cache_ram", "512"], ""),
        ([], "LLAMA_ARG_CONTEXT_SHIFT"),
        ([], "LLAMA_ARG_CACHE_REUSE"),
    ],
)
def test_options_that_work_against_the_store_are_refused(argv: list[str], variable: str, tmp_path: Path):
    with pytest.raises(InvalidParameterError, match=variable or "--"):
        ServerCommand(["llama-server", *argv], {variable: "1"}, tmp_path, separated=True)


@pytest.mark.parametrize("path", ["/metrics", "/prefixstore/status"])
def test_a_location_that_does_not_answer_stops_no_request(path: str):
    answers = threading.Event()
    was_in_time: list[bool] = []

    def ask(*_: object) -> Any:
        was_in_time.append(answers.wait(60))
        raise ClosedError("the store is closed") if path != "/metrics" else UnavailableError("too late")

    store = SimpleNamespace(store=SimpleNamespace(stats=ask), kind=None)
    session: Any = SimpleNamespace(is_ready=False, reason=None, why="", manager=None, store=store)

    async def scene() -> None:
        admission = Admission(Upstream(Path("/nowhere"), timeout=60), has_keys=False)
        own = OwnEndpoints(session, admission, ask, ServeSettings(location="memory:"))
        exchange = Exchange(make_mocked_request("GET", path), 0, BodyBudget(0))
        asked = asyncio.ensure_future(own.answer(exchange))
        await asyncio.sleep(0)
        # another request goes on
        answers.set()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(scene())
    assert was_in_time == [True]


def test_a_server_that_cannot_be_watched_ends_the_command_and_not_just_the_watch():
    async def watch() -> None:
        raise AttributeError("an answer in another form")

    async def scene() -> Exception | None:
        watching = asyncio.create_task(watch())
        await asyncio.wait({watching})
        return failure_of(watching)

    assert "AttributeError" in str(asyncio.run(scene()))


def test_a_store_that_could_not_be_opened_is_opened_by_a_later_request(monkeypatch: pytest.MonkeyPatch):
    opened = list[float]()

    class Ready(ServerSession):
        async def _open(self) -> None:
            self._last_opened = asyncio.get_running_loop().time()
            opened.append(self._last_opened)
            self.store = Store() if len(opened) == 2 else None  # type: ignore[assignment]

        async def _is_asleep(self) -> bool:
            return False

    async def scene() -> None:
        settings, nothing = ServeSettings(location="memory:"), Path("/nowhere")
        session = Ready(Upstream(Path("/nowhere"), timeout=60), settings, nothing, ServerIdentity)
        session.is_ready = True
        await session._open()
        for seconds in (3600.0, 0.0):
            monkeypatch.setattr("prefixstore.server.server_session.REOPEN_SECONDS", seconds)
            assert await session.look()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(scene())
    assert len(opened) == 2


@pytest.mark.parametrize("url", ["sqlite:///kv.db", "sqlite:///~/kv.db"])
def test_a_damaged_file_is_moved_aside_however_its_location_is_written(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "kv.db"

    def use() -> None:
        opened(url, OnDamage.ASIDE, lambda: open_backend(url, max_bytes=1 << 20)).close()

    use()
    file.write_bytes(damaged := file.read_bytes().replace(b"prefixstore_rows", b"\xffrefixstore_rows"))
    use()
    (aside,) = tmp_path.glob("kv.db.damaged-*")
    assert (aside / "kv.db").read_bytes() == damaged
