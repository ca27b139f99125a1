"""Ctrl-C at the k-th place where Python lets one in.

A signal is handled where the interpreter looks for one: when a function or generator begins or goes on, and when a call
of C returns. A profiling function is called at the same places, and what it raises comes out of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import prefixstore

PACKAGE = str(Path(prefixstore.__file__).parent)
# a place counts if it is in the package, or in these modules, which it calls
CALLED = (
    contextlib.__file__,
    threading.__file__,
    queue.__file__,
    concurrent.futures.thread.__file__,
    concurrent.futures._base.__file__,
)


class _Places:
    """Counts places, and raises at one of them."""

    def __init__(self, within: tuple[str, ...], at: int | None = None) -> None:
        self.within = within
        self.at = at
        self.n = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_return") or not self._is_within(frame):
            return
        self.n += 1
        if self.n == self.at:
            sys.setprofile(None)
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name} ({event})"
            raise KeyboardInterrupt

    def _is_within(self, frame: FrameType | None) -> bool:
        """Whether a frame is in these folders, or was called from there without another module in between."""
        while frame is not None and frame.f_code.co_filename in CALLED:
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(self.within)


def places_in(work: Callable[[], object], within: tuple[str, ...] = (PACKAGE,)) -> int:
    """At how many places a Ctrl-C may come while `work` runs."""
    places = _Places(within)
    _profiled(work, places)
    return places.n


def interrupted(work: Callable[[], object], at: int, within: tuple[str, ...] = (PACKAGE,)) -> str:
    """Run `work` with a Ctrl-C at its k-th place, from 1; where that was. Empty if it has fewer places."""
    places = _Places(within, at)
    try:
        _profiled(work, places)
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        # of a condition that was interrupted in `wait`, just after it had let go of its lock
        assert "un-acquired lock" in str(error) or "release unlocked lock" in str(error)  # noqa: PT017 - nothing else
    return places.where


def sample(n: int, most: int) -> Iterator[int]:
    """Numbers from 1 to `n`, evenly spread, and no more than `most`, which the last ones are among."""
    step = max(n / most, 1.0)
    yield from sorted({min(round(1 + i * step), n) for i in range(min(n, most))} | {n})


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Keep finalizers of what earlier steps have left out of this one: an interrupt in them reaches nobody."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _profiled(work: Callable[[], object], profile: Callable[[FrameType, str, Any], None]) -> None:
    """Run this with a profiling function, whose exceptions come out of it."""
    with _no_garbage_collected():
        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
