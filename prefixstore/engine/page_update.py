"""Changes pages: writes and deletes all rows of a page together, its place in the indexes and in the counts included.

One update runs at a time among all threads and processes that share the location. What it wrote becomes visible as a
whole when it closes, and not at all if it closes with an exception or its process dies. A loss of power may lose what
was committed since the last `Pages.sync`, the newest first, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefixstore.backends.contract import Backend, Row, Update
from prefixstore.engine import child_rows, keyspace
from prefixstore.engine.keyspace import Count, Leaf, leaf_row
from prefixstore.engine.page_view import PageView, leaf_of, usage_in
from prefixstore.engine.trie import Entry, Trie
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import parted, salt_in
from prefixstore.format.record import USAGE, Buffer, Record, Usage, head_of, identity_of, record_bytes


class PageUpdate(PageView):
    """Reads and changes pages: exclusive, and all or nothing."""

    rows: Update

    def __init__(self, rows: Update, backend: Backend) -> None:
        super().__init__(rows, backend, Trie())
        # by salt: the count rows of a tenant's namespaces
        self._tenant_rows: dict[str, list[bytes]] = {}
        # namespaces that had no pages at some point of this update
        self._emptied: set[bytes] = set()
        # whether a page was deleted or replaced whose damaged record left its index rows behind: see `Pages.mend`
        self.is_torn = False
        # pages that were deleted and not put again, and what is called after the commit
        self.deleted: set[bytes] = set()
        self.after_commit: list[Callable[[], None]] = []

    # -- counting -----------------------------------------------------------------------------------------------------

    def namespaces_of(self, salt: str) -> dict[bytes, Count]:
        # the range is read once; from then on the update has the rows in memory
        if salt not in self._tenant_rows:
            found = super().namespaces_of(salt)
            self._tenant_rows[salt] = [self._count_row(namespace) for namespace in found]
            return found
        rows = self._tenant_rows[salt]
        stored = [Row(row, value or b"") for row, value in zip(rows, self.rows.get(rows), strict=True)]
        return {row[-KEY_BYTES:]: count for row, count in self._counts_in(stored).items()}

    def _owner(self, namespace: bytes) -> bytes:
        """The tenant under whose key an encrypted location stores a namespace; parts of a tenant share its key."""
        salt = self._salt(namespace)
        return keyspace.tenant_of(None if salt is None else parted(salt)[0], namespace)

    def _add(self, namespace: bytes, change: Count) -> None:
        """Change what a namespace counts."""
        row, after = self._count_row(namespace), self.count(namespace).plus(change)
        if self.rows.get([row])[0] is None:
            # a tenant may have one namespace more now
            self._tenant_rows.clear()
        if not after.pages:
            self._emptied.add(namespace)
        self.rows.put(keyspace.COUNT, self.count().plus(change).pack())
        self.rows.put(row, after.pack())

    def replace_counts(self, counts: dict[bytes, Count]) -> None:
        """Replace all counts."""
        counts = {row: count for row, count in counts.items() if count.pages or row == keyspace.COUNT}
        for row in self.counts().keys() - counts.keys():
            self.rows.delete(row)
            self._emptied.add(row[-KEY_BYTES:])
        for row, count in counts.items():
            self.rows.put(row, count.pack())

    def cost(self, record: Record, n_bytes: int) -> int:
        """The most bytes by which `used` grows if this record is put with a payload of `n_bytes`."""
        costs, n_token_bytes = self.rows.costs, len(record.tokens)
        key = bytes(1 + KEY_BYTES)
        child = costs.of(bytes(child_rows.child_bytes(n_token_bytes)), key)
        leaf = costs.of(leaf_row(key, key), bytes(keyspace.LEAVES.itemsize))
        usage = costs.of(key, bytes(USAGE.size))
        # two child rows: its own, and one for a sibling with the same first tokens
        return costs.of(key, bytes(record_bytes(n_token_bytes)), n_bytes) + usage + leaf + 2 * child

    # -- pages --------------------------------------------------------------------------------------------------------

    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        """Write a page. The memory of `payload` must stay valid until the transaction ends. May raise `FullError`."""
        path, namespace = child_rows.page_path(record), record.namespace
        owner = self._owner(namespace)
        mine, above = leaf_row(namespace, key), leaf_row(namespace, record.parent)
        wanted = [keyspace.RECORD + key, keyspace.USAGE + key, keyspace.RECORD + record.parent, mine, above, *path]
        old, old_usage, parent, *_ = self.rows.get(wanted)
        replaced = self._uncount(old, old_usage)
        self._add(namespace, Count.of(record.head, usage))
        self.rows.put(keyspace.RECORD + key, record.pack(), payload, replaced=replaced, owner=owner)
        self.rows.put(keyspace.USAGE + key, usage.pack())
        identity = identity_of(old)
        if identity is not None and (before := child_rows.page_path(identity)) != path:
            # another page had this key, or its record is damaged
            child_rows.remove_child(self.rows, key, before)
        child_rows.add_child(self.rows, key, path, owner)
        # a new page may already be followed, by one that had lost its parent
        is_leaf = not usage.pinned and not self.followed([key])
        self._set_leaf(namespace, mine, Leaf.of(record.head, usage) if is_leaf else None)
        if (found := head_of(parent)) is not None:
            self._set_leaf(found.namespace, leaf_row(found.namespace, record.parent), None)
        self.deleted.discard(key)

    def delete(self, key: bytes) -> bool:
        """Delete a page, its usage and payload; returns whether anything of it was stored."""
        record, usage = self.rows.get([keyspace.RECORD + key, keyspace.USAGE + key])
        if record is None and usage is None:
            return False
        replaced, identity = self._uncount(record, usage), identity_of(record)
        if identity is not None:
            self.is_torn |= not child_rows.remove_child(self.rows, key, child_rows.page_path(identity))
        self.rows.delete(keyspace.RECORD + key, replaced=replaced)
        self.rows.delete(keyspace.USAGE + key)
        if identity is not None:
            self.drop_leaf(identity.namespace, key)
            self.mend_leaf(identity.parent)
        self.deleted.add(key)
        return True

    def _uncount(self, record: bytes | None, usage: bytes | None) -> int | None:
        """Take a stored page out of the counts; returns the size of its payload, if that is known."""
        if record is None:
            return None
        head = head_of(record)
        if head is None:
            self.is_torn = True
            self.rows.put(keyspace.COUNT, self.count().plus(Count(-1)).pack())
            return None
        self._add(head.namespace, Count(*(-n for n in Count.of(head, usage_in(usage)))))
        return head.stored_bytes

    def _set_leaf(self, namespace: bytes, row: bytes, leaf: Leaf | None) -> None:
        """Write a leaf row, or delete it."""
        is_there = self.rows.get([row])[0] is not None
        if is_there != (leaf is not None):
            self._add(namespace, Count(leaves=-1 if leaf is None else 1))
        if leaf is not None:
            self.rows.put(row, leaf.pack())
        elif is_there:
            self.rows.delete(row)

    def drop_leaf(self, namespace: bytes, key: bytes) -> None:
        """Delete the leaf row of a page that is not stored, so that eviction no longer chooses it."""
        self._set_leaf(namespace, leaf_row(namespace, key), None)

    def mend_leaf(self, key: bytes) -> None:
        """Give a readable page a leaf row if it is not pinned and no page follows it; otherwise delete that row."""
        record, usage = self.rows.get([keyspace.RECORD + key, keyspace.USAGE + key])
        row, leaf = leaf_of(key, record, usage)
        if row is not None:
            self._set_leaf(row[1 : 1 + KEY_BYTES], row, None if leaf is None or self.followed([key]) else leaf)

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        """Read what touching these pages needs, in two requests."""
        entries = self._entries(keys)
        self.rows.get([leaf_row(one.record.namespace, one.key) for one in entries if isinstance(one.record, Record)])

    def touch(self, key: bytes, usage: Usage) -> None:
        """Replace the usage of a page; nothing happens if the page is gone."""
        record, old = self.rows.get([keyspace.RECORD + key, keyspace.USAGE + key])
        if record is None:
            return
        self.rows.put(keyspace.USAGE + key, usage.pack())
        head, was_pinned = head_of(record), usage_in(old).pinned
        if head is None:
            return
        if usage.pinned != was_pinned:
            sign = 1 if usage.pinned else -1
            self._add(head.namespace, Count(pinned=sign, pinned_bytes=sign * head.quota_bytes))
            self.mend_leaf(key)
        elif self.rows.get([row := leaf_row(head.namespace, key)])[0] is not None:
            self.rows.put(row, Leaf.of(head, usage).pack())

    def put_namespace(self, key: bytes, settings: bytes) -> None:
        """Store the canonical settings of a namespace."""
        if self.namespace(key) == settings:
            return
        self._salts[key] = salt_in(settings)
        self.rows.put(keyspace.NAMESPACE + key, settings, owner=self._owner(key))

    def drop_empty_namespaces(self) -> None:
        """Delete the settings of all namespaces that have no pages."""
        for key in self.namespaces():
            if not self.count(key).pages:
                self._drop_namespace(key)

    def _drop_namespace(self, key: bytes) -> None:
        """Delete the settings of a namespace, and the names of its sequences."""
        self.rows.delete(keyspace.NAMESPACE + key)
        self.rows.delete(keyspace.NOTE + keyspace.bookmarks_note(key))

    def put_note(self, name: bytes, value: bytes | None, namespace: bytes | None = None) -> None:
        """Write a short note for other processes; None deletes it.

        A note about a namespace belongs to its tenant, and is not written if nothing says whose that namespace is.
        """
        if value is None:
            self.rows.delete(keyspace.NOTE + name)
        elif namespace is None or self.namespace(namespace):
            self.rows.put(keyspace.NOTE + name, value, owner=None if namespace is None else self._owner(namespace))

    # -- the index ----------------------------------------------------------------------------------------------------

    def enter(self, row: Row) -> None:
        """Index the page of a record row, unless the record cannot be read, or nothing says whose its namespace is."""
        key, record, _ = Entry.of(row.key[1:], row.value, None)
        if isinstance(record, Record) and self.namespace(record.namespace):
            child_rows.add_child(self.rows, key, child_rows.page_path(record), self._owner(record.namespace))

    def finish(self) -> None:
        """Delete namespaces that have no pages. Raises `LocationError` if the location was encrypted meanwhile."""
        self.require_plain()
        for namespace in self._emptied:
            if not self.count(namespace).pages:
                self.rows.delete(self._count_row(namespace))
                self._drop_namespace(namespace)
