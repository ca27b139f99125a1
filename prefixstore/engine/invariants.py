"""What `check` verifies: every invariant of a location. Lists the violations.

The location is read once, page by page. Some 120 bytes of each page stay in memory, for what can be checked only at the
end: that its parent is there, and ends where the page starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixstore.engine.budget import Budget
from prefixstore.engine.page_checks import flaws
from prefixstore.engine.page_view import View
from prefixstore.errors import IncompatibleError, StorageError
from prefixstore.format.codec import decode
from prefixstore.format.keys import KEY_BYTES, SNAPSHOT
from prefixstore.format.record import Buffer, Record

__all__ = ["Violation", "violations"]

AT_ONCE = 4096
KEY = np.dtype(f"V{KEY_BYTES}")
# where a page is; the namespace is a number
PLACE = np.dtype(
    [("key", KEY), ("parent", KEY), ("namespace", "<i4"), ("start", "<i8"), ("end", "<i8"), ("form", "u1")]
)
# the form of a page that a newer version wrote: this one cannot check it
FOREIGN = 255


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


class _Places:
    """Where all pages are."""

    def __init__(self) -> None:
        self._known: list[npt.NDArray[np.void]] = []
        self._new: list[tuple[bytes, bytes, int, int, int, int]] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, key: bytes, record: Record | None) -> None:
        """Add a page; None for the record of one that a newer version wrote."""
        if record is None:
            self._new.append((key, key, -1, 0, 0, FOREIGN))
        else:
            number = self._numbers.setdefault(record.namespace, len(self._numbers))
            end = record.end
            self._new.append((key, record.parent, number, record.start, end, record.form))
        if len(self._new) == AT_ONCE:
            self._pack()

    def _pack(self) -> None:
        self._known.append(np.array(self._new, PLACE))
        self._new = []

    def finish(self) -> None:
        """Prepare the lookups, once all pages have been added."""
        self._pack()
        self._places = np.concatenate(self._known)
        self._known = []
        self._places.sort(order="key")
        self._keys = np.ascontiguousarray(self._places["key"])

    def find(self, keys: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """The index of each of these keys, and whether it is there at all."""
        at = np.minimum(np.searchsorted(self._keys, keys), max(len(self._keys) - 1, 0))
        return at, self._keys[at] == keys if len(self._keys) else np.zeros(len(keys), np.bool_)

    def misplaced(self) -> Iterator[tuple[bytes, bytes]]:
        """Pages whose place in their sequence is wrong, each with its parent. First pages have been checked before."""
        first = np.array(list(self._numbers) or [bytes(KEY_BYTES)], KEY)
        for begin in range(0, len(self._places), AT_ONCE):
            some = self._places[begin : begin + AT_ONCE]
            some = some[some["form"] != FOREIGN]
            some = some[some["parent"] != first[some["namespace"]]]
            at, is_known = self.find(some["parent"])
            parents = self._places[at]
            is_wrong = ~is_known | (parents["end"] != some["start"]) | (parents["form"] == SNAPSHOT)
            is_wrong |= parents["namespace"] != some["namespace"]
            is_wrong &= ~(is_known & (parents["form"] == FOREIGN))
            yield from ((bytes(page["key"]), bytes(page["parent"])) for page in some[is_wrong])


def violations(view: View, budget: Budget) -> list[Violation]:
    """Read the whole location and verify every checksum. An empty list means that no problems were found."""
    found = [Violation(rule, key.hex(), message) for rule, key, message in flaws(view)]
    places = _Places()
    namespaces = view.namespaces()
    for key, record, payload in view.stored():
        if isinstance(record, IncompatibleError):
            places.add(key, None)
            continue
        if not isinstance(record, Record):
            found.append(Violation("record", key.hex(), str(record)))
            continue
        places.add(key, record)
        if record.namespace not in namespaces and _lacks_settings(view, key, record):
            found.append(Violation("namespace", key.hex(), f"namespace {record.namespace.hex()} has no settings"))
        if record.parent == record.namespace and record.start != 0:
            found.append(Violation("position", key.hex(), f"a first page starts at {record.start}, not at 0"))
        problem = _damage(record, payload)
        if problem is not None and (now := _record_now(view, key, record)) != record:
            # this view sees later commits: since the record was read, the page was replaced or deleted
            problem = _damage_now(view, now) if now is not None else None
        if problem is not None:
            found.append(Violation("payload", key.hex(), problem))
    places.finish()
    for key, parent in places.misplaced():
        found += _misplaced(view, key, parent)
    used = view.used
    if budget.exceeded(used):
        found.append(Violation("budget", "", f"{used.bytes:,} bytes in {used.entries:,} pages exceed {budget}"))
    return found


def _misplaced(view: View, key: bytes, parent: bytes) -> Iterator[Violation]:
    """What is wrong with the place of a page that is not a first one, also now: a view may see later commits."""
    found = view.records([key, parent])
    page, above = (found[each][0] if each in found else None for each in (key, parent))
    if not isinstance(page, Record) or isinstance(above, IncompatibleError):
        return
    if not isinstance(above, Record):
        yield Violation("parent", key.hex(), f"its parent {parent.hex()} is missing")
        return
    end = above.end
    if end != page.start:
        yield Violation("position", key.hex(), f"starts at {page.start}, but its parent ends at {end}")
    if above.form == SNAPSHOT:
        yield Violation("parent", key.hex(), "its parent is a snapshot, which cannot have children")
    if above.namespace != page.namespace:
        yield Violation("namespace", key.hex(), "its parent is in another namespace")


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
