"""Faults put into the engine of today: the steps that show each of them, and what the machine says then.

They name what they change in the engine, and are written anew for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import pytest

from prefixstore.engine import delete, invariants, page_update, source
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.commit import Committer
from prefixstore.engine.engine import Engine
from prefixstore.engine.page import Page, Path
from prefixstore.engine.relatives import overlaps_of
from prefixstore.engine.tiers import FarEngine
from prefixstore.format.record import Usage
from tests.model.machine import SPACES

Patch: TypeAlias = pytest.MonkeyPatch

ONE, TWO = SPACES[:2]
PAGE, TWO_PAGES = (ONE, (0,) * 4), (ONE, (0,) * 8)


class Mutation(NamedTuple):
    """A fault.

    Attributes
    ----------
    put_in
        Puts it into this process.
    message
        A part of the message that it leads to.
    steps, options
        The shortest steps that show it; see `machine.play`.
    where
        What it takes to show it: ``"memory"``; ``"two"`` locations; another ``"process"``, which has the fault; or
        ``"power"`` that is lost there.
    """

    put_in: Callable[[Patch], None]
    message: str
    steps: list[tuple[Any, ...]]
    options: dict[str, str]
    where: str


MUTATIONS: dict[str, Mutation] = {}


def apply(name: str) -> None:
    """Put a fault into this process, for good."""
    MUTATIONS[name].put_in(pytest.MonkeyPatch())


def leads_to(
    message: str, *steps: tuple[Any, ...], where: str = "memory", **options: str
) -> Callable[[Callable[[Patch], None]], None]:
    def add(put_in: Callable[[Patch], None]) -> None:
        MUTATIONS[put_in.__name__.replace("_", " ")] = Mutation(put_in, message, list(steps), options, where)

    return add


def wrap(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function; the new one has the old one as its first argument."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **options: change(real, *arguments, **options))


@leads_to("a lookup finds only", ("capture", 0, [TWO_PAGES]), ("match", 0, (TWO, (0,) * 8)))
def match_ignores_the_salt(patch: Patch) -> None:
    def match(real: Any, self: Any, namespace: bytes, tokens: Any, page_tokens: int) -> Path:
        spaces = (namespace, *(one.key for one in self.upkeep.namespaces()))
        return max((real(self, one, tokens, page_tokens) for one in spaces), key=lambda path: path.n_tokens)

    wrap(patch, Engine, "match", match)


@leads_to("what is pinned stays", ("capture", 0, [TWO_PAGES]), ("pin", 0, TWO_PAGES, True), ("evict", 0, 0.0))
def eviction_takes_pinned_pages(patch: Patch) -> None:
    def leaf_of(real: Any, key: bytes, record: Any, usage: Any) -> Any:
        return real(key, record, Usage(1).pack())

    for module in (page_update, invariants):
        wrap(patch, module, "leaf_of", leaf_of)


@leads_to("the budget is kept", ("capture", 0, [(ONE, (0,) * 36)]), limits="entries")
def the_budget_is_ignored(patch: Patch) -> None:
    patch.setattr(Budget, "exceeded", lambda *_, **__: False)


@leads_to("a lookup finds only", ("capture", 1, [PAGE]), ("wait", 61), ("match", 0, PAGE))
def expiry_is_ignored(patch: Patch) -> None:
    patch.setattr(Page, "has_expired", lambda *_: False)


@leads_to("what is deleted is gone", ("capture", 0, [PAGE]), ("delete", 0, None))
def purge_leaves_one_page(patch: Patch) -> None:
    patch.setattr(delete.Choice, "has_stored", lambda _, entry: entry.record.start > 0)


@leads_to("a restore gives the state bit for bit", ("capture", 0, [PAGE]), ("damage", 0), ("restore", 0, PAGE))
def a_damaged_payload_is_returned(patch: Patch) -> None:
    for name in ("verify_payload", "verify_checksum"):
        patch.setattr(source, name, lambda _, view: view)


@leads_to(
    "a lookup finds only|what was captured is stored|what is missing is captured",
    *(("fail", 0, "down", n, 0, [(ONE, (n, n))]) for n in range(0, 20, 2)),
)
def a_failed_commit_is_taken_for_stored(patch: Patch) -> None:
    patch.setattr(Catalog, "give_up", lambda *_: None)


@leads_to("what was captured is stored far away", ("capture", 0, [PAGE]), where="two")
def nothing_goes_to_the_far_location(patch: Patch) -> None:
    patch.setattr(FarEngine, "offer", lambda *_: None)


@leads_to(
    "nothing is evicted without need",
    *(("complete", 0, (ONE, (n, n))) for n in range(0, 40, 2)),
    *(("kill", [(ONE, (n, n, n))], n) for n in range(0, 40, 2)),
    where="process",
)
def a_tail_is_deleted_before_what_replaces_it_is_written(patch: Patch) -> None:
    def commit(real: Any, self: Any, batch: Any) -> Any:
        with self._catalog.update(self._backend) as transaction:
            for new in batch:
                if (tail := overlaps_of(transaction, new.page)[0]) is not None:
                    transaction.delete(tail.key)
        return real(self, batch)

    wrap(patch, Committer, "commit", commit)


@leads_to(
    "what was flushed survives", ("capture", 0, [PAGE]), ("flush", 0), ("lose_power", 0.0, "none", 0), where="power"
)
def flush_does_not_sync(patch: Patch) -> None:
    patch.setattr(Engine, "sync", lambda _: None)
