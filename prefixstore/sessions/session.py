"""A session, as the ``with`` block of `Sessions.admit` has it: the calls of the ``Llama``, while its lease is valid."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from prefixstore.errors import ContextError, InvalidParameterError, MisuseError, NotAttachedError, StaleLeaseError
from prefixstore.format.keys import NO_TOKENS, Tokens, as_tokens
from prefixstore.results import PromptMeter

if TYPE_CHECKING:
    from llama_cpp import Llama
    from typing_extensions import Self

    from prefixstore.results import LastPrompt
    from prefixstore.sessions.llama_queue import Ticket
    from prefixstore.sessions.sessions import Sessions
    from prefixstore.sessions.table import Turn

Source: TypeAlias = Literal["cold", "live", "store"]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

# numbers of leases
_numbers = itertools.count(1)


def _call(method: F) -> F:
    """A method that is run by `Session.using`."""

    @wraps(method)
    def using(self: Session, *args: Any, **kwargs: Any) -> Any:
        return self.using(lambda: method(self, *args, **kwargs))

    return cast("F", using)


class Session:
    """The lease of the ``Llama`` for one conversation, from `Sessions.admit` to the end of the ``with`` block.

    Its calls are those of the ``Llama``. If another thread is in one of them when the block ends, the end waits for it;
    streams that are not exhausted are closed. From then on each call raises `StaleLeaseError`.

    Attributes
    ----------
    name
        Of the session.
    generation
        How often it was discarded before.
    lease
        The number of this lease.
    n_live
        How many of its tokens the context still had when it was admitted.
    n_restored
        How many more were restored from the store.
    """

    def __init__(self, owner: Sessions, turn: Turn, ticket: Ticket) -> None:
        self._owner, self.turn = owner, turn
        self.name, self.generation, self.lease = turn.entry.name, turn.entry.generation, next(_numbers)
        self._hook, self._held = owner.hook, turn.entry.tokens
        # the only reference: when the session is collected, its place in the queue is free
        self._ticket = ticket
        self.n_live = self.n_restored = 0
        self.is_discarded = self._is_ending = False
        # how many nested calls are running
        self._depth = 0
        self._streams: list[Stream] = []

    def __repr__(self) -> str:
        state = "over" if self.is_over else self.source
        return f"Session({self.name!r}, generation={self.generation}, {state})"

    # -- what it found ------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Bring as many tokens of the session into the context as it still holds, and as can be restored."""
        started, context = time.perf_counter(), self._hook.context
        context.settle()
        # counted as a resumed session, not as a prompt
        context.prompt = PromptMeter(is_prompt=False)
        self.n_live = context.continued(self._held)
        if self.n_live < len(self._held):
            self._hook.restore_up_to(self._held, len(self._held))
        n = context.continued(self._held)
        context.prompt.looked_up(len(self._held), n, time.perf_counter() - started)
        self.n_restored = max(n - self.n_live, 0)

    @property
    def source(self) -> Source:
        """Where its tokens came from: the first that applies.

        ``"store"``: some were restored. ``"live"``: the context still had some. ``"cold"``.
        """
        if self.n_restored:
            return "store"
        return "live" if self.n_live else "cold"

    @property
    def last(self) -> LastPrompt | None:
        """How the last prompt of this lease was served, as `PrefixStore.last`; before it, how the session resumed."""
        meter = self._hook.context.prompt
        self.check()
        return meter.record()

    @property
    def is_over(self) -> bool:
        """Whether the lease has ended."""
        return self._is_ending or self._owner.turn is not self.turn

    @property
    def has_evaluated(self) -> bool:
        """Whether anything was evaluated under this lease."""
        return self._hook.n_evaluated != self.turn.n_evaluated

    @property
    @_call
    def tokens(self) -> Tokens:
        """What the session holds; until something is evaluated, what it held before. Empty if it is unknown."""
        known = self.known() if self.has_evaluated else self._held
        return known if known is not None else NO_TOKENS

    def known(self) -> Tokens | None:
        """A copy of what the context holds; None if that is not known, or not stored."""
        self._hook.context.settle()
        known = self._hook.context.known_tokens()
        return known.copy() if known is not None else None

    def _rewound(self) -> list[int]:
        """Cut the context to the longest prefix of the session's tokens; returns the other tokens."""
        held = self.known() if self.has_evaluated else self._held
        rest: list[int] = held[self._hook.rewind(held) :].tolist() if held is not None else []
        return rest

    # -- the calls of the Llama ---------------------------------------------------------------------------------------

    @_call
    def create_chat_completion(self, messages: Any, **options: Any) -> Any:
        """``Llama.create_chat_completion``: the answer, or with ``stream=True`` a `Stream` of its chunks."""
        llm = self._hook.llm
        return self._streamed(llm.create_chat_completion(messages, **options))

    @_call
    def create_completion(self, prompt: Any, **options: Any) -> Any:
        """``Llama.create_completion``: the completion, or with ``stream=True`` a `Stream` of its chunks.

        Raises
        ------
        InvalidParameterError
            If the prompt is neither text nor tokens of the model.
        """
        llm = self._hook.llm
        if not isinstance(prompt, str):
            prompt = self._checked(llm, prompt).tolist()
        return self._streamed(llm.create_completion(prompt, **options))

    @_call
    def generate(self, tokens: Sequence[int], **options: Any) -> Stream:
        """``Llama.generate``, after what is stored of the prompt was restored; with ``reset=False``, as `eval`.

        Raises
        ------
        InvalidParameterError
            If these are no tokens of the model, or there are none at all.
        ContextError
            As for `eval`.
        """
        llm = self._hook.llm
        given, is_new = self._checked(llm, tokens).tolist(), options.get("reset", True)
        if not is_new:
            given = [*self._rewound(), *given]
        if not given and (is_new or not llm.n_tokens):
            raise InvalidParameterError("there is nothing to continue from; give at least one token")
        self._check_room(len(given) + (0 if is_new else llm.n_tokens))
        if is_new:
            self._owner.restore(as_tokens(given))
        stream: Stream = self._streamed(llm.generate(given, **options))
        # each step after the first evaluates the token before it
        stream.before_next = lambda: self._check_room(llm.n_tokens + 1)
        return stream

    @_call
    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those that the session holds, and before that those no longer in the context.

        Raises
        ------
        InvalidParameterError
            If these are no tokens of the model.
        ContextError
            If it is not known what the context holds, as with images, or if they do not fit into it.
        """
        llm = self._hook.llm
        given = [*self._rewound(), *self._checked(llm, tokens).tolist()]
        self._check_room(llm.n_tokens + len(given))
        llm.eval(given)

    def _checked(self, llm: Llama, tokens: Sequence[int]) -> Tokens:
        """These tokens, checked against the vocabulary."""
        given = as_tokens(tokens)
        if len(given) and not 0 <= given.min() <= given.max() < llm.n_vocab():
            raise InvalidParameterError(
                f"the model has the tokens 0 to {llm.n_vocab() - 1}; these are {given.min()} to {given.max()}"
            )
        return given

    def _check_room(self, n: int) -> None:
        """Raise `ContextError` if this many tokens do not fit: llama-cpp-python would drop some without an error."""
        from prefixstore.llama.binding import n_places  # noqa: PLC0415 - the extra "llama"

        n_ctx = n_places(self._hook.llm)
        if n > n_ctx:
            raise ContextError(
                f"{n} tokens do not fit into the context, which has {n_ctx}; load the model with a larger n_ctx, or "
                "begin with fewer in another session"
            )

    def _streamed(self, result: Any) -> Any:
        if not isinstance(result, Iterator):
            return result
        self._streams.append(stream := Stream(self, result))
        return stream

    def forget(self, stream: Stream) -> None:
        """Forget a stream that was exhausted."""
        with suppress(ValueError):
            self._streams.remove(stream)

    def using(self, call: Callable[[], R], *, needs_store: bool = True) -> R:
        """Run a call: one at a time, and none after the end of the lease.

        This is no context manager, since a Ctrl-C at the edge of a ``with`` block could leave it open.
        """
        self.check()
        with self._owner.queue.in_use:
            self._depth += 1
            try:
                self.check()
                if needs_store and not self._hook.is_attached:
                    raise NotAttachedError(
                        f"the store was closed, or detached from the Llama, while session {self.name!r} had it; leave "
                        "the block before that"
                    )
                return call()
            finally:
                self._depth -= 1

    def check(self) -> None:
        """Raise `StaleLeaseError` if the lease has ended."""
        if self.is_over:
            self._hook.context.engine.counters.count("session_stale_leases")
            lease = f"the lease of session {self.name!r} (generation {self.generation})"
            raise StaleLeaseError(f"{lease} has ended, or is that of a parent process; admit it again")

    # -- the end ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.leave(discard=kind is not None)
        except BaseException:  # interrupted
            self.leave(discard=True)
            self._owner.give_up(self._ticket)
            raise

    def leave(self, *, discard: bool = False) -> None:
        """End the lease: the session is idle then, or discarded. A second call does nothing.

        Raises
        ------
        MisuseError
            If this thread is in a call of the session, as in a logits processor.
        """
        if self._owner.turn is not self.turn:
            return
        self._is_ending = True
        try:
            with self._owner.queue.in_use:
                if self._depth:
                    raise MisuseError(f"this thread is in a call of session {self.name!r}; leave it after that")
                try:
                    self.is_discarded = self.is_discarded or discard
                    if self._owner.turn is self.turn:
                        try:
                            for stream in list(self._streams):
                                stream.abandon()
                        finally:
                            self._owner.end(self)
                finally:
                    self._owner.give_up(self._ticket)
        finally:
            self._is_ending = False


class Stream(Iterator[Any]):
    """The stream that a call of a session returns. It ends with the session.

    Attributes
    ----------
    before_next
        Called before each step but the first.
    """

    def __init__(self, session: Session, inner: Iterator[Any]) -> None:
        self._session, self._inner = session, inner
        self._has_begun = False
        self.before_next: Callable[[], object] = lambda: None

    def __next__(self) -> Any:
        return self._session.using(self._next)

    def _next(self) -> Any:
        try:
            if self._has_begun:
                self.before_next()
            self._has_begun = True
            return next(self._inner)
        except BaseException:  # it is exhausted, or has failed
            self._session.forget(self)
            raise

    def close(self) -> None:
        """End the stream before it is exhausted."""
        if not self._session.is_over:
            with suppress(StaleLeaseError):
                self._session.using(self.abandon, needs_store=False)

    def abandon(self) -> None:
        """As `close`, inside of a call."""
        self._session.forget(self)
        close = getattr(self._inner, "close", None)
        if close is not None:
            close()
