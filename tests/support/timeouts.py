"""No timeouts: on a busy machine a lookup or a restore that waits for a core does not count as a slow one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prefixstore.engine import breaker, compute_rate, tiers, write_queue
from prefixstore.server import prefill, rates, slot_manager

# the limits from which on something counts as slow, and values that are never reached
ENDLESS = (
    (breaker, "SLOW_SECONDS", 1000.0),  # a location that answers late
    (breaker, "FAST_SECONDS", 1000.0),  # a location that fails late
    (breaker, "HANG_SECONDS", 1000.0),  # a local one that does not answer
    (write_queue, "NO_PROGRESS_SECONDS", 1000.0),  # a write, or a flush
    (compute_rate, "MAX_SLOWDOWN", 1e9),  # a restore that waits for a core, where computing takes a millisecond
    (compute_rate, "MAX_SHARE", 1e9),  # one that is given up, for the same reason
    (compute_rate, "MAX_CAPTURE_SHARE", 1e9),  # capturing where computing takes a millisecond
    (tiers, "UNKNOWN_SECONDS", 1000.0),  # a lookup in a far location, before it is known what computing takes
    (tiers, "MAX_SHARE", 1e3),  # and after that
    (rates, "MAX_SLOWDOWN", 1e9),  # work of a server on its slots that waited for a core
    (prefill, "MAX_SHARE", 1e9),  # a stop in a prompt
    (slot_manager, "COPY_SECONDS", 1000.0),  # what is copied there, until it is stored
)
# what they are to a user
_USUAL = {(module, name): getattr(module, name) for module, name, _ in ENDLESS}


def disable_timeouts() -> None:
    """Let nothing count as slow in this process."""
    for module, name, value in ENDLESS:
        setattr(module, name, value)


def usual_limits(of: Any) -> Iterator[tuple[str, float]]:
    """The limits of a module as users have them, for the tests that are about it."""
    for (module, name), value in _USUAL.items():
        if module is of:
            yield name, value


def wait_for(condition: Callable[[], object], what: str = "it", seconds: float = 120.0) -> float:
    """Wait until a condition holds; how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.005)
    return time.monotonic() - started
