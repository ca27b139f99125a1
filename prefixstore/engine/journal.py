"""What an open transaction has changed in the catalog, so that a failure undoes exactly that."""

from __future__ import annotations

from collections.abc import Callable

from prefixstore.backends.threads import Signal

__all__ = ["Journal"]


class Journal:
    """The steps that undo changes, and those that wait for the commit. Used under the catalog's lock.

    Attributes
    ----------
    deleted
        Keys of the pages that the transaction has deleted, and not put again.
    deleted_from
        Namespaces from which the transaction has deleted pages.
    ended
        Set when the outcome of the transaction is in the catalog.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._after_commit: list[Callable[[], None]] = []
        self.deleted: set[bytes] = set()
        self.deleted_from: set[bytes] = set()
        self.ended = Signal()

    def undo(self, step: Callable[[], None]) -> None:
        """Have a function called if the transaction fails; the newest first."""
        self._undo.append(step)

    def after_commit(self, step: Callable[[], None]) -> None:
        """Have a function called if the transaction is committed."""
        self._after_commit.append(step)

    def roll_back(self) -> None:
        """Undo the changes of a failed transaction."""
        while self._undo:
            self._undo.pop()()

    def commit(self) -> None:
        """Make the calls that wait for the commit."""
        for step in self._after_commit:
            step()
