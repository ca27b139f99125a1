"""All commands, as one Typer application, each of which is loaded when it is called."""

from __future__ import annotations

import ast
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

FAILED = 1
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# the reader of the output has closed it, or the disk is full that it goes to
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
# the commands, by what they are for: the module of each, and its name
COMMANDS = {
    "Use": "init.init warm.warm serve.serve shim.shim slots.slots measure.demo",
    "Look": "stats.stats stats.top listing.ls listing.tenants tree.tree listing.show diagnose.explain tree.report",
    "Maintain": "diagnose.doctor maintain.check maintain.verify maintain.evict maintain.purge maintain.clear "
    "maintain.pin maintain.unpin key.key maintain.compact measure.bench trace.trace",
    "Move": "move.export move.import move.copy maintain.migrate",
}
# those that have commands of their own, in the module of that name
GROUPS = {
    "slots": (
        "Save the slots of a running llama-server as pages of a store, and restore them.",
        "slots.save slots.restore",
    ),
    "key": ("Make the keys of encrypted stores, and replace them.", "key.new key.add key.list key.rotate key.forget"),
    "trace": ("Replay the recorded requests to a store with other budgets and policies.", "trace.simulate"),
}


@cache
def _docstrings(module: str) -> dict[str, str]:
    """The docstrings of the functions of a module here, without loading it."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text("utf-8"))
    return {one.name: ast.get_docstring(one) or "" for one in tree.body if isinstance(one, ast.FunctionDef)}


def _summary(name: str, module: str) -> str:
    """The first sentence of the help of a command."""
    if name in GROUPS:
        return GROUPS[name][0]
    texts = _docstrings(module)
    first = texts.get(f"{name}_", texts.get(name, "")).partition("\n\n")[0]
    return " ".join(first.split()).partition(". ")[0].removesuffix(".") + "."


class _Commands(dict[str, str]):
    """The module of each command, by its name; ``[name]`` loads the command."""

    def __getitem__(self, name: str) -> Any:
        if name in GROUPS:
            return _Group(name=name, help=GROUPS[name][0], rich_markup_mode=None, no_args_is_help=True)
        module = import_module(f"prefixstore.cli.{self.get(name)}")
        command = getattr(module, f"{name}_", None) or getattr(module, name)
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        ready = import_module("prefixstore.cli.command").ready(command)
        one.command(name, cls=getattr(module, "COMMAND_CLASS", None))(ready)
        found: Any = typer.main.get_command(one)
        for parameter in found.params:
            if parameter.param_type_name == "argument":
                # its name says what it is
                parameter.display_type_rich = lambda **_: ""
        return found


class _Group(TyperGroup):
    """Lists its commands without loading them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        sections = {"Commands": GROUPS[str(self.name)][1]} if self.name in GROUPS else COMMANDS
        self._sections = {heading: [one.split(".") for one in some.split()] for heading, some in sections.items()}
        self.commands: Any = _Commands({name: module for some in self._sections.values() for module, name in some})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module = self.commands.get(cmd_name)
        return module and TyperCommand(cmd_name, short_help=_summary(cmd_name, module))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and self.commands[found.name], rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, some in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, _summary(name, module)) for module, name in some])


app = typer.Typer(
    name="prefixstore",
    cls=_Group,
    help="Fill, inspect, maintain and move stores of prompt states for llama-cpp-python and llama-server. "
    "STORE is lmdb:///path (or a bare path), sqlite:////path, postgresql+psycopg://user@host/database, "
    "valkey://host/0 or s3://bucket/prefix; without it, PREFIXSTORE_LOCATION, then the file of --config, then the "
    "user's cache directory. PREFIXSTORE_KEY=file:PATH has the keys of an encrypted one (see key).\n\n"
    "Exit codes: 0 done; 1 the command ran, but found a problem or left something out (see its --help), or its output "
    "could not be written; 2 wrong usage, or a file that cannot be read or written; 3 the store, or the server, "
    "cannot be used; "
    "130 and 143 interrupted.",
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


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    _open_streams()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    code = 0
    try:
        try:
            app(args=None if arguments is None else list(arguments), prog_name="prefixstore")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else FAILED * (end.code is not None)
        if arguments is None and code in INTERRUPTED:
            # the end of the process would wait for threads that wait for a lock of another one
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        # Python must not write to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"prefixstore: the output cannot be written: {error.strerror}\n")
        return FAILED
    return code


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
