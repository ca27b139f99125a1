"""Commands that keep a location healthy: ``check``, ``verify``, ``evict``, ``purge``, ``pin``, ``compact``."""

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
    NamespaceName,
    NCtx,
    PageKey,
    Prefix,
    Salt,
    TokenizerFile,
    configured,
    max_bytes_of,
    open_model,
    tokens_of_prefix,
)
from prefixstore.cli.output import FAILED, emit, say, table
from prefixstore.config import explain
from prefixstore.engine.delete import Removed
from prefixstore.engine.invariants import Violation
from prefixstore.errors import InvalidParameterError, UnavailableError
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.verify import BOUND, Comparison
from prefixstore.maintenance.verify import verify as compare
from prefixstore.units import format_bytes, parse_bytes, parse_seconds

__all__ = ["check", "compact", "evict", "pin", "purge", "unpin", "verify"]


def check(
    location: Location,
    *,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete damaged pages and their descendants, and build a wrong index again."),
    ] = False,
    max_bytes: MaxBytes = None,
    as_json: AsJson = False,
) -> int:
    """Verify every invariant and every checksum of a store.

    With --max-bytes, a store larger than that is a problem too. Exit code 1: problems were found; with --repair: some
    are left.

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
            typer.echo(f"{removed.pages:,} pages deleted, {format_bytes(removed.bytes)}; they will be recomputed")
        if repair and found:
            typer.echo(f"repaired: {_problems(left)}" + " left" * bool(left))
    return FAILED if left else 0


def _print_violations(location: str, found: list[Violation], pages: int) -> None:
    for violation in found:
        typer.echo(str(violation))
    typer.echo(f"{location}: {pages:,} pages, {_problems(found)}")


def _problems(found: list[Violation]) -> str:
    rules = ", ".join(f"{rule} {n}" for rule, n in sorted(Counter(one.rule for one in found).items()))
    return f"{len(found):,} problem{'s' * (len(found) > 1)} ({rules})" if found else "no problems found"


def verify(
    location: Location,
    *,
    model: ModelFile = None,
    config: ConfigFile = None,
    n_ctx: NCtx = None,
    salt: Salt = None,
    sample: Annotated[int, typer.Option(metavar="N", min=1, help="Number of sequences to compare.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the choice of sequences.")] = 0,
    bound: Annotated[
        float, typer.Option(min=0.0, help="Largest allowed difference, as a share of the logits' range.")
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
            [one.page[:12], f"{one.n_tokens:,}", f"{one.restored:,}", f"{one.difference:.2g}", f"{one.share:.2%}",
             "yes" if one.same_token else "no"]
            for one in found
        ]  # fmt: skip
        table(["page", "tokens>", "restored>", "difference>", "of the range>", "same token"], rows)
        typer.echo(f"{location}: largest difference {largest:.2%} of the range, bound {bound:.2%}, {len(bad)} above it")
    return FAILED if bad or not found else 0


def evict(
    location: Location,
    *,
    to: Annotated[str, typer.Option(metavar="SIZE", help="Size to shrink the store to, such as 10GiB.")],
    as_json: AsJson = False,
) -> int:
    """Evict pages until the store fits SIZE.

    The least recently used pages are evicted first. Exit code 1: the pinned pages alone are larger.

    Example: prefixstore evict lmdb:///var/cache/kv --to 10GiB
    """
    target = parse_bytes(to, "--to")
    with Archive(location) as archive:
        where = archive.location
        removed = archive.evict_to(target)
        used = archive.used()
    if as_json:
        result = {"removed": asdict(removed), "used_bytes": used.bytes, "pages": used.entries}
        emit({"location": where} | result)
    else:
        left = f"{format_bytes(used.bytes)} in {used.entries:,} pages left"
        typer.echo(f"{where}: {removed.pages:,} pages evicted, {left}")
    if used.bytes > target:
        say(f"{where}: everything else is pinned, or smaller than the store itself")
        return FAILED
    return 0


def purge(
    location: Location,
    *,
    namespace: NamespaceName = None,
    salt: Annotated[str | None, typer.Option(help="Only pages of one tenant, of all models.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Only pages not used for this long: 30d, 12h.")
    ] = None,
    page: Annotated[str | None, typer.Option(metavar="HASH", help="Only one page and its descendants.")] = None,
    prefix: Prefix = None,
    model: ModelFile = None,
    tokenizer: TokenizerFile = None,
    everything: Annotated[bool, typer.Option("--everything", help="All pages of the store.")] = False,
    scrub: Annotated[bool, typer.Option("--scrub/--no-scrub", help="Overwrite the deleted bytes.")] = True,
    as_json: AsJson = False,
) -> int:
    """Delete pages and overwrite their bytes.

    Pages that match all given options are deleted, pinned ones included; afterwards their contents cannot be read from
    the files. Overwriting does not reach copies: backups, file system snapshots,
    swap, the spare blocks of an SSD, exported files, and the logs and replicas of a PostgreSQL server. Exit code 1: the
    pages are deleted, but could not be overwritten, since another process is still reading them (run it again),
    there is no tenant of this name, or there are pages of which the tenant is not known, or that a newer version has
    written.

    Example: prefixstore purge lmdb:///var/cache/kv --salt tenant-7
    """
    tokens = tokens_of_prefix(prefix, model, tokenizer)
    if not everything and (namespace, salt, older_than, page, prefix) == (None,) * 5:
        raise InvalidParameterError(
            "no pages are selected; pass --namespace, --salt, --older-than, --page, --prefix or --everything"
        )
    seconds = parse_seconds(older_than, "--older-than") if older_than is not None else None
    scrubbed = False
    with Archive(location) as archive:
        where = archive.location
        holdings = archive.holdings() if salt is not None else []
        is_known = salt is None or any(one.namespace and one.namespace.salt == salt for one in holdings)
        unknown = [one.key.hex() for one in holdings if one.namespace is None and one.pages]
        removed = archive.purge(
            namespace=namespace,
            salt=salt,
            older_than=seconds,
            tokens=tokens,
            page=page,
            everything=everything,
        )
        n_newer = archive.n_newer
        if scrub:
            try:
                archive.scrub()
                scrubbed = True
            except UnavailableError as error:
                say(f"prefixstore: the pages were deleted, but could not be overwritten; run it again: {error}")
    if as_json:
        emit({"location": where, "removed": asdict(removed), "scrubbed": scrubbed})
    else:
        done = "deleted and overwritten" if scrubbed else "deleted"
        typer.echo(f"{where}: {removed.pages:,} pages {done}, {format_bytes(removed.bytes)}")
    if not is_known:
        say(f"{where}: there is no tenant {salt!r}; prefixstore ls lists the tenants")
    for key in unknown:
        say(f"{where}: the settings of namespace {key} are damaged, so its tenant is not known; see --namespace")
    if n_newer:
        say(f"{where}: {n_newer:,} pages of a newer prefixstore are left, which may match; purge with that version")
    return FAILED if (scrub and not scrubbed) or not is_known or unknown or n_newer else 0


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
        typer.echo(f"{where}: {changed:,} pages {'pinned' if pinned else 'unpinned'}")


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
        typer.echo(f"{where}: {format_bytes(freed)} returned to the file system")
