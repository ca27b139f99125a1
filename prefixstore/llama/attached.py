"""`AttachedStore`: the Llamas that use a location as their cache, and how llama-cpp-python calls it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from prefixstore.counters import Kind
from prefixstore.engine.miss import Guard
from prefixstore.engine.page import Path
from prefixstore.errors import (
    IncompatibleError,
    InvalidParameterError,
    MissingExtraError,
    MisuseError,
    NotAttachedError,
    PrefixStoreError,
)
from prefixstore.format.keys import TokenSequence, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.opening import Locations, OpenLocation, open_engine
from prefixstore.parameters import Parameters
from prefixstore.results import LastPrompt, PromptMeter

if TYPE_CHECKING:
    from llama_cpp import Llama
    from llama_cpp.llama import LlamaState

    from prefixstore.llama.hook import Hook
    from prefixstore.sessions.sessions import Sessions

log = logging.getLogger("prefixstore")


class AttachedStore(OpenLocation):
    """A location that any number of Llamas use as their cache, each in its namespace.

    Attributes
    ----------
    parameters
        The validated parameters, for code that works on the engine itself.
    """

    def __init__(self, location: Locations, parameters: Parameters) -> None:
        super().__init__(open_engine(location, parameters), parameters.budget.max_bytes)
        self.parameters = parameters
        # By the id of the Llama, in the order of attaching; a later one may have the id of one that is gone. The Llama
        # keeps its hook alive, by the methods that the hook replaces, and nothing here keeps either alive.
        self._hooks: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()
        self._last_used: Callable[[], Hook | None] = lambda: None
        # how the last prompt was served, and the last one of each Llama
        self._last = PromptMeter()
        self._last_of: weakref.WeakKeyDictionary[Llama, PromptMeter] = weakref.WeakKeyDictionary()
        self._warned_closed = False

    @property
    def min_tokens(self) -> int:
        """Shorter prompts are neither stored nor restored."""
        return self.parameters.min_tokens

    # -- the Llamas ---------------------------------------------------------------------------------------------------

    def attach(self, llm: Llama) -> None:
        """Attach the store to a ``Llama``: its pages are captured as it evaluates tokens.

        A completion of a ``Llama`` whose cache is this store attaches it by itself. If another thread is still in a
        call of an earlier session of this ``Llama``, this waits for its end.

        Raises
        ------
        MisuseError
            If this store, or another one, is attached to this ``Llama`` already.
        """
        self._alive()
        self._attach(llm)

    def _attach(self, llm: Llama, *, is_implicit: bool = False) -> Hook:
        """`is_implicit`: a completion attaches the store, not a caller."""
        from prefixstore.sessions.llama_queue import between_calls  # noqa: PLC0415 - imported where it is used

        if self.is_attached(llm):
            raise MisuseError("the store is attached to this Llama already")
        with between_calls(llm):
            hook = self._make(llm)
            self._hooks[id(llm)] = hook
            hook.attachment.install(hook, self, is_implicit=is_implicit)
        self._use(hook)
        return hook

    def detach(self, llm: Llama | None = None) -> None:
        """Restore the methods of a ``Llama``, by default of all, and remove this store as its cache.

        Does nothing to a ``Llama`` that is not attached.
        """
        for hook in self._all():
            owner = hook.context.llm_or_none
            if llm is not None and owner is not llm:
                continue
            unfinished = hook.context.memory.unfinished
            # a change that another thread has begun is still under way
            if unfinished.is_open and unfinished.thread == threading.get_ident():
                with suppress(PrefixStoreError):  # a Llama that is closed or gone: there is nothing to undo
                    hook.context.settle()
            hook.attachment.remove()
            cache: object = owner.cache if owner is not None else None
            if owner is not None and cache is self:
                owner.set_cache(None)

    def close(self) -> None:
        """Detach, write queued pages, make them durable, and release the location. A second call does nothing.

        Raises
        ------
        StorageError
            If something cannot be written, or made durable. The store is closed all the same.
        """
        self.detach()
        super().close()

    def _all(self) -> list[Hook]:
        """All hooks, including those whose attachment was interrupted or whose ``Llama`` is gone."""
        # `valuerefs` copies in one step, so other threads may attach meanwhile
        return [hook for ref in self._hooks.valuerefs() if (hook := ref()) is not None]

    def _attached(self) -> list[Hook]:
        """The hooks of all attached Llamas, in the order of attaching."""
        return [hook for hook in self._all() if hook.is_attached and hook.context.llm_or_none is not None]

    def _find(self, llm: Llama) -> Hook | None:
        return next((hook for hook in self._attached() if hook.context.llm_or_none is llm), None)

    @property
    def _current(self) -> Hook | None:
        """The hook of the ``Llama`` that was attached or used last; None if none is attached."""
        hooks, last = self._attached(), self._last_used()
        return last if last in hooks else hooks[-1] if hooks else None

    def _use(self, hook: Hook) -> None:
        self._last_used = weakref.ref(hook)

    def hook_of(self, llm: Llama | None) -> Hook:
        """The hook of a Llama, or a new one if it is not attached; without a Llama, that of `self.llm`. For jobs."""
        self._alive()
        found = self._current if llm is None else self._find(llm) or self._make(llm)
        if found is None:
            raise NotAttachedError("no Llama is attached; pass one as llm=, or call attach(llm) first")
        return found

    def _make(self, llm: Llama) -> Hook:
        try:
            from prefixstore.llama.hook import Hook  # noqa: PLC0415 - the extra "llama"
        except ImportError as error:
            if (error.name or "llama_cpp").startswith("llama_cpp."):
                raise IncompatibleError(
                    f"this llama-cpp-python lacks something that the store needs: {error}"
                ) from error
            raise MissingExtraError('llm= needs llama-cpp-python; pip install "prefixstore[llama]"') from error
        if not hasattr(llm, "_ctx") or not hasattr(llm, "_model"):
            raise InvalidParameterError(f"llm must be a llama_cpp.Llama, not {type(llm).__name__}")
        return Hook(llm, self._engine, self.parameters)

    def sessions(self, llm: Llama | None = None, *, max_sessions: int = 64) -> Sessions:
        """Many conversations on an attached ``Llama``, one at a time; see `Sessions.admit`.

        Parameters
        ----------
        llm
            The attached ``Llama``; by default the only one, or of several the one that was used last.
        max_sessions
            How many are kept: above that, the least recently used ones are evicted.

        Returns
        -------
        Sessions
            The same one at each call, as long as it is in use.

        Raises
        ------
        NotAttachedError
            If no Llama is attached.
        ContextError
            If states of this context cannot be stored.
        MisuseError
            If they exist with a different `max_sessions`.
        """
        from prefixstore.sessions.sessions import Sessions  # noqa: PLC0415 - imported where it is used

        self._alive()
        hook = self._current if llm is None else self._find(llm)
        if hook is None:
            raise NotAttachedError("sessions need an attached Llama; call attach(llm) first")
        found = hook.sessions()
        if found is None:
            found = Sessions(self, hook, max_sessions)
            # sessions keep the store alive, not the other way round
            hook.sessions = weakref.ref(found)
        elif found.max_sessions != max_sessions:
            raise MisuseError(
                f"the sessions of this store have max_sessions={found.max_sessions}; pass the same, or drop them first"
            )
        return found

    @property
    def kind(self) -> Kind:
        """What is stored of the context of `llm`, or why nothing is."""
        hook = self._current
        return hook.kind if hook is not None else Kind.UNBOUND

    @property
    def llm(self) -> Llama | None:
        """The attached Llama; of several, the one that was attached or used last.

        `kind`, `namespace` and `page_tokens` are those of this one, and methods that take a Llama take it by default.
        """
        hook = self._current
        return hook.context.llm_or_none if hook is not None else None

    def is_attached(self, llm: Llama) -> bool:
        """Whether the store is attached to this Llama."""
        return self._find(llm) is not None

    @property
    def page_tokens(self) -> int:
        """Tokens per page; fewer than the parameter if the model has a shorter sliding window."""
        hook = self._current
        return hook.page_tokens if hook is not None else self.parameters.page_tokens

    @property
    def namespace(self) -> Namespace:
        """The namespace of `llm`.

        Raises
        ------
        NotAttachedError
            If no Llama is attached.
        """
        return self.hook_of(None).context.namespace

    def path(self, tokens: TokenSequence, llm: Llama | None = None) -> Path:
        """As `match`, but with the pages. For jobs."""
        wanted = as_tokens(tokens)
        return self.hook_of(llm).strategy.path(wanted, len(wanted))

    def restore(self, tokens: TokenSequence, llm: Llama | None = None, *, always: bool = False) -> int:
        """Restore the stored prefix of a prompt into the context, to continue with ``eval`` or ``generate``.

        Parameters
        ----------
        tokens
            The prompt, shape ``(n,)``. Its last token is always left to evaluate.
        llm
            The Llama; by default the attached one.
        always
            Restore even if computing was measured to be faster.

        Returns
        -------
        int
            How many tokens of the prompt are live now: continue with ``llm.eval(tokens[n:])``. At most one less than
            the context has places.

        Raises
        ------
        ClosedError
            If the store is closed, also while it restores: ``llm.n_tokens`` says what the context holds then.
        """
        hook, wanted = self.hook_of(llm), as_tokens(tokens)
        self._use(hook)
        try:
            live = hook.restore(wanted, always=always)
        finally:
            self._note(hook)
        self._alive()
        return live

    @property
    def last(self) -> LastPrompt | None:
        """How the last prompt was served, by any ``Llama``; None before the first one.

        While the prompt is evaluated, it shows the progress. With several threads, use `last_of` to get the one of a
        given ``Llama``.
        """
        return self._last.record()

    def last_of(self, llm: Llama) -> LastPrompt | None:
        """As `last`, for the last prompt of this ``Llama``."""
        meter = self._last_of.get(llm)
        return meter.record() if meter is not None else None

    # -- as llama-cpp-python calls a cache ----------------------------------------------------------------------------

    def __contains__(self, tokens: TokenSequence) -> bool:
        return self.path(tokens).n_tokens > 0

    def __getitem__(self, tokens: TokenSequence) -> LlamaState:
        llm, state = self._asking(), None
        if llm is not None and self._is_closed("miss:closed"):
            raise KeyError("the store is closed")
        hook = self.hook_of(None) if llm is None else self._hook_asking(llm)
        if hook is not None:
            wanted = as_tokens(tokens)
            try:
                state = hook.lookup(wanted)
            finally:
                self._note(hook)
        if state is None:
            raise KeyError("no prefix of this prompt is stored")
        return state

    def __setitem__(self, tokens: TokenSequence, state: LlamaState) -> None:
        llm = self._asking()
        if llm is None:
            self._alive()
            hooks = self._attached()
            if not hooks:
                raise NotAttachedError("no Llama is attached whose states could be stored; call attach(llm) first")
            from prefixstore.llama.llama_state import store_state  # noqa: PLC0415 - the extra "llama"

            store_state(hooks, state)
        elif not self._is_closed("dropped:closed"):
            # `tokens` may include sampled tokens that were never evaluated, so they are not what the context holds
            hook = self._find(llm)
            if hook is not None:
                hook.completed()

    def _hook_asking(self, llm: Llama) -> Hook | None:
        """The hook of a ``Llama`` whose completion asks, which attaches it if necessary; None if that fails."""
        hook = self._find(llm)
        with Guard(self._engine.counters, "miss:not_attached"):
            hook = hook or self._attach(llm, is_implicit=True)
        if hook is not None:
            self._use(hook)
        return hook

    @staticmethod
    def _asking() -> Llama | None:
        """The Llama whose completion has called the cache, if one has."""
        try:
            from prefixstore.llama.binding import running_completion  # noqa: PLC0415 - the extra "llama"
        except ImportError:
            return None
        return running_completion().get("self")

    def _note(self, hook: Hook) -> None:
        """Note that a prompt was looked up."""
        meter, llm = hook.context.prompt, hook.context.llm_or_none
        if meter.n_tokens is not None:
            self._last = meter
            if llm is not None:
                self._last_of[llm] = meter

    def _is_closed(self, count: str) -> bool:
        """Whether the store is closed. A completion that uses it then is counted, and the first one logged."""
        if self._finalizer.alive:
            return False
        self._engine.counters.count(count)
        if not self._warned_closed:
            self._warned_closed = True
            log.warning("a completion uses a closed store; call llm.set_cache(None), or open a new store")
        return True
