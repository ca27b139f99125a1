"""All commands, as one Typer application."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from prefixstore.cli import delete, listing, maintain, measure, transfer
from prefixstore.cli.doctor import doctor
from prefixstore.cli.explain import explain
from prefixstore.cli.init import init
from prefixstore.cli.migrate import migrate
from prefixstore.cli.output import FAILED, guarded, summary
from prefixstore.cli.place import located
from prefixstore.cli.report import report
from prefixstore.cli.serve import ServeCommand, serve
from prefixstore.cli.slots import slots
from prefixstore.cli.stats import stats
from prefixstore.cli.top import top
from prefixstore.cli.trace import trace
from prefixstore.cli.tree import tree
from prefixstore.cli.warm import warm

__all__ = ["app", "run"]

app = typer.Typer(
    name="prefixstore",
    help="Fill, inspect, maintain and move stores of prompt states for llama-cpp-python and llama-server. "
    "LOCATION is lmdb:///path (or a bare path), sqlite:////path, postgresql+psycopg://user@host/database, "
    "valkey://host/0 or s3://bucket/prefix; without it, PREFIXSTORE_LOCATION, then the file of --config, then the "
    "user's cache directory.\n\n"
    "Exit codes: 0 done; 1 the command ran, but found a problem or left something out (see its --help); "
    "2 wrong usage; 3 the store, or the server, cannot be used; 130 and 143 interrupted.",
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
    init,
    warm,
    serve,
    stats,
    top,
    listing.ls,
    tree,
    listing.show,
    report,
    explain,
    doctor,
    maintain.check,
    maintain.verify,
    maintain.evict,
    delete.purge,
    delete.clear,
    maintain.pin,
    maintain.unpin,
    maintain.compact,
    transfer.export,
    transfer.import_,
    transfer.copy,
    migrate,
    measure.bench,
    measure.demo,
):
    app.command(
        command.__name__.rstrip("_"),
        cls=ServeCommand if command is serve else None,
        short_help=summary(command),
    )(guarded(located(command)))
for group, name in ((slots, "slots"), (trace, "trace")):
    app.add_typer(group, name=name, short_help=str(group.info.help))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    _open_streams()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="prefixstore")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED * (end.code is not None)
    except BrokenPipeError:
        # the reader of the output has closed it; Python must not write to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        sys.stderr.write("prefixstore: the output cannot be written: no space left on its device\n")
        return FAILED
    return 0


def _open_streams() -> None:
    """Have files in place of standard streams that are closed.

    Without, files of the store would have their numbers, and a library that writes to its log would write to those.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115 - to the end of the process
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


def _terminate(number: int, _: Any) -> None:
    """End as by an exception: transactions are rolled back, temporary files removed."""
    raise SystemExit(128 + number)
