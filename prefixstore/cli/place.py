"""Which location a command uses: its argument, or the one named by the settings file or the environment."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from prefixstore.backends.location import without_password
from prefixstore.cli.arguments import CONFIG_VARIABLE, ConfigFile
from prefixstore.cli.confirm import has_terminal
from prefixstore.cli.output import guarded, say
from prefixstore.config import Config, load_config
from prefixstore.errors import InvalidParameterError

__all__ = ["ready", "summary"]

# the argument that is the location, by its names in the commands
LOCATIONS = ("location", "source", "store")
# the key of a page; what is none is a location after which it was forgotten
HASH, HEXADECIMAL = "HASH", re.compile("[0-9A-Fa-f]+")
# an argument that can be left out if one of these options is given
INSTEAD = {"prompt": ("prompt_file", "messages")}
# a location rather than a prompt
URL_OR_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(//.*|)|[^\s/]*/\S*")


def ready(command: Callable[..., int | None]) -> Callable[..., None]:
    """A command as it is called: without a location too, with `--config`, and ending with an exit code."""
    return guarded(_located(command))


def summary(command: Callable[..., object]) -> str:
    """The first sentence of a command's help, whole: in lists it would be cut to one line otherwise."""
    return " ".join((inspect.getdoc(command) or "").partition("\n\n")[0].split())


def _located(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Let a command be called without a location, and give it ``--config``.

    Its first argument becomes optional: without it, the location is that of ``PREFIXSTORE_LOCATION``, of the file (the
    nearer one, if that has two), or the default. The file also fills in ``--max-bytes`` and, for texts, ``--model``,
    where a command has them.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = dict(signature.parameters)
    place = next((name for name in LOCATIONS if name in parameters and _is_positional(parameters[name])), None)
    if place is None:
        return command
    # what follows the location, and has to be given
    needed = [
        name
        for name, one in parameters.items()
        if name != place and _is_positional(one) and (one.default is inspect.Parameter.empty or name in INSTEAD)
    ]
    # a command that does without one can be given two by the file
    needs_one = parameters[place].default is inspect.Parameter.empty
    has_config = "config" in parameters
    for name in (place, *needed):
        parameters[name] = parameters[name].replace(default=None)
    if not has_config:
        parameters["config"] = inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile
        )

    @functools.wraps(command)
    def run(**given: Any) -> int | None:
        config: Path | None = given.get("config") if has_config else given.pop("config", None)
        if needed and _is_too_early(given, place, needed[-1]):
            names = [place, *needed]
            values = [given[name] for name in names]
            given.update(zip(names, [None, *values], strict=False))
            last, wanted = given[needed[-1]], _metavar(parameters[needed[-1]])
            if last is None:
                raise InvalidParameterError(f"{wanted} is missing; see --help")
            if wanted == HASH and HEXADECIMAL.fullmatch(last) is None:
                raise InvalidParameterError(f"{last!r} is not the key of a page; pass [LOCATION] HASH, see --help")
        settings = load_config(config) if config is not None else Config()
        if given[place] is None and needs_one:
            given[place] = _place_of(given, config, settings)
        _fill_in(given, settings, texts=not has_config)
        return command(**given)

    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return run


def _is_too_early(given: dict[str, Any], place: str, last: str) -> bool:
    """Whether the location was left out, so that each argument is in the place of the one before it."""
    if given[last] is not None:
        return False
    if last not in INSTEAD:
        return True
    text = given[place]
    if text is None or any(given.get(option) is not None for option in INSTEAD[last]):
        return False
    return URL_OR_PATH.fullmatch(text) is None and not os.path.exists(text)  # noqa: PTH110 - false for a long text


def _place_of(given: dict[str, Any], config: Path | None, settings: Config) -> str:
    """The location of a command to which none is given."""
    nearest, *further = settings.locations
    if further and "far" in given:
        given["far"] = given["far"] or further[0]
    elif further:
        say(
            f"note: this is about {without_password(nearest)} alone; for {without_password(further[0])}, pass that as "
            "LOCATION"
        )
    is_named = config is not None and str(config) != os.environ.get(CONFIG_VARIABLE)
    if not is_named and _deletes(given) and not has_terminal():
        # a variable of a script that is not set must not delete what is in the default location
        raise InvalidParameterError(f"no LOCATION is given; pass one, or --yes for {without_password(nearest)}")
    return nearest


def _deletes(given: dict[str, Any]) -> bool:
    """Whether a command with these options deletes pages, and would ask on a terminal."""
    return "out" not in given and not given.get("yes", True) and not given.get("dry_run")


def _fill_in(given: dict[str, Any], settings: Config, *, texts: bool) -> None:
    """Options that were left out, from the file."""
    for name in ("max_bytes", "far_max_bytes"):
        size = settings.store.get(name)
        if size is not None and given.get(name, "") is None:
            given[name] = str(size)
    wants_text = texts and given.get("model", "") is None and given.get("tokenizer", "") is None
    # a text is shown where it can be, so what is missing for it is no error
    if wants_text and settings.path and Path(settings.path).is_file() and find_spec("llama_cpp") is not None:
        given["model"] = Path(settings.path)


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _metavar(parameter: inspect.Parameter) -> str:
    more = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
    return next((one.metavar for one in more if getattr(one, "metavar", None)), parameter.name.upper())
