"""Text that is longer than the context: its first and its last tokens stay, those between are dropped (StreamingLLM).

What remains is moved: llama.cpp rotates the keys to their new positions. Such rows still depend on what was dropped, so
they are not those that computing the remaining tokens would give, and nothing is stored of them. Nor are they reused:
the context is emptied at the end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import llama_cpp

from prefixstore.errors import ContextError, InvalidParameterError, MisuseError
from prefixstore.format.keys import Tokens, as_tokens
from prefixstore.llama.binding import model_of, n_places, pointer_of, sample, sampler_of, vocab_of
from prefixstore.llama.hook import Hook
from prefixstore.llama.lineage import Unknown
from prefixstore.llama.paged_memory import PagedMemory

__all__ = ["MovingWindow", "generated"]

# llama.cpp ends the process when it turns keys of another type, although it says that it can
TYPES = (llama_cpp.GGML_TYPE_F32, llama_cpp.GGML_TYPE_F16)
ROPES = (llama_cpp.LLAMA_ROPE_TYPE_NORM, llama_cpp.LLAMA_ROPE_TYPE_NEOX)
# beside the window there is room for this part of it at most, so that not each token has all keys turned
PART_DROPPED = 4


def _cannot_shift(hook: Hook) -> str | None:
    """Why the positions of a context cannot be shifted; None if they can."""
    llm, kind = hook.llm, hook.context.kind
    memory, model = llama_cpp.llama_get_memory(pointer_of(llm)), model_of(llm)
    has_rope = llama_cpp.llama_model_rope_type(model) in ROPES
    reasons = {
        "recurrent memory has no rows that could be dropped": kind.has_snapshots,
        f"its states cannot be stored ({kind.reason})": kind.reason is not None,
        "it overwrites rows that leave its sliding window; load the model with swa_full=True": (
            hook.context.memory.overwrites_window
        ),
        "its keys are quantized, or bf16; load the model with type_k of f16 or f32": (
            llm.context_params.type_k not in TYPES
        ),
        "llama.cpp cannot shift its positions": not (has_rope and memory and llama_cpp.llama_memory_can_shift(memory)),
        "a draft model is set": llm.draft_model is not None,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


class MovingWindow:
    """A context that holds the first tokens of a text, and the last ones; see `Session.stream`.

    `before_first` is called before anything is dropped.
    """

    def __init__(
        self, hook: Hook, sink: int, window: int, *, exact: bool, before_first: Callable[[], object] = lambda: None
    ) -> None:
        n_ctx = n_places(hook.llm)
        for name, value, least in (("sink", sink, 0), ("window", window, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidParameterError(f"{name}={value!r} must be an integer of at least {least}")
        if sink + window >= n_ctx:
            raise InvalidParameterError(
                f"sink={sink} and window={window} must be fewer than the {n_ctx} tokens of the context together"
            )
        reason = _cannot_shift(hook) if not exact else None
        if reason is not None:
            raise ContextError(f"this context cannot be shifted: {reason}; exact=True computes the window again")
        self.hook = hook
        self._sink, self._window, self._exact = sink, window, exact
        self._most = sink + window + max(1, min(n_ctx - sink - window, window // PART_DROPPED))
        self._before_first = before_first
        self._has_moved = False
        # what the window may need again
        self._first: list[int] = []
        self._last: deque[int] = deque(maxlen=window)

    def feed(self, tokens: Sequence[int], n_live: int = 0) -> None:
        """Take further tokens, of which the context holds the first ones: the others are evaluated.

        What leaves the window is dropped to make room for them.
        """
        llm = self.hook.llm
        self._note(tokens[:n_live])
        while n_live < len(tokens):
            room = self._most - llm.n_tokens
            if room <= 0:
                self._move()
                continue
            some = tokens[n_live : n_live + min(room, llm.n_batch)]
            llm.eval(some)
            self._note(some)
            n_live += len(some)

    def end(self) -> None:
        """Empty the context, if anything was dropped from it: what it holds is not to be continued."""
        if self._has_moved:
            try:
                with suppress(ContextError):  # the Llama is closed
                    self.hook.context.settle()
                    self.hook.context.empty()
            finally:
                self.hook.writes = True

    def _note(self, tokens: Sequence[int]) -> None:
        self._first += tokens[: max(self._sink - len(self._first), 0)]
        self._last.extend(tokens)

    def _move(self) -> None:
        if not self._has_moved:
            self._before_first()
            self._has_moved = True
            self.hook.writes = False
        if self._exact:
            kept = [*self._first, *self._last]
            self.hook.llm.eval(kept[self.hook.rewind(as_tokens(kept)) :])
        else:
            self._shift(self.hook.llm.n_tokens - self._sink - self._window)

    def _shift(self, drop: int) -> None:
        """Drop `drop` tokens behind the sink, and move the others to their places.

        From here on it is not known what the context holds, and no prompt continues what was moved.
        """
        context, keep = self.hook.context, self._sink
        context.settle()
        llm, memory = context.llm, context.memory
        assert isinstance(memory, PagedMemory)  # see `_cannot_shift`
        n = llm.n_tokens
        context.lineage.lose(Unknown.SHIFTED)
        with context.loading():
            # first the names: a prompt never seems to begin with what was moved
            llm.input_ids[keep:n] = -1
            memory.shift(keep, drop)
            llm.n_tokens = n - drop


def generated(
    moving: MovingWindow,
    prompt: Tokens,
    max_tokens: int | None,
    restore: Callable[[Tokens], int],
    sampling: dict[str, Any],
) -> Iterator[int]:
    """Generate tokens after a prompt, without an end; see `Session.stream`."""
    if not len(prompt):
        raise InvalidParameterError("prompt is empty")
    is_number = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    if max_tokens is not None and not (is_number and max_tokens >= 0):
        raise InvalidParameterError(
            f"max_tokens={max_tokens!r} must be an integer of at least 0, or None to continue until the model "
            f"ends the text"
        )
    hook, llm = moving.hook, moving.hook.llm

    def tokens() -> Iterator[int]:
        try:
            moving.feed(prompt.tolist(), restore(prompt))
            sampler = sampler_of(llm, sampling)
            for _ in itertools.count() if max_tokens is None else range(max_tokens):
                token = sample(llm, sampler)
                if llama_cpp.llama_vocab_is_eog(vocab_of(llm), token):
                    return
                before = hook.n_evaluated, llm.n_tokens
                yield token
                if before != (hook.n_evaluated, llm.n_tokens):
                    raise MisuseError("the context was used for something else; the stream cannot continue")
                moving.feed([token])
        finally:
            moving.end()

    return tokens()
