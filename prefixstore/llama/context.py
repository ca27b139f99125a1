"""A llama.cpp context and what is known about it: what the hook and its strategy share."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llama_cpp
import numpy as np

from prefixstore.counters import Kind
from prefixstore.engine.compute_rate import ComputeRate
from prefixstore.engine.engine import Engine
from prefixstore.engine.miss import BYPASSED, is_bypassed
from prefixstore.engine.page import Page
from prefixstore.errors import MisuseError
from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.format.namespace import Namespace
from prefixstore.llama.binding import is_closed, is_multimodal, keeps_all_logits, live_tokens, pointer_of, set_end
from prefixstore.llama.capture import Place
from prefixstore.llama.kv_memory import ContextMemory, kind_of
from prefixstore.llama.lineage import Lineage, Unknown
from prefixstore.llama.watch import Watch
from prefixstore.parameters import Parameters
from prefixstore.results import PromptMeter

# the reason in ``stats()``
MULTIMODAL = "multimodal"


class Context:
    """A ``Llama``, which is not kept alive, and what is known about its context.

    Attributes
    ----------
    parameters
        Those of the store, with the length of pages in this context.
    kind
        What is stored of the context: less than its memory allows if the layout of its states turns out to be unknown.
    rate, far_rate
        How fast it computes, and how fast pages are restored from the near and from the far location.
    watch
        None unless the store is attached.
    prompt
        Measures how the prompt that was looked up last is served.
    is_text
        Whether the text before the first image of a chat is being evaluated.
    """

    def __init__(
        self,
        llm: llama_cpp.Llama,
        engine: Engine,
        namespace: Namespace,
        parameters: Parameters,
        memory: ContextMemory,
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
        self.prompt = PromptMeter()
        self.is_text = False

    @property
    def llm(self) -> llama_cpp.Llama:
        """The model. Raises `MisuseError` if it is gone."""
        llm = self._llm()
        if llm is None:
            raise MisuseError("the Llama was garbage-collected; keep a reference to it while the store is attached")
        return llm

    @property
    def llm_or_none(self) -> llama_cpp.Llama | None:
        """The model; None if it is gone."""
        return self._llm()

    def bypass_reason(self) -> str | None:
        """Why the context can be neither captured nor restored at the moment; None if it can."""
        llm = self.llm
        reason = "closed" if is_closed(llm) else self.kind.reason
        if reason is None and not self.is_text and is_multimodal(llm):
            reason = MULTIMODAL
        if reason is None and self.watch is not None and not self.watch.is_current(llm):
            reason = "context_replaced"
        if reason is None and self.memory.is_shared():
            reason = "sequence_in_use"
        return reason

    def begins_with_text(self) -> bool:
        """Whether a multimodal chat handler begins a chat: it has reset the ``Llama``, and evaluates text first."""
        llm = self.llm
        return not is_closed(llm) and llm.n_tokens == 0 and self.bypass_reason() == MULTIMODAL

    def skip_reason(self) -> str | None:
        """Why this request is neither looked up nor captured: `bypass_reason`, or a `bypassing` block."""
        return self.bypass_reason() or (BYPASSED if is_bypassed(self.engine) else None)

    def lookup(self, name: str) -> str:
        """The counter for the outcome of a lookup, such as ``"hits"``; resumed sessions have their own."""
        return name if self.prompt.is_prompt else f"resume:{name}"

    def count_miss(self, reason: str) -> None:
        """Count a miss, such as ``"not_found"``."""
        self.engine.counters.count(self.lookup(f"miss:{reason}"), namespace=self.lineage.namespace)
        self.prompt.miss = reason

    def catch_up(self, *, compare: bool = True) -> bool:
        """Bring the lineage up to date with the context; returns whether everything that the context holds is known.

        With `compare`, the tokens in ``llm.input_ids`` must be the known ones. Between two generated tokens that would
        be most of the cost, and nothing is captured or restored there.
        """
        lineage, llm = self.lineage, self.llm
        if self.watch is not None and not lineage.in_flight and self.watch.has_decoded():
            if lineage.unknown is None:
                lineage.lose(Unknown.CHANGED)
            self.watch.note_decoded()
        n, known = llm.n_tokens, lineage.n
        if lineage.unknown is None:
            is_other = (compare or n < known) and lineage.tokens[:n].tobytes() != llm.input_ids[:n].tobytes()
            if n > known or is_other:
                lineage.lose(Unknown.CHANGED)
            elif not self.memory.holds(n):
                lineage.lose(Unknown.STEPPED_BACK if n < known else Unknown.CHANGED)
            else:
                lineage.rewind(n)
        if lineage.unknown is not None and n == 0 and self.memory.empty():
            lineage.replace(())
        return lineage.unknown is None

    def agrees(self, n_evaluated: int) -> bool:
        """Whether the ``Llama`` and its memory hold the known tokens, of which the last `n_evaluated` are new."""
        llm, n = self.llm, self.lineage.n
        new = slice(n - n_evaluated, n)
        # called for each token: bytes compare ten times as fast as arrays
        are_equal = self.lineage.tokens[new].tobytes() == llm.input_ids[new].tobytes()
        return are_equal and llm.n_tokens == n and self.memory.end() == n

    def adopt(self) -> None:
        """Trust ``llm.input_ids``, for which the caller vouches, unless it has placeholders for images."""
        llm = self.llm
        tokens = np.asarray(live_tokens(llm), "<i4")
        if (tokens < 0).any():
            self.lineage.lose(Unknown.CHANGED)
        else:
            self.lineage.replace(tokens)

    def known_tokens(self) -> Tokens | None:
        """What the context holds; None if that is not known, or not stored (`bypass_reason`)."""
        return self.lineage.tokens if self.bypass_reason() is None and self.catch_up() else None

    def continued(self, tokens: Tokens) -> int:
        """The length of the known prefix of a sequence from which the context can continue."""
        known = self.known_tokens()
        n = common_prefix(known, tokens) if known is not None else 0
        return n if n == self.llm.n_tokens or self.memory.holds(n) else 0

    def live_prefix(self, prompt: Tokens) -> int:
        """The length of the prefix of a prompt that ``llm.input_ids`` has."""
        return common_prefix(np.asarray(live_tokens(self.llm), "<i4"), prompt)

    def reusable_prefix(self, prompt: Tokens) -> int:
        """The length of the live prefix of a prompt. If the context cannot step back to it, it is emptied.

        Otherwise llama-cpp-python would continue there, with rows missing from a window, or a wrong recurrent state.
        """
        live = self.live_prefix(prompt)
        if 0 < live < self.llm.n_tokens and not self.memory.holds(live):
            self.empty()
            return 0
        return live

    def has_placeholders(self, prompt: Tokens) -> bool:
        """Whether the live prefix of a prompt has rows that are not of tokens, and cannot be computed again.

        In ``llm.input_ids`` and in the prompt negative numbers stand for them: rows of an image, or of a soft prompt.
        """
        live = self.live_prefix(prompt)
        return bool((prompt[:live] < 0).any()) and self.memory.holds(live)

    def empty(self) -> None:
        """Make the context empty, as ``Llama.reset`` does, and note that it is."""
        llm, before = self.llm, self.lineage.begin()
        set_end(llm, 0)
        if self.memory.empty():
            self.lineage.replace(())
        else:
            self.lineage.end(before or Unknown.INTERRUPTED)

    def disown_unscored(self) -> None:
        """Make llama-cpp-python recompute tokens that were restored without logits, by removing them from `input_ids`.

        A running generation continues. Nothing of llama.cpp is called: the ``Llama`` may be closed.
        """
        llm = self.llm_or_none
        if llm is not None and keeps_all_logits(llm):
            live_tokens(llm)[: self.lineage.unscored] = -1

    def settle(self) -> bool:
        """Undo a change by the store that was interrupted; returns whether the context had to be cleared.

        Everything that uses the context calls this first. Raises `ContextError` if the ``Llama`` is closed.
        """
        pointer_of(self.llm)
        self.lineage.settle()
        if not self.memory.settle():
            return False
        self.lineage.lose(Unknown.INTERRUPTED)
        return True

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A block that loads a whole state. If it fails or is interrupted, the context is cleared."""
        self.memory.unfinished.begin("unverified")
        try:
            yield
        except BaseException:
            self.settle()
            raise
        self.memory.unfinished.unverified = False

    def note_use(self, place: Place, pages: Sequence[Page], n_tokens: int) -> None:
        """Note that a prompt of this many tokens was served with these pages; none for a miss."""
        self.engine.touch(place.namespace.key, pages, n_tokens)
        self.engine.write_queue.nudge()

    def set_live(self, prompt: Tokens) -> None:
        """Note that the context holds this prompt, and that a token must be evaluated before one is sampled."""
        llm, n = self.llm, len(prompt)
        llm.input_ids[:n] = prompt
        set_end(llm, n)
        self.lineage.replace(prompt, unscored=n)

    def rate_of(self, pages: Sequence[Page]) -> ComputeRate:
        """The rate for these pages: `far_rate` if any of them is far, else `rate`."""
        if self.engine.n_near(pages) == len(pages):
            return self.rate
        self.far_rate.token_seconds = self.rate.token_seconds
        return self.far_rate

    def count_restore(self, gained: int, seconds: float, timed: Sequence[Page]) -> None:
        """Count a hit: the tokens gained, the seconds that it took, and the pages whose compute times are added up."""
        self.prompt.restored += gained
        self.prompt.restore_seconds += seconds
        share = gained / (sum(page.n_tokens for page in timed) or 1)
        saved = sum(page.compute_us for page in timed) * share / 1e6 - seconds
        name, namespace = self.lookup("hits"), self.lineage.namespace
        self.engine.counters.restored(gained, seconds, saved, name=name, namespace=namespace)
