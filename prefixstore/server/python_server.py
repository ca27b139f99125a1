"""``llama_cpp.server`` with a store: its application, and the command that runs it.

It serves one request at a time, and one model at a time: a request for another model closes the first, and the store
follows. Requests of all clients share the pages of a model. To keep tenants apart, run a server for each of them, with
a `salt` of its own.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Response
from llama_cpp.server import app as stock
from llama_cpp.server.cli import add_args_from_model, parse_model_from_args
from llama_cpp.server.settings import ModelSettings, ServerSettings, Settings
from pydantic import ValidationError

from prefixstore.config import Config, load_config
from prefixstore.errors import (
    ContextError,
    InvalidParameterError,
    MisuseError,
    PrefixStoreError,
    StorageError,
)
from prefixstore.metrics import RequestMetrics, StoreMetrics, new_registry, render
from prefixstore.opening import Locations
from prefixstore.server.completions import CachedTokens, StoreProxy
from prefixstore.server.listener import bound, stopped_by_signals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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


def run_python_server(
    location: Locations, options: Sequence[str], *, config: Config | None = None, **store_options: Any
) -> int:
    """Serve until a signal ends it, as ``prefixstore serve --model`` does.

    Parameters
    ----------
    location
        Of the store.
    options
        Those of ``llama_cpp.server``, written with ``-`` or ``_``.
    config
        The model, instead of options.
    **store_options
        As for `create_app`.

    Returns
    -------
    int
        The exit status: 0 after serving, 1 if the server has failed, as uvicorn says.

    Raises
    ------
    PrefixStoreError
        If an option is not valid, the port is in use, or the model or the store cannot be opened.
    """
    program = "prefixstore serve STORE --model FILE --"
    # of all options the usage would hide what is wrong
    parser = argparse.ArgumentParser(program, usage="%(prog)s [options of llama_cpp.server]", allow_abbrev=False)
    add_args_from_model(parser, Settings)
    arguments = parser.parse_args([*map(_underscored, options)])
    try:
        served = _from(ServerSettings, arguments)
        models = None if config is not None else [_from(ModelSettings, arguments)]
        given = [name for name in ModelSettings.model_fields if getattr(arguments, name) is not None]
        if config is not None and given:
            raise InvalidParameterError(f"--{given[0]} cannot be used with --config: set it in [model] of the file")
        # llama_cpp.server would serve what that names instead
        os.environ.pop("CONFIG_FILE", None)
        # a port that is in use is told before the model is loaded
        with bound(served.host, served.port) as sockets:
            app = create_app(location, config=config, server_settings=served, model_settings=models, **store_options)
            return _listen(app, sockets)
    except PrefixStoreError:
        raise
    except ValidationError as error:
        wrong = [f"--{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise InvalidParameterError("; ".join(wrong)) from error
    except (ValueError, RuntimeError, OSError) as error:
        raise ContextError(str(error)) from error


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


def _from(settings: type[S], arguments: argparse.Namespace) -> S:
    parse: Any = parse_model_from_args  # its types are those of an instance
    made: S = parse(settings, arguments)
    return made


def _underscored(argument: str) -> str:
    """``--n-ctx=8`` as the server spells it; values stay as they are."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
