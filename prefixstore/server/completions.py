"""The models of ``llama_cpp.server``, each with a store attached while it is loaded; how their prompts were served."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import llama_cpp
from llama_cpp.server.model import LlamaProxy
from llama_cpp.server.settings import ModelSettings
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixstore.errors import PrefixStoreError
from prefixstore.llama.binding import is_multimodal
from prefixstore.stats import Counters
from prefixstore.store import PrefixStore

__all__ = ["CachedTokens", "CompletionWatch", "Metrics", "Request", "StoreProxy", "current_request"]

log = logging.getLogger("prefixstore")
ENDPOINTS = ("/v1/completions", "/v1/engines/copilot-codex/completions", "/v1/chat/completions")


class Metrics(Protocol):
    """Receives the figures of each request; `prefixstore.metrics.RequestMetrics` has these methods."""

    def observe(
        self,
        endpoint: str,
        *,
        source: str,
        reason: str | None,
        prompt_tokens: int,
        live_tokens: int,
        restored_tokens: int,
        computed_tokens: int,
        lookup_seconds: float | None,
        restore_seconds: float | None,
        saved_seconds: float,
    ) -> None:
        """A prompt was evaluated."""

    def passed(self, endpoint: str, reason: str) -> None:
        """A request bypassed the store."""


@dataclass
class Request:
    """One HTTP request, as far as its completions are concerned.

    Attributes
    ----------
    endpoint
        Its path.
    cached_tokens
        Prompt tokens of its completions that were not computed; a chat handler may make several. None: there was none.
    """

    endpoint: str
    cached_tokens: int | None = None


# set for each request by the server; copied into the threads that compute for it
current_request: ContextVar[Request | None] = ContextVar("current_request", default=None)


class CompletionWatch:
    """Replaces two methods of a ``Llama``, and adds the cached tokens of each completion to the current request.

    It does not keep the ``Llama`` alive, and an error in it does not reach the completion.

    Parameters
    ----------
    llm
        The ``Llama``, with a store attached: the store counts the tokens.
    counters
        Gives the counters of the store.
    metrics
        Told of each completion.
    """

    def __init__(self, llm: llama_cpp.Llama, counters: Callable[[], Counters], metrics: Metrics | None = None) -> None:
        self._llm = weakref.ref(llm)
        self._counters = counters
        self._metrics = metrics
        self._before: _Counted | None = None
        vars(llm)["_create_completion"] = self._create_completion
        vars(llm)["generate"] = self._generate

    def _llama(self) -> llama_cpp.Llama:
        llm = self._llm()
        if llm is None:
            raise ReferenceError("the Llama of this completion is gone")
        return llm

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        llm = self._llama()
        self._before = _Counted.now(self._counters())
        yield from type(llm)._create_completion(llm, *args, **kwargs)  # noqa: SLF001 - as create_completion calls it

    def _generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        llm = self._llama()
        with closing(type(llm).generate(llm, tokens, *args, **kwargs)) as generated:
            try:
                token = next(generated)
            except StopIteration:
                return
            self._note(llm, len(tokens))
            while True:
                sent = yield token
                try:
                    token = generated.send(sent)
                except StopIteration:
                    return

    def _note(self, llm: llama_cpp.Llama, n: int) -> None:
        """The first token was sampled: the prompt is evaluated, and nothing else since the completion began."""
        before, self._before = self._before, None
        request = current_request.get()
        if before is None or (request is None and self._metrics is None):
            return
        endpoint = request.endpoint if request is not None else ""
        try:
            if is_multimodal(llm):
                # tokens that a handler has evaluated before are not counted anywhere
                if self._metrics is not None:
                    self._metrics.passed(endpoint, "multimodal")
                return
            facts = before.until(_Counted.now(self._counters()), n)
            if request is not None:
                request.cached_tokens = (request.cached_tokens or 0) + facts["live_tokens"] + facts["restored_tokens"]
            if self._metrics is not None:
                self._metrics.observe(endpoint, **facts)
        except Exception:
            log.warning("a completion could not be counted", exc_info=True)


@dataclass(frozen=True)
class _Counted:
    """Counters of a store at one moment."""

    computed: int
    restored: int
    lookup_seconds: float
    restore_seconds: float
    saved_seconds: float
    misses: Mapping[str, int]

    @classmethod
    def now(cls, counters: Counters) -> _Counted:
        return cls(
            counters["tokens_computed"],
            counters["tokens_restored"],
            counters.seconds("lookup"),
            counters.seconds("restore"),
            counters.seconds("saved"),
            counters.group("miss"),
        )

    def until(self, after: _Counted, n: int) -> dict[str, Any]:
        """What `Metrics.observe` takes of a prompt of `n` tokens that was evaluated between the two."""
        # more than the prompt is computed where the logits of a restored prompt are asked for
        computed = min(after.computed - self.computed, n)
        restored = min(after.restored - self.restored, n - computed)
        live = n - computed - restored
        reasons = [name for name, count in after.misses.items() if count > self.misses.get(name, 0)]
        return {
            "source": "store" if restored else "live" if live else "none",
            "reason": reasons[0] if reasons and not restored else None,
            "prompt_tokens": n,
            "live_tokens": live,
            "restored_tokens": restored,
            "computed_tokens": computed,
            "lookup_seconds": (after.lookup_seconds - self.lookup_seconds) or None,
            "restore_seconds": (after.restore_seconds - self.restore_seconds) or None,
            "saved_seconds": after.saved_seconds - self.saved_seconds,
        }


class CachedTokens:
    """Middleware that tracks the completions of each request, and completes the ``usage`` of its response.

    Answers that are not JSON, and streams, pass through as they are: the server sends no ``usage`` in a stream.

    Parameters
    ----------
    app
        The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or not scope["path"].endswith(ENDPOINTS):
            await self._app(scope, receive, send)
            return
        request = Request(next(path for path in ENDPOINTS if scope["path"].endswith(path)))
        token = current_request.set(request)
        try:
            await self._app(scope, receive, _Answer(request, send))
        finally:
            current_request.reset(token)


