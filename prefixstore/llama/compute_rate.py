"""How long computing tokens and restoring pages take in one context, measured as they happen."""

from __future__ import annotations

__all__ = ["ComputeRate"]

WEIGHT = 0.3
# batches of fewer tokens say nothing about the rate of a prefill
SMALLEST_BATCH = 32
# A restore must be slower by this factor before it is skipped. One in so many is tried anyway, to measure again;
# if it is slower again, the next one comes after twice as many.
MAX_SLOWDOWN = 1.2
RETRY_EVERY = 8
MAX_RETRY_EVERY = 4096


class ComputeRate:
    """Seconds for each token computed and for each page restored; decides whether a restore is worth it."""

    def __init__(self) -> None:
        self.token_seconds: float | None = None
        self.page_seconds: float | None = None
        self._skipped = 0
        self._retry_after = RETRY_EVERY

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Note that a batch was evaluated."""
        if n_tokens >= SMALLEST_BATCH:
            self.token_seconds = _mean(self.token_seconds, seconds / n_tokens)

    def restored(self, n_pages: int, seconds: float) -> None:
        """Note that pages were restored."""
        self.page_seconds = _mean(self.page_seconds, seconds / n_pages)

    def is_worth(self, n_tokens: int, n_pages: int) -> bool:
        """Whether restoring `n_pages` is expected to be faster than computing the `n_tokens` they save."""
        if self.token_seconds is None or self.page_seconds is None:
            return True
        if self.page_seconds * n_pages <= self.token_seconds * n_tokens * MAX_SLOWDOWN:
            self._skipped, self._retry_after = 0, RETRY_EVERY
            return True
        self._skipped += 1
        if self._skipped < self._retry_after:
            return False
        self._skipped, self._retry_after = 0, min(2 * self._retry_after, MAX_RETRY_EVERY)
        return True

    def compute_us(self, n_tokens: int) -> int:
        """Microseconds that computing so many tokens takes here; 0 until something was computed."""
        return round(self.token_seconds * n_tokens * 1e6) if self.token_seconds is not None else 0


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
