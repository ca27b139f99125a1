"""The Llamas that a store is attached to, each with a hook of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from prefixstore.engine.engine import Engine
from prefixstore.engine.miss import Guard
from prefixstore.errors import (
    IncompatibleError,
    InvalidParameterError,
    MissingExtraError,
    MisuseError,
    NotAttachedError,
    PrefixStoreError,
)
from prefixstore.parameters import Parameters

if TYPE_CHECKING:
    from llama_cpp import Llama

    from prefixstore.llama.hook import Hook

__all__ = ["Hooks"]


class Hooks:
    """The Llamas that a store is attached to, and their hooks.

    A ``Llama`` keeps its hook, by the methods that the hook replaces, and nothing here keeps either of them: a
    ``Llama`` that is garbage-collected is no longer attached.

    Parameters
    ----------
    engine
        Of the store.
    parameters
        The store's parameters.
    """

    def __init__(self, engine: Engine, parameters: Parameters) -> None:
        self._engine = engine
        self._parameters = parameters
        # in the order of attaching; by the id of the Llama, which another one may have later
        self._hooks: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()
        self._last: Callable[[], Hook | None] = lambda: None

    @property
    def all(self) -> list[Hook]:
        """All hooks, also of an attachment that was interrupted, or whose ``Llama`` is gone."""
        # other threads attach: `valuerefs` copies at once, and the other iterators do not
        return [hook for ref in self._hooks.valuerefs() if (hook := ref()) is not None]

    @property
    def attached(self) -> list[Hook]:
        """The hooks of all attached Llamas, in the order of attaching."""
        return [hook for hook in self.all if hook.is_attached and hook.context.llm_or_none is not None]

    @property
    def current(self) -> Hook | None:
        """The hook of the ``Llama`` that was attached or used last; None if none is attached."""
        hooks, last = self.attached, self._last()
        return last if last in hooks else hooks[-1] if hooks else None

    def use(self, hook: Hook) -> None:
        """Note that this one is used."""
        self._last = weakref.ref(hook)

    def find(self, llm: object) -> Hook | None:
        """The hook of a ``Llama``; None if it is not attached."""
        return next((hook for hook in self.attached if hook.context.llm_or_none is llm), None)

    def of(self, llm: Llama | None = None) -> Hook:
        """The hook of a ``Llama``, or one for this call if it is not attached; without a ``Llama``, `current`.

        Raises
        ------
        NotAttachedError
            If there is none.
        ContextError
            As in `Hook`.
        """
        found = self.current if llm is None else self.find(llm) or self._make(llm)
        if found is None:
            raise NotAttachedError("no Llama is attached; pass one as llm=, or call attach(llm) first")
        return found

    def attach(self, llm: Llama, cache: object, *, by_itself: bool = False) -> Hook:
        """Attach the store, which is `cache`, to a ``Llama``; `by_itself` if a prompt asks for it, and no caller.

        If another thread is still in a call of an earlier session of this ``Llama``, this waits for its end.

        Raises
        ------
        MisuseError
            If this store, or another one, is attached to it.
        ContextError
            As in `Hook`.
        """
        from prefixstore.sessions.queue import between_calls  # noqa: PLC0415 - imported where it is used

        if self.find(llm) is not None:
            raise MisuseError("the store is attached to this Llama already")
        with between_calls(llm):
            hook = self._make(llm)
            self._hooks[id(llm)] = hook
            hook.attachment.install(hook, cache, by_itself=by_itself)
        self.use(hook)
        return hook

    def detach(self, hook: Hook, cache: object, *, settles: bool = True) -> None:
        """Restore the own methods of a ``Llama``, and remove `cache` if it uses that. May be done again.

        Without `settles`, nothing is done to the context: another thread uses it.
        """
        with suppress(PrefixStoreError):  # a Llama that is closed or gone: there is nothing to undo
            if settles and hook.is_attached:
                hook.context.settle()
        hook.attachment.remove()
        llm = hook.context.llm_or_none
        if llm is not None and llm.cache is cache:
            llm.set_cache(None)

    def asking(self, llm: Llama, cache: object) -> Hook | None:
        """The hook of a ``Llama`` whose completion asks; it is attached now if it was not. None if it cannot be."""
        hook = self.find(llm)
        with Guard(self._engine.counters, "miss:not_attached"):
            hook = hook or self.attach(llm, cache, by_itself=True)
        if hook is not None:
            self.use(hook)
        return hook

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
            raise InvalidParameterError(f"llm must be a llama_cpp.Llama, not {type(llm).__name__}{_inside(llm)}")
        return Hook(llm, self._engine, self._parameters)


def _inside(wrapper: object) -> str:
    """Where the Llama is in an object of another library, such as langchain's."""
    names = ("client", "llm", "model", "_model", "_llm")
    found = next((name for name in names if hasattr(getattr(wrapper, name, None), "_ctx")), None)
    return f"; the Llama in it is its attribute .{found}: pass llm.{found}" if found is not None else ""
