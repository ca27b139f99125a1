"""Replaces methods of a ``Llama`` with those of a hook, from attaching to detaching."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import llama_cpp

from prefixstore.errors import MisuseError, PrefixStoreError
from prefixstore.llama.context import Context
from prefixstore.llama.kv_memory import ContextMemory
from prefixstore.llama.watch import Watch

__all__ = ["REPLACED", "Attachment", "Replacing"]

REPLACED = ("eval", "reset", "save_state", "load_state")


class Replacing(Protocol):
    """Has a method for each of the `REPLACED`."""

    @property
    def context(self) -> Context[ContextMemory]:
        """The context of the ``Llama``."""


class Attachment:
    """Replaces the methods of a ``Llama`` by a hook's, and watches its context.

    It is alive from the end of `install` to the beginning of `remove`, as long as its store lives. Replacements that
    are left behind, because one of the two was interrupted or the store was dropped, call the ``Llama``'s own methods,
    and the next attachment removes them.

    Parameters
    ----------
    hook
        Its methods replace those of the ``Llama``.
    store
        The store: the cache through which a completion saves for the hook. Kept by a weak reference.

    Attributes
    ----------
    hook
        The hook.
    """

    def __init__(self, hook: Replacing, store: object) -> None:
        self.hook = hook
        self._llm = weakref.ref(hook.context.llm)
        self._store = weakref.ref(store, lambda _: self.remove())
        self._originals: dict[str, Callable[..., Any] | None] = {}
        self._is_installed = False

    @property
    def is_alive(self) -> bool:
        """Whether the hook is still there, and is to be called."""
        return self._is_installed and self._store() is not None

    def is_cache(self, cache: object) -> bool:
        """Whether this object is the store."""
        return cache is not None and cache is self._store()

    def install(self) -> None:
        """Replace the methods.

        Raises
        ------
        MisuseError
            If another store is attached.
        ContextError
            If the context cannot be watched.
        """
        context = self.hook.context
        llm = context.llm
        methods = llm.__dict__
        for name in REPLACED:
            found = methods.get(name)
            if isinstance(found, _Replacement):
                if found.attachment.is_alive:
                    raise MisuseError(
                        "llm is attached to another PrefixStore; detach() or close() that one first; "
                        "it may be llm.cache"
                    )
                found.attachment.remove()
                found.attachment.give_methods_back()
        try:
            # the watch first: from then on, a method that is not replaced yet is noticed
            context.watch = Watch(llm, context.lineage, context.memory, context.settle)
            context.watch.start()
            for name in REPLACED:
                self._originals[name] = methods.get(name)
                methods[name] = _Replacement(self, name)
            self._is_installed = True
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Restore the methods of the ``Llama``; does nothing the second time.

        This may be any thread, so nothing of llama.cpp is called. If other sequences wait in the context, the replaced
        methods stay until one of them is called, and frees their cells.
        """
        if self._is_installed:
            self.hook.context.disown_unscored()
        self._is_installed = False
        residents = self.hook.context.memory.residents
        residents.forget_all()
        if not residents.has_tags:
            self.give_methods_back()
        if self.hook.context.watch is not None:
            self.hook.context.watch.stop()

    def give_methods_back(self) -> None:
        """Restore the methods of the ``Llama``."""
        llm = self._llm()
        methods = llm.__dict__ if llm is not None else {}
        for name, original in self._originals.items():
            if methods.get(name) == _Replacement(self, name):
                if original is None:
                    del methods[name]
                else:
                    methods[name] = original

    def original(self, name: str) -> Callable[..., Any]:
        """The method of the ``Llama`` that was replaced. Raises `MisuseError` if the ``Llama`` is gone."""
        llm = self.hook.context.llm
        return self._originals.get(name) or own_method(llm, name)

    def without_the_store(self, name: str) -> Callable[..., Any]:
        """The replaced method, after what is left of this attachment was removed."""
        original = self.original(name)
        self.remove()
        with contextlib.suppress(PrefixStoreError):  # the Llama is closed
            self.hook.context.memory.drop_residents()
        self.give_methods_back()
        return original


def own_method(llm: llama_cpp.Llama, name: str) -> Callable[..., Any]:
    """The method of a ``Llama``'s class, as it was before any store replaced it."""
    bound: Callable[..., Any] = getattr(type(llm), name).__get__(llm)
    return bound


class _Replacement:
    """A method of a hook that replaces a method of the ``Llama``."""

    def __init__(self, attachment: Attachment, name: str) -> None:
        self.attachment = attachment
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.attachment.is_alive:
            return getattr(self.attachment.hook, self._name)(*args, **kwargs)
        return self.attachment.without_the_store(self._name)(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Replacement) and (self.attachment, self._name) == (other.attachment, other._name)

    def __hash__(self) -> int:
        return hash((id(self.attachment), self._name))
