"""Checks every invariant of a location, and lists the violations."""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.backends.base import View
from prefixstore.engine.budget import Budget
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.codec import decode
from prefixstore.format.keys import SNAPSHOT
from prefixstore.format.record import Record

__all__ = ["Violation", "violations"]


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold.

    Attributes
    ----------
    rule
        ``"record"`` (it cannot be read), ``"parent"`` (the parent is missing, or cannot have children), ``"position"``
        (the page does not start where its parent ends), ``"payload"`` (missing, damaged, or of the wrong length),
        ``"orphan"`` (a payload without a record), ``"namespace"`` (unknown, or not that of the parent), ``"budget"``
        (exceeded).
    key
        The page, as hexadecimal digits; empty for the location as a whole.
    message
        What was found.
    """

    rule: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.key} {self.message}"


def violations(view: View, budget: Budget) -> list[Violation]:
    """Read the whole location and verify every checksum. An empty list means that no problems were found."""
    found: list[Violation] = []
    records: dict[bytes, Record] = {}
    foreign: set[bytes] = set()
    for key, record, _ in view.scan():
        if isinstance(record, Record):
            records[key] = record
        elif isinstance(record, IncompatibleError):
            foreign.add(key)  # written by a newer version: this one cannot check it
        else:
            found.append(Violation("record", key.hex(), str(record)))
    namespaces = view.namespaces()
    for key, record in records.items():
        if record.namespace not in namespaces:
            found.append(Violation("namespace", key.hex(), f"namespace {record.namespace.hex()} has no settings"))
        found += [Violation(rule, key.hex(), message) for rule, message in _place(record, records, foreign)]
        problems = _payload(view, key, record)
        if problems and (now := _record_now(view, key, record)) != record:
            # this view sees later commits: since the records were read, the page was replaced or deleted
            problems = _payload(view, key, now) if now is not None else []
        found += [Violation("payload", key.hex(), message) for message in problems]
    for key in view.payload_keys():
        if key not in records and key not in foreign:
            found.append(Violation("orphan", key.hex(), "a payload without a record"))
    used = view.used
    if budget.exceeded(used):
        found.append(Violation("budget", "", f"{used.bytes:,} bytes in {used.entries:,} pages exceed {budget}"))
    return found


def _place(record: Record, records: dict[bytes, Record], foreign: set[bytes]) -> list[tuple[str, str]]:
    """What is wrong with the place of a page in its sequence."""
    if record.parent == record.namespace:
        return [] if record.start == 0 else [("position", f"a first page starts at {record.start}, not at 0")]
    parent = records.get(record.parent)
    if parent is None:
        return [] if record.parent in foreign else [("parent", f"its parent {record.parent.hex()} is missing")]
    end = parent.start + len(parent.tokens) // 4
    problems = [] if end == record.start else [("position", f"starts at {record.start}, but its parent ends at {end}")]
    if parent.form == SNAPSHOT:
        problems.append(("parent", "its parent is a snapshot, which cannot have children"))
    if parent.namespace != record.namespace:
        problems.append(("namespace", "its parent is in another namespace"))
    return problems


def _record_now(view: View, key: bytes, record: Record) -> Record | None:
    try:
        return view.record(key)
    except (CorruptError, IncompatibleError):
        return record


def _payload(view: View, key: bytes, record: Record) -> list[str]:
    """What is wrong with the stored bytes of a page."""
    try:
        payload = view.payload(key)
    except CorruptError as error:
        return [str(error)]
    if payload is None:
        return ["the payload is missing"]
    try:
        decode(record, payload)
    except IncompatibleError:
        return []
    except StorageError as error:
        return [str(error)]
    return []
