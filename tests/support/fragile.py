"""A backend whose calls are counted and can be made to fail, and what an engine knows compared with what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing, contextmanager
from typing import Any

from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.index import NEVER
from prefixstore.errors import UnavailableError
from prefixstore.format.autocodec import pick
from prefixstore.stats import Counters

__all__ = ["Fragile", "assert_complete", "knowledge"]


class _Counted:
    """A transaction whose calls and properties are counted, and fail when it is their turn."""

    def __init__(self, inner: Any, owner: Fragile) -> None:
        self._inner = inner
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
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


def knowledge(engine: Engine, without: Collection[bytes] = ()) -> dict[str, Any]:
    """What the catalog of an engine says about what is stored; without the expiry of these pages."""
    catalog = engine._catalog
    index = catalog._contents.index
    return {
        "pages": {
            page.key: (page.parent, page.start, page.tokens, page.form, page.stored_bytes, page.pinned, page.priority)
            for page in index
            if page.is_stored
        },
        "expires": {page.key: page.expires for page in index if page.key not in without},
        "victims": {page.key for page in index if page.may_be_victim},
        "fixed": {page.key for page in index if page.is_fixed},
        "unplaced": set(catalog._contents.strays._pages),
        "unreadable": (catalog._contents.strays.corrupt, catalog._contents.strays.newer),
        "totals": [index.totals.of(group) for group in (None, *sorted({page.namespace for page in index}))],
        "bytes": catalog.payload_bytes,
    }


def assert_complete(engine: Engine) -> None:
    """The catalog says what one says that is built from the location now, and its running figures are right."""
    catalog = engine._catalog
    inner = engine._backend.inner
    with closing(Engine(_Lent(inner), engine._budget, POLICIES["lru"](), pick("raw"), Counters())) as fresh:
        with fresh.view():
            pass
        # uses that are still to be written have moved the expiry
        used = set(catalog._contents.deferred.uses)
        assert knowledge(engine, used) == knowledge(fresh, used)
    index = catalog._contents.index
    queued = {key for _, key in catalog._contents.candidates._victims._heap}
    expiring = {key for _, key in catalog._contents.candidates._expiring._heap}
    for page in index:
        assert page.n_fixed == sum(child.is_fixed for child in page.dependents)
        assert page.n_endless == sum(child.kept_until == NEVER for child in page.dependents)
        assert page.kept_until == max([page.own_expiry, *(child.kept_until for child in page.dependents)])
        if page.may_be_victim and page.is_leaf and not page.pinned:
            assert page.key in queued
            assert not page.expires or page.key in expiring
    assert all(page.kept_until <= NEVER for page in index)
    assert catalog._contents.journal is None


class _Lent:
    """A backend that is not closed with its engine."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        pass
