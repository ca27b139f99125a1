"""How one prompt was served: where its tokens came from, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LastPrompt", "PromptMeter"]


@dataclass(frozen=True)
class LastPrompt:
    """How a prompt was served for which a store was queried.

    Attributes
    ----------
    source
        ``"store"`` (something was restored), ``"live"`` (nothing had to be: the context held a part of it already) or
        ``"cold"`` (all of it had to be computed).
    n_tokens
        Length of the prompt.
    live, restored, computed
        Tokens of it that the context held, that were restored from the store, and that were computed. Together they are
        `n_tokens` once the prompt is evaluated.
    lookup_seconds
        Time that it took to find out what is stored, and to capture what the context held before.
    restore_seconds
        Time that it took to restore it.
    compute_seconds
        Time that it took to evaluate the tokens that were computed.
    miss
        Why nothing was used from the store: a name in ``Stats.misses``. None if something was restored, or the context
        held as much as the store.
    """

    source: str
    n_tokens: int
    live: int
    restored: int
    computed: int
    lookup_seconds: float
    restore_seconds: float
    compute_seconds: float
    miss: str | None


@dataclass(eq=False)
class PromptMeter:
    """Measures how a prompt is served. Written by the thread that uses the ``Llama``, and read by any.

    Attributes
    ----------
    is_prompt
        False for the tokens of a session that is resumed.
    n_tokens
        Length of the prompt; None until it is looked up.
    reused
        How many of its tokens need not be computed.
    restored
        How many of these were restored.
    lookup_seconds, restore_seconds, compute_seconds, miss
        As in `LastPrompt`.
    """

    is_prompt: bool = field(default=True, kw_only=True)
    n_tokens: int | None = None
    reused: int = 0
    restored: int = 0
    lookup_seconds: float = 0.0
    restore_seconds: float = 0.0
    compute_seconds: float = 0.0
    miss: str | None = None
    _computed: int = 0
    # tokens of the prompt that were not evaluated yet
    _due: int = 0
    _is_begun: bool = False

    def looked_up(self, n_tokens: int, reused: int, seconds: float) -> None:
        """Note that a prompt of so many tokens was looked up: tokens now live (`reused`), and the time it took."""
        self.n_tokens, self.reused = n_tokens, reused
        self.lookup_seconds = max(seconds - self.restore_seconds, 0.0)
        self._due = n_tokens - reused

    def begun(self, n_live: int) -> None:
        """Note that an evaluation begins after so many tokens: the first one shows how many were really reused."""
        if not self._is_begun and self.n_tokens is not None:
            self._is_begun = True
            self.reused = min(n_live, self.n_tokens)
            self._due = self.n_tokens - self.reused

    def evaluated(self, n: int, seconds: float) -> None:
        """Note that so many tokens were evaluated; those after the end of the prompt do not count."""
        if self._due:
            mine = min(n, self._due)
            self._due -= mine
            self._computed += mine
            self.compute_seconds += seconds * mine / n

    def record(self) -> LastPrompt | None:
        """How the prompt was served so far; None if it was not looked up."""
        if self.n_tokens is None:
            return None
        restored = min(self.restored, self.reused)
        live = self.reused - restored
        return LastPrompt(
            source="store" if restored else "live" if live else "cold",
            n_tokens=self.n_tokens,
            live=live,
            restored=restored,
            computed=self._computed,
            # to the microsecond, since people read it
            lookup_seconds=round(self.lookup_seconds, 6),
            restore_seconds=round(self.restore_seconds, 6),
            compute_seconds=round(self.compute_seconds, 6),
            miss=self.miss,
        )
