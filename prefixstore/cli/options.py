"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixstore.cli.output import Form
from prefixstore.errors import InvalidParameterError
from prefixstore.units import parse_bytes

__all__ = [
    "CONFIG_VARIABLE",
    "OTHERWISE",
    "SERVER_KEY",
    "AsJson",
    "ConfigFile",
    "DryRun",
    "Limit",
    "Location",
    "MaxBytes",
    "MessagesFile",
    "ModelFile",
    "NCtx",
    "NamespaceName",
    "OutputForm",
    "PageKey",
    "Prefix",
    "PromptFile",
    "Replace",
    "Salt",
    "Stores",
    "Tenant",
    "TokenizerFile",
    "Yes",
    "flag",
    "form_of",
    "max_bytes_of",
    "option",
    "server_key",
]

CONFIG_VARIABLE = "PREFIXSTORE_CONFIG"
SERVER_KEY = "PREFIXSTORE_SERVER_KEY"
# llama-server's own
OTHER_SERVER_KEY = "LLAMA_API_KEY"


def option(metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    """An option that takes a value, and its help; its name is that of the parameter, or one of `names`."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(names: str, text: str) -> Any:
    """An option without a value, and its help."""
    return typer.Option(*names.split(), help=text)


# what stands for a location that is left out
OTHERWISE = "by default PREFIXSTORE_LOCATION, then that of --config, then ~/.cache/prefixstore/kv."
# `prefixstore.cli.command.ready` makes it optional
Location = Annotated[
    str,
    typer.Argument(metavar="LOCATION", show_default=False, help=f"lmdb:///path, sqlite:////path, …; {OTHERWISE}"),
]
Stores = Annotated[
    list[str] | None,
    option("LOCATION", "lmdb:///path, sqlite:////path, …; a second one is the far location.", "--store"),
]
PageKey = Annotated[str, typer.Argument(metavar="HASH", help="The key of a page, or its first digits.")]
AsJson = Annotated[bool, flag("--json", "Print one JSON document to stdout.")]
OutputForm = Annotated[
    Form | None, typer.Option("--format", help="Output format; --json is the same as --format json.")
]
Limit = Annotated[int | None, option("N", "Show at most N.", min=1)]
MaxBytes = Annotated[str | None, option("SIZE", "Size limit of the store, such as 20GiB.")]
NamespaceName = Annotated[
    str | None, option("NAME", "Only pages of one namespace: its label, or the first digits of its key.")
]
Tenant = Annotated[str | None, option("TENANT", "Only pages of one tenant.", "--salt")]
Salt = Annotated[str | None, option("TENANT", "Tenant: pages are shared only within one tenant.")]
Prefix = Annotated[
    str | None, option("TEXT", "Only sequences that begin with this text; needs --model or --tokenizer.")
]
ModelFile = Annotated[Path | None, option("FILE", "Model file (GGUF).", "--model")]
TokenizerFile = Annotated[Path | None, option("FILE", "A tokenizer.json, instead of a model.", "--tokenizer")]
NCtx = Annotated[int | None, option("N", "Length of the context in tokens.")]
ConfigFile = Annotated[
    Path | None,
    option(
        "FILE",
        "TOML file with [model], [store] and [warm], shared with servers; prefixstore init writes one.",
        envvar=CONFIG_VARIABLE,
    ),
]
PromptFile = Annotated[Path | None, option("FILE", "The text of the prompt; - is stdin.")]
MessagesFile = Annotated[
    Path | None,
    option("FILE", 'A chat as JSON: a list of messages, or a request with "messages" and "tools"; - is stdin.'),
]
Yes = Annotated[
    bool,
    flag(
        "--yes -y",
        "Do not ask for confirmation. Scripts are never asked, and need --yes only to delete without LOCATION or "
        "--config.",
    ),
]
Replace = Annotated[bool, flag("--yes -y", "Replace a file without asking.")]
DryRun = Annotated[bool, flag("--dry-run", "Show what would be done without changing anything.")]


def form_of(form: Form | None, *, as_json: bool) -> Form:
    """The form that ``--format`` and ``--json`` ask for."""
    if as_json and form not in (None, Form.JSON):
        raise InvalidParameterError("--json and --format cannot be combined; pass one of them")
    return Form.JSON if as_json else form or Form.TEXT


def server_key(given: str | None) -> str | None:
    """The key of a llama-server: as given, or from the environment."""
    return given or os.environ.get(SERVER_KEY) or os.environ.get(OTHER_SERVER_KEY)


def max_bytes_of(size: str | None, name: str = "--max-bytes") -> int | None:
    """The bytes of ``--max-bytes``; None if it is not given."""
    return parse_bytes(size, name) if size is not None else None
