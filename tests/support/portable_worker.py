"""Processes with a store that is not attached: ``in_portable_process("complete", model=..., location=...)``."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from prefixstore import PrefixStore
from tests.support import ROOT
from tests.support.models import answer, load
from tests.support.patience import wait_patiently


def in_portable_process(function: str, **arguments: Any) -> Any:
    command = [sys.executable, "-m", "tests.support.portable_worker", function, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def complete(*, model: str, location: str, tokens: list[int], options: dict, n: int = 8, store: dict | None = None):
    """One completion through a store; what it says and what it did."""
    llm = load(model, **options)
    with PrefixStore(location, **(store or {"namespace": "n"})) as cache:
        llm.set_cache(cache)
        text = answer(llm, tokens, n)
        cache.flush()
        stats = cache.stats()
        problems = [str(violation) for violation in cache.check()]
    return {
        "text": text,
        "hits": stats.hits,
        "misses": stats.misses,
        "restored": stats.tokens_restored,
        "captured": stats.pages_captured,
        "unreadable": stats.unreadable,
        "check": problems,
    }


if __name__ == "__main__":
    wait_patiently()
    result = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(result))
