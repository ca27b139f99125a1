"""Replays at other sizes, and the commands."""

from __future__ import annotations

import gzip
import json
import random
from functools import partial

import pytest

from prefixstore import InvalidParameterError
from prefixstore.traces.read import read_trace
from prefixstore.traces.replay import pages_in, replay, simulate


def written(path, prompts, *, packed=False):
    raw = "".join(json.dumps({"timestamp": 0, "hash_ids": blocks}) + "\n" for blocks in prompts).encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    return path


def conversations(seed, n_prompts=150):
    """Prompts that continue others, or start after one of three beginnings; blocks name their prefix."""
    chance = random.Random(seed)
    known = [[0], [1], [2]]
    fresh = 3
    prompts = []
    for _ in range(n_prompts):
        before = chance.choice(known[-30:] if chance.random() < 0.6 else known[:3])
        n = chance.randint(0, 5)
        prompts.append([*before, *range(fresh, fresh + n)])
        fresh += n
        known.append(prompts[-1])
    return prompts


@pytest.fixture
def run(run):
    return partial(run, "trace")


@pytest.fixture
def trace(tmp_path):
    return written(tmp_path / "trace.jsonl", conversations(1, 60))


def ours(path, lines, **about):
    """A trace as a store writes it: 4 tokens a block, 2 blocks a page."""
    header = {"prefixstore_trace": 1, "block_tokens": 4, "min_tokens": 0, **about}
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    return read_trace(path)


def request(names, n, **more):
    return {"namespace": "n", "hash_ids": names, "input_length": n, "hit_length": 0, "page_tokens": 8, **more}


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_read_plain_or_compressed_and_its_blocks_are_numbered(tmp_path, packed):
    found = read_trace(written(tmp_path / "trace", [[70, 9], [70, 12]], packed=packed))
    assert [list(event.blocks) for event in found.requests] == [[0, 1], [0, 2]]


def stored(names, n, n_bytes=100, **more):
    return {"namespace": "n", "hash_ids": names, "stored_length": n, "bytes": n_bytes, **more}


def test_what_is_stored_after_a_request_is_found_by_the_next_one(tmp_path):
    trace = ours(
        tmp_path / "t",
        [
            request(["a", "b", "c"], 13),
            stored(["a", "b"], 8),
            # the tail: a block, and three tokens more
            stored(["c"], 7, 60, after="b", cut="x"),
            request(["d"], 17, after="c"),
            stored(["c", "d"], 8, after="b"),
        ],
    )
    assert [list(event.blocks) for event in trace.requests] == [[0, 1, 2], [0, 1, 2, 3]]
    found = replay(trace, "lru", 10)
    assert (found.requests, found.hits, found.tokens, found.hit_tokens) == (2, 1, 30, 12)
    assert trace.page_bytes == pytest.approx((100 + 60 + 100) / 3)
    assert pages_in(trace, 1000) == 11
    assert pages_in(trace, None) is None


def test_the_recorded_budget_is_the_smaller_of_pages_and_bytes(tmp_path):
    lines = [request(["a", "b"], 9), stored(["a", "b"], 8)]
    assert pages_in(ours(tmp_path / "t", lines, max_entries=5, max_bytes=10_000), None) == 5
    assert pages_in(ours(tmp_path / "t", lines, max_entries=None, max_bytes=10_000), None) == 100
    assert pages_in(ours(tmp_path / "t", lines, max_entries=5, max_bytes=10_000), 200) == 2
    assert pages_in(ours(tmp_path / "t", lines, max_bytes=1), None) == 1


def test_the_last_block_of_a_page_may_be_shorter_than_others(tmp_path):
    # pages of 10 tokens: two blocks of 4, and one of 2
    lines = [request(["a", "b", "c", "d"], 15, page_tokens=10), stored(["a", "b", "c"], 10)] * 2
    trace = ours(tmp_path / "t", lines)
    assert replay(trace, "lru", 10).hit_tokens == 10
    for least, hits in ((10, 1), (11, 0)):
        assert replay(ours(tmp_path / "t", lines, min_tokens=least), "lru", 10).hits == hits
    # not the last token of a prompt
    whole = [request(["a", "b", "c"], 10, page_tokens=10), stored(["a", "b", "c"], 10)] * 2
    assert replay(ours(tmp_path / "t", whole), "lru", 10).hit_tokens == 8


@pytest.mark.slow
def test_more_room_finds_more(trace):
    found = simulate(read_trace(trace), ["lru"], 20)
    assert found.budget == 20
    assert {20, 40} <= set(found.sizes)
    lru = [one.rate for one in found.found["lru"]]
    assert lru == sorted(lru)


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulate_prints_a_table_and_json(trace, run):
    code, out, err = run("simulate", trace, "--pages", 20)
    assert (code, err) == (0, "")
    assert "adaptive: twice the budget (40 pages) finds" in out
    code, out, _ = run("simulate", trace, "--pages", 10**6)
    assert (code, "1,000,000 pages" in out, "twice" in out) == (0, True, False)
    assert "the budget holds all pages of the trace" in out
    found = json.loads(run("simulate", trace, "--pages", 10**6, "--json")[1])
    assert (found["budget_pages"], set(found["twice_the_budget_wins"].values())) == (10**6, {0})
    assert "a tenth of all (no budget in pages" in run("simulate", trace)[1]
    found = json.loads(run("simulate", trace, "--json")[1])
    assert set(found["rates"]) == {"adaptive", "lru"}
    assert found["twice_the_budget_wins"]["lru"] >= 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "none"], "trace 'none' cannot be read: No such file or directory\n"),
        (["simulate", __file__], "has no requests"),
        (["simulate", "{trace}", "--policy", "clock"], "policy='clock' is unknown"),
        # of another system, or of a model that resumes from snapshots only
        (["simulate", "{trace}", "--max-bytes", "1MiB"], "the trace has no sizes of pages; pass --pages"),
    ],
)
def test_what_cannot_be_replayed_is_told(trace, run, arguments, says):
    code, out, err = run(*(argument.format(trace=trace) for argument in arguments))
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize("value", [float("inf"), 1 << 70, -1, []])
@pytest.mark.parametrize("name", ["input_length", "page_tokens", "bytes", "stored_length"])
def test_lengths_that_are_none_are_lines_that_cannot_be_used(tmp_path, name, value):
    one, page = request(["a"], 5), stored(["b"], 4)
    damaged = (one if name in one else page) | {name: value}
    trace = ours(tmp_path / "t", [one, page, damaged])
    assert (len(trace.events), trace.skipped) == (2, 1)
    assert replay(trace, "lru", 3).requests == 1


@pytest.mark.parametrize(
    "about",
    [{"min_tokens": 1e999}, {"max_bytes": 1 << 70}, {"max_entries": []}, {"policy": {}}],
)
def test_a_header_with_values_that_are_none_does_no_harm(tmp_path, run, about):
    ours(tmp_path / "t", [request(["a"], 5, namespace="\ud800"), stored(["a"], 4)], **about)
    code, out, _ = run("simulate", tmp_path / "t", "--json")
    assert (code, json.loads(out)["skipped_lines"]) == (0, 0 if "policy" in about else 1)


def test_a_trace_of_two_lengths_of_blocks_is_refused(tmp_path):
    path = tmp_path / "t"
    path.write_text('{"prefixstore_trace":1,"block_tokens":4}\n{"prefixstore_trace":1,"block_tokens":8}\n')
    with pytest.raises(InvalidParameterError, match="different lengths"):
        read_trace(path)
