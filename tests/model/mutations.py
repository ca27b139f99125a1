"""Faults put into the engine of today: the steps that show each of them, and what the machine says then.

They name what they change in the engine, and are written anew for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import lmdb
import pytest

from prefixstore.backends.lmdb import checked
from prefixstore.engine import commit as committing
from prefixstore.engine import delete, eviction, invariants, page_update, source
from prefixstore.engine.budget import Budget
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.commit import Committer
from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Page, Path
from prefixstore.engine.located import Located
from prefixstore.engine.lookups import Lookups
from prefixstore.engine.queue import WriteQueue
from prefixstore.engine.ram import RamTier
from prefixstore.engine.relatives import siblings_of
from prefixstore.engine.space import Space
from prefixstore.engine.tiers import FarEngine
from prefixstore.format.record import Usage
from prefixstore.maintenance import transfer
from tests.model.machine import SPACES
from tests.model.reference import LARGE

Patch: TypeAlias = pytest.MonkeyPatch

ONE, TWO, OTHER_MODEL, RECURRENT = SPACES
# a page; a page and a tail; two pages, the second of which takes the place of that tail; and others
PAGE, TAIL, TWO_PAGES = (ONE, (0,) * 4), (ONE, (0,) * 6), (ONE, (0,) * 8)
OTHERS = (ONE, (1,) * 7)
# by a child, whatever the tests replace it by
REQUIRE_SOUND = checked.require_sound


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


@leads_to(
    "a lookup finds only|a restore gives pages of its tokens", ("capture", 0, [TAIL]), ("match", 0, (ONE, (0,) * 5))
)
def a_tail_matches_one_token_too_many(patch: Patch) -> None:
    def path(real: Any, self: Any) -> Any:
        path = real(self)
        return Path(path.pages, path.n_tokens + (bool(path.pages) and path.n_tokens < path.pages[-1].end))

    wrap(patch, Located, "path", path)


@leads_to(
    "a lookup finds|a restore gives pages of its tokens",
    ("capture", 0, [(RECURRENT, (0, 0))]),
    ("match", 0, (RECURRENT, (0, 1, 1))),
)
def a_snapshot_of_other_tokens_is_found(patch: Patch) -> None:
    def fitting(real: Any, self: Any) -> list[tuple[int, Any]]:
        found = [page for page in self.snapshots[0] if page.tokens[:4] == self.prompt.pieces[0][:4]]
        return [(0, page) for page in found] or real(self)

    wrap(patch, Located, "fitting_snapshots", fitting)


@leads_to("what is pinned stays", ("capture", 0, [TWO_PAGES]), ("pin", 0, TWO_PAGES, True), ("evict", 0, 0.0))
def eviction_takes_pinned_pages(patch: Patch) -> None:
    def leaf_of(real: Any, key: bytes, record: Any, usage: Any) -> Any:
        return real(key, record, Usage(1).pack())

    for module in (page_update, invariants):
        wrap(patch, module, "leaf_of", leaf_of)


@leads_to("parents outlive", ("capture", 0, [TWO_PAGES, (ONE, (0, 0, 0, 0, 1, 1, 1, 1))]), ("evict", 0, 0.9))
def eviction_takes_the_parent_as_well(patch: Patch) -> None:
    def take(real: Any, self: Any, victim: Any, quota: Any) -> bool:
        return bool(real(self, victim, quota) and self._transaction.delete(victim.leaf.parent))

    wrap(patch, Space, "_take", take)


@leads_to("the budget is kept", ("capture", 0, [(ONE, (0,) * 36)]), limits="entries")
def the_budget_is_ignored(patch: Patch) -> None:
    patch.setattr(Budget, "exceeded", lambda *_, **__: False)


@leads_to("quotas are kept", ("capture", 0, [(ONE, (LARGE,) * 16)]), limits="quotas")
def quotas_are_ignored(patch: Patch) -> None:
    patch.setattr(Space, "_groups", lambda *_: [])


@leads_to(
    "the lowest priority is evicted first",
    ("capture", 1, [(ONE, (0,) * 16)]),
    ("capture", 0, [(ONE, (1,) * 16)]),
    ("capture", 1, [(TWO, (0,) * 4)]),
    limits="entries",
    policy="priority",
)
def priorities_are_ignored(patch: Patch) -> None:
    patch.setitem(eviction.POLICIES, "priority", eviction.POLICIES["longest_first"])


@leads_to("a lookup finds only", ("capture", 1, [PAGE]), ("wait", 61), ("match", 0, PAGE))
def expiry_is_ignored(patch: Patch) -> None:
    patch.setattr(Page, "has_expired", lambda *_: False)


@leads_to("a use renews", ("capture", 1, [PAGE]), ("wait", 50), ("restore", 1, PAGE))
def a_use_does_not_renew_a_page(patch: Patch) -> None:
    patch.setattr(committing, "_write_uses", lambda *_: None)


@leads_to("what is deleted is gone", ("capture", 0, [PAGE]), ("delete", 0, None))
def purge_leaves_one_page(patch: Patch) -> None:
    patch.setattr(delete.Choice, "has_stored", lambda _, entry: entry.record.start > 0)


@leads_to("a restore gives the state bit for bit", ("capture", 0, [PAGE]), ("damage", 0), ("restore", 0, PAGE))
def a_damaged_payload_is_returned(patch: Patch) -> None:
    for name in ("verify", "verify_checksum"):
        patch.setattr(source, name, lambda _, view: view)


@leads_to("a restore gives the state bit for bit", ("capture", 1, [PAGE, OTHERS]), ("restore_all", 1))
def the_states_in_memory_are_confused(patch: Patch) -> None:
    wrap(patch, RamTier, "state", lambda _, self, page: next((one.array.data for one in self._states.values()), None))


@leads_to("an imported page is the same", ("capture", 0, [PAGE]), ("pin", 0, PAGE, True), ("export", 0))
def an_export_forgets_pins(patch: Patch) -> None:
    def pages(real: Any, self: Any) -> Any:
        for one in real(self):
            yield one._replace(usage=replace(one.usage, pinned=False))

    wrap(patch, transfer._Source, "__iter__", pages)


@leads_to(
    "a lookup finds|what is found is restored",
    ("capture", 0, [PAGE]),
    ("match", 1, PAGE),
    ("delete", 0, None),
    ("match", 1, PAGE),
)
def a_reader_keeps_a_stale_index(patch: Patch) -> None:
    known: dict[Any, Any] = {}

    def locate(real: Any, self: Any, view: Any, prompt: Any, waiting: Any, **options: Any) -> Any:
        key = id(self), prompt.namespace, prompt.tokens.tobytes(), *options
        if not known.get(key) or not known[key].pages:
            known[key] = real(self, view, prompt, waiting, **options)
        return known[key]

    wrap(patch, Lookups, "locate", locate)


@leads_to(
    "a lookup finds only|what was captured is stored|what is missing is captured",
    *(("fail", 0, "down", n, 0, [(ONE, (n, n))]) for n in range(0, 20, 2)),
)
def a_failed_commit_is_taken_for_stored(patch: Patch) -> None:
    patch.setattr(Catalog, "give_up", lambda *_: None)


@leads_to("what was captured is stored", ("capture", 0, [(ONE, (0,) * 12)]))
def a_captured_page_is_forgotten(patch: Patch) -> None:
    wrap(patch, WriteQueue, "_next_batch", lambda real, self: real(self)[:2])


@leads_to("a lookup finds the longest", ("hang", [PAGE], [PAGE], None))
def what_waits_is_not_found(patch: Patch) -> None:
    def longest(real: Any, *arguments: Any) -> Path:
        path = real(*arguments)
        pages = tuple(page for page in path.pages if arguments[0]._catalog.get(page.key) is None)
        return Path(pages, min(path.n_tokens, pages[-1].end if pages else 0))

    wrap(patch, Lookups, "longest", longest)


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
                if (tail := siblings_of(transaction, new.page)[0]) is not None:
                    transaction.delete(tail.key)
        return real(self, batch)

    wrap(patch, Committer, "commit", commit)


@leads_to(
    "what was flushed survives", ("capture", 0, [PAGE]), ("flush", 0), ("lose_power", 0.0, "none", 0), where="power"
)
def flush_does_not_sync(patch: Patch) -> None:
    patch.setattr(Engine, "sync", lambda _: None)


@leads_to(
    "what survives|a state survives|not an LMDB environment|is damaged",
    ("capture", 0, [PAGE]),
    ("lose_power", 1.0, "some", 0),
    where="power",
)
def what_is_not_flushed_is_written_in_any_order(patch: Patch) -> None:
    # the process that reads such a file may crash: it is not to be this one
    patch.setattr(checked, "require_sound", REQUIRE_SOUND)
    wrap(patch, lmdb, "open", lambda real, *arguments, **options: real(*arguments, **options | {"sync": False}))
