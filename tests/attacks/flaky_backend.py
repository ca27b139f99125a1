"""A location that can be made to fail, to be slow, or to hang, while it is used."""

from __future__ import annotations

import threading
import time
from collections import Counter

from prefixstore.errors import UnavailableError
from tests.support.faults import Operation, SlowBackend

__all__ = ["FlakyBackend"]


class FlakyBackend(SlowBackend):
    """A backend whose operations are slow or fail as the test says.

    Attributes
    ----------
    seconds
        How much longer each of the `slow` operations takes.
    slow
        Which these are.
    fails
        Whether all of them fail, once they have taken their time.
    gate
        As long as it is not set, they wait for it.
    asked
        How often each operation was begun, by thread.
    sleep
        Lets the time pass that a slow operation takes; a test may have a clock of its own.
    """

    def __init__(self, backend):
        super().__init__(backend, 0.0)
        self.seconds = 0.0
        self.slow: tuple[Operation, ...] = ("view", "payload", "record", "update", "put", "delete", "sync")
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()
        self.asked: Counter[tuple[str, Operation]] = Counter()
        self.sleep = time.sleep

    def _before(self, operation: Operation) -> None:
        self.asked[threading.current_thread().name, operation] += 1
        if operation not in self.slow:
            return
        self.gate.wait()
        self.sleep(self.seconds)
        if self.fails:
            raise UnavailableError(f"{operation} fails on purpose")

    def asked_by_completions(self, operation: Operation | None = None) -> int:
        """How often a completion has waited for the location, or for one of its operations."""
        mine = ("MainThread", "prefixstore-read")
        return sum(
            n for (thread, done), n in self.asked.items() if thread.startswith(mine) and operation in (None, done)
        )
