"""An interrupt (Ctrl-C) at a step that a test chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType, ModuleType
from typing import Any

__all__ = ["interrupted", "steps_of"]


def _tracer(files: Collection[str], count: Callable[[], None]) -> Any:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count()
        return trace

    return trace


def _traced(work: Callable[[], object], modules: Collection[ModuleType], count: Callable[[], None]) -> None:
    files = {module.__file__ for module in modules if module.__file__ is not None}
    before = sys.gettrace()
    sys.settrace(_tracer(files, count))
    try:
        work()
    finally:
        sys.settrace(before)


def steps_of(work: Callable[[], object], modules: Collection[ModuleType]) -> int:
    """How many bytecodes of these modules this runs when it is run again: the first time may take more."""
    work()
    n = 0

    def count() -> None:
        nonlocal n
        n += 1

    _traced(work, modules, count)
    return n


def interrupted(work: Callable[[], object], modules: Collection[ModuleType], step: int) -> None:
    """Run this, with a KeyboardInterrupt before the bytecode of these modules with this number."""
    left = step

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    _traced(work, modules, count)
