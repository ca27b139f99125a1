"""Commands that move pages: ``export``, ``import``, ``copy``, ``migrate``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from prefixstore.backends.files import sync_path
from prefixstore.cli.options import ConfigFile, ModelFile, NCtx, Salt, TokenizerFile, configured, text_of_tokens
from prefixstore.cli.output import FAILED, AsJson, LocationArgument, emit, say
from prefixstore.config import explain
from prefixstore.errors import IncompatibleError, InvalidParameterError, LocationError
from prefixstore.format.export import ExportReader
from prefixstore.format.namespace import Namespace
from prefixstore.maintenance.archive import DEFAULT_BYTES, Archive
from prefixstore.maintenance.transfer import Moved, copy_store, export_store, import_store
from prefixstore.units import format_bytes, parse_bytes

__all__ = ["copy", "export", "import_", "migrate"]

NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Pages of one namespace only: key, or name.")]
PrefixOption = Annotated[
    str | None,
    typer.Option("--prefix", metavar="TEXT", help="Sequences that begin with a text only; needs a model."),
]
PageOption = Annotated[
    str | None, typer.Option("--page", metavar="HASH", help="One page only, with all before and behind it.")
]
MaxBytes = Annotated[
    str | None, typer.Option("--max-bytes", metavar="SIZE", help="What the target may hold: 20GiB; by default 10GiB.")
]
STANDARD = "-"


def export(
    location: LocationArgument,
    *,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The file to write: f.pstore; - is stdout.")],
    namespace: NamespaceOption = None,
    prefix: PrefixOption = None,
    page: PageOption = None,
    model: ModelFile = None,
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> int:
    """Write pages into one portable file.

    Exit code 1: damaged pages were left out.

    Example: prefixstore export lmdb:///var/cache/kv --out night.pstore
    """
    started = time.perf_counter()
    with Archive(location, read_only=True) as archive:
        namespaces, keys = _selected(archive, namespace, prefix, page, model, tokenizer)
        with _writing(out) as file:
            moved = export_store(archive, file, namespaces=namespaces, keys=keys)
    _tell(moved, "exported", time.perf_counter() - started, as_json=as_json, quiet=out == STANDARD)
    return FAILED if moved.damaged else 0


def _selected(
    archive: Archive,
    namespace: str | None,
    prefix: str | None,
    page: str | None,
    model: Path | None,
    tokenizer: Path | None,
) -> tuple[set[bytes] | None, set[bytes] | None]:
    """Namespaces and keys of the pages that are meant; None for all."""
    words = text_of_tokens(model, tokenizer)
    if prefix is not None and words is None:
        raise InvalidParameterError("--prefix needs --model or --tokenizer, which make tokens of the text")
    spaces = {archive.namespace(namespace).key} if namespace is not None else None
    if prefix is None and page is None:
        return spaces, None
    tokens = words.tokens(prefix) if words is not None and prefix is not None else None
    return spaces, archive.with_ancestors(archive.select(namespaces=spaces, tokens=tokens, page=page))


@contextmanager
def _writing(out: str) -> Iterator[BinaryIO]:
    """The file to write; it has its name when it is complete. Only its owner reads it: there are prompts in it."""
    if out == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(out)
    part = target.with_name(target.name + ".part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        sync_path(target.absolute().parent)
    except OSError as error:
        raise LocationError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def import_(
    location: LocationArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="What export has written; - is stdin.")],
    *,
    max_bytes: MaxBytes = None,
    model: ModelFile = None,
    config: ConfigFile = None,
    n_ctx: NCtx = None,
    salt: Salt = None,
    as_json: AsJson = False,
) -> int:
    """Put the pages of a file into a location, which may be new, and of any backend.

    Pages that are there already are passed over, so an import that was interrupted is just run again. With a model the
    file is refused if it has no pages of it with these settings. Exit code 1: the file is damaged or truncated (what
    comes before is imported), or there was no room for all; 3: the file is not of this format, or not for this model.

    Example: prefixstore import sqlite:////var/cache/kv.db night.pstore --model m.gguf
    """
    started = time.perf_counter()
    budget = parse_bytes(max_bytes, "--max-bytes") if max_bytes is not None else None
    with _reading(file) as opened:
        reader = ExportReader(opened, file)
        if model is not None or config is not None:
            settings = configured(location, config, model, n_ctx, salt)
            llm = settings.open_llama()
            with settings.open_store(llm, location="memory:") as store:
                _require(file, reader, store.namespace)
            llm.close()
        with Archive(location, max_bytes=budget, create=True) as archive:
            moved = import_store(reader, archive)
    _tell(moved, "imported", time.perf_counter() - started, as_json=as_json)
    return FAILED if moved.refused else 0


def _require(file: str, reader: ExportReader, wanted: Namespace) -> None:
    """See to it that there are pages of a model in a file."""
    if wanted.key not in reader.namespaces:
        known = [Namespace.parse(settings) for settings in reader.namespaces.values()]
        differences = [text.replace("in the store", "in the file") for text in explain(wanted, known)]
        raise IncompatibleError(
            f"{file} has no pages of this model with these settings: {'; '.join(differences) or 'it is empty'}"
        )


@contextmanager
def _reading(file: str) -> Iterator[BinaryIO]:
    if file == STANDARD:
        yield sys.stdin.buffer
        return
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 - closed below; an OSError of the block is none of the file
    except OSError as error:
        raise LocationError(f"{file} cannot be read: {error.strerror or error}") from error
    with opened:
        yield opened


def copy(
    source: LocationArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Another location, which may be new.")],
    *,
    namespace: NamespaceOption = None,
    max_bytes: MaxBytes = None,
    as_json: AsJson = False,
) -> int:
    """Copy pages into another location, of any backend.

    Exit code 1: damaged pages were left out, or there was no room for all.

    Example: prefixstore copy lmdb:///var/cache/kv sqlite:////backup/kv.db
    """
    started = time.perf_counter()
    budget = parse_bytes(max_bytes, "--max-bytes") if max_bytes is not None else None
    with Archive(source, read_only=True) as archive:
        if _is_same(archive, target):
            raise InvalidParameterError("source and target are the same location")
        wanted = {archive.namespace(namespace).key} if namespace is not None else None
        used = archive.used().bytes
        with Archive(target, max_bytes=budget or max(2 * used, DEFAULT_BYTES), create=True) as other:
            moved = copy_store(archive, other, namespaces=wanted)
    _tell(moved, "copied", time.perf_counter() - started, as_json=as_json)
    return FAILED if moved.damaged or moved.refused else 0


def _is_same(archive: Archive, target: str) -> bool:
    try:
        with Archive(target, read_only=True) as other:
            return other.location == archive.location
    except LocationError:
        return False  # there is none yet


def _tell(moved: Moved, done: str, seconds: float, *, as_json: bool, quiet: bool = False) -> None:
    if as_json and not quiet:
        emit(asdict(moved) | {"seconds": round(seconds, 3)})
        return
    rate = format_bytes(moved.bytes / seconds) if seconds else "0 B"
    more = {
        "were there already": moved.present,
        "are damaged and left out": moved.damaged,
        "found no room": moved.refused,
        "were evicted for them": moved.evicted,
    }
    tell = say if quiet else typer.echo
    tell(f"{moved.pages:,} pages {done}, {format_bytes(moved.bytes)} at {rate}/s")
    for what, n in more.items():
        if n:
            tell(f"{n:,} pages {what}")


def migrate(
    location: LocationArgument,
    *,
    check: Annotated[bool, typer.Option("--check", help="Only say whether there is something to do.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Only print the statements.")] = False,
    as_json: AsJson = False,
) -> int:
    """Create a SQL store, or bring its schema up to date.

    Exit code 1 with --check: there is something to do.

    Example: prefixstore migrate postgresql+psycopg://user@host/db --check
    """
    from prefixstore.backends.sql import migrations as schema  # noqa: PLC0415 - the extras for SQL

    if check and sql:
        raise InvalidParameterError("--check and --sql exclude each other")
    if sql:
        statements = schema.upgrade_sql(location)
        if as_json:
            emit({"sql": statements})
        else:
            typer.echo(statements, nl=False)
        return 0
    before = schema.check(location) if check else schema.upgrade(location)
    if as_json:
        emit({"revision": before.revision, "head": before.head, "current": before.is_current or not check})
    elif before.is_current:
        typer.echo(f"schema {before.revision}: up to date")
    else:
        typer.echo(f"schema {before.revision or 'none'} -> {before.head}{': to be migrated' if check else ''}")
    return FAILED if check and not before.is_current else 0
