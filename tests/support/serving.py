"""Servers for tests: a process that answers prompts through a store, one line of JSON for each line of JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from prefixstore import PrefixStore
from tests.support.models import answer, load, prompt
from tests.support.timeouts import disable_timeouts


def tokens_of(job: dict[str, Any]) -> list[int]:
    """A common beginning and an end of its own."""
    return prompt(job["common"]) + prompt(job["own"], job["seed"])


def counters(store: PrefixStore) -> dict[str, Any]:
    stats = store.stats()
    return {
        "restored": stats.tokens_restored,
        "dropped": stats.dropped,
        "misses": stats.misses,
        "unreadable": stats.unreadable,
    }


def serve(model: str, location: str, options: dict[str, Any]) -> None:
    """Answer prompts until there are no more lines."""
    llm = load(model)
    with PrefixStore(location, llm, **options) as store:
        llm.set_cache(store)
        print(json.dumps({"ready": os.getpid()}), flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            # as for the next user: nothing in the context can be reused
            llm.reset()
            before = store.stats().tokens_restored
            text = answer(llm, tokens_of(job), job.get("max_tokens", 6))
            if job.get("flush", True):
                store.flush()
            result = counters(store)
            print(json.dumps({**result, "text": text, "gained": result["restored"] - before}), flush=True)


def fork(model: str, location: str, options: dict[str, Any]) -> None:
    """Open a store, and fork workers, as uvicorn and gunicorn do; what each of them found."""
    llm = load(model)
    store = PrefixStore(location, llm, **options)
    llm.set_cache(store)
    jobs = [json.loads(line) for line in sys.stdin]
    cold = answer(llm, tokens_of(jobs[0]), 6)
    store.flush()
    children = []
    for job in jobs:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                llm.reset()
                assert answer(llm, tokens_of(jobs[0]), 6) == cold
                assert store.stats().tokens_restored == len(tokens_of(jobs[0])) - 1
                llm.reset()
                answer(llm, tokens_of(job), 6)
                store.close()
                code = 0
            except BaseException:  # noqa: BLE001 - the child must not return
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    found = [store.match(tokens_of(job)).n_tokens for job in jobs]
    problems = [str(violation) for violation in store.check()]
    print(json.dumps({"codes": codes, "found": found, "check": problems}), flush=True)
    store.close()


if __name__ == "__main__":
    disable_timeouts()
    globals()[sys.argv[1]](sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
