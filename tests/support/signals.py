"""Signals of child processes."""

from __future__ import annotations

import signal


def default_signals() -> None:
    """Run in a child before it starts: a background job of a shell ignores SIGINT, and its children inherit that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
