"""What is recorded, and that a replay finds what the live store found."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import stat
import sys
from pathlib import Path

import pytest

from prefixstore import InvalidParameterError, PrefixStore
from prefixstore.format.keys import as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.traces.read import read_trace
from prefixstore.traces.recorder import Recorder
from prefixstore.traces.replay import replay
from tests.support import in_thread
from tests.support.models import caching, forget, load, prompt

PAGE = 16


@pytest.fixture(scope="module")
def llm(models):
    llm = load(models("llama"), n_ctx=512)
    yield llm
    llm.close()


def conversations(seed, n=25):
    """Prompts that continue others, or begin with one of a few system prompts; they part where pages end.

    Where several pages have as much in common with a prompt, the order of their tokens decides which of them counts as
    used, and hashes do not have that order.
    """
    chance = random.Random(seed)
    known = [prompt(2 * PAGE, i) for i in range(3)]
    for i in range(n):
        start = chance.choice(known[-6:])
        known.append([*start, *prompt(PAGE * chance.randint(1, 3), 100 + i)][: 20 * PAGE])
        yield known[-1]


def live(llm, location, trace, policy, max_entries, *, block_tokens, write_behind=False):
    """Hit tokens of each request, as the store itself counts them."""
    found = []
    options = {"page_tokens": PAGE, "policy": policy, "max_entries": max_entries, "write_behind": write_behind}
    with caching(location, llm, **options) as store, store.trace(trace, block_tokens=block_tokens):
        for tokens in conversations(1):
            # as another server that has computed nothing itself
            forget(llm)
            llm(list(tokens), max_tokens=4, temperature=0)
            found.append((store.last.n_tokens, store.last.restored))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "max_entries"), [("lru", 12), ("lfu", 30)])
def test_a_replay_finds_what_the_live_store_found(llm, tmp_path, run, policy, max_entries):
    path = tmp_path / "trace.jsonl"
    found = live(llm, tmp_path / "kv", path, policy, max_entries, block_tokens=1)
    trace = read_trace(path)
    assert trace.skipped == 0
    assert [(one.n_tokens, one.hit_tokens) for one in trace.requests] == found
    replayed = replay(trace, policy, max_entries)
    assert replayed.requests == len(found)
    assert replayed.tokens == sum(n for n, _ in found)
    assert replayed.hit_tokens == sum(hit for _, hit in found)
    assert replayed.hits == sum(hit > 0 for _, hit in found)
    told = json.loads(run("trace", "simulate", path, "--policy", policy, "--json")[1])
    assert (told["budget_pages"], told["recorded_rate"]) == (max_entries, replayed.hit_tokens / replayed.tokens)
    assert told["rates"][policy][told["pages"].index(max_entries)] == round(told["recorded_rate"], 4)
    assert "of the tokens found" in run("trace", "simulate", path)[1]


def test_hashes_and_lengths_are_recorded_and_no_text(llm, tmp_path):
    secret = "a secret that nobody else may read, whatever happens. " * 4
    with caching(tmp_path / "kv", llm, page_tokens=PAGE) as store, store.trace(tmp_path / "plain"):
        llm(secret, max_tokens=2)
    plain = (tmp_path / "plain").read_text()
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o600
    header, request, *stored = map(json.loads, plain.splitlines())
    assert header == {
        "prefixstore_trace": 1,
        "block_tokens": 32,
        "page_tokens": PAGE,
        "min_tokens": 16,
        "max_bytes": 10 << 30,
        "max_entries": None,
        "policy": "adaptive",
    }
    assert set(request) == {"timestamp", "namespace", "hash_ids", "input_length", "hit_length", "page_tokens"}
    assert all({"stored_length", "bytes", "hash_ids"} <= set(line) for line in stored)
    assert "secret" not in plain


def test_a_sequence_that_goes_on_is_written_once(llm, tmp_path):
    tokens = prompt(200, 7)
    with PrefixStore(tmp_path / "kv", llm, page_tokens=PAGE) as store, store.trace(tmp_path / "t", block_tokens=4):
        llm.set_cache(store)
        forget(llm)
        llm(tokens, max_tokens=1)
        llm([*tokens, *prompt(40, 8)], max_tokens=1)
    requests = [line for line in map(json.loads, (tmp_path / "t").read_text().splitlines()) if "input_length" in line]
    assert len(requests[0]["hash_ids"]) == 50
    assert len(requests[1]["hash_ids"]) == 10
    assert requests[1]["after"] == requests[0]["hash_ids"][-1]
    one, two = read_trace(tmp_path / "t").requests
    assert list(two.blocks)[:50] == list(one.blocks)
    assert len(two.blocks) == 60


def open_files(path):
    """How often this process has a file open."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += link.readlink() == path
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_file_is_bounded_and_a_disk_that_fails_ends_recording_not_a_completion(llm, tmp_path, monkeypatch, caplog):
    with caching(tmp_path / "kv", llm, page_tokens=PAGE) as store:
        recorder = store.trace(tmp_path / "t", max_bytes=2000)
        for seed in range(20):
            llm(prompt(60, seed), max_tokens=1)
        assert not recorder.is_open
        assert (tmp_path / "t").stat().st_size <= 2000
        assert read_trace(tmp_path / "t").skipped == 0
        recorder = store.trace(tmp_path / "u")
        real = os.write
        monkeypatch.setattr(
            os, "write", lambda file, data: real(file, data[:10]) if b"hash_ids" in data else real(file, data)
        )
        with caplog.at_level(logging.WARNING, "prefixstore"):
            assert llm(prompt(60, 90), max_tokens=1)["choices"]
        assert not recorder.is_open
        assert "recording to" in caplog.text
        assert open_files(tmp_path / "u") == 0
        monkeypatch.undo()
        recorder.close()


def test_the_environment_has_every_store_recorded_and_does_not_keep_one_from_opening(
    llm, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("PREFIXSTORE_TRACE", str(tmp_path / "t"))
    for seed in (1, 2):
        with caching(tmp_path / f"kv{seed}", llm, page_tokens=PAGE) as store:
            llm(prompt(60, seed), max_tokens=1)
    assert len(read_trace(tmp_path / "t").requests) == 2
    # recording ends with the store
    assert sys.platform != "linux" or open_files(tmp_path / "t") == 0
    for cannot_be_written in (tmp_path / "no" / "t", "/dev/full"):
        caplog.clear()
        monkeypatch.setenv("PREFIXSTORE_TRACE", str(cannot_be_written))
        with PrefixStore(tmp_path / "kv", llm) as store:
            assert "nothing is recorded" in caplog.text
            for arguments, says in (
                ((cannot_be_written,), "cannot be written"),
                ((tmp_path / "t", 0), "block_tokens=0"),
                ((None,), "path=None"),
            ):
                path, *block_tokens = arguments
                with pytest.raises(InvalidParameterError, match=says):
                    store.trace(path, **({"block_tokens": 0} if block_tokens else {}))


def test_a_child_process_goes_on_recording(tmp_path):
    line = {"timestamp": 1, "namespace": "n", "hash_ids": ["a"], "input_length": 5, "hit_length": 0, "page_tokens": 4}
    with PrefixStore(tmp_path / "kv", namespace="n") as store:
        recorder = store.trace(tmp_path / "t")
        child = os.fork()
        if child == 0:
            recorder._write(line)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        recorder._write(line | {"after": "a", "hash_ids": []})
    assert len(read_trace(tmp_path / "t").requests) == 2


def test_lines_that_cannot_be_used_are_counted(tmp_path):
    path = tmp_path / "t"
    path.write_text(
        '{"prefixstore_trace":1,"block_tokens":4}\n'
        '{"timestamp":1,"namespace":"n","hash_ids":["a","b"],"input_length":8,"hit_length":0,"page_tokens":4}\n'
        '{"timestamp":1,"namespace":"n","after":"unknown","hash_ids":["c"],"stored_length":4,"bytes":9}\n'
        '{"timest\n[1]\n\n'
    )
    trace = read_trace(path)
    assert (len(trace.requests), trace.skipped) == (1, 3)
    path.write_text("hello\n")
    with pytest.raises(InvalidParameterError, match="has no requests"):
        read_trace(path)
    path.write_text('{"prefixstore_trace":2,"block_tokens":4}\n')
    with pytest.raises(InvalidParameterError, match="version 2"):
        read_trace(path)
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_a_line_that_was_cut_does_not_take_the_next_recording_with_it(tmp_path):
    path = tmp_path / "t"
    path.write_text('{"prefixstore_trace":1,"block_tokens":4}\n{"timest')
    Recorder(path, {"policy": "lru"}, block_tokens=4).close()
    Recorder(path, {"policy": "lfu"}, block_tokens=4).close()
    lines = [line for line in path.read_text().splitlines() if line]
    assert [line[:10] for line in lines] == ['{"prefixst', '{"timest', '{"prefixst', '{"prefixst']
    assert json.loads(lines[2])["policy"] == "lru"


def test_other_threads_and_lookups_that_are_no_requests_are_not_mixed_up(tmp_path):
    with (
        PrefixStore(tmp_path / "kv", namespace="n", page_tokens=4) as store,
        store.trace(tmp_path / "t", block_tokens=2),
    ):
        engine, key = store.engine, Namespace({"label": "n"}).key

        def ask(seed):
            for i in range(20):
                tokens = as_tokens(prompt(10 + seed, 100 * seed + i))
                engine.match(key, tokens, 4)
                engine.touch(key, (), len(tokens))

        threads = [in_thread(ask, seed) for seed in range(4)]
        for _ in range(20):
            engine.match(key, as_tokens(prompt(30, 1)), 4)
        for thread in threads:
            thread.join()
        # without a lookup before it
        engine.touch(key, (), 10)
    trace = read_trace(tmp_path / "t")
    assert (len(trace.requests), trace.skipped) == (80, 0)
    assert sorted(event.n_tokens for event in trace.requests) == sorted([10, 11, 12, 13] * 20)
    assert all(len(event.blocks) == event.n_tokens // 2 for event in trace.requests)
