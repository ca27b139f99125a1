"""Commands that keep a location healthy: ``check``, ``verify``, ``evict``, ``pin``, ``compact``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from prefixstore.cli.arguments import (
    AsJson,
    ConfigFile,
    Location,
    MaxBytes,
    ModelFile,
    NCtx,
    PageKey,
    Salt,
    configured,
    max_bytes_of,
    open_model,
)
from prefixstore.cli.confirm import DryRun, Yes, has_terminal, is_confirmed
from prefixstore.cli.output import FAILED, emit, say, table, tell
from prefixstore.config import explain
from prefixstore.engine.delete import Removed
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.invariants import Violation
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.verify import BOUND, Comparison
from prefixstore.maintenance.verify import verify as compare
from prefixstore.units import counted, format_bytes, format_share, parse_target

__all__ = ["check", "compact", "evict", "pin", "unpin", "verify"]


def check(
    location: Location,
    *,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete damaged pages and their descendants, and rebuild a wrong index."),
    ] = False,
    max_bytes: MaxBytes = None,
    as_json: AsJson = False,
) -> int:
    """Verify every invariant and every checksum of a store.

    With --max-bytes, a store larger than that is a problem too. Exit code 1: problems were found; with --repair: some
    remain.

    Example: prefixstore check lmdb:///var/cache/kv --repair
    """
    budget = max_bytes_of(max_bytes)
    with Archive(location, read_only=not repair) as archive:
        where = archive.location
        pages = archive.used().entries
        removed = Removed()
        if repair:
            found, removed = archive.repair(budget)
            left = archive.check(budget) if found else []
        else:
            found = left = archive.check(budget)
    if as_json:
        result = {"location": where, "pages": pages, "violations": [asdict(violation) for violation in found]}
        emit(result | ({"removed": asdict(removed), "left": [asdict(one) for one in left]} if repair else {}))
    else:
        _print_violations(where, found, pages)
        if removed.pages:
            they = "it" if removed.pages == 1 else "they"
            tell(f"{counted(removed.pages, 'page')} deleted, {format_bytes(removed.bytes)}; {they} will be recomputed")
        if repair and found:
            tell(f"repaired: {_problems(left)}" + " left" * bool(left))
    return FAILED if left else 0


def _print_violations(location: str, found: list[Violation], pages: int) -> None:
    for violation in found:
        tell(str(violation))
    tell(f"{location}: {counted(pages, 'page')}, {_problems(found)}")


def _problems(found: list[Violation]) -> str:
    rules = ", ".join(f"{rule} {n}" for rule, n in sorted(Counter(one.rule for one in found).items()))
    return f"{counted(len(found), 'problem')} ({rules})" if found else "no problems found"


def verify(
    location: Location,
    *,
    model: ModelFile = None,
    config: ConfigFile = None,
    n_ctx: NCtx = None,
    salt: Salt = None,
    sample: Annotated[int, typer.Option(metavar="N", min=1, help="Number of sequences to compare.")] = 8,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed for choosing the sequences.")] = 0,
    bound: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0.0, help="Largest allowed difference, as a share of the logits' range."),
    ] = BOUND,
    as_json: AsJson = False,
) -> int:
    """Compute stored sequences again and compare the results.

    The logits of the next token are compared with those after a restore. Tokens evaluated in other batches give
    slightly different logits, by rounding; the bound allows for that. Exit code 1: a difference exceeds the bound, a
    page could not be restored, or no page fits the model and its settings.

    Example: prefixstore verify lmdb:///var/cache/kv --model m.gguf --sample 20
    """
    settings = configured(location, config, model, n_ctx, salt)
    if n_ctx is None and "n_ctx" not in settings.model:
        settings = settings.override(model={"n_ctx": 0})  # the length that the model was trained with
    llm = open_model(settings)
    with Archive(location, read_only=True) as archive, settings.open_store(llm, read_only=True) as store:
        where = archive.location
        namespace = store.namespace
        found = list(compare(llm, store, archive, sample, seed=seed))
        if not found:
            say(f"prefixstore: {where} has no pages of this model with these settings")
            known = [holding.namespace for holding in archive.holdings() if holding.namespace is not None]
            for difference in explain(namespace, known):
                say(f"  {difference}")
    llm.close()
    return _report(where, found, bound, as_json=as_json)


def _report(location: str, found: list[Comparison], bound: float, *, as_json: bool) -> int:
    bad = [one for one in found if not one.is_within(bound)]
    largest = max((one.share for one in found), default=None)
    if as_json:
        result = {"sequences": [asdict(one) for one in found], "largest": largest, "bound": bound, "beyond": len(bad)}
        emit({"location": location} | result)
    elif found:
        rows = [
            [
                one.page[:12],
                f"{one.n_tokens:,}",
                f"{one.restored:,}",
                f"{one.difference:.2g}",
                format_share(one.share, 2),
                "yes" if one.same_token else "no",
            ]
            for one in found
        ]
        table(["page", "tokens>", "restored>", "difference>", "of the range>", "same token"], rows)
        difference = f"largest difference {format_share(largest, 2)} of the range"
        tell(f"{location}: {difference}, bound {format_share(bound, 2)}, {len(bad)} above it")
    return FAILED if bad or not found else 0


def evict(
    location: Location,
    *,
    to: Annotated[
        str, typer.Option(metavar="SIZE", help="Size to shrink the store to, such as 10GiB; with --max-bytes also 80%.")
    ],
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Order of eviction: one of {', '.join(POLICIES)}; by default the store's own."
        ),
    ] = None,
    max_bytes: MaxBytes = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Evict pages until the store fits SIZE.

    They are evicted in the order of the policy of the store that was the last to begin writing there; if that is
    unknown, the least recently used first. On a terminal it asks for confirmation. Exit code 1: the pinned pages alone
    are larger, or the answer was no.

    Example: prefixstore evict lmdb:///var/cache/kv --to 10GiB --dry-run
    """
    target = parse_target(to, max_bytes_of(max_bytes), "--to")
    with Archive(location, policy=policy) as archive:
        where = archive.location
        if not dry_run and not yes and has_terminal():
            wanted = archive.evict(target, dry_run=True)
            size = f"{counted(len(wanted.pages), 'page')}, {format_bytes(wanted.bytes)}"
            if wanted.pages and not is_confirmed(f"{where}: evict {size}?", yes=yes):
                return FAILED
        evicted = archive.evict(target, dry_run=dry_run)
        entries = archive.used().entries - len(evicted.pages) * dry_run
    if as_json:
        result = {"policy": evicted.policy, "dry_run": dry_run, "used_bytes": evicted.bytes_left, "pages": entries}
        emit({"location": where, "removed": {"pages": len(evicted.pages), "bytes": evicted.bytes}} | result)
    else:
        left = f"{format_bytes(evicted.bytes_left)} in {counted(entries, 'page')} " + (
            "would be left" if dry_run else "left"
        )
        done = "would be evicted" if dry_run else "evicted"
        tell(f"{where}: {counted(len(evicted.pages), 'page')} {done} (policy {evicted.policy}), {left}")
    if not evicted.is_enough:
        say(f"{where}: everything else is pinned, or smaller than the store itself")
        return FAILED
    return 0


