"""What tests share."""

import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["ROOT", "in_thread"]

ROOT = Path(__file__).parents[2]


def in_thread(work: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that runs this, and does not keep the process alive."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread
