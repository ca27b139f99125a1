"""Why a prompt is found, or not: the result of `PrefixStore.explain`, and its text."""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.units import counted


@dataclass(frozen=True)
class Fork:
    """Where a prompt diverges from the nearest stored sequence.

    Attributes
    ----------
    at
        How many tokens both begin with.
    before
        The text just before that place.
    here, there
        How the prompt continues from there, and how the stored sequence does.
    """

    at: int
    before: str
    here: str
    there: str


@dataclass(frozen=True)
class OtherSettings:
    """The prompt is stored in another namespace.

    Attributes
    ----------
    n_tokens
        How many of its tokens are.
    differences
        What differs: ``"type_k is q8_0 here, f16 in the store"``.
    """

    n_tokens: int
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """What is stored of a prompt, and why not more. ``print`` it to read it.

    Attributes
    ----------
    location
        The store.
    n_tokens
        Length of the prompt.
    n_shared
        How many tokens it shares with what is stored, in this namespace.
    n_matched
        How many of these can be restored: the same, or less where only snapshots can be resumed.
    page_keys
        The pages that hold them.
    reason
        Why the store does not have more, in a word: ``"complete"`` (it has all), ``"fork"`` (the prompt
        parts from what is stored), ``"end"`` (it continues where the stored sequence ends), ``"settings"`` (it is
        stored under other settings), ``"empty"`` (nothing of it is stored in this namespace), ``"snapshot"`` (more is
        shared, but no snapshot was taken there), ``"short"`` (less than ``min_tokens``), ``"unsupported"`` (states of
        this model or context cannot be stored).
    fork
        Where it parts from the nearest stored sequence; None if it does not.
    other_settings
        Other namespaces that have more of the prompt, the one with most first.
    min_tokens
        Shorter prompts and matches are neither stored nor restored.
    note
        Something else that matters; empty if nothing does.
    """

    location: str
    n_tokens: int
    n_shared: int
    n_matched: int
    page_keys: tuple[str, ...]
    reason: str
    fork: Fork | None
    other_settings: tuple[OtherSettings, ...]
    min_tokens: int
    note: str = ""

    def __str__(self) -> str:
        lines = [f"{self.location}: {self.n_matched:,} of {counted(self.n_tokens, 'token')} are stored.", self._why()]
        if self.fork is not None and self.reason in ("fork", "settings", "snapshot"):
            lines += [
                f"After {counted(self.fork.at, 'token')} the texts diverge:",
                f"  before  {_quoted(self.fork.before)}",
                f"  here    {_quoted(self.fork.here)}",
                f"  stored  {_quoted(self.fork.there)}",
            ]
        for one in self.other_settings:
            stored = f"Stored with other settings: {counted(one.n_tokens, 'token')}"
            lines.append(f"{stored}; {'; '.join(one.differences)}")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)

    def _why(self) -> str:
        found = {
            "complete": "All of it that can be restored: only the last token is computed.",
            "fork": "The rest differs from everything that is stored.",
            "end": "The stored sequence ends there; the rest was not computed, or not stored.",
            "settings": "It is stored for other settings, which cannot share states with these.",
            "empty": "Nothing of it is stored for this model and these settings.",
            "snapshot": f"{self.n_shared:,} tokens are the same; this model can only resume at a snapshot.",
            "short": f"Prompts and matches of fewer than min_tokens={self.min_tokens} tokens are always computed.",
            "unsupported": "States of this model, or context, cannot be stored.",
        }
        return found[self.reason]


def _quoted(text: str) -> str:
    return f'"{repr(text)[1:-1]}"'
