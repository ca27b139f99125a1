"""Warming: every shared prefix is computed once, whatever goes wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest

from prefixstore import PrefixStore
from prefixstore.counters import Kind
from prefixstore.errors import MisuseError
from prefixstore.llama.hook import Hook
from prefixstore.warming.job import estimate, warm
from tests.support import python
from tests.support.models import answer, logits, prompt
from tests.support.warming import shared_prompts, unique_tokens, write_jsonl

PROMPTS = shared_prompts(32)
UNIQUE = unique_tokens(PROMPTS)


def holds_all(store, prompts=PROMPTS):
    return store.check() == [] and all(store.match(tokens).n_tokens == len(tokens) for tokens in prompts)


# -- once -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("llama", {"n_batch": 100}),
        ("llama", {"flash_attn": True, "type_k": 8, "type_v": 8}),
        ("gemma3", {"swa_full": False, "n_batch": 100}),
    ],
)
def test_as_many_tokens_are_evaluated_as_the_trie_has(llama, tmp_path, arch, options):
    llm = llama(arch, **options)
    with PrefixStore(tmp_path, llm) as store:
        report = warm(llm, store, PROMPTS)
        assert report.prompts == len(PROMPTS)
        assert report.prompt_tokens == sum(map(len, PROMPTS))
        assert report.unique_tokens == report.missing_tokens == report.evaluated_tokens == UNIQUE
        assert report.evaluated_tokens == store.stats().tokens_computed
        assert (report.problems, report.unstored, report.interrupted, report.full) == ((), (), False, False)
        assert report.stored_bytes > UNIQUE * 100
        assert holds_all(store)
    with PrefixStore(tmp_path, llm) as store:
        again = warm(llm, store, PROMPTS)
        assert (again.evaluated_tokens, again.missing_tokens, again.stored_bytes) == (0, 0, 0)
        assert store.stats().tokens_computed == 0


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "options"), [("llama", {}), ("gemma3", {"swa_full": False})])
def test_warmed_states_equal_computed_states(llama, tmp_path, arch, options):
    llm = llama(arch, **options)
    with PrefixStore(tmp_path, llm) as store:
        warm(llm, store, PROMPTS)
    for tokens in PROMPTS[::13]:
        cold = llama(arch, **options)
        cold.eval(tokens)
        fresh = llama(arch, **options)
        with PrefixStore(tmp_path, fresh) as store:
            assert store.restore(tokens) == len(tokens) - 1
            fresh.eval(tokens[-1:])
            # other batches round differently; a wrong state would be far off
            assert np.abs(logits(fresh) - logits(cold)).max() < 0.25 < np.abs(logits(cold)).max() / 10
            assert answer(fresh, tokens, 1) == answer(cold, tokens, 1)


def test_prompts_of_every_kind_can_be_warmed(llama, tmp_path):
    llm = llama()
    (tmp_path / "text.txt").write_text("The standard library of Python has modules for many things, in many ways.")
    given = [
        "You know the standard library of Python well, and you answer in one line, always.",
        {
            "messages": [
                {"role": "system", "content": "You know Python well. You answer in one line, and never in two."}
            ]
        },
        np.arange(300, 340, dtype=np.int64),
        tmp_path / "text.txt",
        {"prompt": ""},
        tmp_path / "nowhere.jsonl",
    ]
    with PrefixStore(tmp_path / "kv", llm) as store:
        report = warm(llm, store, given)
        assert report.prompts == 4
        assert [problem.where for problem in report.problems] == ["prompt 5", str(tmp_path / "nowhere.jsonl")]
        llm.set_cache(store)
        for call in (
            lambda: llm(given[0] + " Well?", max_tokens=1),
            lambda: llm.create_chat_completion(
                [*given[1]["messages"], {"role": "user", "content": "What is a list?"}], max_tokens=1
            ),
            lambda: llm(given[2].tolist() + [7] * 10, max_tokens=1),
        ):
            llm.reset()
            before = store.stats()
            store._current.context.rate.token_seconds = 1.0  # otherwise a prompt this short would be computed
            call()
            assert store.stats().tokens_restored >= before.tokens_restored + 15
            assert store.stats().tokens_computed <= before.tokens_computed + 16


def test_pages_of_an_earlier_run_are_used_to_the_token_even_in_the_middle_of_a_page(llama, tmp_path):
    llm = llama()
    start = prompt(700)
    with PrefixStore(tmp_path, llm) as store:
        assert warm(llm, store, [start]).evaluated_tokens == 700
        llm.reset()
        report = warm(llm, store, [start + prompt(50, 1), start[:650] + prompt(60, 2)])
        assert (report.unique_tokens, report.evaluated_tokens) == (810, 110)
        assert holds_all(store, [start, start + prompt(50, 1), start[:650] + prompt(60, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_snapshots_are_taken_where_prompts_branch_and_end(llama, tmp_path, arch):
    llm = llama(arch)
    prompts = [*PROMPTS, PROMPTS[0][:500], PROMPTS[0][:900]]
    with PrefixStore(tmp_path, llm, max_snapshots=64) as store:
        report = warm(llm, store, prompts)
        assert report.unique_tokens == report.evaluated_tokens == UNIQUE
        assert report.unstored == ()
        assert holds_all(store, prompts)
        assert warm(llm, store, prompts).evaluated_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("pin", [False, True])
def test_a_job_stops_when_the_store_is_full_and_reports_what_is_not_stored(llama, tmp_path, pin):
    llm = llama()
    with PrefixStore(tmp_path, llm, max_bytes="6MB") as store:
        # what others have stored is evicted, and is no reason to stop
        warm(llm, store, [prompt(900, 7)])
        report = warm(llm, store, PROMPTS, pin=pin)
        assert report.full
        assert not report.interrupted
        assert 0 < report.evaluated_tokens < 0.9 * UNIQUE
        assert 0 < len(report.unstored) < len(PROMPTS)
        assert report.unstored[0].startswith("prompt ")
        assert store.check() == []


def test_prompts_too_short_to_store_are_counted_and_matches_too_short_to_restore_are_missing(llama, tmp_path):
    llm = llama()
    with PrefixStore(tmp_path, llm) as store:
        report = warm(llm, store, [[5] * 15, [9] * 16, [6] * 10 + [7] * 30])
        assert (report.short, report.unique_tokens, report.evaluated_tokens, report.unstored) == (1, 56, 56, ())
        llm.reset()
        expected = estimate(llm, store, [[6] * 10 + [8] * 30])
        report = warm(llm, store, [[6] * 10 + [8] * 30])
        assert expected["missing_tokens"] == report.missing_tokens == report.evaluated_tokens == 40


@pytest.mark.slow
def test_pinned_prompts_are_not_evicted(llama, tmp_path):
    llm = llama()
    with PrefixStore(tmp_path, llm, max_bytes="6MB") as store:
        warm(llm, store, [prompt(900, 1)])
        warm(llm, store, [prompt(900, 1), prompt(900, 2)], pin=True)
        assert warm(llm, store, PROMPTS).unstored
        assert holds_all(store, [prompt(900, 1), prompt(900, 2)])


# -- stopped and started again ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_stopped_many_times_computes_nothing_twice(llama, tmp_path):
    total, runs = 0, 0
    interrupted = True
    while interrupted:
        llm = llama(n_batch=64)
        with PrefixStore(tmp_path, llm) as store:
            asked = iter(range(1, 1000))
            report = warm(llm, store, PROMPTS, stop=lambda asked=asked, runs=runs: next(asked) > 60 + 30 * runs)
            total, interrupted = total + report.evaluated_tokens, report.interrupted
            assert store.check() == []
            assert report.missing_tokens == UNIQUE - total + report.evaluated_tokens
        runs += 1
    assert runs > 2
    assert total == UNIQUE


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [130, 2000])
def test_an_exception_keeps_what_was_computed(llama, tmp_path, error, after):
    llm = llama(n_batch=64)

    def tell(progress):
        if progress.evaluated_tokens > after:
            raise error

    with PrefixStore(tmp_path, llm) as store:
        with pytest.raises(error):
            warm(llm, store, PROMPTS, progress=tell)
        computed = store.stats().tokens_computed
        assert warm(llm, store, PROMPTS).evaluated_tokens == UNIQUE - computed


# -- how much ---------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_counted_and_nothing_is_computed_or_stored(llama, tmp_path):
    llm = llama()
    with PrefixStore(tmp_path, llm) as store:
        warm(llm, store, PROMPTS[:10])
        before = store.stats()
        expected = estimate(llm, store, [*PROMPTS, {"prompt": ""}])
        after = store.stats()
        assert (after.entries, after.tokens_computed) == (before.entries, before.tokens_computed)
        report = warm(llm, store, PROMPTS)
        assert 0 < expected["missing_tokens"] == report.evaluated_tokens
        assert (expected["prompts"], expected["unique_tokens"]) == (report.prompts, report.unique_tokens)
        assert len(expected["problems"]) == 1
        assert estimate(llm, store, PROMPTS)["missing_tokens"] == 0


# -- misuse -----------------------------------------------------------------------------------------------------------


def test_a_llama_of_another_store_a_read_only_one_and_a_model_whose_states_are_not_stored_are_refused(
    llama, tmp_path, monkeypatch
):
    llm = llama()
    refused = pytest.raises(MisuseError, match="another PrefixStore")
    with PrefixStore("memory:", llm), PrefixStore(tmp_path) as store, refused:
        warm(llm, store, [prompt(300)])
    with PrefixStore(tmp_path, llm, read_only=True) as store, pytest.raises(MisuseError, match="read_only"):
        warm(llm, store, [prompt(300)])
    monkeypatch.setattr(Hook, "kind", Kind.STREAMS)
    with PrefixStore("memory:", llm) as store, pytest.raises(MisuseError, match="cannot be stored: streams"):
        warm(llm, store, [prompt(300)])


# -- two jobs ---------------------------------------------------------------------------------------------------------


# one that tells of each batch, and may wait for a line before it begins
JOB = """
import json, sys, time
from pathlib import Path
from prefixstore import PrefixStore
from prefixstore.warming.job import warm
from tests.support.models import load
from tests.support.timeouts import disable_timeouts

