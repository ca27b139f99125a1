"""All commands, as one Typer application."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from prefixstore.cli import inspect as look
from prefixstore.cli import maintain as care
from prefixstore.cli import measure
from prefixstore.cli import transfer as move
from prefixstore.cli.output import FAILED, guarded

__all__ = ["app", "run"]

app = typer.Typer(
    name="prefixstore",
    help="Look into a store of prompt states, care for it, and move it. LOCATION is lmdb:///path (or a bare path), "
    "sqlite:////path or postgresql+psycopg://user@host/database.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from prefixstore import __version__  # noqa: PLC0415 - is not complete while the package is imported

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    pass


for command in (
    look.stats,
    look.ls,
    look.tree,
    look.show,
    care.check,
    care.verify,
    care.evict,
    care.purge,
    care.pin,
    care.unpin,
    care.compact,
    move.export,
    move.import_,
    move.copy,
    move.migrate,
    measure.bench,
    measure.demo,
):
    app.command(command.__name__.rstrip("_"))(guarded(command))

if find_spec("prefixstore.cli.warm") is not None:
    from prefixstore.cli.warm import warm

    app.command("warm")(warm)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="prefixstore")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED * (end.code is not None)
    except BrokenPipeError:
        # whoever read our output has enough of it; nothing more is to be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return 0


def _terminate(number: int, _: Any) -> None:
    """What is open is left as by an exception: transactions are undone, temporary files removed."""
    raise SystemExit(128 + number)
