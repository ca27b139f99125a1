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
from prefixstore.backends.location import without_password
from prefixstore.backends.sql import require_sql
from prefixstore.cli.arguments import (
    AsJson,
    ConfigFile,
    Location,
    MaxBytes,
    ModelFile,
    NamespaceName,
    NCtx,
    Prefix,
    Salt,
    TokenizerFile,
    configured,
    max_bytes_of,
    open_model,
    tokens_of_prefix,
)
from prefixstore.cli.heap import keep_freed_memory
from prefixstore.cli.output import FAILED, emit, say
from prefixstore.config import explain
from prefixstore.errors import IncompatibleError, InvalidParameterError, LocationError
from prefixstore.format.export import MAGIC, ExportReader
from prefixstore.format.namespace import Namespace
from prefixstore.maintenance.archive import DEFAULT_BYTES, Archive
from prefixstore.maintenance.transfer import Moved, copy_store, export_store, import_store
from prefixstore.units import format_bytes

__all__ = ["copy", "export", "import_", "migrate"]

STANDARD = "-"


def export(
    location: Location,
    *,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="The file to write, such as f.pstore; - is stdout.")
    ],
    namespace: NamespaceName = None,
    prefix: Prefix = None,
    page: Annotated[
        str | None, typer.Option(metavar="HASH", help="Only one page, with its ancestors and descendants.")
    ] = None,
    model: ModelFile = None,
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> int:
    """Write pages into one portable file.

    Exit code 1: damaged pages were left out.

    Example: prefixstore export lmdb:///var/cache/kv --out night.pstore
    """
    started = time.perf_counter()
    tokens = tokens_of_prefix(prefix, model, tokenizer)
    with Archive(location, read_only=True) as archive:
        namespaces, keys = _selected(archive, namespace, tokens, page)
        with _writing(out) as file:
            moved = export_store(archive, file, namespaces=namespaces, keys=keys)
        where = archive.location
    seconds = time.perf_counter() - started
    _report(moved, "exported", seconds, {"location": where, "file": out}, as_json=as_json)
    return FAILED if moved.damaged else 0


def _selected(
    archive: Archive, namespace: str | None, prefix: list[int] | None, page: str | None
) -> tuple[set[bytes] | None, set[bytes] | None]:
    """Namespaces and keys of the selected pages; None for all."""
    namespaces = {archive.namespace(namespace).key} if namespace is not None else None
    if prefix is None and page is None:
        return namespaces, None
    return namespaces, archive.with_ancestors(archive.select(namespaces=namespaces, tokens=prefix, page=page))


def _require_replaceable(target: Path) -> None:
    """Refuse a file that is not an export: it was named by mistake."""
    try:
        with target.open("rb") as file:
            begin = file.read(len(MAGIC))
    except OSError:
        return  # there is none, or writing it says why
    if begin and begin != MAGIC:
        raise LocationError(f"{target} exists and is not an export of prefixstore; choose another name, or delete it")


