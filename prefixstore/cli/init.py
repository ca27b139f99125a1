"""``prefixstore init``: a file of settings for jobs, servers and commands."""

from __future__ import annotations

import json
import os
import shlex
import stat
from pathlib import Path

from prefixstore.backends.files import expanded
from prefixstore.backends.location import default_location, is_url, without_password
from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.named_files import is_replaced, writing
from prefixstore.cli.output import FAILED, may_replace, say
from prefixstore.errors import InvalidParameterError
from prefixstore.opening import locations_of
from prefixstore.report.labels import visible

NAME = "prefixstore.toml"
TEXT = """\
# Settings for jobs, servers and commands, so that all of them use the same pages:
#   prefixstore warm --config {name}
#   llm, store = prefixstore.load("{name}")
# Relative paths are relative to the folder of this file.

[model]
path = {model}
n_ctx = {n_ctx}  # as long as a prompt and its answer together
# n_threads = 8
# n_gpu_layers = -1
# type_k = "q8_0"
# type_v = "q8_0"  # needs flash_attn
# flash_attn = true

[store]
location = {location}  # the variable PREFIXSTORE_LOCATION, if set, overrides it
max_bytes = {max_bytes}
{far_max_bytes}# ttl = "30d"
# salt = "tenant-7"
# key = "file:prefixstore.key"  # encrypts the store from its beginning; prefixstore key new makes one

[warm]
prompts = [{prompts}]
# pin = true
"""


def init(
    file: Path = Path(NAME),
    *,
    model: Path | None = None,
    store: list[str] | None = None,
    n_ctx: int = 4096,
    max_bytes: str | None = "10GiB",
    yes: bool = False,
) -> Result | int:
    """Write a file of settings for jobs, servers and commands.

    On a terminal it asks before it replaces a file; otherwise that needs --yes. Exit code 1: it was not replaced.

    Example: prefixstore init --model model.gguf --store lmdb:///var/cache/kv
    """
    options.max_bytes_of(max_bytes)
    exists = is_replaced(file)
    if exists and not may_replace(file, yes=yes):
        return FAILED
    locations = store or [default_location()]
    locations_of(locations)
    # after "--store=" the shell leaves a ~ as it is
    locations = [location if is_url(location) else expanded(location) for location in locations]
    written = [location if is_url(location) else _from(file, Path(location)) for location in locations]
    named = Path(expanded(model or "model.gguf"))
    text = TEXT.format(
        name=visible(str(file)),
        model=_quoted(_from(file, named)),
        n_ctx=n_ctx,
        location=_quoted(written if len(written) > 1 else written[0]),
        max_bytes=json.dumps(max_bytes),
        far_max_bytes='# far_max_bytes = "1TiB"  # of the second location; by default the same\n'
        if len(written) > 1
        else "",
        prompts=json.dumps("prompts.jsonl"),
    )
    is_secret = any(is_url(location) and without_password(location) != location for location in locations)
    try:
        # through a link; what has a password in it can be read by its owner only
        path = file.resolve() if exists else file
        mode = 0o600 if is_secret else stat.S_IMODE(path.stat().st_mode) if exists else 0o666
        with writing(str(path), mode=mode, replace=exists) as opened:
            opened.write(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidParameterError("a path has bytes that are not valid UTF-8; TOML cannot name it") from error
    if not named.is_file():
        say(f"note: model file not found: {named}; put it there, or change path in [model] of {file}")
    shown = [
        without_password(location) if is_url(location) else str(Path(location).absolute()) for location in locations
    ]
    return Result(
        {"file": str(file), "model": str(named), "location": ", ".join(shown)},
        f"{file} written: the store is {', in front of '.join(shown)}. "
        f'Next: prefixstore.load({str(file)!r}) in Python; or write prompts.jsonl, a {{"prompt": …}} or '
        f'{{"messages": […]}} in each line, and run prefixstore warm --config {shlex.quote(str(file))}',
    )


def _quoted(text: str | list[str]) -> str:
    """A text, or some, as TOML has it: as JSON does, except for one more control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _from(file: Path, path: Path) -> str:
    """A path as it is written into the file."""
    if path.is_absolute():
        return str(path)
    return os.path.relpath(path, file.absolute().parent)
