"""Every invariant of a location, each with the violations found."""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.backends.base import View
from prefixstore.engine.budget import Budget
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.codec import decode
from prefixstore.format.record import SNAPSHOT, Record

__all__ = ["Violation", "violations"]


@dataclass(frozen=True)
class Violation:
    """Something that must not be.

    Attributes
    ----------
    rule
        ``"record"`` (it cannot be read), ``"parent"`` (a page without a page before it), ``"position"`` (it does not
        start where that one ends), ``"payload"`` (missing, damaged, or of the wrong length), ``"orphan"`` (a payload
        without a record), ``"namespace"`` (a page of an unknown namespace), ``"budget"`` (more than it allows).
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
    """Walk the location and verify every checksum. An empty list is what you want to see."""
    found: list[Violation] = []
    records: dict[bytes, Record] = {}
    foreign: set[bytes] = set()
    for key, record, _ in view.scan():
        if isinstance(record, Record):
            records[key] = record
        elif isinstance(record, IncompatibleError):
            foreign.add(key)  # a newer version's: not ours to judge
        else:
            found.append(Violation("record", key.hex(), str(record)))
    namespaces = view.namespaces()
    for key, record in records.items():
        if record.namespace not in namespaces:
            found.append(Violation("namespace", key.hex(), f"namespace {record.namespace.hex()} has no settings"))
        found += [Violation(rule, key.hex(), message) for rule, message in _place(record, records, foreign)]
        found += [Violation("payload", key.hex(), message) for message in _payload(view, key, record)]
    for key in view.payload_keys():
        if key not in records and key not in foreign:
            found.append(Violation("orphan", key.hex(), "a payload without a record"))
    used = view.used
    if budget.exceeded(used):
        found.append(Violation("budget", "", f"{used.bytes} bytes in {used.entries} pages, the budget is {budget}"))
    return found


def _place(record: Record, records: dict[bytes, Record], foreign: set[bytes]) -> list[tuple[str, str]]:
    """What is wrong with where the page stands."""
    if record.parent == record.namespace:
        return [] if record.start == 0 else [("position", f"a first page starts at {record.start}")]
    before = records.get(record.parent)
    if before is None:
        return [] if record.parent in foreign else [("parent", f"the page before, {record.parent.hex()}, is not here")]
    end = before.start + len(before.tokens) // 4
    problems = [] if end == record.start else [("position", f"starts at {record.start}, the page before ends at {end}")]
    if before.form == SNAPSHOT:
        problems.append(("parent", "what is before it is a view, behind which there can be nothing"))
    if before.namespace != record.namespace:
        problems.append(("namespace", "the page before is in another namespace"))
    return problems


def _payload(view: View, key: bytes, record: Record) -> list[str]:
    """What is wrong with the bytes of the page."""
    try:
        payload = view.payload(key)
    except CorruptError as error:
        return [str(error)]
    if payload is None:
        return ["there is none"]
    try:
        decode(record, payload)
    except IncompatibleError:
        return []
    except StorageError as error:
        return [str(error)]
    return []
