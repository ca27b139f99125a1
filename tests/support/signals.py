"""Signals of child processes."""

from __future__ import annotations

import signal


def default_signals() -> None:
    """Run in a child before it starts: background jobs ignore SIGINT and nohup SIGHUP, and children, too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
