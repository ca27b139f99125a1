"""One llama.cpp context and everything known about it: what hook and strategies share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import llama_cpp
import numpy as np

from prefixstore.buffers import PooledBuffer
from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page
from prefixstore.engine.pending import PendingPage
from prefixstore.errors import MisuseError
from prefixstore.format.keys import PAGE, Tokens, common_prefix
from prefixstore.format.namespace import Namespace
from prefixstore.last_prompt import PromptMeter
from prefixstore.llama.bypass import BYPASSED, Bypass
from prefixstore.llama.compute_rate import ComputeRate
from prefixstore.llama.kv_memory import ContextMemory, is_closed, kind_of, pointer_of
from prefixstore.llama.lineage import Lineage, Unknown
from prefixstore.llama.watch import Watch
from prefixstore.parameters import Parameters
from prefixstore.stats import Kind

__all__ = ["Context", "bypass_reason", "is_multimodal", "live_prefix_length", "reusable_prefix"]

M_co = TypeVar("M_co", bound=ContextMemory, covariant=True)

# attributes of chat handlers that bring images or sound into the context
MEDIA_ATTRIBUTES = ("clip_model_path", "mtmd_ctx", "mmproj_path")


class Context(Generic[M_co]):
    """A ``Llama`` and what is known about its context.

    Parameters
    ----------
    llm
        Kept by a weak reference: the store does not keep a model in memory.
    engine
        Finds pages, and stores them.
    namespace
        Of the context.
    parameters
        Of the store, with the length that pages have in this context.
    memory
        Access to its memory.

    Attributes
    ----------
    kind
        What can be stored of the context.
    lineage
        The tokens that are known to be in it.
    rate
        How fast it computes, and how fast pages are restored.
    far_rate
        How fast pages are restored from the far location.
    watch
        Notices what else reaches the context; None unless the store is attached.
    bypass
        Whether the running code bypasses the store.
    prompt
        Counts what happens to the prompt that was looked up last.
    """

    def __init__(
        self, llm: llama_cpp.Llama, engine: Engine, namespace: Namespace, parameters: Parameters, memory: M_co
    ) -> None:
        self._llm = weakref.ref(llm)
        self.engine = engine
        self.namespace = namespace
        self.parameters = parameters
        self.memory = memory
        self.kind: Kind = kind_of(llm)
        self.lineage = Lineage(namespace.key, parameters.page_tokens, llm.n_ctx())
        self.rate = ComputeRate(parameters.max_delay)
        self.far_rate = ComputeRate()
        self.watch: Watch | None = None
        self.bypass = Bypass()
        self.prompt = PromptMeter()
        self._settings = namespace.canonical

    @property
    def llm(self) -> llama_cpp.Llama:
        """The model.

        Raises
        ------
        MisuseError
            If it is gone.
        """
        llm = self._llm()
        if llm is None:
            raise MisuseError("the Llama was garbage-collected; keep a reference to it while the store is attached")
        return llm

    @property
    def llm_or_none(self) -> llama_cpp.Llama | None:
        """The model; None if it is gone."""
        return self._llm()

    def bypass_reason(self) -> str | None:
        """Why the context is neither stored nor restored at the moment; None if it is."""
        llm = self.llm
        reason = "closed" if is_closed(llm) else bypass_reason(llm, self.kind)
        if reason is None and self.watch is not None and not self.watch.is_current(llm):
            reason = "context_replaced"
        if reason is None and self.memory.is_shared():
            reason = "sequence_in_use"
        return reason

    def skip_reason(self) -> str | None:
        """Why this request is neither looked up nor captured: `bypass_reason`, or the caller bypasses the store."""
        return self.bypass_reason() or (BYPASSED if self.bypass.is_active else None)

    def lookup(self, name: str) -> str:
        """The name of the counter for the end of a lookup, such as ``"hits"``; resumed sessions have their own."""
        return name if self.prompt.is_prompt else f"resume:{name}"

    def count_lookup(self, name: str) -> None:
        """Count how a lookup has ended, such as ``"hits"``."""
        self.engine.counters.count(self.lookup(name), namespace=self.lineage.namespace)

    def count_miss(self, name: str) -> None:
        """Count a miss of what is looked up, such as ``"miss:not_found"``."""
        self.count_lookup(name)
        self.note_miss(name)

    def note_miss(self, name: str | None) -> None:
        """Note a miss that is counted already; None if there was none."""
        if name is not None:
            self.prompt.miss = name.rpartition(":")[2]

    def catch_up(self, *, compare: bool = True) -> bool:
        """Have the lineage follow a context that was rewound; returns whether all of its contents are known.

        For `compare`, see `Lineage.catch_up`.
        """
        lineage = self.lineage
        if self.watch is not None and not lineage.in_flight and self.watch.has_decoded():
            if lineage.unknown is None:
                lineage.lose(Unknown.CHANGED)
            self.watch.note_decoded()
        return lineage.catch_up(self.llm, self.memory, compare=compare)

    def adopt(self) -> None:
        """Trust ``llm.input_ids``: the caller vouches that the context holds these tokens, if they are tokens."""
        llm = self.llm
        tokens = np.asarray(llm.input_ids[: llm.n_tokens], "<i4")
        if (tokens < 0).any():
            self.lineage.lose(Unknown.CHANGED)
        else:
            self.lineage.replace(tokens)

    def has_placeholders(self, prompt: Tokens) -> bool:
        """Whether the context can continue this prompt from something that is not a token, and cannot be computed.

        Negative numbers stand for it in ``llm.input_ids`` and in the prompt: the rows of an image, or a soft prompt.
        """
        live = live_prefix_length(self.llm, prompt)
        return bool((prompt[:live] < 0).any()) and self.memory.holds(live)

    def empty(self) -> None:
        """Make the context empty, as ``Llama.reset`` does, and note that it is."""
        llm, before = self.llm, self.lineage.begin()
        llm.n_tokens = 0
        llm._requires_eval = True
        if self.memory.empty():
            self.lineage.replace(())
        else:
            self.lineage.end(before or Unknown.INTERRUPTED)

    def disown_unscored(self) -> None:
        """Have llama-cpp-python recompute tokens that were restored without logits, which it would believe computed.

        The ``Llama`` no longer names these tokens, so no prompt begins with them; a running generation continues.
        Nothing of llama.cpp is called: the store may be gone, and the ``Llama`` closed.
        """
        llm = self.llm_or_none
        if llm is not None and llm._logits_all:
            llm.input_ids[: min(self.lineage.unscored, llm.n_tokens)] = -1

    def settle(self) -> bool:
        """Undo an interrupted change by the store; returns whether the context had to be cleared.

        Called at the beginning of everything that uses the context. Raises `ContextError` if the ``Llama`` is closed.
        """
        pointer_of(self.llm)
        self.lineage.settle()
        if not self.memory.settle():
            return False
        self.lineage.lose(Unknown.INTERRUPTED)
        return True

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A block that loads a whole state: if it fails or is interrupted, the context is cleared."""
        self.memory.unverified = True
        try:
            yield
        except BaseException:
            self.settle()
            raise
        self.memory.unverified = False

    def submit(self, start: int, end: int, buffer: PooledBuffer, form: int = PAGE) -> bool:
        """Have a page or a snapshot of the known tokens from `start` up to `end` written; the buffer is handed over.

        False if it is not wanted, since it is stored already or its parent is not.
        """
        lineage = self.lineage
        # losing a snapshot costs recomputing about one interval
        n_tokens = end - start if form == PAGE else min(end, self.parameters.snapshot_interval)
        page = PendingPage.of(
            lineage.namespace,
            self._settings,
            lineage.parent(start // lineage.page_tokens),
            start,
            lineage.page_bytes(start, end),
            buffer,
            self.rate.compute_us(n_tokens),
            form,
        )
        name = "pages_captured" if form == PAGE else "snapshots_captured"
        is_wanted = self.engine.submit(page)
        self.engine.counters.count(name, is_wanted)
        return is_wanted

    def note_use(self, pages: Sequence[Page], n_tokens: int) -> None:
        """Note that a prompt of so many tokens began with these pages; none for a miss."""
        self.engine.touch(self.lineage.namespace, pages, n_tokens)
        self.engine.nudge()

    def set_live(self, prompt: Tokens) -> None:
        """Note that the context holds this prompt, and that a token must be decoded before one is sampled."""
        llm, n = self.llm, len(prompt)
        llm.input_ids[:n] = prompt
        llm.n_tokens = n
        llm._requires_eval = True
        self.lineage.restored(prompt)

    def is_worth(self, pages: Sequence[Page], n_tokens: int) -> bool:
        """Whether restoring pages is expected to be faster than computing the `n_tokens` that they save."""
        if self.engine.n_near(pages) == len(pages):
            return self.rate.is_worth(n_tokens, len(pages))
        self.far_rate.token_seconds = self.rate.token_seconds
        return self.far_rate.is_worth(n_tokens, len(pages))

    def count_restore(
        self, n_pages: int, gained: int, seconds: float, timed: Sequence[Page], *, is_far: bool = False
    ) -> None:
        """Count a hit: pages read, tokens gained, the pages whose compute time is known, and whether any was far."""
        self.prompt.restored += gained
        self.prompt.restore_seconds += seconds
        (self.far_rate if is_far else self.rate).restored(n_pages, seconds)
        share = gained / (sum(page.n_tokens for page in timed) or 1)
        saved = sum(page.compute_us for page in timed) * share / 1e6 - seconds
        name, namespace = self.lookup("hits"), self.lineage.namespace
        self.engine.counters.restored(gained, seconds, saved, name=name, namespace=namespace)


def is_multimodal(llm: llama_cpp.Llama) -> bool:
    """Whether the chat handler brings images or sound into the context, which are not among the tokens."""
    handler = llm.chat_handler
    return handler is not None and any(hasattr(handler, name) for name in MEDIA_ATTRIBUTES)


def bypass_reason(llm: llama_cpp.Llama, kind: Kind) -> str | None:
    """Why a ``Llama`` with a context of this kind is neither stored nor restored at the moment; None if it is."""
    return kind.reason or ("multimodal" if is_multimodal(llm) else None)


def live_prefix_length(llm: llama_cpp.Llama, tokens: Tokens) -> int:
    """How many tokens of a prompt the context holds."""
    return common_prefix(np.asarray(llm.input_ids[: llm.n_tokens], "<i4"), tokens)


def reusable_prefix(
    llm: llama_cpp.Llama, memory: ContextMemory, tokens: Tokens, reset: Callable[[], None] | None = None
) -> int:
    """How many tokens of a prompt the context holds and can continue from; it is reset if it would have to step back.

    llama-cpp-python would continue there: with rows missing from a window, or, after it has refused a shorter stored
    state, from a recurrent state that it has to reset.
    """
    live = live_prefix_length(llm, tokens)
    if 0 < live < llm.n_tokens and not memory.holds(live):
        (reset or llm.reset)()
        return 0
    return live
