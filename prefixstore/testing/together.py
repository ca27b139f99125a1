"""What tests of a backend do in threads and in forked children."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable

# seconds that a test waits for what must happen: far longer than it takes
PATIENCE = 120.0


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, and raise what the first of them that failed has raised."""
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    interval = sys.getswitchinterval()
    # threads that compute hold up one that calls C for this long at each call: the shorter, the more they interleave
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + PATIENCE
        while not failures and any(thread.is_alive() for thread in threads):
            assert time.monotonic() < until, "a thread waits forever"
            time.sleep(0.001)
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]


def fork_child(work: Callable[[], bool]) -> int:
    """Start a child process, which ends with 0 if `work` answers true; its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "this process is multi-threaded": that is the point
        pid = os.fork()
    if pid == 0:
        passed = False
        try:
            # one that waits forever is killed
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(PATIENCE))
            passed = work()
        except BaseException:  # noqa: BLE001 - the child must not return into the parent's stack
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0 if passed else 1)
    return pid


def in_child(work: Callable[[], bool]) -> bool:
    """What `work` answers in a forked child; false if it raises, or if the child does not end."""
    return os.waitpid(fork_child(work), 0)[1] == 0