class _Answer:
    """Sends an answer; one in JSON is held back until it is complete."""

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self._start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_json(message):
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)
        else:
            await self._send(message)

    async def _finish(self, start: Message) -> None:
        body = self._completed()
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _completed(self) -> bytes:
        cached = self._request.cached_tokens
        try:
            answer: Any = json.loads(self._body) if cached is not None else None
        except ValueError:
            return bytes(self._body)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not isinstance(usage, dict) or cached is None:
            return bytes(self._body)
        usage["prompt_tokens_details"] = {"cached_tokens": min(cached, usage.get("prompt_tokens", 0))}
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _is_json(start: Message) -> bool:
    headers = {bytes(name).lower(): bytes(value) for name, value in start["headers"]}
    return headers.get(b"content-type", b"").startswith(b"application/json") and b"content-encoding" not in headers


class StoreProxy(LlamaProxy):
    """Loads models on request of the server, and keeps one store attached to the loaded one.

    The store stays open from the first model on. It leaves a model before the server closes that.

    Parameters
    ----------
    models
        Settings of all models; the first is loaded at once.
    location
        Of the store.
    store_options
        Keyword arguments of `PrefixStore`.
    load
        Loads a model; by default as the server does.
    metrics
        Told of each completion.

    Raises
    ------
    PrefixStoreError
        If the store cannot be opened.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        *,
        location: Any,
        store_options: Mapping[str, Any],
        load: Callable[[ModelSettings], llama_cpp.Llama] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._location = location
        self._store_options = store_options
        self._load = load or LlamaProxy.load_llama_from_model_settings
        self._metrics = metrics
        self._store: PrefixStore | None = None
        try:
            super().__init__(list(models))
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise

    @property
    def store(self) -> PrefixStore:
        """The store."""
        assert self._store is not None  # it is opened for the first model
        return self._store

    def __call__(self, model: str | None = None) -> llama_cpp.Llama:
        """The model of this name, or the default one. The server calls it, one request at a time."""
        known = model if model in self._model_settings_dict else self._default_model_alias
        if known != self._current_model_alias:
            self._leave()
        llm: llama_cpp.Llama = super().__call__(model)
        return llm

    def free(self) -> None:
        """Close the model, after capturing what the store lacks of its context."""
        self._leave()
        llm, self._current_model = self._current_model, None
        if llm is not None:
            llm.close()

    def close(self) -> None:
        """Close the model and the store. Raises `StorageError` if something cannot be written."""
        self.free()
        if self._store is not None:
            self._store.close()

    def load_llama_from_model_settings(self, settings: ModelSettings) -> llama_cpp.Llama:  # type: ignore[override]
        """Load a model, with the store attached and as its cache.

        A model whose store cannot be attached is served without; only the first one is an error then.
        """
        llm = self._load(settings)
        if settings.clip_model_path and llm.chat_handler is not None:
            # one with settings of its own is wrapped by the server, and no longer shows that it brings images
            llm.chat_handler.clip_model_path = settings.clip_model_path  # type: ignore[attr-defined]
        try:
            if self._store is None:
                self._store = PrefixStore(self._location, llm, **self._store_options)
            else:
                self._store.attach(llm)
        except PrefixStoreError as error:
            if self._store is None:
                llm.close()
                raise
            log.warning("model %s is served without the store: %s", settings.model_alias, error)
            return llm
        if settings.cache:
            log.warning("model %s has cache=true; the store is its cache instead", settings.model_alias)
        llm.set_cache(self._store)  # type: ignore[arg-type]  # registered as a BaseLlamaCache
        store = self._store
        CompletionWatch(llm, lambda: store.engine.counters, self._metrics)
        return llm

    def _leave(self) -> None:
        """Capture what the current model still has, and detach the store."""
        store, llm = self._store, self._current_model
        if store is None or llm is None or not store.is_attached(llm):
            return
        try:
            # captures what an aborted completion has left
            llm.reset()
        except (PrefixStoreError, RuntimeError) as error:
            log.warning("what the last completion has left is not stored: %s", error)
        store.detach(llm)
