"""Looks at everything that commonly goes wrong around a store, without writing anything, and says what to change."""

from __future__ import annotations

import os
import platform
import random
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from time import perf_counter

from prefixstore.backends import is_persistent
from prefixstore.backends.files import local_path
from prefixstore.backends.location import is_url, text_of, without_password
from prefixstore.config import Config, explain_of_model, explain_settings
from prefixstore.engine.budget import HIGH_WATER
from prefixstore.errors import LocationError, PrefixStoreError
from prefixstore.format.figures import History
from prefixstore.format.keys import PAGE
from prefixstore.format.record import Facts
from prefixstore.maintenance.archive import DEFAULT_BYTES, Archive
from prefixstore.maintenance.holdings import Holding, holdings_of, read_facts
from prefixstore.opening import locations_of
from prefixstore.units import counted, format_bytes, format_share, parse_bytes

# what an error report needs the versions of, beside this package; installed or not
PACKAGES = ("llama-cpp-python", "lmdb", "numpy", "SQLAlchemy", "psycopg", "valkey", "obstore", "aiohttp")
# contexts of full length that a budget should hold
CONTEXTS = 2
# what is read to find damaged pages
SAMPLE_PAGES, SAMPLE_BYTES = 256, 64 << 20
# a hit rate of this many prompts, and up to this much, is a problem
FEW_LOOKUPS, LOW_HIT_RATE = 10, 0.02
# why prompts miss, and what to do about it
CAUSES = {
    "evicted": "Pages are evicted before they are used again: raise max_bytes (prefixstore trace simulate).",
    "diverged": "Prompts part from what is stored: prefixstore explain shows where.",
    "not_found": "prefixstore explain says why a prompt is not found, prefixstore warm stores prompts ahead of time.",
}

MOUNTS = Path("/proc/self/mountinfo")
# where several machines may have the same files, or memory maps are not shared
NETWORK = frozenset(
    """
    nfs nfs4 cifs smb smb2 smb3 smbfs afs ceph glusterfs fuse.glusterfs lustre gpfs beegfs ocfs2 gfs2 9p virtiofs drvfs
    fuse.sshfs fuse.s3fs fuse.rclone fuse.gcsfuse fuse.blobfuse2 fuse.mount-s3 fuse.juicefs davfs fuse.davfs2 acfs
    """.split()  # noqa: SIM905 - to be read at a glance
)
VOLATILE = {"tmpfs": "memory, which is lost when the machine restarts", "ramfs": "memory, which is lost at a restart"}
VOLATILE |= {"overlay": "the layer of a container, which is deleted with the container"}
ESCAPED = re.compile(r"\\([0-7]{3})")


