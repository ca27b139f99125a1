"""Detects any access to a llama.cpp context other than through the store.

Every call of llama.cpp needs a pointer to the context, and Python code reads that pointer from the ``LlamaContext`` of
the ``Llama``. So there is one thing to watch instead of a list of methods: **a read of the pointer makes the context
unknown, before the pointer can be used.** Exempt are the store itself, and functions of llama-cpp-python that are known
to change nothing (`binding.READERS`).

A pointer that was read before, or past the attribute, is not noticed. Its use shows in llama.cpp's own counters of
decoded tokens.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import llama_cpp

from prefixstore.errors import ContextError, PrefixStoreError
from prefixstore.llama.binding import POINTERS, ContextClass, context_of, only_reads, pointer_of
from prefixstore.llama.lineage import Unknown

if TYPE_CHECKING:
    from prefixstore.llama.context import Context

Counts: TypeAlias = "tuple[int, int, float, float]"


class Watch:
    """Replaces the class of a ``LlamaContext`` to detect reads of its pointers.

    Raises `ContextError` if the ``Llama`` is closed.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._lineage = context, context.lineage
        self._pointer, owner = pointer_of(context.llm), context_of(context.llm)
        self._owner = weakref.ref(owner)
        self._decoded = self._count()
        # an interrupted attachment may have left its class
        self._class = getattr(type(owner), "unwatched", type(owner))
        self._watched = _watched(self._class, self)

    def start(self) -> None:
        """Start watching. Raises `ContextError` if the class cannot be replaced."""
        owner = self._owner()
        try:
            if owner is not None:
                owner.__class__ = self._watched
        except TypeError as error:
            raise ContextError(f"changes to this context cannot be detected: {error}") from error

    def stop(self) -> None:
        """Give the ``LlamaContext`` its own class back."""
        owner = self._owner()
        if owner is not None and type(owner) is self._watched:
            owner.__class__ = self._class

    @property
    def _is_open(self) -> bool:
        owner = self._owner()
        return owner is not None and vars(owner).get("ctx") == self._pointer

    def is_current(self, llm: llama_cpp.Llama) -> bool:
        """Whether the ``Llama`` still has the context that is watched."""
        return context_of(llm) is self._owner() and self._is_open

    # -- llama.cpp's counters -----------------------------------------------------------------------------------------

    def note_decoded(self) -> None:
        """Note that everything decoded up to now is known. Raises `ContextError` if the context is closed."""
        self._decoded = self._count()

    def has_decoded(self) -> bool:
        """Whether anything was decoded since `note_decoded`. Raises `ContextError` if the context is closed."""
        return self._count() != self._decoded

    def _count(self) -> Counts:
        """llama.cpp's counts of the tokens that the context has decoded, and of the time that took.

        They are counted with ``no_perf`` as well, only the times are not; then a single token after a reset of the
        counters is not seen, because llama.cpp gives 1 for 0.
        """
        if not self._is_open:
            raise ContextError("the context was closed or replaced while the store was attached")
        # tokens are counted when their computation is complete
        llama_cpp.llama_synchronize(self._pointer)
        data = llama_cpp.llama_perf_context(self._pointer)
        return data.n_p_eval, data.n_eval, data.t_p_eval_ms, data.t_eval_ms

    # -- access to the context ----------------------------------------------------------------------------------------

    def notice(self, caller: FrameType) -> None:
        """Called when a pointer is read, with the frame of the reader."""
        if self._lineage.in_flight or only_reads(caller):
            return
        with contextlib.suppress(PrefixStoreError):  # it is being closed: there is nothing to undo
            self._context.settle()
        self.changed()

    def changed(self) -> None:
        """Note that the contents of the context are unknown, or will be in a moment."""
        self._lineage.lose(Unknown.CHANGED)

    @property
    def _is_own_call(self) -> bool:
        """Whether the store itself is changing the context, and was not interrupted before."""
        return self._lineage.in_flight and not self._context.memory.unfinished.is_open

    def truncate(self, n: int, truncate: Callable[[], bool]) -> bool:
        """``kv_cache_seq_rm`` of everything from position `n` on: tokens before `n` stay known.

        Also ``kv_cache_clear``, with an `n` of 0: the context is known to be empty then.
        """
        lineage = self._lineage
        if self._is_own_call:
            return truncate()
        if self._context.settle():
            return False  # nothing is left to keep
        before = lineage.begin()
        done = truncate()
        if before is None or n == 0:
            lineage.rewind(n)
            before = None if done and self._context.memory.holds(lineage.n) else Unknown.STEPPED_BACK
        lineage.end(before)
        return done

    def reset_timings(self, reset: Callable[[], None]) -> None:
        """``reset_timings``: compares the counters before they are lost."""
        lineage = self._lineage
        if self._is_own_call:
            reset()
            return
        if self.has_decoded():
            self.changed()
        before = lineage.begin()
        reset()
        self.note_decoded()
        lineage.end(before)


def _watched(base: type[ContextClass], watch: Watch) -> type[ContextClass]:
    """A subclass that reports reads of the pointers to a `Watch`."""

    def pointer(name: str) -> property:
        def get(self: Any, *, frame: Callable[[int], FrameType] = sys._getframe) -> Any:  # noqa: SLF001
            watch.notice(frame(1))
            try:
                return vars(self)[name]
            except KeyError:
                raise AttributeError(name) from None

        def put(self: Any, value: Any) -> None:
            # close() does this: the context may be freed already, so nothing can be undone in it
            watch.changed()
            vars(self)[name] = value

        return property(get, put)

    class Watched(base):  # type: ignore[valid-type, misc] # a class that is known when the program runs
        unwatched = base

        def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
            if seq_id > 0 or p1 >= 0 or p0 < 0:
                return bool(super().kv_cache_seq_rm(seq_id, p0, p1))
            return watch.truncate(p0, lambda: super(Watched, self).kv_cache_seq_rm(seq_id, p0, p1))

        def kv_cache_clear(self) -> None:
            watch.truncate(0, lambda: super(Watched, self).kv_cache_clear() is None)

        def reset_timings(self) -> None:
            watch.reset_timings(super().reset_timings)

    for name in POINTERS:
        setattr(Watched, name, pointer(name))
    Watched.__name__, Watched.__qualname__, Watched.__module__ = base.__name__, base.__qualname__, base.__module__
    return Watched
