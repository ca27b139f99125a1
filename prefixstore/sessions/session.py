"""A session as its ``with`` block has it: the calls of the ``Llama``, while its lease is valid."""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prefixstore.errors import ContextError, InvalidParameterError, NotAttachedError, StaleLeaseError
from prefixstore.format.keys import Tokens, as_tokens
from prefixstore.sessions.place import Place
from prefixstore.sessions.queue import Ticket
from prefixstore.sessions.resuming import known_tokens, resume, rewind

if TYPE_CHECKING:
    from llama_cpp import Llama
    from typing_extensions import Self

    from prefixstore.last_prompt import LastPrompt

__all__ = ["Session", "Source", "Stream"]

Source: TypeAlias = Literal["cold", "live", "store"]


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

    # until the Llama is prepared for it; of the class, since a constructor may be interrupted
    _is_over = True

    def __init__(
        self,
        name: str,
        lease: int,
        generation: int,
        tokens: Tokens,
        place: Place,
        ticket: Ticket,
        end: Callable[[Session, bool], None],
    ) -> None:
        self.name = name
        self.generation = generation
        self.lease = lease
        self._held = tokens
        self.place = place
        # the only reference: if the session is dropped, its place in the queue is free
        self._ticket = ticket
        ticket.end = weakref.WeakMethod(self.end_for_its_owner)
        self._end = end
        self.n_live = self.n_restored = 0
        self._is_ending = self._is_discarded = False
        # the thread that is in a call
        self._caller: int | None = None
        self._streams: list[Stream] = []
        # the last tokens from which nothing was dropped, once something is
        self.held_before_shift: Tokens | None = None

    def __repr__(self) -> str:
        state = "over" if self._is_over else self.source
        return f"Session({self.name!r}, generation={self.generation}, {state})"

    def prepare(self, *, uses_live: bool, uses_store: bool) -> None:
        """Bring what can be reused of the session into the context."""
        self._is_over = False
        self.place.take(reads=uses_store)
        self.n_live, self.n_restored = resume(self.place.hook, self._held, uses_live=uses_live, uses_store=uses_store)

    # -- what it found ------------------------------------------------------------------------------------------------

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
        """How the last prompt of this lease was served, as `PrefixStore.last`; before the first, its own tokens."""
        meter = self.place.hook.context.prompt
        self._check()
        return meter.record()

    @property
    def is_over(self) -> bool:
        """Whether the lease has ended."""
        return self._is_over or self._is_ending or self.place.is_lost

    @property
    def has_evaluated(self) -> bool:
        """Whether anything was evaluated under this lease."""
        return self.place.has_evaluated

    @property
    def tokens(self) -> Tokens:
        """What the session holds; until something is evaluated, what it held before. Empty if it is unknown."""
        with self.using():
            if not self.has_evaluated:
                return self._held
            known = known_tokens(self.place.hook)
            return known if known is not None else self._held[:0]

    # -- the calls of the Llama ---------------------------------------------------------------------------------------

    def create_chat_completion(self, messages: Any, **options: Any) -> Any:
        """``Llama.create_chat_completion``: the answer, or with ``stream=True`` a `Stream` of its chunks."""
        with self.using() as llm:
            return self._streamed(llm.create_chat_completion(messages, **options))

    def create_completion(self, prompt: Any, **options: Any) -> Any:
        """``Llama.create_completion``: the completion, or with ``stream=True`` a `Stream` of its chunks.

        Raises
        ------
        InvalidParameterError
            If the prompt is neither text nor tokens of the model.
        """
        with self.using() as llm:
            if not isinstance(prompt, str):
                prompt = self._checked(llm, prompt).tolist()
            return self._streamed(llm.create_completion(prompt, **options))

    def generate(self, tokens: Sequence[int], **options: Any) -> Stream:
        """``Llama.generate``, after what is stored of the prompt was restored; with ``reset=False``, as `eval`.

        Raises
        ------
        InvalidParameterError
            If these are no tokens of the model, or there are none at all.
        ContextError
            As for `eval`.
        """
        with self.using() as llm:
            given = self._checked(llm, tokens).tolist()
            if not options.get("reset", True):
                given = [*self._rewound(), *given]
                self._check_room(llm.n_tokens + len(given))
            elif given:
                self._check_room(len(given))
                self.place.restore(as_tokens(given))
            if not given and (options.get("reset", True) or not llm.n_tokens):
                raise InvalidParameterError("there is nothing to continue from; give at least one token")
            stream: Stream = self._streamed(llm.generate(given, **options))
            # from then on, each step evaluates the token before
            stream.before_next = lambda: self._check_room(llm.n_tokens + 1)
            return stream

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those that the session holds, and before that those no longer in the context.

        Raises
        ------
        InvalidParameterError
            If these are no tokens of the model.
        ContextError
            If it is not known what the context holds, as with images, or if they do not fit into it.
        """
        with self.using() as llm:
            given = [*self._rewound(), *self._checked(llm, tokens).tolist()]
            self._check_room(llm.n_tokens + len(given))
            llm.eval(given)

    def _checked(self, llm: Llama, tokens: Sequence[int]) -> Tokens:
        """These tokens, if the model has them: llama.cpp would say -1."""
        given = as_tokens(tokens)
        if len(given) and not 0 <= given.min() <= given.max() < llm.n_vocab():
            raise InvalidParameterError(
                f"the model has the tokens 0 to {llm.n_vocab() - 1}; these are {given.min()} to {given.max()}"
            )
        return given

    def _check_room(self, n: int) -> None:
        """Whether so many tokens fit: llama-cpp-python would lose those that do not, without an error."""
        n_ctx = len(self.place.hook.llm.input_ids)
        if n > n_ctx:
            raise ContextError(
                f"{n} tokens do not fit into the context, which has {n_ctx}; load the model with a larger n_ctx, begin "
                "with fewer in another session, or use stream(), which goes beyond the context"
            )

    def _rewound(self) -> list[int]:
        """Have the context hold nothing but the beginning of what the session holds; the rest of that."""
        held = self._held
        if self.has_evaluated:
            known = known_tokens(self.place.hook)
            if self.held_before_shift is None or known is None or len(known):
                return []
            # a stream has emptied the context
            held = self.held_before_shift
        rest: list[int] = held[rewind(self.place.hook, held) :].tolist()
        return rest

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        sink: int = 4,
        window: int = 2048,
        exact: bool = False,
        max_tokens: int | None = None,
        **sampling: Any,
    ) -> Stream:
        """Generate tokens beyond the length of the context: only its first tokens, and the last ones, stay in it.

        What is captured is captured before anything is dropped. Afterwards nothing is, and when the stream ends, the
        context is emptied; the session holds what it held before anything was dropped.

        Parameters
        ----------
        prompt
            Text, or tokens; it may be longer than the context.
        sink
            How many of the first tokens stay.
        window
            How many of the last tokens stay at least; both together must be fewer than the context has.
        exact
            Compute the window again behind the sink when tokens are dropped, instead of moving its rows: slower, as
            accurate as a new context, and for any kind of memory.
        max_tokens
            After how many tokens it ends; None for when the model ends the text.
        **sampling
            As for ``Llama.generate``: `temp`, `top_k`, ...

        Returns
        -------
        Stream
            Of token ids.

        Raises
        ------
        InvalidParameterError
            If the prompt, `sink`, `window` or `max_tokens` is not valid.
        ContextError
            If rows of this context cannot be moved, with the reason.
        """
        from prefixstore.sessions.moving_window import stream  # noqa: PLC0415 - the extra "llama"

        with self.using() as llm:
            try:
                tokens = llm.tokenize(prompt.encode(), special=True) if isinstance(prompt, str) else prompt
            except UnicodeEncodeError as error:
                raise InvalidParameterError(f"the prompt must be valid text: {error}") from error
            tokens_of = stream(
                self.place.hook,
                self._checked(llm, tokens),
                sink=sink,
                window=window,
                exact=exact,
                max_tokens=max_tokens,
                before_first=self._before_shift,
                restore=self.place.restore,
                sampling=sampling,
            )
            streamed: Stream = self._streamed(tokens_of)
            return streamed

    def _before_shift(self) -> None:
        """Have all pages captured, and note what they hold."""
        self.place.capture()
        self.held_before_shift = known_tokens(self.place.hook)

    def _streamed(self, result: Any) -> Any:
        if not isinstance(result, Iterator):
            return result
        stream = Stream(self, result)
        self._streams.append(stream)
        return stream

    def forget(self, stream: Stream) -> None:
        """Forget a stream that was exhausted."""
        with suppress(ValueError):
            self._streams.remove(stream)

    @contextmanager
    def using(self) -> Generator[Llama]:
        """A block for one call: one at a time, and not after the end of the lease."""
        with self.alone():
            if not self.place.hook.is_attached:
                raise NotAttachedError(
                    f"the store was closed, or detached from the Llama, while session {self.name!r} had it; leave the "
                    "block before that"
                )
            yield self.place.hook.llm

    @contextmanager
    def alone(self) -> Generator[None]:
        """As `using`, for calls that do not need the store."""
        self._check()
        with self.place.in_use:
            outer, self._caller = self._caller, threading.get_ident()
            try:
                self._check()
                yield
            finally:
                self._caller = outer
                if self._is_ending and outer is None:
                    # the thread that ended it did not wait for this call
                    self._finish()

    def _check(self) -> None:
        if self.is_over:
            self.place.count("session_stale_leases")
            why = self.place.why_lost or "has ended; admit it again"
            raise StaleLeaseError(f"the lease of session {self.name!r} (generation {self.generation}) {why}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._check()
        self._ticket.is_block = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.leave(discard=kind is not None)
        except BaseException:
            # interrupted before it has begun to end
            self.end_soon(discard=kind is not None)
            raise

    def leave(self, *, discard: bool = False) -> None:
        """End the lease: the session is idle then, or discarded. Does nothing the second time."""
        if self._is_over or self.place.is_lost:
            return
        self._is_discarded = self._is_discarded or discard
        self._is_ending = True
        if self._caller == threading.get_ident():
            # from a function that the call itself calls, such as a logits processor: it ends with the call
            return
        try:
            with self.place.in_use:
                self._finish()
        except BaseException:  # interrupted
            self.end_soon()
            raise

    def end_soon(self, *, discard: bool = False) -> None:
        """As `leave`, without waiting: if a thread is in a call, the lease ends with that."""
        if self._caller == threading.get_ident():
            return
        self._is_discarded = self._is_discarded or discard
        self._is_ending = True
        in_use = self.place.in_use
        if in_use.acquire(blocking=False):
            try:
                self._finish()
                self.place.leave()
            finally:
                in_use.release()

    def _finish(self) -> None:
        """The end of the lease. The caller is in no call, and no other thread is."""
        if self._is_over or self.place.is_lost:
            return
        try:
            try:
                for stream in self._streams:
                    stream.abandon()
            finally:
                self._is_over = True
                self._end(self, self._is_discarded)
        finally:
            self.place.leave()

    def end_for_its_owner(self) -> None:
        """Discard the session, since its task will never continue."""
        self.end_soon(discard=True)

    def __del__(self) -> None:
        # Dropped without an end: Ctrl-C came before its block began, or there was no block. The garbage collector may
        # run anywhere, so no lock is taken here.
        if not self._is_over and not self.place.is_lost:
            self.place.give_back()
            self._ticket.is_abandoned = True
            with suppress(RuntimeError):
                # so that the next one is admitted immediately
                _thread.start_new_thread(self.place.leave, ())


class Stream(Iterator[Any]):
    """The stream that a call of a session returns. It ends with the session.

    Parameters
    ----------
    session
        The session.
    inner
        What the ``Llama`` has returned.

    Attributes
    ----------
    before_next
        Called before each step but the first.
    """

    def __init__(self, session: Session, inner: Iterator[Any]) -> None:
        self._session = session
        self._inner = inner
        self._has_begun = False
        self.before_next: Callable[[], object] = lambda: None

    def __next__(self) -> Any:
        with self._session.using():
            try:
                if self._has_begun:
                    self.before_next()
                self._has_begun = True
                return next(self._inner)
            except BaseException:  # it is exhausted, or has failed
                self._session.forget(self)
                raise

    def send(self, value: Any) -> Any:
        """As a generator's: the next one, after `value` was passed in."""
        inner: Any = self._inner
        with self._session.using():
            return inner.send(value)

    def close(self) -> None:
        """End it before it is exhausted."""
        if not self._session.is_over:
            with suppress(StaleLeaseError), self._session.alone():
                self.abandon()
                self._session.forget(self)

    def abandon(self) -> None:
        """As `close`, inside of a call."""
        close = getattr(self._inner, "close", None)
        if close is not None:
            close()
