"""No timeouts: on a busy machine a lookup or a restore that waits for a core does not count as a slow one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prefixstore.engine import breaker
from prefixstore.llama import compute_rate

# the limits from which on something counts as slow, and values that are never reached
ENDLESS = (
    (breaker, "SLOW_SECONDS", 1000.0),  # a location that answers late
    (breaker, "FAST_SECONDS", 1000.0),  # a location that fails late
    (compute_rate, "MAX_SLOWDOWN", 1e9),  # a restore that waits for a core, where computing takes a millisecond
    (compute_rate, "MAX_SHARE", 1e9),  # one that is given up, for the same reason
)


def disable_timeouts(set_value: Callable[[Any, str, float], None] = setattr, *, but: Any = None) -> None:
    """Let nothing count as slow, except in `but`; a test undoes it, a process of its own need not.

    Parameters
    ----------
    set_value
        Sets an attribute: ``monkeypatch.setattr`` in a test.
    but
        The module that a test is about.
    """
    for module, name, value in ENDLESS:
        if module is not but:
            assert hasattr(module, name)
            set_value(module, name, value)


def wait_for(condition: Callable[[], object], what: str = "it", seconds: float = 120.0) -> float:
    """Wait until a condition holds; how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.005)
    return time.monotonic() - started
