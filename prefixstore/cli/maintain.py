"""Commands that keep a location healthy, or delete from it."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from prefixstore.backends import extra_needed
from prefixstore.backends.location import without_password
from prefixstore.backends.sql import require_sql
from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.model import NO_SUCH_TEXT, configured, open_model, tokens_of_prefix
from prefixstore.cli.output import DONE, FAILED, confirmed, listed, say, tell
from prefixstore.config import explain_settings
from prefixstore.engine.delete import Removed
from prefixstore.engine.invariants import Violation
from prefixstore.errors import InvalidParameterError, UnavailableError
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.verify import BOUND
from prefixstore.maintenance.verify import compare_computed as compare
from prefixstore.units import counted, format_bytes, format_share, parse_seconds, parse_target

SHORT = 12  # digits shown of a key
# what `verify` lists
COMPARED = {"page": "page", "tokens>": "n_tokens", "restored>": "restored", "difference>": "difference"}
COMPARED |= {"of the range>": "share", "same token": "same_token"}
KEY = re.compile(rf"\b([0-9a-f]{{{SHORT}}})[0-9a-f]{{{64 - SHORT}}}\b")


def check(
    location: str, *, repair: bool = False, max_bytes: str | None = None, dry_run: bool = False, yes: bool = False
) -> Result | int:
    """Verify every invariant and every checksum of a store.

    With --max-bytes, a store larger than that is a problem too. With --repair it asks for confirmation on a terminal,
    and --dry-run says what would be deleted. Exit code 1: problems were found; with --repair: some remain, or the
    answer was no.

    Example: prefixstore check lmdb:///var/cache/kv --repair --dry-run
    """
    budget = options.max_bytes_of(max_bytes)
    with Archive(location, read_only=not repair or dry_run) as archive:
        where, pages = archive.location, archive.used().entries
        mended = confirmed(
            partial(archive.repair, budget),
            lambda one: f"{where}: {_plan(*one, budget)}?" if one[0] else None,
            dry_run=dry_run or not repair,
            yes=yes,
        )
        if mended is None:
            return FAILED
        found, removed = mended
        is_repaired = repair and not dry_run
        left = archive.check(budget) if is_repaired and found else found
    data: dict[str, object] = {"location": where, "pages": pages, "violations": [asdict(one) for one in found]}
    if repair:
        data |= {"removed": asdict(removed), "left": [asdict(one) for one in left], "dry_run": dry_run}

    def show() -> None:
        for violation in found:
            tell(KEY.sub(r"\1", str(violation)))
        tell(f"{where}: {counted(pages, 'page')}, {_problems(found)}")
        if found and not is_repaired:
            tell(f"check --repair would {_plan(found, removed, budget)}")
        if is_repaired and removed.pages:
            they = "it" if removed.pages == 1 else "they"
            tell(f"{counted(removed.pages, 'page')} deleted, {format_bytes(removed.bytes)}; {they} will be recomputed")
        if is_repaired and found:
            tell(f"repaired: {_problems(left)}{' left' if left else ''}")

    return Result(data, show, FAILED if left else DONE)


def _plan(found: Sequence[Violation], removed: Removed, budget: int | None) -> str:
    """What a repair would do."""
    rules = {one.rule for one in found}
    parts = [
        f"delete {counted(removed.pages, 'page')} ({format_bytes(removed.bytes)}): damaged ones, and those after them"
        if removed.pages
        else "",
        "delete what cannot be decrypted" if "undecryptable" in rules else "",
        "rebuild the index" if "index" in rules else "",
        f"evict pages down to {format_bytes(budget or 0)}" if "budget" in rules else "",
    ]
    return ", and ".join(filter(None, parts)) or "change nothing"


def _problems(found: Sequence[Violation]) -> str:
    rules = ", ".join(f"{rule} {n}" for rule, n in sorted(Counter(one.rule for one in found).items()))
    return f"{counted(len(found), 'problem')} ({rules})" if found else "no problems found"


def verify(
    location: str,
    *,
    model: Path | None = None,
    config: Path | None = None,
    n_ctx: int | None = None,
    salt: str | None = None,
    sample: int = 8,
    seed: int = 0,
    bound: float = BOUND,
) -> Result:
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
        # the comparison detaches the store
        where, namespace = archive.location, store.namespace
        found = list(compare(llm, store, archive, sample, seed=seed))
        if not found:
            say(f"prefixstore: {where} has no pages of this model with these settings")
            known = [holding.namespace for holding in archive.holdings() if holding.namespace is not None]
            for difference in explain_settings(namespace, known, archive.history().models):
                say(f"  {difference}")
    llm.close()
    n_bad = sum(not one.is_within(bound) for one in found)
    largest = max((one.share for one in found), default=None)

    def show() -> None:
        if found:
            shares = ({"page": one.page[:SHORT], "share": format_share(one.share, 2)} for one in found)
            listed(COMPARED, map(operator.or_, map(asdict, found), shares))
            difference = f"largest difference {format_share(largest, 2)} of the range"
            tell(f"{where}: {difference}, bound {format_share(bound, 2)}, {n_bad} above it")

    data = {"sequences": [asdict(one) for one in found], "largest": largest, "bound": bound, "beyond": n_bad}
    return Result({"location": where} | data, show, FAILED if n_bad or not found else DONE)


def pin(location: str, digits: str) -> Result:
    """Keep a page from eviction.

    Its ancestors and descendants are pinned too.

    Example: prefixstore pin lmdb:///var/cache/kv 4f9c1b
    """
    return _pin(location, digits, pinned=True)


def unpin(location: str, digits: str) -> Result:
    """Undo pin.

    An ancestor stays pinned if it leads to another pinned page.

    Example: prefixstore unpin lmdb:///var/cache/kv 4f9c1b
    """
    return _pin(location, digits, pinned=False)


def _pin(location: str, digits: str, *, pinned: bool) -> Result:
    with Archive(location) as archive:
        page = archive.find(digits)
        changed = archive.pin(page, pinned=pinned)
        return Result(
            {"location": archive.location, "page": page.key.hex(), "changed": changed, "pinned": pinned},
            f"{archive.location}: {counted(changed, 'page')} {'pinned' if pinned else 'unpinned'}",
        )


def compact(location: str) -> Result:
    """Return the space of deleted pages to the file system.

    Example: prefixstore compact lmdb:///var/cache/kv
    """
    with Archive(location) as archive:
        freed = archive.compact()
        return Result(
            {"location": archive.location, "bytes": freed},
            f"{archive.location}: {format_bytes(freed)} returned to the file system",
        )


def migrate(location: str, *, check: bool = False) -> Result:
    """Create a SQL store, or bring its schema up to date.

    Exit code 1 with --check: the schema is not up to date.

    Example: prefixstore migrate postgresql+psycopg://user@host/db --check
    """
    require_sql(location)
    with extra_needed(location):
        from prefixstore.backends.sql import migrations as schema  # noqa: PLC0415 - the extras for SQL

    where = without_password(location)
    before = schema.check_schema(location) if check else schema.upgrade(location)
    was_current = before == schema.HEAD
    is_current = was_current or not check
    change = f"schema {before or 'none'} -> {schema.HEAD} {'needed' if check else 'done'}"
    return Result(
        {"location": where, "revision": before, "head": schema.HEAD, "current": is_current},
        f"{where}: schema {before} is up to date" if was_current else f"{where}: {change}",
        DONE if is_current else FAILED,
    )


# -- what deletes -----------------------------------------------------------------------------------------------------


def evict(
    location: str,
    *,
    to: str,
    policy: str | None = None,
    max_bytes: str | None = None,
    dry_run: bool = False,
    yes: bool = False,
) -> Result | int:
    """Evict pages until the store fits SIZE.

    They are evicted in the order of the policy of the store that was the last to begin writing there; if that is
    unknown, the least recently used first. On a terminal it asks for confirmation. --dry-run evicts and takes that
    back, so it needs to write, too. Exit code 1: the pinned pages alone are larger, or the answer was no.

    Example: prefixstore evict lmdb:///var/cache/kv --to 10GiB --dry-run
    """
    target = parse_target(to, options.max_bytes_of(max_bytes), "--to")
    with Archive(location, policy=policy) as archive:
        where = archive.location
        evicted = confirmed(
            partial(archive.evict, target),
            lambda found: (
                f"{where}: evict {counted(len(found.pages), 'page')} ({format_bytes(found.bytes)})?"
                if found.pages
                else None
            ),
            dry_run=dry_run,
            yes=yes,
        )
        if evicted is None:
            return FAILED
        entries = archive.used().entries - len(evicted.pages) * dry_run
    if not evicted.is_enough:
        say(f"{where}: it cannot be made as small: the rest is pinned (prefixstore tree --pinned), or the store itself")
    would_be = "would be " if dry_run else ""
    return Result(
        {
            "location": where,
            "removed": {"pages": len(evicted.pages), "bytes": evicted.bytes},
            "policy": evicted.policy,
            "dry_run": dry_run,
            "used_bytes": evicted.bytes_left,
            "pages": entries,
        },
        f"{where}: {counted(len(evicted.pages), 'page')} {would_be}evicted (policy {evicted.policy}), "
        f"{format_bytes(evicted.bytes_left)} in {counted(entries, 'page')} {would_be}left",
        DONE if evicted.is_enough else FAILED,
    )


def purge(
    location: str,
    *,
    namespace: str | None = None,
    salt: str | None = None,
    older_than: str | None = None,
    page: str | None = None,
    prefix: str | None = None,
    model: Path | None = None,
    everything: bool = False,
    scrub: bool = True,
    dry_run: bool = False,
    yes: bool = False,
) -> Result | int:
    """Delete pages and overwrite their bytes.

    Pages that match all given options are deleted, pinned ones included; afterwards their contents cannot be read from
    the files. Overwriting does not reach copies: backups, file system snapshots, swap, the spare blocks of an SSD,
    exported files, and data that a server retains: freed memory, logs, old versions, replicas. On a terminal it asks
    for confirmation.

    Exit code 1: the pages are deleted but could not be overwritten, since another process is still reading them (run
    it again); there is no such tenant, or no page with this prefix; there are pages whose tenant is unknown, or that a
    newer version has written; or the answer was no.

    Example: prefixstore purge lmdb:///var/cache/kv --salt tenant-7
    """
    tokens = tokens_of_prefix(prefix, model)
    if not everything and (namespace, salt, older_than, page, prefix) == (None,) * 5:
        raise InvalidParameterError(
            "no pages are selected; pass --namespace, --salt, --older-than, --page, --prefix or --everything"
        )
    seconds = parse_seconds(older_than, "--older-than") if older_than is not None else None
    with Archive(location, read_only=dry_run) as archive:
        where, is_local = archive.location, archive.backend.is_local
        is_known = salt is None or bool(archive.holdings(salt=salt))
        delete = partial(
            archive.purge,
            namespace=namespace,
            salt=salt,
            older_than=seconds,
            tokens=tokens,
            page=page,
            everything=everything,
        )
        removed = confirmed(
            delete,
            lambda found: (
                f"{where}: delete {counted(found.pages, 'page')} ({format_bytes(found.bytes)})?" if is_known else None
            ),
            dry_run=dry_run,
            yes=yes,
        )
        if removed is None:
            return FAILED
        problems = [] if is_known else [f"there is no tenant {salt!r}; prefixstore tenants lists them"]
        if tokens is not None and not removed.pages:
            problems.append(NO_SUCH_TEXT)
        left = archive.unmatched(salt)
        scrubbed = scrub and not dry_run and _is_scrubbed(archive)
    shown = is_known or removed.pages
    done = "would be deleted" if dry_run else "deleted and overwritten" if scrubbed and is_local else "deleted"
    if scrubbed and not is_local:
        say("note: what the server keeps of them is not overwritten: freed memory, logs, old versions, replicas")
    elif scrubbed and not removed.pages:
        say("note: what was deleted before is overwritten now")
    # the log of the archive has said what a purge leaves
    for problem in [*problems, *(left if dry_run else [])]:
        say(f"{where}: {problem}")
    return Result(
        {"location": where, "removed": asdict(removed), "scrubbed": scrubbed, "dry_run": dry_run},
        f"{where}: {counted(removed.pages, 'page')} {done}, {format_bytes(removed.bytes)}" if shown else "",
        FAILED if problems or left or scrubbed != (scrub and not dry_run) else DONE,
    )


def clear(location: str, *, dry_run: bool = False, yes: bool = False) -> Result | int:
    """Delete all pages, of all tenants and models.

    Their bytes stay in the files until the space is reused; purge --everything overwrites them. On a terminal it asks
    for confirmation. Exit code 1: the answer was no.

    Example: prefixstore clear lmdb:///var/cache/kv --dry-run
    """
    return purge(location, everything=True, scrub=False, dry_run=dry_run, yes=yes)


def _is_scrubbed(archive: Archive) -> bool:
    try:
        archive.scrub()
    except UnavailableError as error:
        say(f"prefixstore: the pages were deleted, but could not be overwritten yet; run it again: {error}")
        return False
    return True
