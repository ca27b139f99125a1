"""A backend whose calls are counted and can be made to fail, and what an engine knows compared with what is stored."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page, depth_first
from prefixstore.engine.page_view import Entry
from prefixstore.errors import UnavailableError
from prefixstore.format.keys import SNAPSHOT
from prefixstore.format.record import Record

__all__ = ["Fragile", "Lent", "assert_true", "known_keys", "known_now"]


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
    error
        What is raised.
    on_call
        Called with the name of each operation in a transaction, before it.
    calls
        How often each operation was called, in views and transactions.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.fails_at: int | None = None
        self.error: BaseException = UnavailableError("fails on purpose")
        self.calls: Counter[str] = Counter()
        self._in_update = False
        self.on_call: Callable[[str], None] = lambda name: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def called(self, name: str) -> None:
        self.calls[name] += 1
        if self._in_update:
            self.on_call(name)
        if self.fails_at is not None and self._in_update:
            self.fails_at -= 1
            if self.fails_at == 0:
                self.fails_at = None
                raise self.error

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


def known_keys(engine: Engine) -> set[bytes]:
    """All pages that an engine knows once it has read everything."""
    return {page.key for page in engine.pages()}


def known_now(engine: Engine) -> list[Page]:
    """The pages that an engine knows, without asking the location, in the order of their sequences."""
    return list(depth_first(engine._catalog._contents.index.roots()))


def assert_true(engine: Engine) -> None:
    """What the catalog of an engine knows is what the location has; and what it knows to be missing, is."""
    catalog = engine._catalog
    contents = catalog._contents
    with engine.view() as view:
        stored = {key: Entry(key, record, usage) for key, record, usage in view.scan()}
    records = {key: one.record for key, one in stored.items() if isinstance(one.record, Record)}
    # uses that are still to be written have moved the expiry
    used = contents.deferred.uses
    for page in contents.index:
        assert page.is_stored == (page.key in records) or page.key in contents.pending
        if page.is_stored:
            record, usage = records[page.key], stored[page.key].usage
            assert (page.parent, page.start, page.tokens) == (record.parent, record.start, record.tokens)
            assert (page.form, page.stored_bytes) == (record.form, record.stored_bytes)
            assert (page.pinned, page.priority) == (usage.pinned, usage.priority)
            # what others have used is announced only from time to time
            assert page.expires == usage.expires or page.key in used or 0 < page.expires < usage.expires
    for node in (*contents.index._roots.values(), *contents.index):
        assert len(node.sealed) == len(node.children) + 1
        for key, record in records.items():
            if (record.parent, key in contents.index) == (node.key, False) and record.follows(records.get(node.key)):
                if record.form == SNAPSHOT:
                    assert not node.knows_snapshots
                else:
                    assert not node.sealed[bisect_left(node.child_tokens, record.tokens)]
    assert contents.journal is None
    assert [one for one in engine.check() if one.rule == "index"] == []


class Lent:
    """A backend that is not closed with its engine."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        pass
