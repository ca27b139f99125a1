"""Commands that delete: ``evict``, ``purge``, ``clear``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.model import tokens_of_prefix
from prefixstore.cli.output import DONE, FAILED, confirmed, say
from prefixstore.engine.delete import Removed
from prefixstore.errors import InvalidParameterError, UnavailableError
from prefixstore.maintenance.archive import Archive
from prefixstore.units import counted, format_bytes, parse_seconds, parse_target

__all__ = ["clear", "evict", "purge"]


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
    unknown, the least recently used first. On a terminal it asks for confirmation. Exit code 1: the pinned pages alone
    are larger, or the answer was no.

    Example: prefixstore evict lmdb:///var/cache/kv --to 10GiB --dry-run
    """
    target = parse_target(to, options.max_bytes_of(max_bytes), "--to")
    with Archive(location, policy=policy) as archive:
        where = archive.location
        evicted = confirmed(
            partial(archive.evict, target),
            lambda found: (
                f"{where}: evict {counted(len(found.pages), 'page')}, {format_bytes(found.bytes)}?"
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
    tokenizer: Path | None = None,
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
    it again); there is no tenant with this name; there are pages whose tenant is unknown, or that a newer version has
    written; or the answer was no.

    Example: prefixstore purge lmdb:///var/cache/kv --salt tenant-7
    """
    tokens = tokens_of_prefix(prefix, model, tokenizer)
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
            delete, lambda found: _question(where, found) if is_known else None, dry_run=dry_run, yes=yes
        )
        if removed is None:
            return FAILED
        problems = [] if is_known else [f"there is no tenant {salt!r}; prefixstore tenants lists them"]
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


def _question(location: str, removed: Removed) -> str:
    return f"{location}: delete {counted(removed.pages, 'page')} ({format_bytes(removed.bytes)})?"
