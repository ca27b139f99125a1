"""What `check` verifies: every invariant of a location. Lists the violations."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from prefixstore.backends.contract import Row
from prefixstore.engine import keyspace
from prefixstore.engine.budget import Budget
from prefixstore.engine.keyspace import usage_row
from prefixstore.engine.page_checks import flaws
from prefixstore.engine.page_view import View
from prefixstore.engine.trie import Entry
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.codec import decode
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
    namespaces = set(view.namespaces())
    for rows in keyspace.walk(view.rows, keyspace.RECORD):
        usages = view.rows.get([usage_row(row.key[1:]) for row in rows])
        for row, usage in zip(rows, usages, strict=True):
            faults = list(_faults(view, row, usage, namespaces))
            if faults:
                # this view may see later commits: as the page is now
                value, used = view.rows.get([row.key, usage_row(row.key[1:])])
                now = Row(row.key, value or b"")
                faults = list(_faults(view, now, used, set(view.namespaces()))) if value is not None else []
            found += [Violation(rule, row.key[1:].hex(), message) for rule, message in faults]
    size = view.used
    if budget.exceeded(size):
        found.append(Violation("budget", "", f"{size.bytes:,} bytes in {size.entries:,} pages exceed {budget}"))
    return found


def _faults(view: View, row: Row, usage: bytes | None, namespaces: Collection[bytes]) -> Iterator[tuple[str, str]]:
    """What is wrong with a page itself: rules, and messages. One at a time: what a server sends is in memory."""
    key = row.key[1:]
    record = Entry.of(key, row.value, usage).record
    try:
        if isinstance(record, Record):
            stored, payload = next(iter(view.rows.payloads([row.key]))) or (row.value, None)
            # the row itself may be damaged where its value is kept twice
            record = Entry.of(key, stored, usage).record
        if not isinstance(record, Record):
            raise record
    except IncompatibleError:
        return
    except CorruptError as error:
        yield "payload" if isinstance(record, Record) else "record", str(error)
        return
    if record.namespace not in namespaces:
        yield "namespace", f"namespace {record.namespace.hex()} has no settings"
    try:
        if payload is None:
            yield "payload", "the payload is missing"
        else:
            decode(record, payload)
    except IncompatibleError:
        pass
    except StorageError as error:
        yield "payload", str(error)
