"""``llama_cpp.server`` with a store: its application, and the command that runs it.

It serves one request at a time, and one model at a time: a request for another model closes the first, and the store
follows. Requests of all clients share the pages of a model. To keep tenants apart, run a server for each of them, with
a `salt` of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Response
from llama_cpp.server import app as stock
from llama_cpp.server.cli import add_args_from_model, parse_model_from_args
from llama_cpp.server.settings import ConfigFileSettings, ModelSettings, ServerSettings, Settings
from pydantic import ValidationError

from prefixstore.backends.location import text_of
from prefixstore.config import Config, load_config
from prefixstore.errors import (
    IncompatibleError,
    InvalidParameterError,
    LocationError,
    MisuseError,
    PrefixStoreError,
    StorageError,
    UnavailableError,
)
from prefixstore.metrics import RequestMetrics, StoreMetrics, new_registry, render
from prefixstore.opening import Locations
from prefixstore.server.completions import CachedTokens, StoreProxy
from prefixstore.server.listener import bound, stopped_by_signals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["create_app", "main", "run"]

S = TypeVar("S", ServerSettings, ModelSettings)

log = logging.getLogger("prefixstore")


def create_app(
    location: Locations = None,
    *,
    config: str | os.PathLike[str] | Config | None = None,
    settings: Settings | None = None,
    server_settings: ServerSettings | None = None,
    model_settings: Sequence[ModelSettings] | None = None,
    metrics: RequestMetrics | None = None,
    **store_options: Any,
) -> FastAPI:
    """The application of ``llama_cpp.server``, with a store.

    A process can have one, since ``llama_cpp.server`` keeps its models in a global. When it ends, the store writes what
    is queued: by the application's lifespan, or, where another application mounts it, when the process ends.

    Parameters
    ----------
    location
        Of the store, as `PrefixStore` takes it.
    config
        A TOML file with a model and a store, or what `prefixstore.config.load_config` has made of it; instead of
        settings of models. The model is loaded as `prefixstore.load` loads it, so a warming job with the same file uses
        the same namespace.
    settings, server_settings, model_settings
        As ``llama_cpp.server.app.create_app`` takes them. Without any, they come from the environment.
    metrics
        Told of each request, for a page of your own: a `RequestMetrics`, or what has its methods. Without it,
        ``/metrics`` is served.
    **store_options
        Keyword arguments of `PrefixStore`; they replace those of `config`.

    Returns
    -------
    fastapi.FastAPI
        The application. ``app.state.prefixstore`` is the store.

    Raises
    ------
    MisuseError
        If this process has one that is not closed.
    PrefixStoreError
        If the store cannot be opened.

    Examples
    --------
    >>> from llama_cpp.server.settings import ModelSettings, ServerSettings
    >>> app = create_app(  # doctest: +SKIP
    ...     "lmdb:///var/cache/kv",
    ...     server_settings=ServerSettings(),
    ...     model_settings=[ModelSettings(model="model.gguf", n_ctx=8192)],
    ... )
    """
    if isinstance(stock._llama_proxy, StoreProxy):  # noqa: SLF001 - its only place
        raise MisuseError(
            "this process has an application with a store; close that one first, or start another process"
        )
    load: Callable[[ModelSettings], Any] | None = None
    if config is not None:
        if settings is not None or model_settings is not None:
            raise InvalidParameterError("config= has the settings of the model; do not pass model_settings= as well")
        read = config if isinstance(config, Config) else load_config(config)
        store_options = {**read.store, **store_options}
        from_file = store_options.pop("location", None)
        location = from_file if location is None else location
        model_settings = [ModelSettings(model=str(read.path))]
        load = _loader(read)
    registry = None
    if metrics is None:
        registry = new_registry()
        metrics = RequestMetrics(registry)
    if model_settings is not None and server_settings is None:
        server_settings = ServerSettings()
    proxies: list[StoreProxy] = []

    def set_llama_proxy(model_settings: Sequence[ModelSettings]) -> None:
        made = StoreProxy(model_settings, location=location, store_options=store_options, load=load, metrics=metrics)
        proxies.append(made)
        stock._llama_proxy = made  # noqa: SLF001 - as its own function does

    own = stock.set_llama_proxy
    stock.set_llama_proxy = set_llama_proxy
    try:
        app: FastAPI = stock.create_app(
            settings=settings,
            server_settings=server_settings,
            model_settings=list(model_settings) if model_settings is not None else None,
        )
    finally:
        stock.set_llama_proxy = own
    (proxy,) = proxies
    if registry is not None:
        _add_metrics(app, proxy, registry)
    app.add_middleware(CachedTokens)
    app.state.prefixstore = proxy.store
    inner: Any = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[Any]:
        async with inner(application) as state:
            try:
                yield state
            finally:
                _close(proxy)

    app.router.lifespan_context = lifespan
    return app


def _loader(config: Config) -> Callable[[ModelSettings], Any]:
    if "n_ctx" not in config.model:
        log.warning("the configuration sets no n_ctx, so the context has 512 tokens; set n_ctx in [model]")
    return lambda _: config.open_llama()


def _add_metrics(app: FastAPI, proxy: StoreProxy, registry: CollectorRegistry) -> None:
    """Serve ``/metrics``, with the server's own key."""
    StoreMetrics(registry, proxy.store)

    def metrics() -> Response:
        body, kind = render(registry)
        return Response(body, headers={"content-type": kind})

    app.add_api_route("/metrics", metrics, dependencies=[Depends(stock.authenticate)], tags=[stock.extras_tag])