class Level(str, Enum):
    """How much a finding matters."""

    GOOD = "good"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What was examined, what was found, whether that is good, and else what to change."""

    name: str
    value: str
    level: Level = Level.GOOD
    advice: str = ""


def _found(name: str, value: str, problem: str = "", note: str = "") -> Finding:
    """A finding: a problem or a note if there is something to say about it, and else good."""
    level = Level.PROBLEM if problem else Level.NOTE if note else Level.GOOD
    return Finding(name, value, level, problem or note)


def examine(location: str | None, config: Config | None = None, max_bytes: int | str | None = None) -> list[Finding]:
    """Examine an installation and a location. Nothing is written, and no permission to write is needed.

    The location and the budget are by default those of the config, or the default ones; it may have two locations, of
    which the budget is that of the nearer one. If it has a model, that is loaded, and its settings are compared with
    those of the stored pages. Raises `InvalidParameterError`.
    """
    settings = config.store if config is not None else {}
    given = location if location is not None else settings.get("location")
    texts = [text_of(each) for each in locations_of(given)]
    for text in texts:
        is_persistent(text)
    limit = max_bytes if max_bytes is not None else settings.get("max_bytes")
    budget = None if limit is None else parse_bytes(limit, "max_bytes")
    far_limit = settings.get("far_max_bytes")
    far_budget = budget if far_limit is None else parse_bytes(far_limit, "far_max_bytes")
    found = [_versions()]
    holdings: list[Holding] = []
    names: dict[str, str] = {}
    can_open = True
    for n, (text, size) in enumerate(zip(texts, (budget, far_budget), strict=False), 1):
        there, held = _location(text, size, names, is_written=not settings.get("read_only"), is_nearer=n < len(texts))
        found += there
        holdings += held or ()
        can_open = can_open and held is not None
    if config is not None and config.path is not None and can_open:
        found += _settings(config, holdings, names, budget or DEFAULT_BYTES)
    return found


def _location(
    text: str, budget: int | None, names: dict[str, str], *, is_written: bool, is_nearer: bool
) -> tuple[list[Finding], Sequence[Holding] | None]:
    """What is found in a location, and what it holds, None if it cannot be opened; adds its names of models."""
    found = [_found("location", without_password(text) if is_url(text) else str(Path(text).absolute()))]
    path = local_path(text)
    if path is not None:
        found.append(_file_system(path))
    try:
        with Archive(text, read_only=True) as archive:
            if path is not None:
                found.append(_permissions(path, is_written=is_written, is_store=True))
            with archive.view() as view:
                facts = read_facts(view)
                holdings, used, history = holdings_of(view, facts), view.used.bytes, archive.history()
            names |= history.models
            found.append(_stored(used, holdings))
            found.append(_found("encryption", archive.encryption))
            # as `stats` has it: that of the process that was the last to begin writing
            found += _budget(path, used, budget or history.max_bytes or DEFAULT_BYTES)
            found += [*_sampled(archive, facts), *_use(history)]
    except PrefixStoreError as error:
        if not isinstance(error, LocationError) or path is None or not _is_missing(path):
            return [*found, _found("store", "cannot be opened", str(error))], None
        advice = "Check the path. If it is right, the first writer creates the store: prefixstore warm, or a server."
        # a new machine begins without one of its own
        found.append(_found("store", "none yet", "" if is_nearer else advice, advice))
        holdings = []
        found.append(_permissions(path, is_written=is_written, is_store=False))
        found += _budget(path, 0, budget or DEFAULT_BYTES)
    return found, holdings


def _sampled(archive: Archive, facts: Facts) -> Iterator[Finding]:
    """Whether pages, drawn by chance, are intact, and whether restoring them is faster than computing them was."""
    size, restoring, computing, read, timed = 0, 0.0, 0.0, 0, 0
    damaged = 0
    for page in facts[random.sample(range(len(facts)), min(len(facts), SAMPLE_PAGES))]:
        if size > SAMPLE_BYTES:
            break
        started = perf_counter()
        is_damaged = archive.damage(bytes(page["key"])) is not None
        size, read, damaged = size + int(page["stored_bytes"]), read + 1, damaged + is_damaged
        if page["compute_us"] and page["raw_bytes"] and page["form"] == PAGE and not is_damaged:
            restoring += perf_counter() - started
            computing += int(page["compute_us"]) / 1e6
            timed += int(page["n_tokens"])
    if damaged:
        advice = f"prefixstore check {archive.location} lists them, and with --repair deletes them."
        yield _found("pages", f"{damaged:,} damaged of {read:,} that were read", advice)
    elif read:
        yield _found("pages", f"{read:,} of {len(facts):,} read, none damaged")
    if timed:
        times = f"{computing / restoring:,.0f}" if computing >= 100 * restoring else f"{computing / restoring:.1f}"
        text = f"restoring {timed / restoring:,.0f} tokens/s, computing {timed / computing:,.0f} (ratio {times})"
        advice = (
            "Restoring is slower than computing here, and skipped: use codec='raw', memory in front, or a faster disk "
            "(prefixstore bench)."
        )
        yield _found("break-even", text, advice if restoring > computing else "")


def _use(history: History) -> Iterator[Finding]:
    """Whether prompts of today and yesterday found something."""
    day = history.total(2)
    if day.hit_rate is None:
        return
    causes = {reason: getattr(day, f"misses_{reason}") for reason in CAUSES}
    causes["other reasons"] = day.misses - sum(causes.values())
    missed = ", ".join(f"{reason.replace('_', ' ')} {n:,}" for reason, n in causes.items() if n) or "none"
    found = (
        f"hit rate {format_share(day.hit_rate)} of {counted(day.lookups, 'prompt')} since yesterday; missed: {missed}"
    )
    is_low = day.lookups >= FEW_LOOKUPS and day.hit_rate <= LOW_HIT_RATE
    advice = CAUSES.get(max(causes, key=lambda reason: causes[reason]), "The log of the servers says more.")
    yield _found("use", f"{found}; {counted(day.evictions, 'page')} evicted", advice if is_low else "")


# -- versions ---------------------------------------------------------------------------------------------------------


def _versions() -> Finding:
    from prefixstore import __version__  # noqa: PLC0415 - is not complete while the package is imported

    found = [
        f"prefixstore {__version__}",
        f"python {platform.python_version()} on {platform.system()} {platform.machine()}",
    ]
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return _found("versions", ", ".join(found))


# -- the place --------------------------------------------------------------------------------------------------------


def _file_system(path: Path) -> Finding:
    mount = mount_of(path)
    if mount is None:
        return _found("file system", "not known", note="A network file system does not work.")
    kind, point = mount
    shared = "LMDB and SQLite share memory: use a local disk, or PostgreSQL, Valkey or a bucket."
    lost = f"It is {VOLATILE.get(kind)}; use a disk or a volume to keep pages."
    return _found(
        "file system",
        f"{kind} at {point}",
        shared if kind in NETWORK else "",
        lost if kind in VOLATILE else "",
    )


def _permissions(path: Path, *, is_written: bool, is_store: bool) -> Finding:
    """Who may use a store, or the directory where it would be created."""
    here = existing(path)
    rights = here.stat().st_mode
    private = f"chmod {'700' if here.is_dir() else '600'} {here}"
    problem = note = ""
    if is_written and not os.access(here, os.W_OK):
        problem = "This user cannot write to it: servers of this user need read_only=True, or its owner."
    elif is_store and rights & stat.S_IRWXO:
        problem = f"Others can read the prompts in it; {private}"
    elif is_store and rights & stat.S_IRWXG:
        note = f"Its group can read the prompts in it. If that is not intended: {private}"
    return _found("permissions", f"{stat.filemode(rights)} {here}", problem, note)


def _is_missing(path: Path) -> bool:
    """Whether nothing is there; what is hidden from this user may be there."""
    try:
        return not path.exists()
    except OSError:
        return False


# -- file systems ----------------------------------------------------------------------------------------------------


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists, as far as this user may know."""
    path = path.absolute()
    return next((one for one in (path, *path.parents) if os.path.exists(one)), path)  # noqa: PTH110 - never raises


