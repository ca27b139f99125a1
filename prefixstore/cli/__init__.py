"""The command line: ``prefixstore COMMAND STORE``, with the extra "cli"."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

MISUSED = 2
PACKAGES = {"rich", "typer"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        from prefixstore.cli.app import run  # noqa: PLC0415 - the extra "cli"
    except ImportError as error:
        if (error.name or "").split(".")[0] not in PACKAGES:
            raise
        sys.stderr.write(f'prefixstore: the commands need {error.name}; pip install "prefixstore[cli]"\n')
        return MISUSED
    return run(arguments)
