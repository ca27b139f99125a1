"""Generations of a server that may lose its latest changes: it restarts from an older copy, or a replica takes over.

It then counts the same generations again, for other changes. Each change has a random number beside its generation, and
each request names the last pair that this process has seen: so the reply tells whether the server still knows it.
If it does not, the generations of this process continue after the highest that it has seen, and changes since an
earlier one are unknown: everything that was known of the location is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from prefixstore.backends import refusals
from prefixstore.backends.valkey.entries import entries_in
from prefixstore.backends.valkey.layout import MAGIC, Counts
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import FORMAT_VERSION

__all__ = ["COMPLETE", "Head", "History", "changed_in"]

# how many structures a location has; with fewer the server has evicted some
COMPLETE = 5
_CHANGE_BYTES = 16


class History(NamedTuple):
    """The last generation that this process has seen of a server.

    Attributes
    ----------
    generation, change
        As the server counts, and the number of the change that led to it.
    shift
        How much more it is for this process.
    floor
        The first generation of this process, in its own count, that belongs to what the server has now.
    """

    generation: int = 0
    change: bytes = b""
    shift: int = 0
    floor: int = 0


class Head(NamedTuple):
    """The facts of a whole location at one moment.

    Attributes
    ----------
    history
        With its generation.
    n_structures
        `COMPLETE`; 0 if there is no location; otherwise a part of it is gone.
    counts
        What is counted.
    since
        The generation that the question named, in the count of this process.
    changes
        What each later generation has changed, as the server has logged it; None if that is not known any more.
    pages
        The entries of these pages, empty for those that are gone; None if they are too many.
    """

    history: History
    n_structures: int
    counts: Counts
    since: int
    changes: Sequence[bytes] | None
    pages: dict[bytes, bytes] | None

    @property
    def generation(self) -> int:
        """The generation, as this process counts."""
        return self.history.generation + self.history.shift

    @property
    def server_generation(self) -> bytes:
        """The generation, as the server counts."""
        return str(self.history.generation).encode()

    @classmethod
    def of(cls, answer: Sequence[Any], seen: History, where: str) -> Head:
        """Parse the script's reply to a request that named `seen`.

        Raises
        ------
        IncompatibleError
            If the location is that of another application, or has another format.
        CorruptError
            If what it counts cannot be read.
        """
        n_structures, meta, before, logged, pages = answer[:5]
        magic, version, generation, change, *counts = meta
        since = seen.generation + seen.shift
        if n_structures == COMPLETE or magic is not None:
            _require_ours(magic, version, where)
        if n_structures != COMPLETE:
            # what is left of it is dropped by the next writer
            return cls(_continued(seen, 0, b"", None), n_structures, Counts(0, 0, 0, 0), since, None, None)
        try:
            history = _continued(seen, int(generation), change, before)
            return cls(
                history,
                n_structures,
                Counts(*map(int, counts)),
                since,
                _changes(history, seen, logged),
                dict(entries_in(pages)) if pages is not None else None,
            )
        except (TypeError, ValueError) as error:
            raise CorruptError(f"{where}: its counters cannot be read: {error}") from None

    def changes_since(self, since: int) -> list[bytes] | None:
        """As `View.changes`; None also if the request named a later generation."""
        if since == self.generation:
            return []
        if self.changes is None or not max(self.since, self.history.floor) <= since < self.generation:
            return None
        return changed_in(self.changes[since - self.since :])


def _require_ours(magic: bytes | None, version: bytes | None, where: str) -> None:
    if magic != MAGIC.encode():
        raise refusals.foreign(where, "keys")
    if version is None or not version.isdigit():
        raise IncompatibleError(f"{where} has no format; choose another location")
    if int(version) != FORMAT_VERSION:
        raise refusals.other_format(where, int(version), FORMAT_VERSION)


def _continued(seen: History, generation: int, change: bytes, before: bytes | None) -> History:
    """The history after an answer; `before` is the number of the change that the server has for `seen`, if it has."""
    is_same = generation > seen.generation if before is None else before == seen.change
    if is_same and generation >= seen.generation:
        return History(generation, change, seen.shift, seen.floor)
    if (generation, change) == (seen.generation, seen.change):
        return seen
    shift = max(seen.shift, seen.generation + seen.shift + 1 - generation)
    return History(generation, change, shift, generation + shift)


def _changes(history: History, seen: History, logged: Sequence[bytes]) -> Sequence[bytes] | None:
    is_whole = history.floor == seen.floor and len(logged) == history.generation - seen.generation
    return logged if is_whole else None


def changed_in(logged: Sequence[bytes]) -> list[bytes]:
    """The keys of the changed pages, oldest first, in what the server has logged of some generations."""
    return [keys[at : at + KEY_BYTES] for keys in logged for at in range(_CHANGE_BYTES, len(keys), KEY_BYTES)]
