"""Commands that move pages: ``export``, ``import``, ``copy``."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from prefixstore.backends.encryption_keys import Keys, provider_of
from prefixstore.backends.files import place_of
from prefixstore.backends.location import without_password
from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.listing import chosen_namespaces
from prefixstore.cli.model import NO_SUCH_TEXT, tokens_of_prefix
from prefixstore.cli.named_files import STANDARD, is_replaced, reading, writing
from prefixstore.cli.output import DONE, FAILED, may_replace, say, tell
from prefixstore.engine.page import Page
from prefixstore.errors import CorruptError, InvalidParameterError, LocationError, MissingExtraError
from prefixstore.format.export import ENCRYPTED, MAGIC, ExportReader
from prefixstore.maintenance.archive import DEFAULT_BYTES, Archive
from prefixstore.maintenance.transfer import Moved, chosen, copy_store, export_store, import_store
from prefixstore.units import counted, format_bytes


def export(
    location: str,
    *,
    out: str,
    namespace: str | None = None,
    salt: str | None = None,
    prefix: str | None = None,
    page: str | None = None,
    model: Path | None = None,
    dry_run: bool = False,
    yes: bool = False,
) -> Result | int:
    """Write pages into one portable file.

    On a terminal it asks before it replaces an export; otherwise that needs --yes. A file that is not an export is
    never replaced. The file of an encrypted store is encrypted, too, under its newest key. Exit code 1: damaged pages
    were left out, nothing was replaced, or no such tenant or text is stored.

    Example: prefixstore export lmdb:///var/cache/kv --out night.pstore
    """
    started = time.perf_counter()
    if out == STANDARD and not dry_run and sys.stdout.isatty():
        raise InvalidParameterError("--out - writes bytes to stdout, which is a terminal; redirect it, or pass a file")
    tokens = tokens_of_prefix(prefix, model)
    with Archive(location, read_only=True) as archive:
        where = archive.location
        namespaces = chosen_namespaces(archive, namespace, salt)
        if namespaces is not None and not namespaces:
            return FAILED
        is_part = prefix is not None or page is not None
        keys = archive.select(namespaces=namespaces, tokens=tokens, page=page) if is_part else None
        if is_part and not keys:
            say(NO_SUCH_TEXT)
            return FAILED
        exists = out != STANDARD and is_replaced(Path(out), (MAGIC, ENCRYPTED))
        if dry_run:
            note = ", which would be replaced" if exists else ""
            return _planned("exported", archive, out, chosen(archive, namespaces, keys), note)
        if exists and not may_replace(out, yes=yes):
            return FAILED
        with writing(out) as file:
            moved = export_store(archive, _sealing(file, archive.keys), namespaces=namespaces, keys=keys)
    return _moved(moved, "exported", started, {"location": where, "file": out})


def _planned(done: str, archive: Archive, target: str, pages: list[Page], note: str = "") -> Result:
    """What would be exported or copied."""
    size, name = sum(page.stored_bytes for page in pages), "file" if done == "exported" else "target"
    return Result(
        {"location": archive.location, name: target, "pages": len(pages), "bytes": size, "dry_run": True},
        f"{counted(len(pages), 'page')}, {format_bytes(size)}, "
        f"would be {done} from {archive.location} to {target}{note}",
    )


def import_(
    location: str,
    file: str,
    *,
    max_bytes: str | None = None,
    from_key: str | None = None,
) -> Result | int:
    """Import the pages of a file into a store of any backend.

    The store is created if it does not exist. Pages that it already has are skipped, so an interrupted import can
    simply be run again. Without --max-bytes the limit is 10 GiB, or the size of the store if that is larger. Exit code
    1: the file is damaged or truncated (everything before that point is imported), or there was no space for all
    pages; 3: the file does not have this format.

    Example: prefixstore import sqlite:////var/cache/kv.db night.pstore
    """
    started = time.perf_counter()
    budget = options.max_bytes_of(max_bytes)
    name = "stdin" if file == STANDARD else file
    try:
        with reading(file) as opened:
            reader = ExportReader(opened, name, partial(_unsealed, from_key, name))
            with Archive(location, max_bytes=budget, create=True) as archive:
                if reader.is_encrypted and archive.keys is None:
                    say(f"note: {file} is encrypted, and {archive.location} is not: PREFIXSTORE_KEY is not set")
                moved = import_store(reader, archive)
                places = {"file": file, "location": archive.location}
    except CorruptError as error:
        # mostly the file is: the store can be used
        say(f"prefixstore: {error}")
        return FAILED
    return _moved(moved, "imported", started, places)


def _sealing(file: BinaryIO, keys: Keys | None) -> BinaryIO:
    """A file for exported pages, which are encrypted if the store is."""
    if keys is None:
        return file
    from prefixstore.backends.sealing import sealing  # noqa: PLC0415 - the extra "encryption"

    return sealing(file, keys)


def _unsealed(key: str | None, name: str, begin: bytes, file: BinaryIO) -> BinaryIO:
    """A file of exported pages that is encrypted."""
    provider = provider_of(key)
    try:
        from prefixstore.backends.sealing import SealedFile  # noqa: PLC0415 - the extra "encryption"
    except ImportError as error:
        raise MissingExtraError(f'{name} is encrypted; pip install "prefixstore[encryption]"') from error
    return cast("BinaryIO", SealedFile(file, begin, Keys.read(provider) if provider is not None else Keys(), name))


def copy(
    source: str,
    target: str,
    *,
    namespace: str | None = None,
    salt: str | None = None,
    max_bytes: str | None = None,
    from_key: str | None = None,
    to_key: str | None = None,
    dry_run: bool = False,
) -> Result:
    """Copy pages into another store, of any backend.

    With --from-key and --to-key it encrypts a store, or decrypts it. Without --max-bytes the target may grow to 10 GiB
    or twice the size of the source, whichever is more. Exit code 1: damaged pages were left out, or there was no space
    for all pages.

    Example: prefixstore copy lmdb:///var/cache/kv sqlite:////backup/kv.db
    """
    started = time.perf_counter()
    budget = options.max_bytes_of(max_bytes)
    with Archive(source, read_only=True, key=from_key) as archive:
        if _is_same(archive, target, to_key):
            raise InvalidParameterError("source and target are the same location")
        wanted = chosen_namespaces(archive, namespace, salt)
        if dry_run:
            return _planned("copied", archive, without_password(target), chosen(archive, wanted))
        size = budget or max(2 * archive.used().bytes, DEFAULT_BYTES)
        with Archive(target, max_bytes=size, create=True, key=to_key) as other:
            if archive.keys is not None and other.keys is None:
                say(f"note: {archive.location} is encrypted, and {other.location} is not")
            moved = copy_store(archive, other, namespaces=wanted)
            places = {"location": archive.location, "target": other.location}
    return _moved(moved, "copied", started, places)


def _is_same(archive: Archive, target: str, key: str | None) -> bool:
    try:
        with Archive(target, read_only=True, key=key) as other:
            return place_of(other.location) == place_of(archive.location)
    except LocationError:
        return False  # the target does not exist yet


def _moved(moved: Moved, done: str, started: float, places: dict[str, str]) -> Result:
    """What was moved. `places` are the source and the target, by their names in the JSON document."""
    seconds = time.perf_counter() - started
    source, target = places.values()
    # stdout may carry the pages themselves
    is_piped = done == "exported" and target == STANDARD
    show = say if is_piped else tell
    more = {
        "already existed": moved.present,
        "damaged and left out": moved.damaged,
        "did not fit": moved.refused,
        "evicted to make space": moved.evicted,
    }

    def text() -> None:
        size = f"{format_bytes(moved.bytes)} at {format_bytes(moved.bytes / seconds)}/s" if moved.bytes else "no bytes"
        show(f"{counted(moved.pages, 'page')} {done} from {source} to {target}: {size}")
        for what, n in more.items():
            if n:
                show(f"{counted(n, 'page')} {what}")

    # a damaged import file has been told as an error
    is_whole = not moved.refused and (done == "imported" or not moved.damaged)
    data = None if is_piped else places | asdict(moved) | {"seconds": round(seconds, 3)}
    return Result(data, text, DONE if is_whole else FAILED)
