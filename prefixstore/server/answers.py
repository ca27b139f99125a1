"""What the end of a response reports about the work that was done for it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace

__all__ = ["AnswerTail", "Usage"]

KEPT = 8192
# Quotes inside of a JSON text are escaped, so that these match the fields of the server and nothing that a model says.
TIMINGS = re.compile(rb'"timings"\s*:\s*\{([^{}]*)\}')
FIELD = re.compile(rb'"(\w+)"\s*:\s*([0-9.eE+-]+)')
# The end of an answer that is cut may be half a number, and a client may have numbers repeated that no count is.
LARGEST = 1e15


@dataclass(frozen=True)
class Usage:
    """Tokens and time of a request, as the server reports them.

    Attributes
    ----------
    cached_tokens, computed_tokens
        Prompt tokens that were in the slot; those that were computed.
    generated_tokens
        Tokens of the answer.
    computed_seconds
        Time that computing the prompt took; None if the answer does not say.
    """

    cached_tokens: int
    computed_tokens: int
    generated_tokens: int = 0
    computed_seconds: float | None = None

    def after(self, n_ahead: int) -> Usage:
        """The same, with tokens that were computed ahead of the request, and are cached ones for it."""
        return replace(
            self,
            cached_tokens=max(self.cached_tokens - n_ahead, 0),
            computed_tokens=self.computed_tokens + n_ahead,
        )


class AnswerTail:
    """The last bytes of a response that is passed through."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """The next bytes."""
        self._tail = (self._tail + chunk)[-KEPT:]

    def usage(self) -> Usage | None:
        """What the server reports; None if it reports nothing, as before the end of a stream."""
        found = TIMINGS.findall(self._tail)
        if found:
            timings = _numbers(found[-1])
            if b"cache_n" in timings and b"prompt_n" in timings:
                milliseconds = timings.get(b"prompt_ms")
                return Usage(
                    int(timings[b"cache_n"]),
                    int(timings[b"prompt_n"]),
                    int(timings.get(b"predicted_n", 0)),
                    None if milliseconds is None else milliseconds / 1e3,
                )
        fields = _numbers(self._tail)
        if b"cache_read_input_tokens" in fields and b"input_tokens" in fields:
            return Usage(
                int(fields[b"cache_read_input_tokens"]),
                int(fields[b"input_tokens"]),
                int(fields.get(b"output_tokens", 0)),
            )
        total = fields.get(b"prompt_tokens", fields.get(b"input_tokens"))
        if total is None or b"cached_tokens" not in fields:
            return None
        cached = int(fields[b"cached_tokens"])
        generated = fields.get(b"completion_tokens", fields.get(b"output_tokens", 0))
        return Usage(cached, int(total) - cached, int(generated))


def _numbers(text: bytes) -> dict[bytes, float]:
    """The fields of a JSON text that are counts or times."""
    found: dict[bytes, float] = {}
    for name, written in FIELD.findall(text):
        with contextlib.suppress(ValueError):
            value = float(written)
            if 0 <= value <= LARGEST:
                found[name] = value
    return found
