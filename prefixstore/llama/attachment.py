"""Replaces methods of a ``Llama`` with those of a hook, from attaching to detaching."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llama_cpp.llama_cache import BaseLlamaCache

from prefixstore.errors import MisuseError
from prefixstore.llama.binding import REPLACED
from prefixstore.llama.context import Context
from prefixstore.llama.watch import Watch

if TYPE_CHECKING:
    from prefixstore.llama.hook import Hook


class Attachment:
    """Replaces the methods of a ``Llama`` by a hook's, and watches its context.

    It is alive from the end of `install` to the beginning of `remove`, as long as its store lives. Replacements that
    are left behind, because one of the two was interrupted or the store was dropped, call the ``Llama``'s own methods,
    and the next attachment removes them.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store: Callable[[], object] = lambda: None
        self._is_implicit = False
        self._originals: dict[str, Callable[..., Any] | None] = {}
        self._is_installed = False

    @property
    def is_alive(self) -> bool:
        """Whether the methods of the hook are to be called."""
        return self._is_installed and self._store() is not None

    @property
    def store_is_cache(self) -> bool:
        """Whether the store is the cache of the ``Llama``, so that completions save for it."""
        cache = self._context.llm.cache
        return cache is not None and cache is self._store()

    def install(self, hook: Hook, store: object, *, is_implicit: bool = False) -> None:
        """Replace the methods by those of the hook. The store is not kept alive.

        `is_implicit`: a completion attaches the store, not a caller. Then another store may take its place as the
        cache.
        Raises `MisuseError` if another store is attached, and `ContextError` if the context cannot be watched.
        """
        context = self._context
        llm = context.llm
        methods = llm.__dict__
        for name in REPLACED:
            found = methods.get(name)
            if isinstance(found, _Replacement):
                other = found.hook.attachment
                if other.is_alive and not (other._is_implicit and llm.cache is store):  # noqa: SLF001 - of this class
                    raise MisuseError(
                        "llm is attached to another PrefixStore; detach() or close() that one first; "
                        "it may be llm.cache"
                    )
                other.remove()
        BaseLlamaCache.register(type(store))
        self._store, self._is_implicit = weakref.ref(store, lambda _: self.remove()), is_implicit
        try:
            # the watch first: from then on, a method that is not replaced yet is noticed
            context.watch = Watch(context)
            context.watch.start()
            for name in REPLACED:
                self._originals[name] = methods.get(name)
                methods[name] = _Replacement(hook, name)
            self._is_installed = True
        except BaseException:
            # it stays the cache of the Llama: the next prompt may attach it
            self.remove()
            raise

    def remove(self) -> None:
        """Restore the methods of the ``Llama``; does nothing the second time.

        This may be any thread, so nothing of llama.cpp is called.
        """
        context = self._context
        if self._is_installed:
            context.disown_unscored()
        self._is_installed = False
        llm = context.llm_or_none
        methods = llm.__dict__ if llm is not None else {}
        for name, original in self._originals.items():
            found = methods.get(name)
            if isinstance(found, _Replacement) and found.hook.attachment is self:
                if original is None:
                    del methods[name]
                else:
                    methods[name] = original
        if context.watch is not None:
            context.watch.stop()

    def original(self, name: str) -> Callable[..., Any]:
        """A method of the ``Llama`` as it was before it was replaced. Raises `MisuseError` if the ``Llama`` is gone."""
        llm = self._context.llm
        return self._originals.get(name) or getattr(type(llm), name).__get__(llm)


class _Replacement:
    """A method of a hook that replaces a method of the ``Llama``."""

    def __init__(self, hook: Hook, name: str) -> None:
        self.hook = hook
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = self.hook.attachment
        if attachment.is_alive:
            return getattr(self.hook, self._name)(*args, **kwargs)
        # left behind by an attachment that has ended
        original = attachment.original(self._name)
        attachment.remove()
        return original(*args, **kwargs)
