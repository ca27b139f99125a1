"""How long a server takes to compute, to restore and to save, measured as it happens, and what its answers say."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from dataclasses import dataclass, field, replace
from http import HTTPStatus

WEIGHT = 0.3
# fewer tokens say nothing about the rate of a prefill
SMALLEST_PREFILL = 32
SMALLEST_FILE = 1 << 16
# as many are computed as fast as one
FEW_TOKENS = 8
# a stop in a prompt divides batches, and the server computes the last tokens before it in one of their own
BATCHES_OF_A_STOP = 2
COPIES_REMEMBERED = 16
# Work on a slot is done instead of computing tokens unless it takes longer than this many times as long.
MAX_SLOWDOWN = 1.0
# By how much less a restore is believed to take each time that one is left out because it is slower than computing: the
# last one may have been slow by chance, and nothing is learned of those that are left out.
HOPE = 0.98
# What an answer may say of its prompt: at its end, and that of /v1/messages at the beginning of a stream. Quotes inside
# of a JSON text are escaped, so that this matches fields of the server and nothing that a model says. An object that
# begins with a code and a message is an error, which a stream that has begun may have in place of its end.
FIELD = re.compile(
    rb'"((?:cache|prompt|predicted)_n|prompt_ms|(?:cache_read_input|input|output|prompt|cached|completion)_tokens|'
    rb'(?<=\{")code(?="\s*:\s*\d+,\s*"message"))"\s*:\s*([0-9.eE+-]+)(?=[,}\s])'
)
LONGEST_FIELD = 80
# a client may have numbers repeated that no count is
LARGEST = 1e15


@dataclass
class Rates:
    """Seconds for each unit of work. The values before the first measurement favour the store."""

    # for a prompt token computed
    token_seconds: float = 1e-3
    # for a byte restored from the store into a slot, and for one saved
    restore_seconds: float = 2e-9
    save_seconds: float = 3e-9
    # of a token in a slot file
    token_bytes: float = 4096.0
    # the last batches of few tokens, and copies of slots
    _batches: deque[float] = field(default_factory=lambda: deque(maxlen=COPIES_REMEMBERED))
    _copies: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=COPIES_REMEMBERED))
    _measured: frozenset[str] = frozenset()

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Note that this many tokens of a prompt were computed."""
        if n_tokens >= SMALLEST_PREFILL:
            self._note("token_seconds", seconds / n_tokens)
        elif 0 < n_tokens <= FEW_TOKENS:
            self._batches.append(seconds)

    def restored(self, n_tokens: int, n_bytes: int, seconds: float) -> None:
        """Note that a slot was filled."""
        if n_bytes >= SMALLEST_FILE:
            self._note("restore_seconds", seconds / n_bytes)
            self._note("token_bytes", n_bytes / max(n_tokens, 1))

    def saved(self, n_tokens: int, n_bytes: int, seconds: float) -> None:
        """Note that a slot was saved."""
        self._copies.append((n_tokens, seconds))
        if n_bytes >= SMALLEST_FILE:
            self._note("save_seconds", seconds / n_bytes)
            self._note("token_bytes", n_bytes / max(n_tokens, 1))

    def computing(self, n_tokens: int) -> float:
        """Seconds that computing this many tokens takes."""
        return self.token_seconds * max(n_tokens, 0)

    def restoring(self, n_bytes: float) -> float:
        """Seconds that restoring this many bytes takes."""
        return self.restore_seconds * n_bytes

    def saving(self, n_tokens: int) -> float:
        """Seconds that saving a slot with this many tokens takes."""
        return self.save_seconds * self.token_bytes * n_tokens

    def stopping(self, n_tokens: int) -> float:
        """Seconds that it takes at most to stop after this many tokens of a prompt, and to copy the slot.

        A file of twice as many tokens takes at most twice as long, and of recurrent memory no longer. Of the last ones
        the fastest counts: beside other prompts a batch takes as long as theirs, with a stop or without.
        """
        copying = (seconds * max(n_tokens / max(n, 1), 1.0) for n, seconds in self._copies)
        return min(copying, default=0.0) + BATCHES_OF_A_STOP * min(self._batches, default=0.0)

    def is_faster(self, seconds: float, n_tokens: int) -> bool:
        """Whether work that takes this many seconds is faster than computing this many tokens."""
        return seconds < self.computing(n_tokens) * MAX_SLOWDOWN

    def left_out(self) -> None:
        """Note that something was not restored, since that would have been slower than computing it."""
        self.restore_seconds *= HOPE

    def _note(self, name: str, value: float) -> None:
        old = getattr(self, name)
        setattr(self, name, (1 - WEIGHT) * old + WEIGHT * value if name in self._measured else value)
        self._measured |= {name}


@dataclass(frozen=True)
class RequestUsage:
    """Tokens and time of a request, as the server reports them.

    Of the prompt, `cached_tokens` were in the slot, and computing the others took this many seconds; None if the answer
    does not say.
    """

    cached_tokens: int
    computed_tokens: int
    generated_tokens: int = 0
    computed_seconds: float | None = None

    def after(self, n_ahead: int) -> RequestUsage:
        """The same, with tokens that were computed ahead of the request, and are cached ones for it."""
        return replace(
            self,
            cached_tokens=max(self.cached_tokens - n_ahead, 0),
            computed_tokens=self.computed_tokens + n_ahead,
        )


class Report:
    """What a response that is passed through says of its prompt; its `status` is None until it has begun."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._fields: dict[bytes, float] = {}
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """The next bytes."""
        text = self._rest + chunk
        for name, written in FIELD.findall(text):
            with contextlib.suppress(ValueError):
                value = float(written)
                if 0 <= value <= LARGEST:
                    self._fields[name] = value
        self._rest = text[-LONGEST_FIELD:]

    @property
    def has_failed(self) -> bool:
        """Whether the server has failed to compute it: what its slot holds after that is not known."""
        return HTTPStatus.INTERNAL_SERVER_ERROR in (self._fields.get(b"code"), self.status)

    def usage(self) -> RequestUsage | None:
        """What the server reports; None if it reports nothing, as before the end of most streams."""
        said = self._fields
        if b"cache_n" in said and b"prompt_n" in said:
            cached, computed = said[b"cache_n"], said[b"prompt_n"]
        elif b"cache_read_input_tokens" in said and b"input_tokens" in said:
            cached, computed = said[b"cache_read_input_tokens"], said[b"input_tokens"]
        elif b"cached_tokens" in said and (total := said.get(b"prompt_tokens", said.get(b"input_tokens"))) is not None:
            cached, computed = said[b"cached_tokens"], total - said[b"cached_tokens"]
        else:
            return None
        generated = said.get(b"predicted_n", said.get(b"completion_tokens", said.get(b"output_tokens", 0)))
        milliseconds = said.get(b"prompt_ms")
        seconds = None if milliseconds is None else milliseconds / 1e3
        return RequestUsage(int(cached), int(computed), int(generated), seconds)
