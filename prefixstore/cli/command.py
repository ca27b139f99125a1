"""What surrounds every command: its location, the settings file, errors, ``--json`` and the exit code."""

from __future__ import annotations

import errno
import inspect
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import hexdigits
from typing import Any, get_args

import typer

from prefixstore.backends import is_persistent
from prefixstore.backends.encryption_keys import use_by_default
from prefixstore.backends.location import ENVIRONMENT, without_password, without_passwords
from prefixstore.cli import options
from prefixstore.cli.output import DONE, FAILED, emit, fields, has_terminal, say, tell
from prefixstore.config import Config, load_config
from prefixstore.errors import (
    CorruptError,
    IncompatibleError,
    InvalidParameterError,
    LocationError,
    MisuseError,
    PrefixStoreError,
    ServerBusyError,
    ServerUnreachableError,
    UnavailableError,
)
from prefixstore.units import parse_bytes

MISUSED, UNUSABLE = 2, 3
ARE_UNUSABLE = (
    CorruptError,
    IncompatibleError,
    LocationError,
    ServerBusyError,
    ServerUnreachableError,
    UnavailableError,
)
# what `Path.is_file` raises for a path given by the user
HIDDEN = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
# the argument that is the location, by its names in the commands
LOCATIONS = ("location", "source", "store")


@dataclass(frozen=True)
class Result:
    """What a command has found. A command that returns one has the option ``--json``."""

    # for --json, or a function that makes it; None if stdout is in use
    data: object
    # printed otherwise: a line (not an empty one), names and values, or a function that prints
    text: str | Mapping[str, object] | Callable[[], None]
    code: int = DONE

    def print(self, *, as_json: bool) -> None:
        """Print it to stdout."""
        if as_json and self.data is not None:
            emit(self.data() if callable(self.data) else self.data)
        elif isinstance(self.text, str):
            if self.text:
                tell(self.text)
        elif isinstance(self.text, Mapping):
            fields(self.text)
        else:
            self.text()


def ready(command: Callable[..., Result | int | None]) -> Callable[..., None]:
    """A command as it is called: its results are printed, its errors reported, and it ends with an exit code.

    It gets ``--json`` if it returns a `Result`. If it has a location, that may be left out, and it gets ``--config``:
    the location is then that of ``PREFIXSTORE_LOCATION``, of the file (the nearer one, if that has two), or the
    default. The file also fills in size limits and, for texts, ``--model``.
    """
    signature = inspect.signature(command, eval_str=True)
    has_result = Result in (signature.return_annotation, *get_args(signature.return_annotation))
    parameters = dict(signature.parameters)
    positional = [name for name, one in parameters.items() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    needed = [name for name in positional if parameters[name].default is inspect.Parameter.empty]
    place = next((name for name in LOCATIONS if name in positional), None)
    # the location, and what follows it and has to be given
    names = [place, *(name for name in needed if name != place)] if place is not None else []
    parameters |= {name: parameters[name].replace(default=None) for name in names}
    if has_result:
        parameters["as_json"] = _keyword("as_json", bool, default=False)
    if names:
        parameters.setdefault("config", _keyword("config", Path | None, default=None))
    parameters = {name: options.with_help(command, one) for name, one in parameters.items()}

    def run(**given: Any) -> None:
        as_json = has_result and given.pop("as_json")
        try:
            if names:
                # a command that does without a location can be given two by the file
                _find(given, names, is_needed=place in needed, has_config="config" in signature.parameters)
            result = command(**given)
            if isinstance(result, Result):
                result.print(as_json=as_json)
                result = result.code
            code = result or DONE
        except PrefixStoreError as error:
            # it may repeat an argument that was not where a location is expected
            say(f"prefixstore: {without_passwords(str(error))}")
            code = (
                MISUSED if isinstance(error, MisuseError) else UNUSABLE if isinstance(error, ARE_UNUSABLE) else FAILED
            )
        except OSError as error:
            if error.errno not in HIDDEN or error.filename is None:
                raise
            say(f"prefixstore: {os.fsdecode(error.filename)}: {error.strerror}")
            code = MISUSED
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        raise typer.Exit(code)

    run.__doc__ = command.__doc__
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters.values()], return_annotation=None
    )
    run.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return run


def _keyword(name: str, annotation: Any, *, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _find(given: dict[str, Any], names: list[str], *, is_needed: bool, has_config: bool) -> None:
    """Fill in the location, the first of these names, and what else the file has, where it was left out."""
    place = names[0]
    config: Path | None = given.get("config") if has_config else given.pop("config")
    if len(names) > 1 and given[names[-1]] is None:
        # the location was left out, so each argument is in the place of the one before it
        given.update(zip(names, [None, *(given[name] for name in names)], strict=False))
        last = given[names[-1]]
        # a single argument that is not a hash is the location
        if last is None or (names[-1] == "digits" and last.strip(hexdigits)):
            raise InvalidParameterError(f"{options.HELP[names[-1]][0]} is missing; see --help")
    settings = load_config(config) if config is not None else Config()
    if given[place] is None and is_needed:
        given[place] = _default_location(given, config, settings)
    key: Any = settings.store.get("key")
    if isinstance(key, list) and key:
        key = key[min(settings.locations.index(_kept(settings)[0]), len(key) - 1)]
    use_by_default(key)
    for name in ("max_bytes", "far_max_bytes"):
        size = settings.store.get(name)
        if size is not None and given.get(name, "") is None:
            given[name] = f"{parse_bytes(size, f'config {config}: [store] {name}')}B"
    wants_text = not has_config and given.get("model", "") is None
    # a text is shown where it can be, so what is missing for it is no error
    if wants_text and settings.path and Path(settings.path).is_file():
        given["model"] = Path(settings.path)


def _kept(settings: Config) -> list[str]:
    """The locations that a command can be about, the nearer one of two first: not the memory of another process."""
    return [text for text in settings.locations if is_persistent(text)] or settings.locations


def _default_location(given: dict[str, Any], config: Path | None, settings: Config) -> str:
    """The location of a command to which none is given."""
    nearest, *further = _kept(settings)
    if further and "far" in given:
        given["far"] = given["far"] or further[0]
    elif further:
        far = without_password(further[0])
        say(f"note: this is about {without_password(nearest)} alone; for {far}, pass that as STORE")
    is_named = config is not None and str(config) != os.environ.get(options.CONFIG_VARIABLE)
    if "target" in given and config is None and ENVIRONMENT not in os.environ:
        # the one argument may as well have been meant as the source
        only = without_password(given["target"])
        raise InvalidParameterError(f"only {only} is given; pass STORE TARGET, or --config, or set {ENVIRONMENT}")
    # whether it deletes pages, and would ask on a terminal
    deletes = given.get("yes") is False and "out" not in given and given.get("repair", True) and not given["dry_run"]
    if deletes and not is_named and not has_terminal():
        # a variable of a script that is not set must not delete what is in the default location
        raise InvalidParameterError(f"no STORE is given; pass one, or --yes for {without_password(nearest)}")
    return nearest
