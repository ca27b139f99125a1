"""Questions before something is deleted or replaced."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from prefixstore.cli.output import say
from prefixstore.cli.terminal import wrapped

__all__ = ["DryRun", "Replace", "Yes", "has_terminal", "is_confirmed"]

Yes = Annotated[
    bool,
    typer.Option(
        "--yes",
        "-y",
        help="Do not ask for confirmation. Scripts are never asked, and need --yes only to delete without "
        "LOCATION or --config.",
    ),
]
Replace = Annotated[bool, typer.Option("--yes", "-y", help="Replace a file without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done without changing anything.")]


def has_terminal() -> bool:
    """Whether there is someone to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def is_confirmed(question: str, *, yes: bool, without_terminal: bool = True) -> bool:
    """Ask on a terminal whether to go on; a no is reported.

    Parameters
    ----------
    question
        What would be done.
    yes
        Whether ``--yes`` was given: then nothing is asked.
    without_terminal
        The answer if there is no terminal to ask on.
    """
    if yes:
        return True
    if not has_terminal():
        if not without_terminal:
            say(f"{question} Without a terminal to ask on, that needs --yes")
        return without_terminal
    if typer.confirm(wrapped(question, sys.stderr), err=True):
        return True
    say("nothing was changed")
    return False