def _close(proxy: StoreProxy) -> None:
    if stock._llama_proxy is proxy:  # noqa: SLF001 - its only place
        stock._llama_proxy = None  # noqa: SLF001
    try:
        proxy.close()
    except StorageError as error:
        log.error("some pages could not be written: %s", error)  # noqa: TRY400 - the server ends; the message says it


# -- the command ------------------------------------------------------------------------------------------------------

TEXT, NUMBER, SHARE = str, int, float
STORE_OPTIONS: dict[str, tuple[type, str]] = {
    "namespace": (TEXT, "a name that separates these pages from others in the location"),
    "salt": (TEXT, "separates the pages of a tenant, who has a server of its own"),
    "page_tokens": (NUMBER, "tokens per page"),
    "min_tokens": (NUMBER, "shorter prompts are neither stored nor restored"),
    "snapshot_interval": (NUMBER, "recurrent models: tokens between snapshots"),
    "max_snapshots": (NUMBER, "recurrent models: how many snapshots of a conversation are kept"),
    "max_bytes": (TEXT, "size limit of the location, such as 20GiB"),
    "max_entries": (NUMBER, "limit on the number of pages"),
    "high_water": (SHARE, "share of the size limit above which new pages are packed"),
    "low_water": (SHARE, "share down to which they are"),
    "quota": (TEXT, "limit for one tenant, such as 2GiB"),
    "ttl": (TEXT, "time to live after the last use, such as 30d"),
    "ram_bytes": (TEXT, "memory for hot pages, such as 1GiB"),
    "codec": (TEXT, "auto, raw, zstd, zstd:LEVEL or planes"),
    "policy": (TEXT, "the order of eviction"),
    "priority": (NUMBER, "priority of the pages written here, for --policy priority"),
    "queue_bytes": (TEXT, "memory for pages that wait to be written"),
    "max_delay": (TEXT, "how long a prompt may wait for a slow location, beyond computing, such as 0.1s"),
    "far_max_bytes": (TEXT, "size limit of the far location"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m prefixstore.server",
        # of all options it would hide what is wrong
        usage="%(prog)s [STORE] (--model FILE | --config FILE | --config_file FILE) [options]",
        description="llama_cpp.server with a persistent prefix cache. Options may be written with - or _.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "store", nargs="?", help="location of the store, a path or a URL; by default in the user's cache directory"
    )
    group = parser.add_argument_group("store")
    group.add_argument("--far", metavar="LOCATION", help="a far location, shared with other machines")
    group.add_argument("--config", metavar="FILE", help="TOML file with [model] and [store], as for warming jobs")
    for name, (kind, text) in STORE_OPTIONS.items():
        group.add_argument(f"--{name}", type=kind, help=text)
    group.add_argument("--read_only", action="store_true", default=None, help="never write to the store")
    add_args_from_model(parser, Settings)
    parser.add_argument(
        "--config_file", metavar="FILE", help="file of llama_cpp.server: JSON or YAML, with several models"
    )
    return parser


def run(location: str | None, options: Sequence[str]) -> int:
    """Serve until a signal ends it.

    Parameters
    ----------
    location
        Of the store; None to take it from ``--config``, or the user's cache directory.
    options
        Options of the command line: those of the store, and all of ``llama_cpp.server``.

    Returns
    -------
    int
        The exit status: 0 after serving, 1 if the model cannot be loaded or the server has failed, 2 for options that
        are not valid or a port in use, 3 if the store cannot be opened.
    """
    arguments = _parser().parse_args([*([location] if location is not None else []), *map(_underscored, options)])
    try:
        where, options_of_app, served = _plan(arguments)
        # a port that is in use is told before the model is loaded
        with bound(served.host, served.port) as sockets:
            return _listen(create_app(where, **options_of_app), sockets)
    except ValidationError as error:
        wrong = [
            "no model is given"
            if (one["loc"], one["type"]) == (("model",), "missing")
            else f"--{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors()
        ]
        hint = "" if arguments.model else "; pass --model FILE, --config FILE or --config_file FILE"
        return _fail("; ".join(wrong) + hint, 2)
    except (PrefixStoreError, ValueError, RuntimeError, OSError) as error:
        return _fail(error, _status_of(error))


def _plan(arguments: argparse.Namespace) -> tuple[Locations, dict[str, Any], ServerSettings]:
    """Where the store is, what else `create_app` takes, and how the server listens."""
    given = {name: value for name in (*STORE_OPTIONS, "read_only") if (value := getattr(arguments, name)) is not None}
    if arguments.config:
        _check_config_alone(arguments)
        served, config = _from(ServerSettings, arguments), load_config(arguments.config)
        return _locations(arguments, config), {"config": config, "server_settings": served, **given}, served
    if file := arguments.config_file or os.environ.get("CONFIG_FILE"):
        # the server reads the file that is named there, whatever it is told
        os.environ["CONFIG_FILE"] = file
        settings = _settings_of_file(Path(file))
        served, models = ServerSettings.model_validate(settings), settings.models
    else:
        served, models = _from(ServerSettings, arguments), [_from(ModelSettings, arguments)]
    return _locations(arguments, Config()), {"server_settings": served, "model_settings": models, **given}, served


def _locations(arguments: argparse.Namespace, config: Config) -> Locations:
    """The location of the command line, or else that of the file, with the one of ``--far`` behind it."""
    location = arguments.store or config.store.get("location")
    if arguments.far is None:
        return location
    nearest = location[0] if isinstance(location, list) else location
    return [text_of(nearest), arguments.far]


def _settings_of_file(path: Path) -> ConfigFileSettings:
    """The file of ``llama_cpp.server``, read as its `create_app` does."""
    if not path.exists():
        raise InvalidParameterError(f"config_file {path} is not found")
    text = path.read_bytes()
    if path.suffix in (".yaml", ".yml"):
        import yaml  # type: ignore[import-untyped]  # noqa: PLC0415 - llama_cpp.server has it

        text = json.dumps(yaml.safe_load(text)).encode()
    return ConfigFileSettings.model_validate_json(text)


def _listen(app: FastAPI, sockets: list[socket.socket]) -> int:
    """Serve until a signal ends it, and return the exit status."""
    served = next(stock.get_server_settings())
    server = _Server(uvicorn.Config(app, ssl_keyfile=served.ssl_keyfile, ssl_certfile=served.ssl_certfile))
    server.run(sockets)
    # uvicorn has said why it could not begin
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """A server that a signal ends cleanly, with status 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with stopped_by_signals(lambda number: self.handle_exit(number, None)):
            yield


def _status_of(error: Exception) -> int:
    if isinstance(error, MisuseError):
        return 2
    return 3 if isinstance(error, (LocationError, IncompatibleError, UnavailableError)) else 1


def _check_config_alone(arguments: argparse.Namespace) -> None:
    """Settings of the model that would be ignored are an error."""
    given = [name for name in (*ModelSettings.model_fields, "config_file") if getattr(arguments, name) is not None]
    if given:
        raise InvalidParameterError(
            f"--{given[0]} cannot be used with --config: set it in [model] of {arguments.config}, or leave out --config"
        )


def _from(settings: type[S], arguments: argparse.Namespace) -> S:
    parse: Any = parse_model_from_args  # its types are those of an instance
    made: S = parse(settings, arguments)
    return made


def _fail(error: Exception | str, status: int) -> int:
    print(f"prefixstore: {error}", file=sys.stderr)  # noqa: T201 - a command
    return status


def _underscored(argument: str) -> str:
    """``--n-ctx=8`` as the server spells it; values stay as they are."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m prefixstore.server``."""
    return run(None, sys.argv[1:] if arguments is None else arguments)
