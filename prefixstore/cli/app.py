"""All commands, as one Typer application."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from prefixstore.cli import inspect, maintain, measure, transfer
from prefixstore.cli.output import FAILED, guarded
from prefixstore.cli.warm import warm

__all__ = ["app", "run"]

app = typer.Typer(
    name="prefixstore",
    help="Fill, inspect, maintain and move stores of prompt states for llama-cpp-python. "
    "LOCATION is lmdb:///path (or a bare path), sqlite:////path or postgresql+psycopg://user@host/database.\n\n"
    "Exit codes: 0 done; 1 the command ran, but found a problem or left something out (see its --help); "
    "2 wrong usage; 3 the store cannot be used; 130 and 143 interrupted.",
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in (
    warm,
    inspect.stats,
    inspect.ls,
    inspect.tree,
    inspect.show,
    maintain.check,
    maintain.verify,
    maintain.evict,
    maintain.purge,
    maintain.pin,
    maintain.unpin,
    maintain.compact,
    transfer.export,
    transfer.import_,
    transfer.copy,
    transfer.migrate,
    measure.bench,
    measure.demo,
):
    app.command(command.__name__.rstrip("_"))(guarded(command))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="prefixstore")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED * (end.code is not None)
    except BrokenPipeError:
        # the reader of our output has closed it; Python must not write to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return 0


def _terminate(number: int, _: Any) -> None:
    """End as by an exception: transactions are rolled back, temporary files removed."""
    raise SystemExit(128 + number)
