"""Slots of a real llama-server, and pages: the same bytes as those of a `Llama`, and the same answers as cold."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixstore import PrefixStore
from prefixstore.errors import (
    CorruptError,
    FullError,
    InvalidParameterError,
    ServerRefusedError,
    UnavailableError,
)
from prefixstore.format.keys import PAGE, page_keys
from prefixstore.llama.capture import Capture, Place
from prefixstore.llama.state.form import Form
from prefixstore.server import SlotStore, slot_file
from prefixstore.server import slot_files as slot_files_module
from prefixstore.server.identity import ServerIdentity
from prefixstore.server.slot_files import PREFIX, SlotDirectory
from tests.support.faults import Until
from tests.support.llama_server import Running
from tests.support.models import answer, forget, load, prompt

N = 700
KEEP_SLOTS = "--no-cache-idle-slots"
# arguments of the server, the slots to save and restore, options of a Llama with the same states
FULL = {
    "on, four slots": (["-fa", "on", "-np", "4"], 3, 0, {"flash_attn": True}),
    "off, four slots, unified": (["-fa", "off", "-np", "4", "-kvu", KEEP_SLOTS], 3, 2, {}),
    "q8_0": (["-ctk", "q8_0", "-ctv", "q8_0", "-np", "4"], 3, 0, {"flash_attn": True, "type_k": 8, "type_v": 8}),
}


def opened(running: Running, location: str, **options: Any) -> SlotStore:
    identity = ServerIdentity.of_command(running.argv, os.environ, running.client.props())
    return SlotStore(location, running.client, running.slots_dir, identity, **options)


def states(store: PrefixStore | SlotStore, namespace: bytes, tokens: list[int], step: int) -> list[bytes]:
    """The states of all full pages of a prompt."""
    engine = store.engine
    engine.drain()
    pages = engine.match(namespace, np.asarray(tokens, "<i4"), step).pages
    with engine.fetching(pages) as fetched:
        return [bytes(state) for state, page in zip(fetched, pages, strict=True) if page.n_tokens == step]


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL)
def test_pages_of_a_slot_are_those_of_a_llama_and_both_answer_as_cold(
    case: str, models: Callable[..., Path], llama_server: Callable[..., Running], tmp_path: Path
):
    arguments, source, target, options = FULL[case]
    model = models("llama", n_head=2)
    running = llama_server(model, *arguments)
    tokens = prompt(N)
    # first: beside the cells of others, rounding differs
    running.complete(tokens, n=4, slot=source)

    with opened(running, "memory:") as slots:
        saved = slots.save(source)
        assert saved.reason is None
        assert saved.tokens[:N].tolist() == tokens
        assert slots.save(source).n_new_pages == 0, "all of it is stored"
        cold = running.cold(tokens, slot=target)
        running.client.erase(target)
        found = slots.find(tokens)
        restored = slots.restore(target, tokens)
        assert found.n_tokens == restored.n_tokens == N
        again = running.complete(tokens, slot=target)
        assert again["timings"]["cache_n"] == N - 1
        assert again["content"] == cold
        place = slots.namespace()
        assert place is not None
        ours = states(slots, place.key, tokens, 256)

    llm = load(model, **options)
    location = str(tmp_path / "python")
    with PrefixStore(location, llm) as store:
        llm.set_cache(store)
        assert answer(llm, tokens) == cold
        assert store.namespace.differences(place) == {}
        assert states(store, place.key, tokens, 256) == ours
        assert len(ours) == N // 256

    # and from the Llama's pages
    with opened(running, location) as slots:
        running.client.erase(target)
        assert slots.restore(target, tokens).n_tokens == N
        again = running.complete(tokens, slot=target)
        assert (again["timings"]["cache_n"], again["content"]) == (N - 1, cold)

        other = prompt(N, seed=1)
        running.complete(other, n=4, slot=source)
        kept = slots.save(source).tokens.tolist()
    forget(llm)
    expected = answer(llm, [*kept, 500, 501])
    forget(llm)
    with PrefixStore(location, llm) as store:
        llm.set_cache(store)
        assert answer(llm, [*kept, 500, 501]) == expected
        assert store.stats().tokens_restored == len(kept)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", "lfm2"])
def test_what_cannot_be_cut_continues_where_it_ended(
    arch: str, models: Callable[..., Path], llama_server: Callable[..., Running]
):
    running = llama_server(models(arch))
    tokens = prompt(N)
    first = running.complete(tokens, n=6, slot=0)
    with opened(running, "memory:") as slots:
        saved = slots.save(0)
        assert saved.reason is None
        assert slots.save(0).n_new_pages == 0
        longer = [*saved.tokens.tolist(), *prompt(40, seed=2)]
        cold = running.cold(longer, slot=1)
        running.client.erase(1)
        assert slots.find(longer).n_tokens == len(saved.tokens)
        assert slots.restore(1, longer).n_tokens == len(saved.tokens)
        again = running.complete(longer, slot=1)
        assert (again["timings"]["cache_n"], again["content"]) == (len(saved.tokens), cold)

        # a prompt that ends before: what is stored cannot be used, and the slot is left alone
        assert slots.find(tokens).n_tokens == 0
        assert slots.restore(1, tokens).reason == "not_found"
        assert running.complete(tokens, n=6, slot=1)["content"] == first["content"]


@pytest.mark.slow
def test_rows_that_a_window_has_left_are_never_missing(
    models: Callable[..., Path], llama_server: Callable[..., Running], tmp_path: Path
):
    """With --swa-full the server trusts that all rows are there; its slot files do not have them."""
    model = models("gemma3")
    running = llama_server(model, "--swa-full")
    tokens = prompt(N)
    running.complete(tokens, n=4)
    with opened(running, "memory:") as slots:
        assert slots.save(0).reason == "incomplete"
        assert slots.counters["dropped:incomplete"] == 1
        running.complete(tokens[:200], n=2)
        assert slots.save(0).reason is None, "all rows are in the window"
    llm = load(model, flash_attn=True)
    location = str(tmp_path / "python")
    with PrefixStore(location, llm) as store:
        llm.set_cache(store)
        answer(llm, tokens)
    with opened(running, location) as slots:
        assert slots.restore(1, tokens).n_tokens == N
    # the server steps back in it
    branch = [*tokens[:450], *prompt(30, seed=3)]
    cold = running.cold(branch, slot=0)
    again = running.complete(branch, slot=1)
    assert (again["timings"]["cache_n"], again["content"]) == (450, cold)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_slot_is_restored_whatever_its_draft_held_and_the_pages_are_those_of_a_server_without(
    arch: str, models: Callable[..., Path], llama_server: Callable[..., Running], tmp_path: Path
):
    model, tokens = models(arch, n_head=2), prompt(N)
    # a model that drafts for itself takes what it has proposed
    drafting = ["-md", str(model), "--spec-type", "draft-simple"]
    running, store = llama_server(model, *drafting, "-fa", "on"), str(tmp_path / "store")
    right = running.complete(tokens)
    assert right["timings"]["draft_n_accepted"] == right["timings"]["draft_n"] > 0
    with opened(running, store) as slots:
        assert slots.server.is_drafting
        assert slots.save(0).reason is None
        tokens = [*tokens, *right["tokens"], *prompt(40, seed=1)]
        right = running.complete(tokens, cache_prompt=False)
        # where it ends before the restored prompt, and where it goes on after that, with other tokens
        for n_before in (N // 2, N + 100):
            running.complete(prompt(n_before, seed=2), slot=1)
            restored = slots.restore(1, tokens).n_tokens
            assert restored >= N
            again = running.complete(tokens, slot=1)
            assert (again["timings"]["cache_n"], again["content"]) == (restored, right["content"])
            assert again["timings"]["draft_n"] > 0
        namespace = slots.namespace()
    plain = llama_server(model, "-fa", "on")
    with opened(plain, store) as slots:
        assert not slots.server.is_drafting
        assert slots.namespace() == namespace
        assert slots.restore(0, tokens).n_tokens == restored
        assert plain.complete(tokens)["content"] == right["content"]


@pytest.mark.slow
def test_an_unknown_version_is_said_once_and_nothing_is_stored(
    models: Callable[..., Path],
    llama_server: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    running = llama_server(models("llama", n_head=2))
    said = "this llama-server writes slot files of version 3, and prefixstore knows 2: nothing is stored or restored"
    monkeypatch.setattr(slot_file, "STATE_VERSION", 2)
    with caplog.at_level(logging.WARNING), opened(running, "memory:") as slots:
        for _ in range(2):
            running.complete(prompt(N), n=2)
            assert slots.save(0).reason == slots.restore(0, prompt(N)).reason == slots.reason == "version"
        assert said in slots.why
        assert slots.store.stats().dropped == {"version": 1}
        assert running.complete(prompt(N), n=2)["timings"]["cache_n"] == N - 1, "the slot is as it was"
    assert [said in record.getMessage() for record in caplog.records] == [True]


# -- faults ------------------------------------------------------------------------------------------------------------


@contextmanager
def served(running: Running, location: str = "memory:", **options: Any):
    """A store with a prompt of slot 0."""
    tokens = prompt(N)
    running.complete(tokens, n=4)
    with opened(running, location, **options) as slots:
        assert slots.save(0).reason is None
        yield slots, tokens


@pytest.fixture
def running(models: Callable[..., Path], llama_server: Callable[..., Running]) -> Running:
    return llama_server(models("llama", n_head=2), KEEP_SLOTS)


def left_behind(running: Running) -> list[str]:
    return [path.name for path in running.slots_dir.iterdir()]


def test_a_fault_or_a_ctrl_c_leaves_no_file_behind(running: Running, monkeypatch: pytest.MonkeyPatch):
    with served(running) as (slots, tokens):
        for error in (KeyboardInterrupt, MemoryError):

            def fail(*_: Any, error: type[BaseException] = error, **__: Any) -> None:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(Capture, "store", fail)
                patch.setattr("prefixstore.server.slot_files.parse_slot_file", fail)
                with pytest.raises(error):
                    slots.save(0)
            with monkeypatch.context() as patch:
                patch.setattr(slots.server, "restore", fail)
                with pytest.raises(error):
                    slots.restore(1, tokens)
            assert left_behind(running) == []
        assert slots.restore(1, tokens).n_tokens == N
        # it is kept for the next one
        assert len(left_behind(running)) == 1
        with pytest.raises(InvalidParameterError, match="has the slots 0, 1"):
            slots.restore(2, tokens)
    assert left_behind(running) == []


def test_stale_files_are_swept_and_others_are_not(running: Running):
    old, young, other = (running.slots_dir / name for name in (f"{PREFIX}old", f"{PREFIX}young", "mine"))
    for path in (old, young, other):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    os.utime(other, (1, 1))
    with opened(running, "memory:"):
        assert sorted(left_behind(running)) == ["mine", young.name]


def test_a_directory_that_the_server_does_not_use_is_refused(running: Running, tmp_path: Path):
    identity = ServerIdentity.of_command(running.argv, os.environ, running.client.props())
    (tmp_path / "other").mkdir()
    before = left_behind(running)
    with pytest.raises(InvalidParameterError, match="is not the directory that the server writes"):
        SlotStore("memory:", running.client, tmp_path / "other", identity)
    # nothing of a prompt is left where nobody deletes it
    assert left_behind(running) == before
    with pytest.raises(InvalidParameterError, match="is not a directory"):
        SlotStore("memory:", running.client, tmp_path / "none", identity)


@pytest.mark.parametrize("planted", ["symlink", "fifo", "directory"])
def test_what_is_planted_in_place_of_a_file_is_neither_followed_nor_waited_for(
    planted: str, running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 100)
    with served(running) as (slots, tokens):
        save = slots.server.save

        def replaced(slot: int, name: str) -> Any:
            action = save(slot, name)
            path = running.slots_dir / name
            path.unlink()
            if planted == "symlink":
                path.symlink_to(secret)
            elif planted == "fifo":
                os.mkfifo(path)
            else:
                path.mkdir()
            return action

        with monkeypatch.context() as patch:
            patch.setattr(slots.server, "save", replaced)
            with pytest.raises((CorruptError, UnavailableError)):
                slots.save(0)
        assert secret.read_bytes() == b"x" * 100
        # old things with such names that are not files are left alone
        for path in running.slots_dir.iterdir():
            os.utime(path, (1, 1), follow_symlinks=False)
        SlotDirectory(running.slots_dir)
        assert slots.restore(1, tokens).n_tokens == N


def test_a_damaged_page_ends_a_restore_before_it(running: Running, tmp_path: Path):
    with served(running, str(tmp_path / "kv"), codec="raw") as (slots, tokens):
        slots.engine.flush()
        cold = running.cold(tokens, slot=1)
        place = slots.namespace()
        assert place is not None
        key = page_keys(place.key, np.asarray(tokens, "<i4"), 256)[1]
        with slots.engine._backend.update() as transaction:
            ((_, payload),) = transaction.fetch([key])
            broken = bytearray(payload)
            broken[-1] ^= 1
            record, usage = transaction.records([key])[key]
            transaction.put(key, record, usage, bytes(broken))
        assert slots.restore(1, tokens).n_tokens == 256
        again = running.complete(tokens, slot=1)
        assert (again["timings"]["cache_n"], again["content"]) == (256, cold)


def test_what_came_before_a_restore_was_late_is_used_and_not_read_again(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with served(running, str(tmp_path / "kv"), codec="raw") as (slots, tokens):
        slots.engine.flush()
        cold = running.cold(tokens, slot=1)
        asked: list[int] = []

        def deadline(pages: Sequence[Any], *_: Any, **__: Any) -> Until:
            asked.append(len(pages))
            return Until(2)

        monkeypatch.setattr(slots.rate, "deadline", deadline)
        assert slots.restore(1, tokens).n_tokens == 512
        assert asked == [3]
        again = running.complete(tokens, slot=1)
        assert (again["timings"]["cache_n"], again["content"]) == (512, cold)


def test_pages_of_another_shape_never_reach_the_server(running: Running, models: Callable[..., Path]):
    """They cannot be there unless two models have one fingerprint; but a wrong file could end the server."""
    other = load(models("llama", n_layer=3), flash_attn=True)
    with served(running) as (slots, tokens):
        mine = slots.namespace()
        assert mine is not None
        slots.engine.upkeep.clear(None)
        with PrefixStore("memory:", other, page_tokens=256) as wrong:
            wrong._current.context.namespace = mine  # as if the fingerprints were equal
            wrong._current.context.lineage.namespace = mine.key
            wrong._current.strategy.place = Place(mine, 256)
            other.set_cache(wrong)
            answer(other, tokens)
            wrong.engine.drain()
            with wrong.engine.fetching(wrong.engine.match(mine.key, np.asarray(tokens, "<i4"), 256).pages) as states:
                data = [bytes(state) for state in states]
        for i, state in enumerate(data[:2]):
            buffer = slots.engine.write_queue.acquire(len(state))
            buffer.view[:] = state
            keys = page_keys(mine.key, np.asarray(tokens, "<i4"), 256)
            parent = keys[i - 1] if i else mine.key
            place = slots.place(None)
            array = np.asarray(tokens[i * 256 : (i + 1) * 256], "<i4")
            forged = Capture(slots.engine, place, Form(), slots.rate.compute_us, slots.store.parameters)
            forged.add(array, parent, i * 256, buffer, PAGE)
            assert forged.submit().n == 1
        assert slots.find(tokens).n_tokens == 512
        assert slots.restore(1, tokens).reason == "unreadable"
        assert running.is_alive()


@pytest.mark.slow
def test_another_server_at_the_same_place_is_refused(
    running: Running, models: Callable[..., Path], llama_server: Callable[..., Running]
):
    other = llama_server(models("llama", n_head=2), "-fa", "off", name="other")
    with served(running) as (slots, tokens):
        # restarted with other settings: the same slots and another layout
        slots.server, slots.directory.path = other.client, other.slots_dir
        other.complete(tokens, n=2)
        with pytest.raises(ServerRefusedError, match="open the store again"):
            slots.save(0)
        with pytest.raises(ServerRefusedError):
            slots.restore(0, tokens)
        assert other.is_alive()
        slots.server, slots.directory.path = running.client, running.slots_dir


def test_a_model_that_was_replaced_is_refused(running: Running):
    with served(running) as (slots, tokens):
        model = Path(running.argv[2])
        times = model.stat()
        os.utime(model, (1, 1))
        with pytest.raises(ServerRefusedError, match="its model replaced"):
            slots.save(0)
        with pytest.raises(ServerRefusedError, match="its model replaced"):
            slots.restore(0, tokens)
        os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_what_another_tenant_has_in_the_slot_is_not_stored(running: Running):
    with served(running) as (slots, tokens):
        assert slots.save(0, salt="b", expected=[*tokens[:5], 1]).reason == "other_tokens"
        assert slots.find(tokens, salt="b").n_tokens == 0
        assert slots.save(0, salt="b", expected=tokens).reason is None
        assert slots.find(tokens, salt="b").n_tokens == N
        assert slots.find(tokens, salt="c").n_tokens == 0


@pytest.mark.parametrize(("mode", "n_warnings"), [(0o700, 0), (0o1777, 0), (0o777, 1)])
def test_a_slot_directory_in_which_all_can_replace_files_is_warned_of(
    mode: int, n_warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (place := tmp_path / "slots").mkdir()
    place.chmod(mode)
    SlotDirectory(place)
    assert len([record for record in caplog.records if "every user" in record.message]) == n_warnings


def test_a_full_slot_directory_is_a_full_error(running: Running, monkeypatch: pytest.MonkeyPatch):
    with served(running) as (slots, tokens):

        def full(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(slot_files_module, "_created", full)
        with pytest.raises(FullError, match="no space for a slot file"):
            slots.restore(1, tokens)
        assert left_behind(running) == []
