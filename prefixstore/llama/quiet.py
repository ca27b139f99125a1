"""Discards the log that llama.cpp writes to stderr."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

__all__ = ["silence"]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator,unused-ignore]
def _discard(level: int, text: bytes, data: Any) -> None:
    pass


def silence() -> None:
    """Discard the log of llama.cpp in this process, for commands whose stderr is their own.

    ``Llama(verbose=False)`` alone lets warnings through: llama-cpp-python treats them as errors.
    """
    llama_cpp.llama_log_set(_discard, ctypes.c_void_p(0))
