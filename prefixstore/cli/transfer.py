"""Commands that move pages: ``export``, ``import``, ``copy``."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from prefixstore.backends.files import sync_path
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
from prefixstore.cli.confirm import DryRun, Replace, is_confirmed
from prefixstore.cli.heap import keep_freed_memory
from prefixstore.cli.output import FAILED, emit, say, tell
from prefixstore.config import explain, load_config
from prefixstore.errors import IncompatibleError, InvalidParameterError, LocationError
from prefixstore.format.export import MAGIC, ExportReader
from prefixstore.format.namespace import Namespace
from prefixstore.maintenance.archive import DEFAULT_BYTES, Archive
from prefixstore.maintenance.transfer import Moved, copy_store, export_store, import_store, missing_bytes
from prefixstore.units import counted, format_bytes

__all__ = ["copy", "export", "import_"]

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
    dry_run: DryRun = False,
    yes: Replace = False,
    as_json: AsJson = False,
) -> int:
    """Write pages into one portable file.

    On a terminal it asks before it replaces an export; a file that is not an export is never replaced. Exit code 1:
    damaged pages were left out, or the answer was no.

    Example: prefixstore export lmdb:///var/cache/kv --out night.pstore
    """
    started = time.perf_counter()
    if out == STANDARD and not dry_run and sys.stdout.isatty():
        raise InvalidParameterError("--out - writes bytes to stdout, which is a terminal; redirect it, or pass a file")
    tokens = tokens_of_prefix(prefix, model, tokenizer)
    with Archive(location, read_only=True) as archive:
        where = archive.location
        namespaces, keys = _selected(archive, namespace, tokens, page)
        if out != STANDARD:
            _require_replaceable(Path(out))
        if dry_run:
            return _say_what_would_be_exported(archive, out, namespaces, keys, as_json=as_json)
        if out != STANDARD and Path(out).exists() and not is_confirmed(f"{out} exists; replace it?", yes=yes):
            return FAILED
        with _writing(out) as file:
            moved = export_store(archive, file, namespaces=namespaces, keys=keys)
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


def _say_what_would_be_exported(
    archive: Archive, out: str, namespaces: set[bytes] | None, keys: set[bytes] | None, *, as_json: bool
) -> int:
    pages = [
        page
        for page in archive.pages()
        if (namespaces is None or page.namespace in namespaces) and (keys is None or page.key in keys)
    ]
    size = sum(page.stored_bytes for page in pages)
    if as_json:
        emit({"location": archive.location, "file": out, "pages": len(pages), "bytes": size, "dry_run": True})
    else:
        replaced = ", which would be replaced" if out != STANDARD and Path(out).exists() else ""
        held = f"{counted(len(pages), 'page')}, {format_bytes(size)}"
        tell(f"{held}, would be exported from {archive.location} to {out}{replaced}")
    return 0


def _require_replaceable(target: Path) -> None:
    """Refuse a file that is not an export: it was named by mistake."""
    if target.exists() and not target.is_file():
        # a device would be replaced, and a pipe waited for
        raise LocationError(f"{target} exists and is not a file; choose another name, or - for stdout")
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
    part: Path | None = None
    try:
        # a unique name: an existing file may be a link, or readable by others
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        part = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        sync_path(target.absolute().parent)
    except OSError as error:
        raise LocationError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def import_(
    location: Location,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file written by export; - is stdin.")],
    *,
    max_bytes: MaxBytes = None,
    model: ModelFile = None,
    config: ConfigFile = None,
    n_ctx: NCtx = None,
    salt: Salt = None,
    as_json: AsJson = False,
) -> int:
    """Import the pages of a file into a store of any backend.

    The store is created if it does not exist. Pages that it already has are skipped, so an interrupted import can
    simply be run again. With --model or --config, a file without pages for that model and its settings is refused.
    Without --max-bytes the limit is 10 GiB, or the size of the store if that is larger. Exit code 1: the file is
    damaged or truncated (everything before that point is imported), or there was no space for all pages; 3: the file
    does not have this format, or is not for this model.

    Example: prefixstore import sqlite:////var/cache/kv.db night.pstore --model m.gguf
    """
    started = time.perf_counter()
    budget = max_bytes_of(max_bytes)
    keep_freed_memory()
    with _reading(file) as opened:
        reader = ExportReader(opened, file)
        if model is not None or (config is not None and load_config(config).path is not None):
            settings = configured(location, config, model, n_ctx, salt)
            llm = open_model(settings)
            with settings.open_store(llm, location="memory:") as store:
                _require(file, reader, store.namespace)
            llm.close()
        with Archive(location, max_bytes=budget, create=True) as archive:
            _warn_of_a_small_budget(file, archive)
            moved = import_store(reader, archive)
            where = archive.location
    seconds = time.perf_counter() - started
    _report(moved, "imported", seconds, {"file": file, "location": where}, as_json=as_json)
    return FAILED if moved.refused else 0


def _warn_of_a_small_budget(file: str, archive: Archive) -> None:
    """Say before anything is written that not all of a file will fit."""
    room = archive.max_bytes - archive.used().bytes
    path = Path(file)
    if file == STANDARD or not path.is_file() or path.stat().st_size <= room:
        return
    with _reading(file) as opened:
        wanted = missing_bytes(ExportReader(opened, file), archive)
    if wanted > max(room, 0):
        _warn(file, wanted, archive, room)


def _warn(source: str, wanted: int, archive: Archive, room: int) -> None:
    say(
        f"note: {source} has {format_bytes(wanted)} that {archive.location} lacks; its limit is "
        f"{format_bytes(archive.max_bytes)}, with {format_bytes(max(room, 0))} free: pages will be left out, or "
        "evicted; pass a larger --max-bytes to keep them all"
    )


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
            size = sum(page.stored_bytes for page in archive.pages() if wanted is None or page.namespace in wanted)
            room = other.max_bytes - other.used().bytes
            if budget is not None and size > other.max_bytes:
                _warn(archive.location, size, other, room)
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
    size = f"{format_bytes(moved.bytes)} at {format_bytes(moved.bytes / seconds)}/s" if moved.bytes else "no bytes"
    more = {
        "already existed": moved.present,
        "damaged and left out": moved.damaged,
        "did not fit": moved.refused,
        "evicted to make space": moved.evicted,
    }
    show = say if is_piped else tell
    show(f"{counted(moved.pages, 'page')} {done} from {source} to {target}: {size}")
    for what, n in more.items():
        if n:
            show(f"{counted(n, 'page')} {what}")
