"""``prefixstore serve``: an HTTP server with the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from prefixstore.cli import options
from prefixstore.cli.output import DONE, say
from prefixstore.config import Config, load_config, model_file
from prefixstore.errors import InvalidParameterError, MissingExtraError
from prefixstore.units import parse_bytes

ON_DAMAGE = ("aside", "without", "fail")
MAX_BODY, MAX_WAITING, SILENT_SECONDS = "16MiB", 256, 3600.0

# the settings of a file that this command does not use: it has a namespace of its own, and tenants of its clients
IGNORED = ("namespace", "salt", "read_only")


class ServeCommand(TyperCommand):
    """Says where options of llama-server belong."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        at = args.index("--") if "--" in args else len(args)
        try:
            rest = super().parse_args(ctx, args[:at])
        except Exception as error:
            # the classes of the parser's errors are not public
            if at == len(args) and hasattr(error, "option_name") and hasattr(error, "message"):
                error.message += (
                    "\nOptions of llama-server follow --: prefixstore serve STORE -- llama-server -m FILE"
                    "\nSo do those of llama_cpp.server: prefixstore serve STORE --model FILE -- --n_ctx 8192"
                )
            raise
        # also where no location comes before them
        ctx.params["command"] = [*(ctx.params.get("command") or ()), *args[at + 1 :]]
        return rest


COMMAND_CLASS = ServeCommand


def serve(
    location: str,
    command: list[str] | None = None,
    *,
    model: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    admin_key: str | None = None,
    salt_from: str | None = None,
    far: str | None = None,
    far_max_bytes: str | None = None,
    max_bytes: str | None = None,
    ttl: str | None = None,
    quota: str | None = None,
    on_damage: str = "without",
    max_body: str = MAX_BODY,
    max_bodies: str | None = None,
    max_waiting: int = MAX_WAITING,
    allow_field: list[str] | None = None,
    timeout: float = SILENT_SECONDS,
    config: Path | None = None,
) -> int | None:
    """Serve a model over HTTP, with the prompts of STORE.

    Starts llama-server, and listens in front of it. All of its endpoints pass through; completions start from the
    stored prefix of their prompt, and new tokens are stored when a slot is idle.

    With --model, or --config FILE that has a model, llama-cpp-python's own server is served instead, in this process;
    its options follow --.

    Exit codes: 0 it was stopped; 1 the server has failed; 2 wrong usage; 3 the store cannot be used.

    Example: prefixstore serve ./store --port 8080 -- llama-server -m model.gguf -np 4

    Example: prefixstore serve ./store --model model.gguf -- --n_ctx 8192 --n_threads 8
    """
    settings_of_file = Config() if config is None else load_config(config)
    sizes = {"max_bytes": max_bytes, "far_max_bytes": far_max_bytes, "quota": quota}
    limits = {name: options.max_bytes_of(size, f"--{name.replace('_', '-')}") for name, size in sizes.items()}
    given = {name: value for name, value in {**limits, "ttl": ttl}.items() if value is not None}
    places = location if far is None else [location, far]
    command = command or []
    is_options = not command or command[0].startswith("-")
    if model is not None or (settings_of_file.path is not None and is_options):
        of_llama_server = {
            "--admin-key": admin_key,
            "--salt-from": salt_from,
            "--on-damage": on_damage != "without",
            "--max-body": max_body != MAX_BODY,
            "--max-bodies": max_bodies,
            "--max-waiting": max_waiting != MAX_WAITING,
            "--allow-field": allow_field or None,
            "--timeout": timeout != SILENT_SECONDS,
        }
        for name, value in of_llama_server.items():
            if value is not None and value is not False:
                raise InvalidParameterError(f"{name} is for llama-server; options of llama_cpp.server follow --")
        return _serve_model(places, settings_of_file, given, model, command, host, port)
    try:
        # the extra "server"
        from prefixstore.server.server_session import OnDamage  # noqa: PLC0415
        from prefixstore.server.serving import ServeSettings, serve_child  # noqa: PLC0415
        from prefixstore.server.tenants import TenantSource  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            f'serve needs {error.name}, which is not installed; pip install "prefixstore[server]"'
        ) from error
    if admin_key is not None and not admin_key.strip():
        # a shell makes it empty of a variable that is not set
        raise InvalidParameterError("--admin-key is empty: everybody would have that key; pass one, or leave it out")
    body, bodies = parse_bytes(max_body, "--max-body"), options.max_bytes_of(max_bodies, "--max-bodies")
    if bodies is not None and bodies < body:
        raise InvalidParameterError("--max-bodies is for all requests together; it cannot be below --max-body")
    if on_damage not in ON_DAMAGE:
        raise InvalidParameterError(f"--on-damage {on_damage} is unknown; choose {', '.join(ON_DAMAGE)}")
    _log_to_stderr()
    if ignored := sorted(settings_of_file.store.keys() & set(IGNORED)):
        say(f"note: {config}: serve ignores {', '.join(ignored)} in [store]")
    in_file = {name: one for name, one in settings_of_file.store.items() if name not in ("location", *IGNORED)}
    settings = ServeSettings(
        location=places,
        host=host,
        port=port,
        admin_key=admin_key,
        tenants=None if salt_from is None else TenantSource.parse(salt_from),
        store_options={**in_file, **given},
        on_damage=OnDamage(on_damage),
        max_body=body,
        max_bodies=bodies,
        max_waiting=max_waiting,
        allowed_fields=frozenset(allow_field or ()),
        timeout=timeout,
        announce=_announce,
    )
    if not command:
        raise InvalidParameterError(
            "no server is given; add -- llama-server -m FILE, or pass --model FILE, or --config FILE with a model"
        )
    serve_child(settings, command)
    return DONE


def _announce(text: str) -> None:
    # the terminal may be closed, or the reader of the first lines gone: the server keeps running
    with suppress(OSError):
        say(f"prefixstore: {text}")


def _log_to_stderr() -> None:
    """Print warnings like everything else that this command says."""
    log = logging.getLogger("prefixstore")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("prefixstore: %(message)s"))
        log.addHandler(handler)


def _serve_model(
    location: str | list[str],
    settings: Config,
    given: Mapping[str, object],
    model: Path | None,
    command: list[str],
    host: str,
    port: int,
) -> int:
    """Serve a model, or that of the file, with ``llama_cpp.server``, whose options are passed on."""
    if command and not command[0].startswith("-"):
        raise InvalidParameterError(
            f"{command[0]} cannot follow --: with --model, only options of llama_cpp.server can; leave out --model for "
            "llama-server"
        )
    try:
        from prefixstore.server.python_server import run_python_server  # noqa: PLC0415 - the extra "python-server"
    except ImportError as error:
        raise MissingExtraError(
            f'--model needs {error.name}, which is not installed; pip install "prefixstore[python-server]"'
        ) from error
    if model is not None:
        if settings.model:
            raise InvalidParameterError(
                f"--model cannot be used with a file that sets {next(iter(settings.model))} in [model]: "
                "leave out --model, and name the model in [model] path of the file"
            )
        # the server loads it last: wrong options, and a port in use, are told before
        settings = Config(path=model_file(model, is_read=False), store=settings.store)
        command = ["--model", str(settings.path), *command]
    store_options = {**settings.store, **given}
    store_options.pop("location", None)
    options = ["--host", host, "--port", str(port), *command]
    return run_python_server(location, options, config=None if model is not None else settings, **store_options)
