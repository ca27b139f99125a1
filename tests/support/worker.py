"""Processes for tests: ``in_process("capture", location=...)`` runs a function of this module, `in_fork` forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from prefixstore import PrefixStore
from tests.support import ROOT
from tests.support.models import answer, load, logits, prompt, state_digest
from tests.support.patience import wait_patiently


def command(function: str, **arguments: Any) -> list[str]:
    return [sys.executable, "-m", "tests.support.worker", function, json.dumps(arguments)]


def in_process(function: str, **arguments: Any) -> Any:
    done = subprocess.run(
        command(function, **arguments), cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def in_fork(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; what it raises fails the test."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the forked child hangs")
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(status) == 0


def evaluate_and_store(
    *, model: str, location: str, tokens: list[int], cuts: list[int], options: dict, store: dict | None = None
) -> dict:
    """Process A: compute the prompt through the store, then report the state that it has at each cut."""
    llm = load(model, **options)
    with PrefixStore(location, llm, **(store or {})) as cache:
        llm.set_cache(cache)
        text = answer(llm, tokens)
        cache.flush()
        problems = [str(violation) for violation in cache.check()]
        entries = cache.stats().entries
    llm.set_cache(None)
    states = {}
    for cut in cuts:
        # computed up to there and no further: a window cache forgets what it would need to be cut back
        llm.reset()
        llm.eval(tokens[:cut])
        states[str(cut)] = state_digest(llm, cut)
    return {"text": text, "states": states, "check": problems, "entries": entries}


def restore_and_report(
    *, model: str, location: str, tokens: list[int], cuts: list[int], options: dict, store: dict | None = None
) -> dict:
    """Process B: restore each cut into an empty context."""
    llm = load(model, **options)
    states, next_logits, computed = {}, {}, {}
    with PrefixStore(location, llm, **(store or {})) as cache:
        for cut in cuts:
            llm.reset()
            live = cache.restore([*tokens[:cut], 7])
            computed[str(cut)] = live
            states[str(cut)] = state_digest(llm, live)
            llm.eval([7])
            next_logits[str(cut)] = logits(llm).tolist()
        llm.reset()
        llm.set_cache(cache)
        before = cache.stats().tokens_computed
        text = answer(llm, tokens, 12)
        evaluated = cache.stats().tokens_computed - before - 11  # the last token of 12 is sampled, not evaluated
        stats = cache.stats()
    return {
        "text": text,
        "states": states,
        "logits": next_logits,
        "restored": computed,
        "evaluated": evaluated,
        "hits": stats.hits,
        "misses": stats.misses,
        "kind": stats.kind,
    }


def capture_until_killed(*, model: str, location: str, options: dict, store: dict) -> None:
    """Capture prompt after prompt; a line on stdout says what is flushed."""
    llm = load(model, **options)
    cache = PrefixStore(location, llm, **store)
    llm.set_cache(cache)
    for seed in range(10_000):
        llm.reset()
        answer(llm, prompt(700, seed), 2)
        if seed % 3 == 0:
            cache.flush()
            print(seed, flush=True)


def write_at_the_same_time(*, model: str, location: str, seeds: list[int], common: int, store: dict) -> dict:
    """Several prompts with a common start, through one location that others use as well."""
    llm = load(model)
    texts = {}
    with PrefixStore(location, llm, **store) as cache:
        llm.set_cache(cache)
        for seed in seeds:
            texts[str(seed)] = answer(llm, prompt(common) + prompt(300, seed), 8)
            time.sleep(0.01)
        cache.flush()
        stats = cache.stats()
    return {"texts": texts, "dropped": stats.dropped, "misses": stats.misses, "hits": stats.hits, "pid": os.getpid()}


def answer_turns(*, model: str, location: str, turns: list[list[int]]) -> dict:
    """Prompts one after the other, each answered in 10 tokens, through one store."""
    llm = load(model)
    with PrefixStore(location, llm, snapshot_interval=256) as store:
        llm.set_cache(store)
        texts = [answer(llm, tokens, 10) for tokens in turns]
        store.flush()
        stats, problems = store.stats(), [str(violation) for violation in store.check()]
    return {
        "texts": texts,
        "computed": stats.tokens_computed,
        "misses": stats.misses,
        "dropped": stats.dropped,
        "check": problems,
    }


if __name__ == "__main__":
    wait_patiently()
    result = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(result))
