"""A backend whose calls are counted and can be made to fail, and what an engine knows compared with what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing, contextmanager
from typing import Any

from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES, VictimQueue
from prefixstore.engine.index import NEVER
from prefixstore.engine.page_columns import SHIFT
from prefixstore.engine.page_table import MASK
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
        "fixed": {page.key for page in index if index.table.is_fixed(index.table.find(page.key))},
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
    table = index.table
    assert sorted(page.key for page in index) == sorted(map(table.key, table))
    victims = {table.key(slot) for slot in VictimQueue(table, POLICIES["lru"]()).victims()}
    given = {table.key(slot) for slot in catalog._contents.candidates.victims().victims()}
    expiring = {table.key(slot) for slot in catalog._contents.candidates.expiring().victims()}
    for key in {*given, *expiring}:
        catalog._contents.candidates.add(key)
    assert given == victims
    for page in index:
        block, at = table.blocks[table.find(page.key) >> SHIFT], table.find(page.key) & MASK
        assert block.n_children[at] == len(page.dependents)
        assert block.n_fixed[at] == sum(table.is_fixed(table.find(child.key)) for child in page.dependents)
        entry = table.entry(table.find(page.key))
        assert entry[:8] == (
            page.key,
            page.namespace,
            page.end,
            page.last_used,
            page.expires,
            page.stored_bytes + len(page.tokens),
            page.priority,
            entry.uses,
        )
        assert entry[8:] == (page.codec, page.form, page.pinned, page.is_stored, page.may_be_victim, False)
        assert page.n_endless == sum(child.kept_until == NEVER for child in page.dependents)
        assert page.kept_until == max([page.own_expiry, *(child.kept_until for child in page.dependents)])
        if page.may_be_victim and page.is_leaf and not page.pinned:
            assert page.key in victims
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
