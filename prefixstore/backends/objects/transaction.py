"""A transaction on a location in object storage: its changes are kept over the known log until they are committed.

Writers do not wait for each other. What another process has committed meanwhile comes first, and a transaction that
conflicts with it is not committed (`ConflictError`). It conflicts

- if a page that it puts follows one that is gone, or is in a namespace that is gone, or was stored before and is gone;
- if a page that it deletes has a child now, or is pinned;
- if an announced usage or a note that it replaces is no longer the one that it has seen.

If both have put the same page, the last one counts.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from prefixstore.backends.base import Transaction, Used
from prefixstore.backends.contract import ConflictError
from prefixstore.backends.objects.client import Client
from prefixstore.backends.objects.log import Log
from prefixstore.backends.objects.manifest import NONCE_BYTES, Payload, Segment, Stored, name_of
from prefixstore.backends.objects.pages import ENTRY_BYTES, Pages, Siblings, cost_of
from prefixstore.backends.objects.payloads import Uploads
from prefixstore.backends.objects.read_ahead import Arrived
from prefixstore.backends.objects.strays import GRACE_SECONDS
from prefixstore.backends.objects.view import ObjectsView
from prefixstore.errors import StorageError, UnavailableError
from prefixstore.format.keys import PAGE, SNAPSHOT
from prefixstore.format.record import Buffer, Record, Usage

__all__ = ["ObjectsTransaction"]


class ObjectsTransaction(ObjectsView, Transaction):
    """Stages changes, and uploads payloads at once; `commit` makes them part of pages.

    Parameters
    ----------
    log, client
        Of the location.
    """

    def __init__(self, log: Log, client: Client) -> None:
        super().__init__(log, client, read_only=False)
        self._uploads = Uploads(client)
        self._begun = time.monotonic()
        # what is staged of a page, and what was there before
        self._staged: dict[bytes, Stored | None] = {}
        self._before: dict[bytes, Stored | None] = {}
        self._put: set[bytes] = set()
        # what followed a page when it was deleted
        self._left_behind: set[bytes] = set()
        # what pages that are put depend on
        self._parents: set[bytes] = set()
        self._used_spaces: set[bytes] = set()
        self._announced: set[bytes] = set()
        self._payloads: dict[bytes, bytes] = {}
        self._structural: list[bytes] = []
        self._spaces: dict[bytes, bytes | None] = {}
        self._notes: dict[bytes, bytes | None] = {}
        self._seen_notes: dict[bytes, bytes | None] = {}
        # what is staged of the children of a page: those that are gone, those that are new
        self._gone: dict[tuple[bytes, int], set[bytes]] = {}
        self._new: dict[tuple[bytes, int], Siblings] = {}
        self._bytes, self._n_entries, self._sizes = 0, 0, (0, 0)
        self._is_committed = self._is_unknown = False

    # -- what lies over the log ---------------------------------------------------------------------------------------

    def _stored(self, key: bytes) -> Stored | None:
        return self._staged[key] if key in self._staged else super()._stored(key)

    def _items(self) -> list[tuple[bytes, Stored]]:
        items = dict(super()._items()) | self._staged
        return [(key, stored) for key, stored in items.items() if stored is not None]

    def _siblings(self, parent: bytes, form: int) -> Siblings:
        of = parent, form
        siblings, gone = super()._siblings(parent, form), self._gone.get(of)
        if gone is None and of not in self._new:
            return siblings
        return sorted([one for one in siblings if not gone or one[1] not in gone] + self._new.get(of, []))

    def _keys(self) -> list[bytes]:
        return sorted(key for key, _ in self._items()) if self._staged else super()._keys()

    def namespaces(self) -> Mapping[bytes, bytes]:
        found: dict[bytes, bytes | None] = {**super().namespaces(), **self._spaces}
        return {key: settings for key, settings in found.items() if settings is not None}

    def namespace(self, key: bytes) -> bytes | None:
        return self._spaces[key] if key in self._spaces else super().namespace(key)

    def note(self, name: bytes) -> bytes | None:
        if name in self._notes:
            return self._notes[name]
        value = super().note(name)
        # what is written later depends on it
        return self._seen_notes.setdefault(name, value)

    @property
    def sizes(self) -> tuple[int, int]:
        stored, raw = super().sizes
        return stored + self._sizes[0], raw + self._sizes[1]

    @property
    def used(self) -> Used:
        known = super().used
        return Used(known.bytes + self._bytes, known.entries + self._n_entries)

    def payload(self, key: bytes) -> Buffer | None:
        return self._payloads[key] if key in self._payloads else super().payload(key)

    def _read(
        self, key: bytes, stored: Stored, arrived: Arrived = lambda _: None
    ) -> tuple[Stored, Buffer | None] | None:
        return (stored, self._payloads[key]) if key in self._payloads else super()._read(key, stored, arrived)

    # -- changes ------------------------------------------------------------------------------------------------------

    def cost(self, record: Record, n_bytes: int) -> int:
        return len(record.tokens) + n_bytes + ENTRY_BYTES

    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        self._remove(key)
        if self._stored(record.parent) is not None:
            self._parents.add(record.parent)
        if self.namespace(record.namespace) is not None:
            self._used_spaces.add(record.namespace)
        stored = Stored(record, usage, os.urandom(NONCE_BYTES))
        self._staged[key] = stored
        self._count(stored, 1)
        insort(self._new.setdefault((record.parent, record.form), []), (record.tokens, key))
        self._put.add(key)
        self._structural.append(key)
        self._payloads[key] = copy = bytes(payload)
        if copy:
            self._uploads.begin(name_of(key, stored.nonce), copy)

    def delete(self, key: bytes) -> bool:
        is_there = self._remove(key)
        if is_there:
            # a page may be deleted before those that follow it, or without them: that is the caller's business
            self._left_behind.update(child for form in (PAGE, SNAPSHOT) for _, child in self._siblings(key, form))
            self._structural.append(key)
        return is_there

    def _remove(self, key: bytes) -> bool:
        self._look_at(key)
        stored = self._staged[key]
        self._staged[key] = None
        if stored is None:
            return False
        if isinstance(stored.record, Record):
            of = stored.record.parent, stored.record.form
            new, one = self._new.get(of, []), (stored.record.tokens, key)
            at = bisect_left(new, one)
            if new[at : at + 1] == [one]:
                del new[at]
            else:
                self._gone.setdefault(of, set()).add(key)
        self._count(stored, -1)
        self._put.discard(key)
        self._announced.discard(key)
        self._payloads.pop(key, None)
        return True

    def _look_at(self, key: bytes) -> None:
        """A page is about to be changed: what it is now is what the change depends on."""
        if key not in self._staged:
            self._staged[key] = self._before[key] = super()._stored(key)

    def _count(self, stored: Stored, sign: int) -> None:
        self._n_entries += sign
        self._bytes += sign * cost_of(stored)
        self._sizes = self._sizes[0] + sign * stored.stored_bytes, self._sizes[1] + sign * stored.raw_bytes

    def touch(self, key: bytes, usage: Usage, *, announce: bool = False) -> None:
        self._look_at(key)
        stored = self._staged[key]
        if stored is None:
            return
        self._staged[key] = Stored(stored.record, usage, stored.nonce, stored.packed)
        if announce:
            # the usage of a page that is put here replaces nothing
            if key not in self._put:
                self._announced.add(key)
            self._structural.append(key)

    def put_namespace(self, key: bytes, settings: bytes) -> None:
        if self.namespace(key) != settings:
            self._spaces[key] = settings

    def drop_namespace(self, key: bytes) -> None:
        if self.namespace(key) is not None:
            self._spaces[key] = None

    def put_note(self, name: bytes, value: bytes | None) -> None:
        if self.note(name) != value:
            self._notes[name] = value

    # -- the end ------------------------------------------------------------------------------------------------------

    def commit(self, removed: Collection[Payload]) -> None:
        """Publish the staged changes, if there are any, and which unreferenced payloads were deleted.

        Raises
        ------
        ConflictError, UnavailableError
            As `Log.commit`.
        """
        segment = self._segment()
        if segment.is_empty:
            return
        self._uploads.finish()
        if self._uploads.names and time.monotonic() - self._begun > GRACE_SECONDS / 2:
            raise UnavailableError(f"{self._client.where}: a transaction took too long; its pages were not stored")
        segment.removed.update(dict.fromkeys(removed))
        try:
            self._log.commit(segment, self._require)
        except ConflictError:
            raise
        except BaseException:
            self._is_unknown = True
            raise
        self._is_committed = True

    def _segment(self) -> Segment:
        segment = Segment(namespaces=dict(self._spaces), notes=dict(self._notes))
        for key, stored in self._staged.items():
            before = self._before[key]
            if stored is None:
                if before is not None:
                    segment.deleted[key] = None
            elif key in self._put:
                segment.puts[key] = stored
            elif before is not None and stored.usage != before.usage:
                segment.usages[key] = stored.usage
        if self._structural:
            segment.groups.append(self._structural)
        return segment

    def _require(self, pages: Pages) -> None:
        deleted = {key for key, stored in self._staged.items() if stored is None}
        left = deleted | self._left_behind
        for key, stored in self._staged.items():
            before, now = self._before[key], pages.entries.get(key)
            if stored is None:
                # if it was put again, it is the same page with another payload
                if now is not None and pages.has_children(key, left):
                    raise self._conflict("stored a child of a page that is deleted here")
                if now is not None and now.usage.pinned and not (before is not None and before.usage.pinned):
                    raise self._conflict("pinned a page that is deleted here")
            elif key in self._put and before is not None and now is None:
                raise self._conflict("deleted a page that is packed here")
            elif key in self._announced and (now is None or before is None or _told(now) != _told(before)):
                raise self._conflict("changed the usage of a page")
        self._require_places(pages, deleted)

    def _require_places(self, pages: Pages, deleted: set[bytes]) -> None:
        needed = {one.record.parent for one in self._new_pages() if isinstance(one.record, Record)} & self._parents
        if any(key not in pages.entries and self._staged.get(key) is None for key in needed):
            raise self._conflict("deleted a page that is followed here")
        for space, settings in self._spaces.items():
            if settings is None and pages.has_children(space, deleted):
                raise self._conflict("stored pages in a namespace that is dropped here")
        if any(space not in pages.namespaces and self._spaces.get(space) is None for space in self._used_spaces):
            raise self._conflict("dropped a namespace that is used here")
        if any(pages.notes.get(name) != self._seen_notes[name] for name in self._notes):
            raise self._conflict("changed a note")

    def _new_pages(self) -> Iterator[Stored]:
        """What is put."""
        return (stored for key in self._put if (stored := self._staged[key]) is not None)

    def _conflict(self, what: str) -> ConflictError:
        return ConflictError(f"{self._client.where}: another process {what}; try again")

    def end(self) -> None:
        """Wait for payloads in transit, and delete those that belong to no page."""
        self._uploads.close()
        if self._is_unknown:
            return
        kept: set[str] = set()
        if self._is_committed:
            staged = ((key, self._staged[key]) for key in self._put)
            kept = {name_of(key, stored.nonce) for key, stored in staged if stored is not None}
        # what cannot be deleted is found by `strays`
        with suppress(StorageError):
            self._client.delete([name for name in self._uploads.names if name not in kept])


def _told(stored: Stored) -> tuple[bool, int, int]:
    """What processes announce of a usage; uses are not announced, and the last one counts."""
    return stored.usage.pinned, stored.usage.priority, stored.usage.expires
