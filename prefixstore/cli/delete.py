"""Commands that delete: ``purge``, ``clear``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from prefixstore.cli.arguments import (
    AsJson,
    Location,
    ModelFile,
    NamespaceName,
    Prefix,
    TokenizerFile,
    tokens_of_prefix,
)
from prefixstore.cli.confirm import DryRun, Yes, has_terminal, is_confirmed
from prefixstore.cli.output import DONE, FAILED, emit, say, tell
from prefixstore.engine.delete import Removed
from prefixstore.errors import InvalidParameterError, UnavailableError
from prefixstore.maintenance.archive import Archive
from prefixstore.units import counted, format_bytes, parse_seconds

__all__ = ["clear", "purge"]


def purge(
    location: Location,
    *,
    namespace: NamespaceName = None,
    salt: Annotated[str | None, typer.Option(metavar="TENANT", help="Only pages of one tenant, of all models.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Only pages not used for this long: 30d, 12h.")
    ] = None,
    page: Annotated[str | None, typer.Option(metavar="HASH", help="Only one page and its descendants.")] = None,
    prefix: Prefix = None,
    model: ModelFile = None,
    tokenizer: TokenizerFile = None,
    everything: Annotated[bool, typer.Option("--everything", help="All pages of the store.")] = False,
    scrub: Annotated[bool, typer.Option("--scrub/--no-scrub", help="Overwrite the deleted bytes.")] = True,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
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
    chosen: dict[str, Any] = {
        "namespace": namespace,
        "salt": salt,
        "older_than": seconds,
        "tokens": tokens,
        "page": page,
        "everything": everything,
    }
    with Archive(location, read_only=dry_run) as archive, _said_here():
        where = archive.location
        holdings = archive.holdings() if salt is not None else []
        is_known = salt is None or any(one.namespace and one.namespace.salt == salt for one in holdings)
        unknown = [one.key.hex() for one in holdings if one.namespace is None and one.pages]
        if dry_run or (is_known and not yes and has_terminal()):
            removed = archive.purge(**chosen, dry_run=True)
            if not dry_run and not is_confirmed(f"{where}: delete {_amount(removed)}?", yes=yes):
                return FAILED
        if not dry_run:
            removed = archive.purge(**chosen)
        n_newer = archive.n_newer
        scrubbed = scrub and not dry_run and _is_scrubbed(archive)
        is_local = archive.backend.is_local
    if as_json:
        emit({"location": where, "removed": asdict(removed), "scrubbed": scrubbed, "dry_run": dry_run})
    elif is_known or removed.pages:
        done = "would be deleted" if dry_run else "deleted and overwritten" if scrubbed and is_local else "deleted"
        tell(f"{where}: {counted(removed.pages, 'page')} {done}, {format_bytes(removed.bytes)}")
        if scrubbed and not is_local:
            say("note: what the server keeps of them is not overwritten: freed memory, logs, old versions, replicas")
    problems = [] if is_known else [f"there is no tenant {salt!r}; prefixstore ls lists the tenants"]
    problems += [
        f"the settings of namespace {key} are damaged, so its tenant is unknown; see --namespace" for key in unknown
    ]
    if n_newer:
        problems.append(
            f"not deleted: {counted(n_newer, 'page')} of a newer prefixstore, which may match; purge with that version"
        )
    for problem in problems:
        say(f"{where}: {problem}")
    return FAILED if problems or scrubbed != (scrub and not dry_run) else DONE


def clear(location: Location, *, dry_run: DryRun = False, yes: Yes = False, as_json: AsJson = False) -> int:
    """Delete all pages, of all tenants and models.

    Their bytes stay in the files until the space is reused; purge --everything overwrites them. On a terminal it asks
    for confirmation. Exit code 1: the answer was no.

    Example: prefixstore clear lmdb:///var/cache/kv --dry-run
    """
    with Archive(location, read_only=dry_run) as archive:
        where = archive.location
        if dry_run or (not yes and has_terminal()):
            removed = archive.purge(everything=True, dry_run=True)
            if not dry_run and not is_confirmed(f"{where}: delete {_amount(removed)}?", yes=yes):
                return FAILED
        if not dry_run:
            removed = archive.purge(everything=True)
    if as_json:
        emit({"location": where, "removed": asdict(removed), "dry_run": dry_run})
    else:
        tell(f"{where}: {_amount(removed)} {'would be ' * dry_run}deleted")
    return DONE


def _is_scrubbed(archive: Archive) -> bool:
    try:
        archive.scrub()
    except UnavailableError as error:
        say(f"prefixstore: the pages were deleted, but could not be overwritten; run it again: {error}")
        return False
    return True


def _amount(removed: Removed) -> str:
    return f"{counted(removed.pages, 'page')} ({format_bytes(removed.bytes)})"


@contextmanager
def _said_here() -> Iterator[None]:
    """Keep the log of the archive from the terminal: the command says the same."""

    def is_other(record: logging.LogRecord) -> bool:
        return record.module != "archive"

    log = logging.getLogger("prefixstore")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)
