"""Detects any access to a llama.cpp context other than through the store.

Whatever llama.cpp does with a context, it needs a pointer to it, and Python code reads that pointer
from the ``LlamaContext`` of the ``Llama``. So there is one thing to watch instead of a list of methods: **what reads
the pointer makes the context unknown, before it can use it.** Unknown is the default. Exempt are the functions of
llama-cpp-python that are known to read only (`READERS`), and the store itself.

A pointer that was read earlier, or past the attribute, is not seen. For these there are llama.cpp's own counters of
decoded tokens (`DecodeCounters`).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeAlias

import llama_cpp
from llama_cpp._internals import LlamaContext, LlamaSampler

from prefixstore.errors import ContextError, PrefixStoreError
from prefixstore.llama.kv_memory import ContextMemory, pointer_of
from prefixstore.llama.lineage import Lineage, Unknown

__all__ = ["READERS", "DecodeCounters", "Watch"]

# the attributes of a LlamaContext that give access to it
POINTERS = ("ctx", "memory")

# What may read the pointer: it only reads the context, or changes nothing that a state depends on. A name that a
# version of llama-cpp-python lacks does no harm.
READERS: dict[type, tuple[str, ...]] = {
    llama_cpp.Llama: ("_create_completion", "sample", "save_state"),
    LlamaSampler: ("sample",),
    LlamaContext: (
        "get_embeddings",
        "get_embeddings_ith",
        "get_embeddings_seq",
        "get_logits",
        "get_logits_ith",
        "get_state_size",
        "n_ctx",
        "pooling_type",
        "print_timings",
        "set_n_threads",
    ),
}

Counts: TypeAlias = "tuple[int, int, float, float]"


def _codes() -> frozenset[CodeType]:
    found = (getattr(getattr(cls, name, None), "__code__", None) for cls, names in READERS.items() for name in names)
    return frozenset(code for code in found if code is not None)


_READING = _codes()
# a property that hands the pointer on: the code that reads the property counts
_PASSING_ON = llama_cpp.Llama.ctx.fget.__code__  # type: ignore[attr-defined] # a property


class DecodeCounters:
    """llama.cpp's counts of the tokens that a context has decoded, and of the time that took.

    They are counted with ``no_perf`` as well, only the times are not; then a single token after a reset of the counters
    is not seen, because llama.cpp gives 1 for 0.
    """

    def __init__(self, pointer: int) -> None:
        self._noted = self._read(pointer)

    @staticmethod
    def _read(pointer: int) -> Counts:
        # what was decoded is counted when it is complete
        llama_cpp.llama_synchronize(pointer)
        data = llama_cpp.llama_perf_context(pointer)
        return data.n_p_eval, data.n_eval, data.t_p_eval_ms, data.t_eval_ms

    def have_changed(self, pointer: int) -> bool:
        """Whether they have changed since they were noted."""
        return self._read(pointer) != self._noted

    def note(self, pointer: int) -> None:
        """Note the counters as they are now."""
        self._noted = self._read(pointer)


class Watch:
    """Replaces the class of a ``LlamaContext``, so that reading its pointers is detected.

    Parameters
    ----------
    llm
        The ``Llama``.
    lineage
        What is known about its context.
    memory
        Its memory, with the note of what may have been interrupted.
    settle
        Undoes what was interrupted; called before anybody else reaches the context, and true if it was cleared.

    Raises
    ------
    ContextError
        If the ``Llama`` is closed.
    """

    def __init__(
        self, llm: llama_cpp.Llama, lineage: Lineage, memory: ContextMemory, settle: Callable[[], bool]
    ) -> None:
        self._pointer = pointer_of(llm)
        self._lineage = lineage
        self._memory = memory
        self._settle = settle
        self._counters = DecodeCounters(self._pointer)
        self._context = weakref.ref(llm._ctx)
        # an attachment that was interrupted may have left its own
        self._class = getattr(type(llm._ctx), "unwatched", type(llm._ctx))
        self._watched = _watched(self._class, self)

    def start(self) -> None:
        """Begin to watch.

        Raises
        ------
        ContextError
            If the class cannot be replaced.
        """
        context = self._context()
        try:
            if context is not None:
                context.__class__ = self._watched
        except TypeError as error:
            raise ContextError(f"changes to this context cannot be detected: {error}") from error

    def stop(self) -> None:
        """Give the ``LlamaContext`` its own class back."""
        context = self._context()
        if context is not None and type(context) is self._watched:
            context.__class__ = self._class

    def is_current(self, llm: llama_cpp.Llama) -> bool:
        """Whether the ``Llama`` still has the context that is watched."""
        return llm._ctx is self._context() and vars(llm._ctx).get("ctx") == self._pointer

    def note_decoded(self) -> None:
        """Note that what was decoded up to now is accounted for. Raises `ContextError` if the context is closed."""
        self._counters.note(self._open_pointer())

    def has_decoded(self) -> bool:
        """Whether something was decoded since the last note. Raises `ContextError` if the context is closed."""
        return self._counters.have_changed(self._open_pointer())

    def _open_pointer(self) -> int:
        context = self._context()
        if context is None or vars(context).get("ctx") != self._pointer:
            raise ContextError("the context was closed or replaced while the store was attached")
        return self._pointer

    def notice(self, caller: FrameType) -> None:
        """Called when a pointer is read. The frame is the reader's."""
        if self._lineage.in_flight:
            return
        reader = caller.f_back if caller.f_code is _PASSING_ON else caller
        if reader is None or reader.f_code not in _READING:
            self.changed()

    def changed(self) -> None:
        """Called when the context is about to be changed."""
        with contextlib.suppress(PrefixStoreError):  # it is being closed: there is nothing to undo
            self._settle()
            self._memory.drop_residents()
        self._lineage.lose(Unknown.CHANGED)

    def replaced(self) -> None:
        """Called when a pointer is set, as by ``close()``; the context may be freed, so nothing can be undone in it."""
        self._lineage.lose(Unknown.CHANGED)

    @property
    def has_residents(self) -> bool:
        """Whether sequences are parked in the context."""
        return self._memory.residents.has_tags

    # -- calls with a known meaning -----------------------------------------------------------------------------------

    @property
    def _is_own_call(self) -> bool:
        """Whether the store itself is at work, and was not interrupted with something left to undo."""
        return self._lineage.in_flight and not self._memory.unfinished.is_open

    def truncate(self, n: int, truncate: Callable[[], bool]) -> bool:
        """``kv_cache_seq_rm`` of everything from position `n` on: what is known before it stays known."""
        lineage = self._lineage
        if self._is_own_call:
            return truncate()
        if self._settle():
            return False  # nothing is left that could be kept
        before = lineage.begin()
        done = truncate()
        if before is None:
            lineage.rewind(n)
            if not done or not self._memory.holds(lineage.n):
                before = Unknown.STEPPED_BACK
        lineage.end(before)
        return done

    def clear(self, clear: Callable[[], None]) -> None:
        """``kv_cache_clear``: the context is known to be empty."""
        if self._is_own_call:
            clear()
            return
        self._settle()
        self._lineage.begin()
        clear()
        self._memory.residents.lost()
        self._lineage.replace(())

    def reset_timings(self, reset: Callable[[], None]) -> None:
        """``reset_timings``: what was decoded before is compared before the counters are lost."""
        lineage = self._lineage
        if self._is_own_call:
            reset()
            return
        if self.has_decoded():
            lineage.lose(Unknown.CHANGED)
        before = lineage.begin()
        reset()
        self.note_decoded()
        lineage.end(before)