def show(progress):
    print(json.dumps({"phase": progress.phase, "evaluated": progress.evaluated_tokens}), flush=True)
    time.sleep(float(pause))

disable_timeouts()
model, location, prompts, pause, waits = sys.argv[1:]
llm = load(model, n_batch=64)
if waits == "True":
    print(json.dumps({"phase": "loaded"}), flush=True)
    sys.stdin.readline()
with PrefixStore(location, llm, max_delay=None) as store:
    report = warm(llm, store, [Path(prompts)], progress=show)
print(json.dumps({"phase": "end", "evaluated": report.evaluated_tokens, "unstored": report.unstored}), flush=True)
"""


def start(models, tmp_path, prompts=PROMPTS, scheme="lmdb", *, pause, waits=False):
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"tokens": tokens} for tokens in prompts])
    return python(JOB, models("llama"), location_in(tmp_path, scheme), file, pause, waits)


def start_two(*arguments, **more):
    """Two jobs that have loaded their models, and begin at once."""
    running = [start(*arguments, waits=True, **more) for _ in range(2)]
    for process in running:
        assert json.loads(process.stdout.readline())["phase"] == "loaded"
    for process in running:
        print(file=process.stdin, flush=True)
    return running


def location_in(tmp_path, scheme: str) -> str:
    return f"{scheme}:///{tmp_path / 'kv'}"


def told(process) -> list[dict]:
    """All output lines of a job, to its end."""
    lines = process.communicate(timeout=240)[0].splitlines()
    assert process.returncode == 0
    return [json.loads(line) for line in lines]


def one_system_prompt() -> list[list[int]]:
    return [prompt(1500) + prompt(80, seed) for seed in range(1, 60)]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("prompts", "scheme"),
    [(PROMPTS, "lmdb"), (one_system_prompt(), "sqlite")],
    ids=["documents", "one system prompt"],
)
def test_two_jobs_on_one_list_divide_the_work(models, llama, tmp_path, prompts, scheme):
    unique = unique_tokens(prompts)
    # what both need at the same moment is computed twice: all of it if they happen to begin at one prompt
    for directory in (tmp_path / str(i) for i in range(6)):
        directory.mkdir()
        running = start_two(models, directory, prompts, scheme, pause=0.01)
        ends = [told(process)[-1] for process in running]
        evaluated = [end["evaluated"] for end in ends]
        assert unique <= sum(evaluated) <= 2 * unique
        if sum(evaluated) <= 1.5 * unique:
            break
    else:
        pytest.fail("they never divided the work")
    # both did a share, whichever started first
    assert min(evaluated) > 0
    assert [end["unstored"] for end in ends] == [[], []]
    llm = llama()
    with PrefixStore(location_in(directory, scheme), llm) as store:
        assert holds_all(store, prompts)


@pytest.mark.attack
def test_a_job_goes_on_at_once_where_a_killed_one_has_left_off(models, llama, tmp_path):
    lost, one = 0, start(models, tmp_path, pause=0.02)
    for line in one.stdout:
        lost = json.loads(line)["evaluated"]
        if lost > 0.3 * UNIQUE:
            one.kill()
            break
    one.communicate()
    llm = llama()
    with PrefixStore(location_in(tmp_path, "lmdb"), llm) as store:
        report = warm(llm, store, PROMPTS)
        assert report.unstored == ()
        # what it had not written yet is computed again
        assert UNIQUE <= lost + 128 + report.evaluated_tokens <= 1.5 * UNIQUE
        assert holds_all(store)


@pytest.mark.slow
def test_what_another_job_has_stored_meanwhile_is_not_computed(llama):
    llm, other, others = llama(), llama(), []
    with PrefixStore("memory:", llm) as store:

        def tell(progress):
            if progress.evaluated_tokens and not others:
                others.append(warm(other, store, sorted(PROMPTS)[16:]))

        report = warm(llm, store, PROMPTS, progress=tell)
        assert others[0].evaluated_tokens > 0.3 * UNIQUE
        # twice at most what it was at when the other one began
        assert report.evaluated_tokens + others[0].evaluated_tokens <= UNIQUE + max(map(len, PROMPTS))
        assert holds_all(store)
