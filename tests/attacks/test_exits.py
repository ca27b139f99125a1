"""A process ends while pages wait to be written: in time, without noise, and with what it could write."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import product

import pytest

from prefixstore.maintenance.archive import Archive
from tests.support import PATIENCE, ROOT
from tests.support.models import TORTURE
from tests.support.places import place
from tests.support.signals import default_signals

SCRIPT = """
import atexit, gc, os, signal, sys, threading
import prefixstore.opening
from prefixstore import PrefixStore
from prefixstore.engine import write_queue
from tests.support.faults import FlakyBackend
from tests.support.models import answer, load, prompt
from tests.support.timeouts import disable_timeouts
disable_timeouts()
model, location, speed, end, llm_is = sys.argv[1:]
real, made = prefixstore.opening.open_pages, []
def opened(*arguments, **options):
    made.append(FlakyBackend(real(*arguments, **options)))
    return made[-1]
prefixstore.opening.open_pages = opened
llm = load(model)
store = PrefixStore(location, llm)
llm.set_cache(store)
answer(llm, prompt(300, 0), 2)
store.flush()
made[-1].slow = ("update",)
if speed == "slow":
    made[-1].seconds = 0.3
elif speed == "hangs":
    write_queue.NO_PROGRESS_SECONDS = 2.0
    made[-1].gate.clear()
for seed in range(1, 4):
    answer(llm, prompt(300, seed), 2)
if llm_is == "collected":
    llm.set_cache(None)
    llm = None
elif llm_is == "collected with the store":
    llm.set_cache(None)
    store.owner = store
    llm = store = None
    gc.collect()
print("ready", flush=True)
if end == "return":
    pass
elif end == "exit":
    sys.exit(7)
elif end == "exception":
    raise ValueError("on purpose")
elif end == "os._exit":
    os._exit(9)
elif end == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
elif end == "SIGTERM handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)
elif end == "daemon":
    def forever(llm, number):
        while True:
            answer(llm, prompt(300, number), 2)
    threading.Thread(target=forever, args=(llm, 9), daemon=True).start()
elif end == "atexit":
    # registered last, so called first
    atexit.register(lambda: (answer(llm, prompt(300, 5), 2) if llm else None, print("at exit", flush=True)))
elif end == "closed at exit":
    atexit.register(lambda: store and store.close())
"""

CODES = {"exit": 7, "exception": 1, "os._exit": 9, "SIGTERM": -signal.SIGTERM, "SIGTERM handled": 143}
# one that does not end would take for ever: a location hangs, or a thread evaluates
SECONDS = 5 * PATIENCE
# these end the process at once: what was queued is lost
AT_ONCE = ("os._exit", "SIGTERM")
ENDS = ["return", "exit", "exception", "os._exit", "SIGTERM", "SIGTERM handled", "atexit", "closed at exit"]
SPEEDS, LLMS = ["slow", "hangs"], ["alive", "collected", "collected with the store"]
# each end, and each of the others with the ends that take another way through the exit of Python; at length, all
CASES = [
    *(("slow", end, "alive", "lmdb") for end in ENDS),
    *(("slow", end, llm, "lmdb") for end in ("return", "SIGTERM handled") for llm in LLMS[1:]),
    *(("hangs", end, "alive", "lmdb") for end in ("return", "SIGTERM handled", "closed at exit")),
    ("hangs", "return", "collected with the store", "lmdb"),
]
ALL = product(SPEEDS, ENDS, LLMS, ["lmdb"])
# an executor does nothing any more when the store is closed then; a thread that evaluates does not keep the process
OTHERS = [("slow", "return", "alive", "s3"), ("fast", "daemon", "alive", "lmdb")]


@pytest.mark.parametrize(("speed", "end", "llm", "scheme"), [*ALL, *OTHERS] if TORTURE > 1 else [*CASES, *OTHERS])
def test_a_process_ends_in_time_with_what_it_could_write(models, tmp_path, request, speed, end, llm, scheme):
    location = place(scheme, tmp_path, request)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(models("llama")), location, speed, end, llm],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        preexec_fn=default_signals,
    )
    assert done.stdout.startswith("ready\n"), done.stderr
    assert done.returncode == CODES.get(end, 0), done.stderr
    noise = done.stderr
    if end == "exception":
        assert noise.count("Traceback") >= 1
        assert "ValueError: on purpose" in noise
    if speed == "slow" and end != "exception":
        assert noise == ""
    if speed == "hangs" and end not in AT_ONCE:
        assert "nothing was written for 2 s" in noise
    with Archive(location) as archive:
        assert archive.check() == []
        tokens = {page.tokens[:16] for page in archive.pages() if page.start == 0}
        # the flushed one, and all others if they could be written
        assert len(tokens) >= (4 if speed == "slow" and end not in AT_ONCE else 1)