def pin(location: Location, digits: PageKey, *, as_json: AsJson = False) -> None:
    """Keep a page from eviction.

    Its ancestors and descendants are pinned too.

    Example: prefixstore pin lmdb:///var/cache/kv 4f9c1b
    """
    _pin(location, digits, pinned=True, as_json=as_json)


def unpin(location: Location, digits: PageKey, *, as_json: AsJson = False) -> None:
    """Undo pin.

    An ancestor stays pinned if it leads to another pinned page.

    Example: prefixstore unpin lmdb:///var/cache/kv 4f9c1b
    """
    _pin(location, digits, pinned=False, as_json=as_json)


def _pin(location: str, digits: str, *, pinned: bool, as_json: bool) -> None:
    with Archive(location) as archive:
        page = archive.find(digits)
        changed = archive.pin(page, pinned=pinned)
        where = archive.location
    if as_json:
        emit({"location": where, "page": page.key.hex(), "changed": changed, "pinned": pinned})
    else:
        tell(f"{where}: {counted(changed, 'page')} {'pinned' if pinned else 'unpinned'}")


def compact(location: Location, *, as_json: AsJson = False) -> None:
    """Return the space of deleted pages to the file system.

    Example: prefixstore compact lmdb:///var/cache/kv
    """
    with Archive(location) as archive:
        where = archive.location
        freed = archive.compact()
    if as_json:
        emit({"location": where, "bytes": freed})
    else:
        tell(f"{where}: {format_bytes(freed)} returned to the file system")
