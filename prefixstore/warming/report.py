"""What a warming job reports: its progress while it runs, and its result at the end."""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.warming.prompts import Problem

__all__ = ["Progress", "WarmReport"]


@dataclass(frozen=True)
class Progress:
    """A job's progress.

    Attributes
    ----------
    phase
        ``"reading"`` prompts, or ``"evaluating"``.
    prompts
        Prompts read.
    unique_tokens, missing_tokens
        Tokens of the trie, and how many of them were not stored when the job began.
    done_tokens
        How many of the missing tokens are done, by any job.
    evaluated_tokens
        Tokens that this job has evaluated.
    walked_tokens
        Tokens of the finished prompts; shared tokens count once for each prompt.
    stored_bytes
        Growth of the store since the job began.
    seconds
        Time since the evaluation began.
    """

    phase: str = "reading"
    prompts: int = 0
    unique_tokens: int = 0
    missing_tokens: int = 0
    done_tokens: int = 0
    evaluated_tokens: int = 0
    walked_tokens: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Missing tokens done per second."""
        return self.done_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Expected time to the end at this rate; None while the rate is unknown."""
        left = self.missing_tokens - self.done_tokens
        return left / self.rate if self.rate else None if left else 0.0

    @property
    def hit_share(self) -> float:
        """The share of the finished prompts' tokens that did not have to be evaluated."""
        return max(0.0, 1 - self.evaluated_tokens / self.walked_tokens) if self.walked_tokens else 0.0


@dataclass(frozen=True)
class WarmReport:
    """The result of a job.

    Attributes
    ----------
    prompts, prompt_tokens
        Usable prompts, duplicates included, and their tokens.
    unique_tokens, missing_tokens
        Tokens of their trie, and how many of them were not stored before.
    evaluated_tokens
        Tokens that this job has evaluated.
    stored_bytes
        Growth of the store, in bytes of pages.
    seconds
        From the first prompt read to the last page written.
    short
        Prompts with fewer tokens than the store keeps (`min_tokens`); they are skipped.
    unstored
        Origins of prompts that are not completely stored, since there was no space; if the job was not interrupted.
    problems
        Prompts that could not be used.
    interrupted
        Whether the job was stopped before its end.
    full
        Whether it ended before its end because the store does not keep what it computed: it is full.
    """

    prompts: int
    prompt_tokens: int
    unique_tokens: int
    missing_tokens: int
    evaluated_tokens: int
    stored_bytes: int
    seconds: float
    short: int = 0
    unstored: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    interrupted: bool = False
    full: bool = False
