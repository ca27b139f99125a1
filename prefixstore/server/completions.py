"""How the prompts of a ``Llama``'s completions were served: tokens live, restored and computed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import llama_cpp

from prefixstore.llama.binding import is_multimodal
from prefixstore.stats import Counters

__all__ = ["CompletionWatch", "Metrics", "PromptOrigin", "Request", "current_request"]

log = logging.getLogger("prefixstore")


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


@dataclass(frozen=True)
class PromptOrigin:
    """Where the tokens of a prompt came from.

    Attributes
    ----------
    prompt_tokens
        Length of the prompt.
    live_tokens
        Those that the context held already.
    restored_tokens
        Those that came from the store.
    computed_tokens
        The others.
    reason
        Why nothing was restored, as `Stats.misses` names it; None if something was, or was not needed.
    lookup_seconds, restore_seconds
        How long it took to find and to restore its stored prefix; None if that was not done.
    saved_seconds
        What the restore has saved.
    """

    prompt_tokens: int
    live_tokens: int
    restored_tokens: int
    computed_tokens: int
    reason: str | None
    lookup_seconds: float | None
    restore_seconds: float | None
    saved_seconds: float

    @property
    def cached_tokens(self) -> int:
        """Tokens that were not computed."""
        return self.live_tokens + self.restored_tokens

    @property
    def source(self) -> str:
        """Where most of what was not computed came from: ``"store"``, ``"live"`` or ``"none"``."""
        if self.restored_tokens:
            return "store"
        return "live" if self.live_tokens else "none"


@dataclass
class Request:
    """One HTTP request, as far as its completions are concerned.

    Attributes
    ----------
    endpoint
        Its path.
    origins
        One for each completion; a chat handler may make several.
    """

    endpoint: str
    origins: list[PromptOrigin] = field(default_factory=list)


# set for each request by the server; copied into the threads that compute for it
current_request: ContextVar[Request | None] = ContextVar("current_request", default=None)


class CompletionWatch:
    """Replaces two methods of a ``Llama``, and adds the `PromptOrigin` of each completion to the current request.

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
            origin = before.until(_Counted.now(self._counters()), n)
            if request is not None:
                request.origins.append(origin)
            if self._metrics is not None:
                self._metrics.observe(
                    endpoint,
                    source=origin.source,
                    reason=origin.reason,
                    prompt_tokens=origin.prompt_tokens,
                    live_tokens=origin.live_tokens,
                    restored_tokens=origin.restored_tokens,
                    computed_tokens=origin.computed_tokens,
                    lookup_seconds=origin.lookup_seconds,
                    restore_seconds=origin.restore_seconds,
                    saved_seconds=origin.saved_seconds,
                )
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

    def until(self, after: _Counted, n: int) -> PromptOrigin:
        """The origin of a prompt of `n` tokens that was evaluated between the two."""
        # more than the prompt is computed where the logits of a restored prompt are asked for
        computed = min(after.computed - self.computed, n)
        restored = min(after.restored - self.restored, n - computed)
        reasons = [name for name, count in after.misses.items() if count > self.misses.get(name, 0)]
        return PromptOrigin(
            prompt_tokens=n,
            live_tokens=n - computed - restored,
            restored_tokens=restored,
            computed_tokens=computed,
            reason=reasons[0] if reasons and not restored else None,
            lookup_seconds=(after.lookup_seconds - self.lookup_seconds) or None,
            restore_seconds=(after.restore_seconds - self.restore_seconds) or None,
            saved_seconds=after.saved_seconds - self.saved_seconds,
        )
