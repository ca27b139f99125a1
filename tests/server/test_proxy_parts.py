"""Parts of the proxy by themselves: what a request asks for, which slot it gets, what an answer says."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from prefixstore.errors import ClosedError, CorruptError, InvalidParameterError, ServerError, UnavailableError
from prefixstore.server import slot_pool
from prefixstore.server.chats import Turns
from prefixstore.server.command import ServerCommand, private_directory
from prefixstore.server.exchange import BodyBudget, Exchange
from prefixstore.server.own_endpoints import OwnEndpoints
from prefixstore.server.prompts import MAX_PARTS, Ask, parse, unknown_field
from prefixstore.server.rates import RETRY_EVERY, AnswerTail, Rates, Usage
from prefixstore.server.slot_manager import SlotManager
from prefixstore.server.slot_pool import Plan, PoolFullError, SlotPool
from prefixstore.server.slot_record import Claim, PoolSlot, Request, Rows
from prefixstore.server.tenants import NoTenantError, TenantSource
from prefixstore.server.upstream import Upstream, end_to_end

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
        ("/completion", {"prompt": 3}, "invalid", False, True),
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
        ("/v1/responses", {"input": 3}, "invalid", False, True),
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


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": 1}'.decode().encode("utf-16"), b"[" * 100_000])
def test_a_body_that_is_not_an_object_is_left_to_the_server(body: bytes):
    assert parse(CHAT, body).reason == "invalid"
    # what can just be read may be nested too deeply to be written: where the limit is depends on the caller
    nested = (
        b'{"input":"a","tools":[{"type":"function","parameters":' + b"[" * n + b"]" * n + b"}]}"
        for n in range(900, 1000)
    )
    assert {parse("/v1/responses", one).reason for one in nested} == {None, "invalid"}


def test_a_body_of_too_many_parts_is_not_read_and_one_with_brackets_in_its_text_is():
    many = {"messages": [{"role": "user", "content": "a"}] * (MAX_PARTS + 1)}
    assert parse(CHAT, json.dumps(many).encode()) == Ask(
        "structure", can_pin=False, taints=True, can_add=False, may_fail_late=True
    )
    text = '[{"\\' * MAX_PARTS
    assert parse("/completion", json.dumps({"prompt": text}).encode()) == Ask(prompt=text)


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (b'{"prompt": "x", "steering": 1}', (400, 501, 503)),
        (b'{"prompt": [1, 2], "steering": 1}', (400, 501, 503)),
        (b'{"prompt": "x", "lora": [1]}', (400, 501, 503)),
        # some of these may have been computed before the next one was refused
        (b'{"prompt": [[1], [2]], "steering": 1}', ()),
        (b'{"prompt": ["x", "y"], "lora": [1]}', ()),
        (b'{"prompt": [[1], [2]], "id_slot": 1.0}', ()),
        # what the server cannot read either
        (b"{", (400, 500, 501, 503)),
        (b"[]", (400, 500, 501, 503)),
        # what it reads
        (b'{"prompt": "x"}\0', ()),
        (b'\xef\xbb\xbf{"prompt": "x"}', ()),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ()),
        (b'{"prompt": "x", "unused": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", ()),
        (b'{"prompt": "x", "unused": [' + b"[]," * 100_000 + b"[]]}", ()),
    ],
)
def test_which_errors_say_that_nothing_was_computed(body: bytes, statuses: tuple[int, ...]):
    ask = parse("/completion", body)
    assert tuple(status for status in (200, 400, 500, 501, 503) if ask.has_left_nothing(status)) == statuses


def test_what_a_model_says_is_not_taken_for_the_words_of_the_server():
    said = json.dumps({"content": '"timings":{"cache_n":9,"prompt_n":9}', "timings": {"cache_n": 1, "prompt_n": 2}})
    tail = AnswerTail()
    for i in range(0, len(said), 7):
        tail.feed(said[i : i + 7].encode())
    assert tail.usage() == Usage(1, 2)
    tail = AnswerTail()
    tail.feed(json.dumps({"content": '"timings":{"cache_n":9,"prompt_n":9}'}).encode())
    assert tail.usage() is None


def weigh(
    pool: SlotPool,
    slot: PoolSlot,
    prompt: Any,
    owner: str | None = None,
    found: tuple[int, int] = (0, 0),
    *,
    trusts: bool = False,
) -> Plan:
    claim = Claim(prompt, owner, trusts=trusts)
    claim.n_found, claim.n_bytes = found
    return pool.weigh(slot, claim)


def chosen(pool: SlotPool, prompt: Any) -> PoolSlot | None:
    return pool.take_now(Claim(prompt, None))


def test_the_slot_that_holds_most_of_the_prompt_is_chosen_then_the_one_used_longest_ago():
    pool = SlotPool([(0, 100), (1, 100)], Rates())
    pool.slots[1].tokens = tokens(*range(50))
    plan = weigh(pool, pool.slots[1], tokens(*range(60)))
    assert (plan.n_live, plan.restore) == (50, False)
    assert chosen(pool, tokens(*range(60))) is pool.slots[1]
    assert chosen(pool, tokens(9, 9)) is pool.slots[0]
    assert chosen(pool, tokens(1)) is None


class Copying:
    """A store in which nothing is found, and whose copy of a slot ends when it is told to."""

    n_bytes = n_tokens = n_restores = 0
    reason = None
    has_media = False

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.tokens: Any = None

    def find(self, prompt: Any, *, salt: str | None = None) -> Any:
        return self

    def restore(self, slot: int, prompt: Any, *, salt: str | None = None) -> Any:
        self.n_restores += 1
        return SimpleNamespace(n_tokens=self.n_tokens, n_bytes=self.n_bytes, saved_seconds=0.0, reason=None)

    def copy(self, slot: int, *, salt: str | None = None, expected: Any = None) -> Any:
        self.begun.set()
        assert self.may_end.wait(60)
        return self

    def store(self) -> object:
        return True


class Emptying:
    """Empties slots, but for some."""

    def __init__(self, *stuck: int):
        self.stuck, self.asked = set(stuck), list[int]()

    def __call__(self, slot: int) -> None:
        self.asked.append(slot)
        if slot in self.stuck:
            raise UnavailableError("it does not answer")


@pytest.mark.parametrize(("stuck", "wanted", "slot"), [((), None, 0), ((0,), None, 0), ((0,), 1, 1), ((1,), 1, 1)])
def test_of_a_slot_that_cannot_be_emptied_nothing_is_used(stuck: tuple[int, ...], wanted: int | None, slot: int):
    async def run() -> None:
        pool, erase = SlotPool([(i, 100) for i in range(3)]), Emptying(*stuck)
        manager = SlotManager(pool, None, erase)
        for i, one in enumerate(pool.slots):
            one.rows, one.used = Rows.ALTERED, i
        held = await manager.acquire(tokens(*range(60)), None, wanted)
        # else it is not saved, and emptied before its next use
        is_emptied = slot not in stuck
        assert (held.slot.id, held.slot.is_clean, held.must_compute) == (slot, is_emptied, not is_emptied)
        assert erase.asked == [slot]
        assert [one for one in pool.slots if one.is_busy] == [held.slot]
        manager.release(held, Usage(0, 60), began=True)
        assert held.slot.is_dirty is is_emptied
        assert pool.n_busy == 0
        manager.close()

    asyncio.run(run())


def test_a_copy_is_dropped_if_a_request_that_may_use_any_slot_has_begun_meanwhile():
    """The server may have given it the slot before the copy was made."""
    store = Copying()
    store.tokens = tokens(*range(60))

    async def run() -> tuple[int, bool]:
        pool = SlotPool([(0, 100)], Rates())
        manager = SlotManager(pool, store, lambda _: None)
        manager.release(await manager.acquire(store.tokens, None), Usage(0, 60), began=True)
        saving = asyncio.create_task(manager.save_when_idle())
        await asyncio.to_thread(store.begun.wait, 60)
        with pool.elsewhere(taints=True):
            store.may_end.set()
            pool.release(await asyncio.wait_for(pool.take(Claim(tokens(), None)), 60))
            await manager.keep_copies(60)
        saving.cancel()
        manager.close()
        return manager.n_saves, not pool.slots[0].is_clean

    assert asyncio.run(run()) == (0, True)


def test_nothing_is_saved_while_a_request_runs_that_may_use_any_slot():
    async def run() -> list[PoolSlot | None]:
        pool = SlotPool([(0, 100)], Rates())
        manager = SlotManager(pool, Copying(), lambda _: None)
        manager.release(await manager.acquire(tokens(*range(60)), None), Usage(0, 60), began=True)
        saves = [_saved_now(manager)]
        with pool.elsewhere(taints=True) as use:
            saves.append(_saved_now(manager))
            assert not manager.pool.would_save(pool.slots[0])
            use.is_harmless = True
        saves.append(_saved_now(manager))
        manager.close()
        assert saves[0] is saves[2] is pool.slots[0]
        return saves

    assert asyncio.run(run())[1] is None


def _saved_now(manager: SlotManager) -> PoolSlot | None:
    due = manager.pool.next_save()
    return due[1] if due is not None and due[0] <= time.monotonic() else None


def test_a_slot_that_was_filled_across_a_restart_of_the_server_is_emptied():
    """The server that was started meanwhile may have another model."""
    pools: list[SlotPool] = []
    erase = Emptying()

    class Restoring(Copying):
        n_tokens = n_bytes = 60
        saved_seconds, reason = 0.0, None

        def restore(self, slot: int, prompt: Any, *, salt: str | None = None) -> Any:
            loop.call_soon_threadsafe(pools[0].restarted)
            return self

    async def run() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        pools.append(SlotPool([(0, 100)]))
        manager = SlotManager(pools[0], Restoring(), erase)
        held = await manager.acquire(tokens(*range(60)), None)
        assert (held.n_restored, len(held.slot.tokens)) == (0, 0)
        manager.close()

    loop: Any = None
    asyncio.run(run())
    assert erase.asked == [0]


@pytest.mark.parametrize("stuck", [(), (0,)])
def test_nothing_is_computed_from_a_slot_whose_restore_has_failed(stuck: tuple[int, ...]):
    """The erasing of what the server has read may have failed as well."""

    class Failing(Copying):
        n_tokens = n_bytes = 60

        def restore(self, slot: int, prompt: Any, *, salt: str | None = None) -> Any:
            raise CorruptError("as a test wants it")

    async def run() -> None:
        pool, erase = SlotPool([(0, 100), (1, 100)]), Emptying(*stuck)
        manager = SlotManager(pool, Failing(), erase)
        held = await manager.acquire(tokens(*range(60)), None)
        assert (held.slot.id, held.must_compute, held.n_restored, erase.asked) == (0, bool(stuck), 0, [0])
        assert [one.id for one in pool.slots if one.must_empty(trusts=True)] == list(stuck)
        manager.close()

    asyncio.run(run())


def test_a_request_gets_no_rows_that_may_be_those_of_another_tenant_even_if_it_would_trust_its_own():
    """A slot that could not be emptied, and that its next request has not computed anything in."""

    async def run() -> None:
        pool, erase = SlotPool([(0, 100)], separated=True), Emptying(0)
        manager = SlotManager(pool, None, erase)
        prompt = tokens(*range(60))
        manager.release(await manager.acquire(prompt, "ann"), Usage(0, 60), began=True)
        held = await manager.acquire(prompt, "bob")
        assert held.must_compute
        # the server has refused it
        manager.release(held, None, began=False)
        erase.stuck.clear()
        held = await manager.acquire(prompt, "bob", asks=False, trusts=True)
        assert (held.must_compute, erase.asked[-1], len(erase.asked)) == (False, 0, 2)
        assert held.slot.rows is Rows.CLEAN
        manager.release(held, None, began=False)
        # a request that may use any slot, as of embeddings, has left the rows of anyone
        with pool.elsewhere(taints=True):
            pass
        await manager.acquire(prompt, "bob", asks=False, trusts=True)
        assert len(erase.asked) == 3
        manager.close()

    asyncio.run(run())


def test_an_answer_that_goes_on_across_a_restart_leaves_rows_that_nobody_trusts():
    async def run() -> None:
        pool, erase = SlotPool([(0, 100)]), Emptying()
        manager = SlotManager(pool, None, erase)
        held = await manager.acquire(tokens(*range(60)), None)
        pool.restarted()
        manager.release(held, Usage(0, 60), began=True)
        await manager.acquire(tokens(*range(60)), None, asks=False, trusts=True)
        assert erase.asked == [0]
        manager.close()

    asyncio.run(run())


def test_a_slot_whose_rows_come_into_doubt_while_it_is_saved_is_emptied(monkeypatch: pytest.MonkeyPatch):
    """Another request may run in it then: for the server it is idle."""
    monkeypatch.setattr(slot_pool, "SOON", 0.0)

    async def run() -> None:
        pool, erase, store = SlotPool([(0, 200)], Rates(token_seconds=1.0)), Emptying(), Copying()
        manager = SlotManager(pool, store, erase)
        manager.release(await manager.acquire(tokens(*range(60)), None), Usage(0, 60), began=True)
        acquiring = asyncio.ensure_future(manager.acquire(tokens(*range(100, 160)), None))
        assert await asyncio.to_thread(store.begun.wait, 60)
        with pool.elsewhere(taints=True):
            pass
        store.may_end.set()
        held = await acquiring
        assert (erase.asked, held.slot.is_clean) == ([0], True)
        manager.close()

    asyncio.run(run())


def test_what_is_found_is_restored_if_that_is_faster_than_computing_it():
    pool = SlotPool([(0, 100)], Rates(token_seconds=1e-3, restore_seconds=1e-6))
    slot, prompt = pool.slots[0], tokens(*range(50))
    assert weigh(pool, slot, prompt, found=(40, 10_000)).restore
    assert not weigh(pool, slot, prompt, found=(40, 50_000)).restore


def test_restores_that_stay_slow_are_tried_ever_more_seldom():
    rates = Rates()
    tried = [rates.tries(is_faster=False) for _ in range(3 * RETRY_EVERY)]
    assert tried == [*[False] * (RETRY_EVERY - 1), True, *[False] * (2 * RETRY_EVERY - 1), True]
    assert rates.tries(is_faster=True)
    assert [rates.tries(is_faster=False) for _ in range(RETRY_EVERY)] == [*[False] * (RETRY_EVERY - 1), True]


def test_of_memory_that_cannot_be_cut_only_what_ends_where_the_prompt_goes_on_is_usable():
    pool = SlotPool([(0, 100)], Rates(token_seconds=1e-3, restore_seconds=1e-9))
    slot, prompt = pool.slots[0], tokens(*range(50))
    slot.tokens = tokens(*range(40), 99)
    assert not weigh(pool, slot, prompt, found=(30, 1000)).restore
    pool.can_cut = False
    assert weigh(pool, slot, prompt, found=(30, 1000)).restore
    slot.tokens = tokens(*range(40))
    assert not weigh(pool, slot, prompt, found=(30, 1000)).restore


def test_a_request_that_may_use_any_slot_taints_all_even_one_that_is_busy():
    pool = SlotPool([(0, 100), (1, 100)])
    pool.hold(pool.slots[0])
    with pool.elsewhere(taints=True) as use:
        pool.release(pool.slots[0])
        assert not pool.slots[0].is_clean
    assert not any(slot.is_clean for slot in pool.slots)
    assert not use.is_harmless


def test_requests_wait_in_order_and_one_that_gives_up_wakes_the_next():
    async def scene() -> list[str]:
        pool, done = SlotPool([(0, 100)], max_waiting=3), []
        pool.hold(pool.slots[0])

        async def request(name: str) -> None:
            await pool.take(Claim(tokens(), None))
            done.append(name)
            await asyncio.sleep(0)
            pool.release(pool.slots[0])

        tasks = [asyncio.create_task(request(name)) for name in "abc"]
        await asyncio.sleep(0)
        with pytest.raises(PoolFullError):
            await pool.take(Claim(tokens(), None))
        pool.release(pool.slots[0])
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pool.n_waiting == 0
        return done

    assert asyncio.run(asyncio.wait_for(scene(), 120)) == ["b", "c"]


SYSTEM = {"role": "system", "content": "Be brief. " * 400}
ASKED = [SYSTEM, {"role": "user", "content": "I am Ann. What is a slot?"}]
ANSWERED = {"role": "assistant", "content": "A part of the context."}
NEXT = [*ASKED, ANSWERED, {"role": "user", "content": "And a page?"}]


def _turns(messages: list[dict[str, Any]], **others: Any) -> Turns:
    ask = parse(CHAT, json.dumps({"messages": messages, **others}).encode())
    assert ask.turns is not None
    return ask.turns


@pytest.mark.parametrize(
    ("messages", "others"),
    [
        (ASKED, {}),
        ([SYSTEM, {"role": "user", "content": "I am Bob. What is a page?"}], {}),
        ([SYSTEM, {"role": "user", "content": "I am Ann. What is a slot? And a page?"}], {}),
        ([SYSTEM, {"role": "user", "content": "I am Bob."}, *NEXT[2:]], {}),
        ([{"role": "system", "content": "Be long."}, *NEXT[1:]], {}),
        ([*ASKED, {"role": "user", "content": "And a page?"}], {}),
        ([*ASKED, ANSWERED, {"role": "user", "content": "x" * 3000}], {}),
        (NEXT, {"tools": [{"type": "function", "function": {"name": "look"}}]}),
        ([SYSTEM], {}),
    ],
    ids=[
        "same",
        "another_user",
        "longer_question",
        "other_before",
        "other_system",
        "no_answer",
        "long_text",
        "other_tools",
        "less",
    ],
)
def test_a_request_that_lacks_or_adds_more_than_the_next_messages_continues_no_conversation(messages, others):
    assert not _turns(messages, **others).follow(_turns(ASKED))
    assert _turns(NEXT).follow(_turns(ASKED))


def test_the_next_request_of_a_conversation_gets_its_slot_and_that_of_another_user_does_not():
    pool, answered = SlotPool([(0, 100), (1, 100)]), Request(CHAT, _turns(ASKED), 60)
    pool.slots[1].request = answered
    other = [SYSTEM, {"role": "user", "content": "I am Bob. What is a slot?"}, *NEXT[2:]]
    assert pool.continued(CHAT, _turns(other), None) is None
    assert pool.continued("/v1/messages", _turns(NEXT), None) is None
    assert pool.continued(CHAT, _turns(NEXT), "ann") is None
    # the slot that has the most of it
    pool.slots[0].request = Request(CHAT, _turns(NEXT), 70)
    later = _turns([*NEXT, ANSWERED, {"role": "user", "content": "And a token?"}])
    for slot in pool.slots:
        found = pool.continued(CHAT, later, None)
        assert found is not None
        assert found[0] is slot
    assert pool.continued(CHAT, later, None) is None


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
        with pytest.raises(NoTenantError):
            one.salt({})
    with pytest.raises(NoTenantError):
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
    assert command.key not in argv
    assert (tmp_path / "api-key").stat().st_mode & 0o077 == 0
    for variable in ("LLAMA_ARG_CONTEXT_SHIFT", "LLAMA_ARG_CACHE_REUSE"):
        with pytest.raises(InvalidParameterError, match=variable):
            ServerCommand(["llama-server"], {variable: "1"}, tmp_path)


def test_tenants_share_no_cache_of_the_server_wherever_that_is_switched_on(tmp_path: Path):
    for given, environ in ((["--cache-ram", "0"], {}), ([], {"LLAMA_ARG_CACHE_RAM": "0"}), ([], {})):
        command = ServerCommand(["llama-server", *given], environ, tmp_path, separated=True)
        command.check_started(command.argv(), environ)
        for added in (["-cram", "100"], ["--cache-ram", "-1"]):
            with pytest.raises(ServerError, match="cache-ram"):
                command.check_started([*command.argv(), *added], environ)
    shared = ServerCommand(["llama-server"], {}, tmp_path)
    shared.check_started([*shared.argv(), "-cram", "100"], {})


def test_no_connection_to_the_server_is_used_twice():
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
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=60)
            for _ in range(3):
                response = await upstream.send("GET", b"/v1/models", {}, None)
                assert [chunk async for chunk in response.chunks()] == [b"ok"]
                response.close()
            await upstream.close()
            await asyncio.gather(*(task for task in served if task is not None))

    asyncio.run(ask())
    assert len(served) == 3


def exchange(path: str, headers: list[tuple[str, str]]) -> Exchange:
    return Exchange(make_mocked_request("GET", path, CIMultiDict(headers)), 0, BodyBudget(0))


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
        own = OwnEndpoints(session, ask, has_keys=False)
        one = exchange(path, [])
        asked = asyncio.ensure_future(own.answer(one))
        await asyncio.sleep(0)
        # another request goes on
        answers.set()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(scene())
    assert was_in_time == [True]