def mount_of(path: Path) -> tuple[str, str] | None:
    """The type of the file system that a path is on, or would be created on, and where that is mounted.

    None where the system does not say.
    """
    try:
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(existing(path))
    found: tuple[str, str] | None = None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        columns, kinds = fields.split(), rest.split()
        if len(columns) < 6 or not kinds:
            continue
        point = ESCAPED.sub(lambda digits: chr(int(digits[1], 8)), columns[4])
        is_inside = real == point or real.startswith(point.rstrip("/") + "/")
        # of several mounts on one directory, the last one is seen
        if is_inside and (found is None or len(point) >= len(found[1])):
            found = kinds[0], point
    return found


# -- sizes ------------------------------------------------------------------------------------------------------------


def _stored(used: int, holdings: Sequence[Holding]) -> Finding:
    pages = counted(sum(holding.pages for holding in holdings), "page")
    return _found("stored", f"{format_bytes(used)} in {pages} of {counted(len(holdings), 'namespace')}")


def _budget(path: Path | None, used: int, budget: int) -> Iterator[Finding]:
    share = used / budget
    more = "More is stored than max_bytes: raise it, or prefixstore evict. (Pass the servers' with --max-bytes.)"
    full = "It is full: pages are packed and evicted. prefixstore trace simulate shows the gain of a larger budget."
    text = f"{format_bytes(used)} of {format_bytes(budget)} ({format_share(share)})"
    yield _found("budget", text, more if share > 1 else "", full if share > HIGH_WATER else "")
    if path is None:
        return
    try:
        free = shutil.disk_usage(existing(path)).free
    except OSError as error:
        yield Finding("free space", f"not known: {error.strerror}", Level.NOTE)
        return
    most = format_bytes(used + free * 0.9)
    advice = f"The disk is full before max_bytes is reached: lower it to {most}, or free some disk space."
    yield _found("free space", format_bytes(free), advice if free < budget - used else "")


# -- settings ---------------------------------------------------------------------------------------------------------


def _settings(config: Config, holdings: Sequence[Holding], names: Mapping[str, str], budget: int) -> Iterator[Finding]:
    """Whether there are pages for the settings of a config."""
    try:
        llm = config.open_llama()
    except PrefixStoreError as error:
        yield _found("model", str(config.path), str(error))
        return
    try:
        n_ctx = llm.n_ctx()
        if "n_ctx" not in config.model:
            advice = "Set n_ctx in [model]: llama-cpp-python takes 512 by default, and longer prompts fail."
            yield _found("context", f"{n_ctx:,} tokens", advice)
        with config.open_store(llm, location="memory:", read_only=False) as store:
            namespace, kind, names = store.namespace, store.kind, {**names, **store.history().models}
    except PrefixStoreError as error:
        yield _found("settings", "cannot be compared", str(error))
        return
    finally:
        llm.close()
    stored = [one for one in holdings if one.namespace is not None and one.pages]
    mine = next((one for one in stored if one.key == namespace.key), None)
    known = [one.namespace for one in stored if one.namespace is not None]
    differences = explain_settings(namespace, known, names)
    if not kind.is_stored:
        yield _found("settings", f"{kind}", "This model, or a context with these settings, cannot be stored.")
    elif mine is not None:
        yield _found("settings", f"{counted(mine.pages, 'page')} for them")
        needed = round(CONTEXTS * n_ctx * mine.raw_bytes / max(mine.tokens, 1))
        if needed > budget:
            advice = f"max_bytes holds less than {CONTEXTS} full contexts ({format_bytes(needed)}); raise it."
            yield _found("budget for this context", format_bytes(budget), advice)
    elif differences:
        similar = f"The most similar pages are for other settings: {'; '.join(differences)}."
        advice = f"{similar} Use the same everywhere; prefixstore ls lists them."
        # a model, or a tenant, begins without any
        is_problem = bool(explain_of_model(namespace, known))
        yield _found("settings", "no pages for them", advice if is_problem else "", note=similar)
    else:
        advice = "prefixstore warm, or the first requests, fill it."
        yield _found("settings", "nothing is stored yet", note=advice)
