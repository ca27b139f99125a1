"""An interrupt (Ctrl-C) at a step that a test chooses."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

__all__ = ["in_own_thread", "interrupted", "profiled", "steps_of"]


def in_own_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a thread of its own: an exception before a bytecode that ends a handler stays the handled one."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                test(*arguments, **options)
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    return run


def _tracer(files: Collection[str], count: Callable[[], None]) -> Any:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count()
        return trace

    return trace


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Keep finalizers of what earlier steps have left out of this one: an interrupt in them reaches nobody."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _traced(work: Callable[[], object], modules: Collection[ModuleType], count: Callable[[], None]) -> None:
    files = {module.__file__ for module in modules if module.__file__ is not None}
    before = sys.gettrace()
    with _no_garbage_collected():
        sys.settrace(_tracer(files, count))
        try:
            work()
        finally:
            sys.settrace(before)


class _Steps:
    """Counts steps, and raises a KeyboardInterrupt at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.n = 0

    def __call__(self) -> None:
        self.n += 1
        if self.n == self.at:
            raise KeyboardInterrupt


def steps_of(work: Callable[[], object], modules: Collection[ModuleType]) -> int:
    """How many bytecodes of these modules this runs when it is run again: the first time may take more."""
    work()
    steps = _Steps()
    _traced(work, modules, steps)
    return steps.n


def interrupted(work: Callable[[], object], modules: Collection[ModuleType], step: int) -> None:
    """Run this, with a KeyboardInterrupt before the bytecode of these modules with this number."""
    _traced(work, modules, _Steps(step))


def profiled(work: Callable[[], object], profile: Callable[[FrameType, str, Any], None]) -> None:
    """Run this with a profiling function, whose exceptions come out of it."""
    with _no_garbage_collected():
        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
