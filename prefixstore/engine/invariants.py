"""What `check` verifies: every invariant of a location. Lists the violations."""

from __future__ import annotations

from dataclasses import dataclass

from prefixstore.engine.budget import Budget
from prefixstore.engine.page_checks import flaws
from prefixstore.engine.page_view import View
from prefixstore.errors import IncompatibleError, StorageError
from prefixstore.format.codec import decode
from prefixstore.format.record import Buffer, Record

__all__ = ["Violation", "violations"]


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold.

    Attributes
    ----------
    rule
        ``"record"`` (it cannot be read), ``"parent"`` (the parent is missing, or cannot have children), ``"position"``
        (the page does not start where its parent ends), ``"payload"`` (missing, damaged, or of the wrong length),
        ``"orphan"`` (a usage without a record), ``"index"`` (the backend does not find a page among the children of
        its parent, or finds another there), ``"file"`` (the file is damaged elsewhere),
        ``"namespace"`` (unknown, or not that of the parent), ``"budget"``
        (exceeded), ``"undecryptable"`` (rows that were changed, or whose key is missing).
    key
        The page, as hexadecimal digits; empty for the location as a whole.
    message
        What was found.
    """

    rule: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.key} {self.message}" if self.key else f"{self.rule}: {self.message}"


def violations(view: View, budget: Budget) -> list[Violation]:
    """Read the whole location and verify every checksum. An empty list means that no problems were found."""
    found = [Violation(rule, key.hex(), message) for rule, key, message in flaws(view)]
    namespaces = view.namespaces()
    for key, record, payload in view.stored():
        if isinstance(record, IncompatibleError):
            continue
        if not isinstance(record, Record):
            found.append(Violation("record", key.hex(), str(record)))
            continue
        if record.namespace not in namespaces and _lacks_settings(view, key, record):
            found.append(Violation("namespace", key.hex(), f"namespace {record.namespace.hex()} has no settings"))
        problem = _damage(record, payload)
        if problem is not None and (now := _record_now(view, key, record)) != record:
            # this view sees later commits: since the record was read, the page was replaced or deleted
            problem = _damage_now(view, now) if now is not None else None
        if problem is not None:
            found.append(Violation("payload", key.hex(), problem))
    used = view.used
    if budget.exceeded(used):
        found.append(Violation("budget", "", f"{used.bytes:,} bytes in {used.entries:,} pages exceed {budget}"))
    return found


def _lacks_settings(view: View, key: bytes, record: Record) -> bool:
    """Whether the settings of a page's namespace are missing, also now: a view may see later commits."""
    return view.namespace(record.namespace) is None and _record_now(view, key, record) == record


def _record_now(view: View, key: bytes, record: Record) -> Record | None:
    try:
        return view.record(key)
    except StorageError:
        return record


def _damage_now(view: View, record: Record) -> str | None:
    try:
        return _damage(record, view.payload(record.key))
    except StorageError as error:
        return str(error)


def _damage(record: Record, payload: Buffer | StorageError | None) -> str | None:
    """What is wrong with the stored bytes of a page; None if they are what was written."""
    if payload is None:
        return "the payload is missing"
    if isinstance(payload, StorageError):
        return str(payload)
    try:
        decode(record, payload)
    except IncompatibleError:
        return None
    except StorageError as error:
        return str(error)
    return None
