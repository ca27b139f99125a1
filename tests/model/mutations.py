"""Faults put into the engine of today, each with what the machine says when it finds it.

They name what they change in the engine, and are written anew for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import pytest

from prefixstore.engine import eviction, index, page_table, readers
from prefixstore.engine.budget import Budget, Evictor
from prefixstore.engine.catalog import Catalog
from prefixstore.engine.commit import Committer
from prefixstore.engine.delete import Deleter
from prefixstore.engine.engine import Engine
from prefixstore.engine.follow import Follower
from prefixstore.engine.index import Index, Page, Path
from prefixstore.engine.journal import Journal
from prefixstore.engine.queue import WriteQueue
from prefixstore.engine.ram import RamTier

Patch: TypeAlias = pytest.MonkeyPatch


class Mutation(NamedTuple):
    """A fault; a part of the message that it leads to; and whether only a loss of power shows it."""

    put_in: Callable[[Patch], None]
    message: str
    needs_power_loss: bool = False


MUTATIONS: dict[str, Mutation] = {}


def apply(name: str) -> None:
    """Put a fault into this process, for good."""
    MUTATIONS[name].put_in(pytest.MonkeyPatch())


def leads_to(message: str, *, needs_power_loss: bool = False) -> Callable[[Callable[[Patch], None]], None]:
    def add(put_in: Callable[[Patch], None]) -> None:
        MUTATIONS[put_in.__name__.replace("_", " ")] = Mutation(put_in, message, needs_power_loss)

    return add


def wrap(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function; the new one has the old one as its first argument."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **options: change(real, *arguments, **options))


@leads_to("a lookup finds only")
def match_ignores_the_salt(patch: Patch) -> None:
    def match(real: Any, self: Any, namespace: bytes, tokens: Any, page_tokens: int) -> Path:
        paths = [real(self, one, tokens, page_tokens) for one in (namespace, *self._contents.index._roots)]
        return max(paths, key=lambda path: path.n_tokens)

    wrap(patch, Catalog, "match", match)


@leads_to("a lookup finds only|a restore gives pages of its tokens")
def a_tail_matches_one_token_too_many(patch: Patch) -> None:
    def match(real: Any, *arguments: Any) -> Any:
        path, unknown = real(*arguments)
        return Path(path.pages, path.n_tokens + (bool(path.pages) and path.n_tokens < path.pages[-1].end)), unknown

    wrap(patch, Index, "match", match)


@leads_to("a lookup finds|a restore gives pages of its tokens")
def a_snapshot_of_other_tokens_is_found(patch: Patch) -> None:
    wrap(
        patch,
        index,
        "_prefixes",
        lambda _, snapshots, wanted: [snapshots[key] for key in snapshots if key[:4] == wanted[:4]],
    )


@leads_to("what is pinned stays")
def eviction_takes_pinned_pages(patch: Patch) -> None:
    for module in (eviction, page_table):
        patch.setattr(module, "PINNED", 0)
    change = lambda real, self, victim, usage, **options: real(self, victim, replace(usage, pinned=False), **options)  # noqa: E731
    wrap(patch, Catalog, "remove_victim", change)


@leads_to("what is pinned stays|pins are kept")
def the_pin_of_a_tail_is_lost_with_it(patch: Patch) -> None:
    wrap(
        patch,
        Catalog,
        "_set_pinned",
        lambda real, self, page, *, pinned: None if not page.is_stored else real(self, page, pinned=pinned),
    )


@leads_to("parents outlive")
def eviction_takes_the_parent_as_well(patch: Patch) -> None:
    def delete(real: Any, self: Any, transaction: Any, victim: Any, cause: Any) -> bool:
        record = transaction.record(victim.key)
        return bool(real(self, transaction, victim, cause) and record and transaction.delete(record.parent))

    wrap(patch, Evictor, "_delete", delete)


@leads_to("the budget is kept")
def the_budget_is_ignored(patch: Patch) -> None:
    patch.setattr(Budget, "exceeded", lambda *_, **__: False)


@leads_to("quotas are kept")
def quotas_are_ignored(patch: Patch) -> None:
    patch.setattr(Evictor, "_quotas", lambda *_: [])


@leads_to("the lowest priority is evicted first")
def priorities_are_ignored(patch: Patch) -> None:
    patch.setitem(eviction.POLICIES, "priority", eviction.POLICIES["longest_first"])


@leads_to("a lookup finds only")
def expiry_is_ignored(patch: Patch) -> None:
    patch.setattr(Page, "has_expired", lambda *_: False)


@leads_to("a use renews")
def a_use_does_not_renew_a_page(patch: Patch) -> None:
    patch.setattr(Committer, "_write_uses", lambda *_: None)


@leads_to("what is deleted is gone")
def purge_leaves_one_page(patch: Patch) -> None:
    wrap(patch, Deleter, "_select", lambda real, self, choose: real(self, choose)[1:])


@leads_to("nothing is evicted without need|what is pinned stays")
def clear_takes_all_tenants(patch: Patch) -> None:
    wrap(patch, Engine, "clear", lambda real, self, _: real(self, None))


@leads_to("a restore gives the state bit for bit")
def a_damaged_payload_is_returned(patch: Patch) -> None:
    for name in ("verify", "verify_checksum"):
        patch.setattr(readers, name, lambda _, view: view)


@leads_to("a restore gives the state bit for bit")
def the_states_in_memory_are_confused(patch: Patch) -> None:
    wrap(patch, RamTier, "state", lambda _, self, page: next((one.array.data for one in self._states.values()), None))


@leads_to("an export has everything|what was captured is stored")
def an_import_drops_the_last_page(patch: Patch) -> None:
    wrap(patch, Engine, "import_pages", lambda real, self, batch, settings: real(self, batch[:-1], settings))


@leads_to("a lookup finds|what is found is restored")
def a_reader_keeps_a_stale_index(patch: Patch) -> None:
    wrap(patch, Follower, "refresh", lambda real, self, view, **options: real(self, view, **options) if options else 0)


@leads_to("a lookup finds only|what was captured is stored")
def a_failed_commit_is_taken_for_stored(patch: Patch) -> None:
    patch.setattr(Journal, "roll_back", lambda _: None)
    patch.setattr(Catalog, "drop", lambda *_: None)


@leads_to("what was captured is stored")
def a_captured_page_is_forgotten(patch: Patch) -> None:
    wrap(patch, WriteQueue, "_next_batch", lambda real, self: real(self)[:2])


@leads_to("what was flushed survives", needs_power_loss=True)
def flush_does_not_sync(patch: Patch) -> None:
    patch.setattr(Engine, "sync", lambda _: None)
