"""Commands that keep a location healthy: ``check``, ``verify``, ``evict``, ``purge``, ``pin``, ``compact``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from prefixstore.cli.options import ConfigFile, ModelFile, NCtx, Salt, TokenizerFile, configured, text_of_tokens
from prefixstore.cli.output import FAILED, AsJson, LocationArgument, emit, say, table
from prefixstore.config import explain
from prefixstore.engine.check import Violation
from prefixstore.engine.delete import Removed
from prefixstore.errors import InvalidParameterError, UnavailableError
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.verify import BOUND, Comparison
from prefixstore.maintenance.verify import verify as compare
from prefixstore.units import format_bytes, parse_bytes, parse_seconds

__all__ = ["check", "compact", "evict", "pin", "purge", "unpin", "verify"]

MaxBytes = Annotated[str | None, typer.Option("--max-bytes", metavar="SIZE", help="What it may hold: 20GiB.")]
Digits = Annotated[str, typer.Argument(metavar="HASH", help="The key of a page; its first digits do.")]


def check(
    location: LocationArgument,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Delete what is broken, and what is behind it.")] = False,
    max_bytes: MaxBytes = None,
    as_json: AsJson = False,
) -> int:
    """Verify every invariant and every checksum.

    Exit code 1: something is wrong. With --repair: it still is afterwards.

    Example: prefixstore check lmdb:///var/cache/kv --repair
    """
    budget = parse_bytes(max_bytes, "--max-bytes") if max_bytes is not None else None
    with Archive(location, read_only=not repair) as archive:
        pages = archive.used().entries
        removed = Removed()
        if repair:
            found, removed = archive.repair(budget)
            left = archive.check(budget) if found else []
        else:
            found = left = archive.check(budget)
    if as_json:
        result = {"pages": pages, "violations": [asdict(violation) for violation in found]}
        emit(result | ({"removed": asdict(removed), "left": [asdict(one) for one in left]} if repair else {}))
    else:
        _print_violations(found, pages)
        if removed.pages:
            typer.echo(
                f"{removed.pages:,} pages were deleted, {format_bytes(removed.bytes)}; they will be computed anew"
            )
    return FAILED if left else 0


def _print_violations(found: list[Violation], pages: int) -> None:
    for violation in found:
        typer.echo(str(violation))
    rules = ", ".join(f"{rule} {n}" for rule, n in sorted(Counter(one.rule for one in found).items()))
    typer.echo(f"{pages:,} pages, {len(found)} violations ({rules})" if found else f"{pages:,} pages, all is well")


def verify(
    location: LocationArgument,
    *,
    model: ModelFile = None,
    config: ConfigFile = None,
    n_ctx: NCtx = None,
    salt: Salt = None,
    sample: Annotated[int, typer.Option(metavar="N", min=1, help="How many sequences.")] = 8,
    seed: Annotated[int, typer.Option(help="Picks them.")] = 0,
    bound: Annotated[float, typer.Option(min=0.0, help="Largest difference, as a share of the logits' range.")] = BOUND,
    as_json: AsJson = False,
) -> int:
    """Compute stored sequences anew, and compare the logits of the next token with those after a restore.

    The same tokens in other batches differ by rounding, which the bound allows for. Exit code 1: a difference is beyond
    it, or something could not be restored.

    Example: prefixstore verify lmdb:///var/cache/kv --model m.gguf --sample 20
    """
    settings = configured(location, config, model, n_ctx, salt)
    if n_ctx is None and "n_ctx" not in settings.model:
        settings = settings.override(model={"n_ctx": 0})  # the model's own
    llm = settings.open_llama()
    with Archive(location, read_only=True) as archive, settings.open_store(llm, read_only=True) as store:
        namespace = store.namespace
        found = list(compare(llm, store, archive, sample, seed=seed))
        if not found:
            say("prefixstore: nothing is stored of this model with these settings")
            known = [holding.namespace for holding in archive.holdings() if holding.namespace is not None]
            for difference in explain(namespace, known):
                say(f"  {difference}")
    llm.close()
    return _report(found, bound, as_json=as_json)


def _report(found: list[Comparison], bound: float, *, as_json: bool) -> int:
    bad = [one for one in found if not one.is_within(bound)]
    largest = max((one.share for one in found), default=None)
    if as_json:
        emit({"sequences": [asdict(one) for one in found], "largest": largest, "bound": bound, "beyond": len(bad)})
    elif found:
        rows = [
            [one.page[:12], f"{one.n_tokens:,}", f"{one.restored:,}", f"{one.difference:.2g}", f"{one.share:.2%}",
             "yes" if one.same_token else "no"]
            for one in found
        ]  # fmt: skip
        table(["page", "tokens>", "restored>", "difference>", "of the range>", "same token"], rows)
        typer.echo(f"largest difference {largest:.2%} of the range, bound {bound:.2%}, {len(bad)} beyond it")
    return FAILED if bad or not found else 0


def evict(
    location: LocationArgument,
    *,
    to: Annotated[str, typer.Option(metavar="SIZE", help="What may be left: 10GiB.")],
    as_json: AsJson = False,
) -> int:
    """Evict pages, least recently used first, until the location holds no more than a size.

    Exit code 1: what is pinned is more.

    Example: prefixstore evict lmdb:///var/cache/kv --to 10GiB
    """
    target = parse_bytes(to, "--to")
    with Archive(location) as archive:
        removed = archive.evict_to(target)
        used = archive.used()
    if as_json:
        emit({"removed": asdict(removed), "used_bytes": used.bytes, "pages": used.entries})
    else:
        typer.echo(f"{removed.pages:,} pages evicted, {format_bytes(used.bytes)} in {used.entries:,} pages left")
    return FAILED if used.bytes > target else 0


def purge(
    location: LocationArgument,
    *,
    namespace: Annotated[str | None, typer.Option(help="Pages of one namespace: key, or name.")] = None,
    salt: Annotated[str | None, typer.Option(help="Pages of one tenant, of all models.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Pages not used for so long: 30d, 12h.")
    ] = None,
    page: Annotated[str | None, typer.Option(metavar="HASH", help="One page, and all behind it.")] = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Sequences that begin with a text; needs a model.")
    ] = None,
    model: ModelFile = None,
    tokenizer: TokenizerFile = None,
    everything: Annotated[bool, typer.Option("--everything", help="All pages of the location.")] = False,
    scrub: Annotated[bool, typer.Option("--scrub/--no-scrub", help="Overwrite what is deleted.")] = True,
    as_json: AsJson = False,
) -> int:
    """Delete pages, pinned ones too, so that nothing of them can be read from the files.

    Of what several options choose, that which fits all of them is deleted. Exit code 1: it is deleted, but somebody
    still reads it, so that it could not be overwritten; run it again. docs/operations.md says what each backend can
    promise.

    Example: prefixstore purge lmdb:///var/cache/kv --salt tenant-7
    """
    words = text_of_tokens(model, tokenizer)
    if prefix is not None and words is None:
        raise InvalidParameterError("--prefix needs --model or --tokenizer, which make tokens of the text")
    if not everything and (namespace, salt, older_than, page, prefix) == (None,) * 5:
        raise InvalidParameterError(
            "nothing is chosen; give --namespace, --salt, --older-than, --page, --prefix, or --everything"
        )
    seconds = parse_seconds(older_than, "--older-than") if older_than is not None else None
    scrubbed = False
    with Archive(location) as archive:
        removed = archive.purge(
            namespace=namespace,
            salt=salt,
            older_than=seconds,
            tokens=words.tokens(prefix) if words is not None and prefix is not None else None,
            page=page,
            everything=everything,
        )
        if scrub:
            try:
                archive.scrub()
                scrubbed = True
            except UnavailableError as error:
                say(f"prefixstore: what was deleted could not be overwritten: {error}")
    if as_json:
        emit({"removed": asdict(removed), "scrubbed": scrubbed})
    else:
        typer.echo(
            f"{removed.pages:,} pages deleted, {format_bytes(removed.bytes)}{', overwritten' if scrubbed else ''}"
        )
    return FAILED if scrub and not scrubbed else 0


def pin(location: LocationArgument, digits: Digits, *, as_json: AsJson = False) -> None:
    """Keep a page from eviction, with all before and behind it.

    Example: prefixstore pin lmdb:///var/cache/kv 4f9c1b
    """
    _pin(location, digits, pinned=True, as_json=as_json)


def unpin(location: LocationArgument, digits: Digits, *, as_json: AsJson = False) -> None:
    """Undo pin; what comes before stays pinned if it leads to another pinned page.

    Example: prefixstore unpin lmdb:///var/cache/kv 4f9c1b
    """
    _pin(location, digits, pinned=False, as_json=as_json)


def _pin(location: str, digits: str, *, pinned: bool, as_json: bool) -> None:
    with Archive(location) as archive:
        page = archive.find(digits)
        changed = archive.pin(page, pinned=pinned)
    if as_json:
        emit({"page": page.key.hex(), "changed": changed, "pinned": pinned})
    else:
        typer.echo(f"{changed:,} pages {'pinned' if pinned else 'unpinned'}")


def compact(location: LocationArgument, *, as_json: AsJson = False) -> None:
    """Give the disk back what deletions have freed in the files.

    Example: prefixstore compact lmdb:///var/cache/kv
    """
    with Archive(location) as archive:
        given = archive.compact()
    if as_json:
        emit({"bytes": given})
    else:
        typer.echo(f"{format_bytes(given)} given back to the disk")
