"""All commands, as one Typer application, each of which is loaded when it is called."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["app", "run"]

FAILED = 1
# the commands, by what they are for: the module of each, and the first sentence of its help, without loading it
COMMANDS = {
    "Use": {
        "init": ("init", "Write a file of settings for jobs, servers and commands."),
        "warm": ("warm", "Compute prompts and store them, each shared prefix once."),
        "serve": ("serve", "Serve a model over HTTP, with the prompts of STORE."),
        "shim": ("shim", "Write a llama-server that runs behind the proxy, for programs that start one."),
        "slots": ("slots", "Save the slots of a running llama-server as pages of a store, and restore them."),
        "demo": ("measure", "Compute a prompt in one process and restore it in another."),
    },
    "Look": {
        "stats": ("stats", "Show what a store holds, and how much it helps."),
        "top": ("stats", "Watch how a store is used."),
        "ls": ("listing", "List the namespaces: models, tenants, and the settings that differ."),
        "tenants": ("listing", "List the tenants: what each has stored, and the name by which purge deletes it."),
        "tree": ("tree", "Show the stored prefixes as a tree."),
        "show": ("listing", "Show one page, and whether its bytes are intact."),
        "explain": ("diagnose", "Explain how much of a prompt is stored, and why not more."),
        "report": ("tree", "Write a page that shows a store: its tree and its use."),
    },
    "Maintain": {
        "doctor": ("diagnose", "Examine the installation and a store, and say what to change."),
        "check": ("maintain", "Verify every invariant and every checksum of a store."),
        "verify": ("maintain", "Compute stored sequences again and compare the results."),
        "evict": ("maintain", "Evict pages until the store fits SIZE."),
        "purge": ("maintain", "Delete pages and overwrite their bytes."),
        "clear": ("maintain", "Delete all pages, of all tenants and models."),
        "pin": ("maintain", "Keep a page from eviction."),
        "unpin": ("maintain", "Undo pin."),
        "key": ("key", "Make the keys of encrypted stores, and replace them."),
        "compact": ("maintain", "Return the space of deleted pages to the file system."),
        "bench": ("measure", "Measure a store on this machine."),
        "trace": ("trace", "Replay the recorded requests to a store with other budgets and policies."),
    },
    "Move": {
        "export": ("transfer", "Write pages into one portable file."),
        "import": ("transfer", "Import the pages of a file into a store of any backend."),
        "copy": ("transfer", "Copy pages into another store, of any backend."),
        "migrate": ("maintain", "Create a SQL store, or bring its schema up to date."),
    },
}
GROUPS = {
    "slots": {
        "status": ("slots", "Show what the slots of a server hold."),
        "save": ("slots", "Store the contents of slots that the store does not have yet."),
        "restore": ("slots", "Give a slot the longest stored prefix of a prompt."),
        "erase": ("slots", "Empty a slot of the server."),
    },
    "key": {
        "new": ("key", "Make a file with a new key."),
        "add": ("key", "Add a new key to a file of keys."),
        "list": ("key", "List the ids of the keys in a file, in the order of their lines, the newest last."),
        "rotate": ("key", "Encrypt everything in a store under the newest key."),
        "forget": ("key", "Delete the key of a tenant from a file of keys."),
    },
    "trace": {
        "replay": ("trace", "Replay a trace in the real engine, at one size, and show how much each policy finds."),
        "simulate": ("trace", "Show the hit rate against the size of the store, and what twice the budget would gain."),
    },
}


class _Commands(Mapping[str, Any]):
    """Commands by name, loaded when they are looked up."""

    def __init__(self, places: Mapping[str, tuple[str, str]]) -> None:
        self.places = places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, name: str) -> Any:
        place, summary = self.places[name]
        if name in GROUPS:
            return _Group(name=name, help=summary, rich_markup_mode=None, no_args_is_help=True)
        module = import_module(f"prefixstore.cli.{place}")
        command = getattr(module, f"{name}_", None) or getattr(module, name)
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        ready = import_module("prefixstore.cli.command").ready(command)
        one.command(name, cls=getattr(module, "COMMAND_CLASS", None))(ready)
        return typer.main.get_command(one)


class _Group(TyperGroup):
    """Lists its commands without loading them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._sections = {"Commands": GROUPS[str(self.name)]} if self.name in GROUPS else COMMANDS
        self.commands: Any = _Commands(
            {name: at for section in self._sections.values() for name, at in section.items()}
        )

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = self.commands.places.get(cmd_name)
        return found and TyperCommand(cmd_name, short_help=found[1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and self.commands[found.name], rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, section in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, summary) for name, (_, summary) in section.items()])


app = typer.Typer(
    name="prefixstore",
    cls=_Group,
    help="Fill, inspect, maintain and move stores of prompt states for llama-cpp-python and llama-server. "
    "LOCATION is lmdb:///path (or a bare path), sqlite:////path, postgresql+psycopg://user@host/database, "
    "valkey://host/0 or s3://bucket/prefix; without it, PREFIXSTORE_LOCATION, then the file of --config, then the "
    "user's cache directory. PREFIXSTORE_KEY=file:PATH has the keys of an encrypted one (see key).\n\n"
    "Exit codes: 0 done; 1 the command ran, but found a problem or left something out (see its --help); "
    "2 wrong usage, or a file that cannot be read or written; 3 the store, or the server, cannot be used; "
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
    try:
        app(args=None if arguments is None else list(arguments), prog_name="prefixstore")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED * (end.code is not None)
    except BrokenPipeError:
        # the reader of the output has closed it; Python must not write to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
