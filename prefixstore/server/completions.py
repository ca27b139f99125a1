"""The models of ``llama_cpp.server``, each with a store attached while it is loaded; how their prompts were served."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import llama_cpp
from llama_cpp.server.model import LlamaProxy
from llama_cpp.server.settings import ModelSettings
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixstore.errors import PrefixStoreError
from prefixstore.llama.binding import is_multimodal
from prefixstore.metrics import RequestMetrics
from prefixstore.store import PrefixStore

log = logging.getLogger("prefixstore")
ENDPOINTS = ("/v1/completions", "/v1/engines/copilot-codex/completions", "/v1/chat/completions")


@dataclass
class Request:
    """One HTTP request, as far as its completions are concerned.

    A chat handler may make several; `cached_tokens` are prompt tokens that were not computed, None if there was none.
    """

    endpoint: str
    cached_tokens: int | None = None


# set for each request by the server; copied into the threads that compute for it
current_request: ContextVar[Request | None] = ContextVar("current_request", default=None)


class CompletionWatch:
    """Replaces `generate` of a ``Llama``, and adds the cached tokens of each completion to the current request.

    It does not keep the ``Llama`` alive, and an error in it does not reach the completion. `metrics` are told of each
    completion.
    """

    def __init__(self, llm: llama_cpp.Llama, store: PrefixStore, metrics: RequestMetrics) -> None:
        self._llm, self._store, self._metrics = weakref.ref(llm), store, metrics
        self._saved = store.engine.counters.seconds("saved")
        vars(llm)["generate"] = self._generate

    def _generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        llm = self._llm()
        if llm is None:
            raise ReferenceError("the Llama of this completion is gone")
        generated = type(llm).generate(llm, tokens, *args, **kwargs)
        for token in generated:
            # the prompt is evaluated, and nothing else
            self._note(llm, len(tokens))
            yield token
            break
        yield from generated

    def _note(self, llm: llama_cpp.Llama, n: int) -> None:
        request = current_request.get()
        endpoint = request.endpoint if request is not None else ""
        try:
            if is_multimodal(llm):
                # tokens that a handler has evaluated before are not counted anywhere
                self._metrics.passed(endpoint, "multimodal")
                return
            last = self._store.last_of(llm)
            if last is None or last.n_tokens != n:
                return
            if request is not None:
                request.cached_tokens = (request.cached_tokens or 0) + last.live + last.restored
            before, self._saved = self._saved, self._store.engine.counters.seconds("saved")
            self._metrics.observe(
                endpoint,
                source="none" if last.source == "cold" else last.source,
                reason=last.miss,
                prompt_tokens=n,
                live_tokens=last.live,
                restored_tokens=last.restored,
                computed_tokens=n - last.live - last.restored,
                lookup_seconds=last.lookup_seconds or None,
                restore_seconds=last.restore_seconds or None,
                saved_seconds=self._saved - before,
            )
        except Exception:
            log.warning("a completion could not be counted", exc_info=True)


class CachedTokens:
    """Middleware that tracks the completions of each request, and completes the ``usage`` of its response.

    Answers that are not JSON, and streams, pass through as they are: the server sends no ``usage`` in a stream.
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
        start: Message | None = None

        async def answer(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_json(message):
                start = message
                return
            if start is not None:
                # the answer of a completion comes in one piece
                first, start = start, None
                if not message.get("more_body", False):
                    body = _completed(message.get("body", b""), request.cached_tokens)
                    headers = [(name, value) for name, value in first["headers"] if name.lower() != b"content-length"]
                    first["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
                    message["body"] = body
                await send(first)
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            current_request.reset(token)


def _completed(body: bytes, cached: int | None) -> bytes:
    try:
        answer: Any = json.loads(body) if cached is not None else None
    except ValueError:
        return body
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict) or cached is None:
        return body
    usage["prompt_tokens_details"] = {"cached_tokens": min(cached, usage.get("prompt_tokens", 0))}
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _is_json(start: Message) -> bool:
    headers = {bytes(name).lower(): bytes(value) for name, value in start["headers"]}
    return headers.get(b"content-type", b"").startswith(b"application/json") and b"content-encoding" not in headers


class StoreProxy(LlamaProxy):
    """Loads models on request of the server, and keeps one store attached to the loaded one.

    The store is opened before the first of them, which is loaded at once. It leaves a model before the server closes
    that. `metrics` are told of each completion.

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
        metrics: RequestMetrics,
        load: Callable[[ModelSettings], llama_cpp.Llama] | None = None,
    ) -> None:
        self._load = load or LlamaProxy.load_llama_from_model_settings
        self._metrics, self._is_first = metrics, True
        # a model may take minutes to load: what can be said before is said before
        self.store = PrefixStore(location, **store_options)
        try:
            super().__init__(list(models))
        except BaseException:
            self.store.close()
            raise

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
        self.store.close()

    def load_llama_from_model_settings(self, settings: ModelSettings) -> llama_cpp.Llama:  # type: ignore[override]
        """Load a model, with the store attached and as its cache.

        A model whose store cannot be attached is served without; only the first one is an error then.
        """
        llm = self._load(settings)
        if settings.clip_model_path and llm.chat_handler is not None:
            # one with settings of its own is wrapped by the server, and no longer shows that it brings images
            llm.chat_handler.clip_model_path = settings.clip_model_path  # type: ignore[attr-defined]
        is_first, self._is_first = self._is_first, False
        try:
            self.store.attach(llm)
        except PrefixStoreError as error:
            if is_first:
                llm.close()
                raise
            log.warning("model %s is served without the store: %s", settings.model_alias, error)
            return llm
        if settings.cache:
            log.warning("model %s has cache=true; the store is its cache instead", settings.model_alias)
        llm.set_cache(self.store)  # type: ignore[arg-type]  # registered as a BaseLlamaCache
        CompletionWatch(llm, self.store, self._metrics)
        return llm

    def _leave(self) -> None:
        """Capture what the current model still has, and detach the store."""
        llm = self._current_model
        if llm is None or not self.store.is_attached(llm):
            return
        try:
            # captures what an aborted completion has left
            llm.reset()
        except (PrefixStoreError, RuntimeError) as error:
            log.warning("what the last completion has left is not stored: %s", error)
        self.store.detach(llm)