@contextmanager
def _writing(out: str) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete. Only its owner can read it, since it contains prompts."""
    if out == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(out)
    _require_replaceable(target)
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
    location: Location,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file that export has written; - is stdin.")],
    *,
    max_bytes: MaxBytes = None,
    model: ModelFile = None,
    config: ConfigFile = None,
    n_ctx: NCtx = None,
    salt: Salt = None,
    as_json: AsJson = False,
) -> int:
    """Import the pages of a file into a store of any backend.

    The store is created if it does not exist. Pages that are there already are skipped, so an interrupted import is
    simply run again. With --model or --config, a file without pages for that model and its settings is refused. Without
    --max-bytes the limit is 10 GiB, or the size of the store if that is larger. Exit code 1: the file is damaged or
    truncated (everything before that point is imported), or there was no space for all pages; 3: the file does not have
    this format, or is not for this model.

    Example: prefixstore import sqlite:////var/cache/kv.db night.pstore --model m.gguf
    """
    started = time.perf_counter()
    budget = max_bytes_of(max_bytes)
    keep_freed_memory()
    with _reading(file) as opened:
        reader = ExportReader(opened, file)
        if model is not None or config is not None:
            settings = configured(location, config, model, n_ctx, salt)
            llm = open_model(settings)
            with settings.open_store(llm, location="memory:") as store:
                _require(file, reader, store.namespace)
            llm.close()
        with Archive(location, max_bytes=budget, create=True) as archive:
            moved = import_store(reader, archive)
            where = archive.location
    seconds = time.perf_counter() - started
    _report(moved, "imported", seconds, {"file": file, "location": where}, as_json=as_json)
    return FAILED if moved.refused else 0


def _require(file: str, reader: ExportReader, wanted: Namespace) -> None:
    """Raise unless the file has pages of this namespace."""
    if wanted.key not in reader.namespaces:
        known = [Namespace.parse(settings) for settings in reader.namespaces.values()]
        differences = [text.replace("in the store", "in the file") for text in explain(wanted, known)]
        raise IncompatibleError(
            f"{file} has no pages for this model and its settings: {'; '.join(differences) or 'it is empty'}"
        )


@contextmanager
def _reading(file: str) -> Iterator[BinaryIO]:
    if file == STANDARD:
        yield sys.stdin.buffer
        return
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 - closed below; an OSError in the block does not come from the file
    except OSError as error:
        raise LocationError(f"{file} cannot be read: {error.strerror or error}") from error
    with opened:
        yield opened


def copy(
    source: Location,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Another location; it is created if it does not exist.")
    ],
    *,
    namespace: NamespaceName = None,
    max_bytes: MaxBytes = None,
    as_json: AsJson = False,
) -> int:
    """Copy pages into another store, of any backend.

    Without --max-bytes the target may grow to 10 GiB or twice the size of the source, whichever is more. Exit code 1:
    damaged pages were left out, or there was no space for all pages.

    Example: prefixstore copy lmdb:///var/cache/kv sqlite:////backup/kv.db
    """
    started = time.perf_counter()
    budget = max_bytes_of(max_bytes)
    keep_freed_memory()
    with Archive(source, read_only=True) as archive:
        if _is_same(archive, target):
            raise InvalidParameterError("source and target are the same location")
        wanted = {archive.namespace(namespace).key} if namespace is not None else None
        used = archive.used().bytes
        with Archive(target, max_bytes=budget or max(2 * used, DEFAULT_BYTES), create=True) as other:
            moved = copy_store(archive, other, namespaces=wanted)
            places = {"location": archive.location, "target": other.location}
    _report(moved, "copied", time.perf_counter() - started, places, as_json=as_json)
    return FAILED if moved.damaged or moved.refused else 0


def _is_same(archive: Archive, target: str) -> bool:
    try:
        with Archive(target, read_only=True) as other:
            return other.location == archive.location
    except LocationError:
        return False  # the target does not exist yet


def _report(moved: Moved, done: str, seconds: float, places: dict[str, str], *, as_json: bool) -> None:
    """Print what was moved. `places` are the source and the target, by their names in the JSON document."""
    source, target = places.values()
    # stdout may carry the pages themselves
    is_piped = done == "exported" and target == STANDARD
    if as_json and not is_piped:
        emit(places | asdict(moved) | {"seconds": round(seconds, 3)})
        return
    rate = format_bytes(moved.bytes / seconds) if seconds else "0 B"
    more = {
        "already existed": moved.present,
        "were damaged and left out": moved.damaged,
        "did not fit": moved.refused,
        "were evicted to make space": moved.evicted,
    }
    show = say if is_piped else typer.echo
    show(f"{moved.pages:,} pages {done} from {source} to {target}: {format_bytes(moved.bytes)} at {rate}/s")
    for what, n in more.items():
        if n:
            show(f"{n:,} pages {what}")


def migrate(
    location: Location,
    *,
    check: Annotated[bool, typer.Option("--check", help="Only report whether the schema is up to date.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Only print the SQL statements.")] = False,
    as_json: AsJson = False,
) -> int:
    """Create a SQL store, or bring its schema up to date.

    Exit code 1 with --check: the schema is not up to date.

    Example: prefixstore migrate postgresql+psycopg://user@host/db --check
    """
    require_sql(location)
    from prefixstore.backends.sql import migrations as schema  # noqa: PLC0415 - the extras for SQL

    if check and sql:
        raise InvalidParameterError("--check and --sql cannot be combined")
    if sql:
        statements = schema.upgrade_sql(location)
        if as_json:
            emit({"sql": statements})
        else:
            typer.echo(statements, nl=False)
        return 0
    before = schema.check(location) if check else schema.upgrade(location)
    where = without_password(location)
    if as_json:
        emit(
            {
                "location": where,
                "revision": before.revision,
                "head": before.head,
                "current": before.is_current or not check,
            }
        )
    elif before.is_current:
        typer.echo(f"{where}: schema {before.revision} is up to date")
    else:
        change = f"schema {before.revision or 'none'} -> {before.head}"
        typer.echo(f"{where}: {change} {'needed' if check else 'done'}")
    return FAILED if check and not before.is_current else 0