def _watched(base: type[LlamaContext], watch: Watch) -> type[LlamaContext]:
    """A subclass that reports reads of the pointers to a `Watch`."""

    def pointer(name: str) -> property:
        def get(self: Any, *, frame: Callable[[int], FrameType] = sys._getframe) -> Any:
            watch.notice(frame(1))
            try:
                return vars(self)[name]
            except KeyError:
                raise AttributeError(name) from None

        def put(self: Any, value: Any) -> None:
            watch.replaced()
            vars(self)[name] = value

        return property(get, put)

    class Watched(base):  # type: ignore[valid-type, misc] # a class that is known when the program runs
        unwatched = base

        def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
            if seq_id > 0 or p1 >= 0 or p0 < 0:
                return bool(super().kv_cache_seq_rm(seq_id, p0, p1))
            # -1 means all sequences, those of residents too
            return watch.truncate(
                p0, lambda: super(Watched, self).kv_cache_seq_rm(0 if watch.has_residents else seq_id, p0, p1)
            )

        def kv_cache_clear(self) -> None:
            watch.clear(super().kv_cache_clear)

        def reset_timings(self) -> None:
            watch.reset_timings(super().reset_timings)

    for name in POINTERS:
        setattr(Watched, name, pointer(name))
    Watched.__name__, Watched.__qualname__, Watched.__module__ = base.__name__, base.__qualname__, base.__module__
    return Watched
