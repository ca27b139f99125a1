"""A backend whose calls are counted and can be made to fail, and what an engine knows compared with what is stored."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

from prefixstore.engine.engine import Engine
from prefixstore.errors import UnavailableError

__all__ = ["Fragile", "assert_true"]


class _Counted:
    """A transaction whose calls and properties are counted, and fail when it is their turn."""

    def __init__(self, inner: Any, owner: Fragile) -> None:
        self._inner = inner
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name == "rows":
            # what is read through them is not counted
            return value
        if not callable(value):
            self._owner.called(name)
            return value

        def counted(*args: Any, **options: Any) -> Any:
            self._owner.called(name)
            return value(*args, **options)

        return counted


class Fragile:
    """Another backend, whose transactions fail at a call that is chosen by its number.

    Attributes
    ----------
    fails_at
        The number of the call in transactions that fails, counted from now on; None for none.
    calls
        How often each operation was called, in views and transactions.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.fails_at: int | None = None
        self.calls: Counter[str] = Counter()
        self._in_update = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def called(self, name: str) -> None:
        self.calls[name] += 1
        if self.fails_at is not None and self._in_update:
            self.fails_at -= 1
            if self.fails_at == 0:
                self.fails_at = None
                raise UnavailableError("fails on purpose")

    @contextmanager
    def view(self):
        with self.inner.view() as view:
            yield _Counted(view, self)

    @contextmanager
    def update(self):
        with self.inner.update() as transaction:
            self._in_update = True
            try:
                self.called("update")
                yield _Counted(transaction, self)
                # an error here rolls the transaction back
                self.called("commit")
            finally:
                self._in_update = False


def assert_true(engine: Engine) -> None:
    """The indexes of the location are those of its pages."""
    assert [one for one in engine.upkeep.check() if one.rule == "index"] == []
