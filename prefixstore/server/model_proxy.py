"""The models of ``llama_cpp.server``, one loaded at a time, with a store attached to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llama_cpp
from llama_cpp.server.model import LlamaProxy
from llama_cpp.server.settings import ModelSettings

from prefixstore.errors import PrefixStoreError
from prefixstore.server.completions import CompletionWatch, Metrics
from prefixstore.store import PrefixStore

__all__ = ["StoreProxy"]

log = logging.getLogger("prefixstore")


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
