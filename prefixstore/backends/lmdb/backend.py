"""Pages in an LMDB environment: a directory that many processes share.

A payload is one value, so it is contiguous in the memory map and a restore reads it from there. LMDB never overwrites
what an open view can see, so the map is safe to read while others evict. The size of the map bounds the file: it never
grows beyond `FILE_FACTOR` times the budget plus `FILE_EXTRA`, whatever the churn. If it was filled with a larger
budget, it may grow by up to `FILE_EXTRA` after it is opened, within the bound of that budget.

LMDB writes a changed page of the file to another place, and reuses what a transaction freed only two commits later. So
deleting takes space, too, and a commit that leaves none would be the last one. Each transaction therefore leaves a
number of pages of the file that the next one can use; those that put leave more than others, so that what they have put
can be deleted.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice, takewhile

import lmdb
import numpy as np
import numpy.typing as npt

from prefixstore.backends import refusals
from prefixstore.backends.base import CHANGES_KEPT, FACTS, Backend, Entry, Transaction, Used, View
from prefixstore.backends.files import absolute, make_directory
from prefixstore.backends.lmdb.children import Siblings, remove_everywhere
from prefixstore.backends.lmdb.children_check import ChildrenCheck
from prefixstore.backends.lmdb.environment import DATABASES, FILE_EXTRA, SCRUBS, Environment, acquire, release
from prefixstore.backends.lmdb.file import read_layout
from prefixstore.backends.lmdb.free_space import common, erase, punch, split
from prefixstore.backends.lmdb.sizes import counted, put_counted
from prefixstore.backends.lmdb.write_back import WriteBack
from prefixstore.backends.location import path_of
from prefixstore.backends.packed_facts import facts_of
from prefixstore.errors import FullError, LocationError, StorageError, UnavailableError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT
from prefixstore.format.record import Buffer, Record, Usage, place_of, sizes_of

__all__ = ["LMDBBackend", "open_lmdb"]

FILE_FACTOR = 1.25

# Pages of the file that a transaction leaves. To delete a page of the store takes some 40 of them at most, a commit
# some 10.
LEFT_BY_PUTS = 176
LEFT_BY_OTHERS = 96
LEFT_BY_RECLAIM = 32

log = logging.getLogger("prefixstore")

# in the database meta, while the index of children is rebuilt: who does it
REINDEXING = b"reindexing"
MAKER = struct.Struct("<I8s")
META_GENERATION = struct.Struct("<Q")
NOTE = b"note:"
CHANGE_KEY = struct.Struct(">Q")
PAGE_HEADER = 16
# seconds that a scrub waits for readers of an older state, and bytes that it clears at a time while writers wait
READERS_WITHIN = 10.0
CLEARED_AT_ONCE = 256 << 20
# records whose place among the children is written in one transaction
RECORDS_AT_ONCE = 512
# Of so many pages a transaction adds up the sizes, if they are not known: it takes a fraction of a second. Of more they
# stay unknown until `reindex`, which does not keep other writers waiting.
SUMMED_AT_ONCE = 100_000
# how often `reindex` adds up the sizes while others write, before it keeps them waiting
SUMS = 5


class _View(View):
    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        self._txn = txn
        self._environment = environment
        self._db = environment.databases

    @property
    def generation(self) -> int:
        stored = self._txn.get(b"generation", db=self._db[b"meta"])
        return int(META_GENERATION.unpack(stored)[0]) if stored is not None else 0

    def changes(self, since: int) -> list[bytes] | None:
        now = self.generation
        if since == now:
            return []
        cursor = self._txn.cursor(self._db[b"changes"])
        if since > now or not cursor.set_key(CHANGE_KEY.pack(since + 1)):
            return None
        return [
            bytes(keys[i : i + KEY_BYTES])
            for keys in cursor.iternext(keys=False)
            for i in range(0, len(keys), KEY_BYTES)
        ]

    def leading(self, keys: Sequence[bytes]) -> list[Entry]:
        records = self._db[b"records"]
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._txn.get(keys[middle], db=records) is not None:
                low = middle + 1
            else:
                high = middle
        found = self.records(keys[:low])
        return [Entry(key, *found[key]) for key in takewhile(found.__contains__, keys[:low])]

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        for stored_key, stored in self._txn.cursor(self._db[b"records"]):
            key = bytes(stored_key)
            record: Record | StorageError
            try:
                record = Record.unpack(key, stored)
                usage = self.usage(key) or Usage(record.created)
            except StorageError as error:
                record, usage = error, Usage(0)
            yield key, record, usage

    def record(self, key: bytes) -> Record | None:
        stored = self._txn.get(key, db=self._db[b"records"])
        return Record.unpack(key, stored) if stored is not None else None

    def usage(self, key: bytes) -> Usage | None:
        stored = self._txn.get(key, db=self._db[b"usage"])
        return Usage.unpack(stored) if stored is not None else None

    def payload(self, key: bytes) -> Buffer | None:
        return self._txn.get(key, db=self._db[b"payloads"])

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        return self._siblings(parent, PAGE).around(tokens)

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        return [
            each
            for parent in dict.fromkeys(parents)
            for each in islice(self._siblings(parent, form).ordered(), at_most)
        ]

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        return {key for key in keys if any(self._has_children(key, form) for form in (PAGE, SNAPSHOT))}

    def _has_children(self, parent: bytes, form: int) -> bool:
        records = self._db[b"records"]
        return any(self._txn.get(key, db=records) is not None for key in self._siblings(parent, form).stored_or_not())

    def _siblings(self, parent: bytes, form: int) -> Siblings:
        return Siblings(self._txn, self._db[b"children"], parent, form, self._readable)

    def _readable(self, key: bytes) -> Entry | None:
        """The page with this key, if its record and usage can be read."""
        try:
            record = self.record(key)
            return Entry(key, record, self.usage(key) or Usage(record.created)) if record is not None else None
        except StorageError:
            return None

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        cursor = self._txn.cursor(self._db[b"records"])
        found = cursor.set_range(after) if after else cursor.first()
        if found and cursor.key() == after:
            found = cursor.next()
        if not found:
            return np.empty(0, FACTS)
        keys, records = zip(*((bytes(key), stored) for key, stored in islice(cursor, at_most)), strict=True)
        used = self._txn.cursor(self._db[b"usage"]).getmulti(keys)
        if len(used) == len(keys):
            return facts_of(keys, records, [usage for _, usage in used])
        known = dict(used)
        return facts_of(keys, records, [known.get(key) for key in keys])

    def flaws(self) -> Iterator[tuple[str, bytes, str]]:
        self._environment.check(self._txn)
        check = ChildrenCheck(self._txn, self._db[b"children"], self._readable)
        found = _Sum()
        for key, message in check.flaws(found.added(Entry(*each)) for each in self.scan()):
            yield "index", key, message
        known = self._counted()
        if known is not None and found.is_complete and known != found.sizes:
            yield "index", b"", f"the payloads and their states have {found.sizes} bytes, and were counted as {known}"

    def payload_keys(self) -> Iterator[bytes]:
        return map(bytes, self._txn.cursor(self._db[b"payloads"]).iternext(values=False))

    def namespaces(self) -> Mapping[bytes, bytes]:
        return {bytes(key): bytes(settings) for key, settings in self._txn.cursor(self._db[b"namespaces"])}

    def namespace(self, key: bytes) -> bytes | None:
        stored = self._txn.get(key, db=self._db[b"namespaces"])
        return bytes(stored) if stored is not None else None

    def note(self, name: bytes) -> bytes | None:
        stored = self._txn.get(NOTE + name, db=self._db[b"meta"])
        return bytes(stored) if stored is not None else None

    @property
    def sizes(self) -> tuple[int, int]:
        known = self._counted()
        return self.summed() if known is None else known

    def summed(self) -> tuple[int, int]:
        """The sizes, added up."""
        return super().sizes

    def _counted(self) -> tuple[int, int] | None:
        """The sizes as they were counted."""
        return counted(self._txn, self._db[b"meta"], self._entries())

    def _entries(self) -> int:
        return int(self._txn.stat(self._db[b"records"])["entries"])

    @property
    def used(self) -> Used:
        stats = [self._txn.stat(self._db[name]) for name in DATABASES]
        pages = 4 + sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return Used(pages * stats[0]["psize"], self._entries())


class _Sum:
    """Adds up sizes of pages."""

    def __init__(self) -> None:
        self.sizes = 0, 0
        # whether the sizes of all pages are known
        self.is_complete = True

    def added(self, entry: Entry) -> Entry:
        """The page, when its sizes have been added."""
        if isinstance(entry.record, Record):
            self.sizes = self.sizes[0] + entry.record.stored_bytes, self.sizes[1] + entry.record.raw_bytes
        else:
            self.is_complete = False
        return entry


class _Change(_View, Transaction):
    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        super().__init__(txn, environment)
        self._page_size = txn.stat(self._db[b"meta"])["psize"]
        self._changed: list[bytes] = []
        # pages that were deleted, and whose records did not say among which siblings they were
        self._lost: set[bytes] = set()
        # the sizes with what was changed so far; None if they are not known
        self._sizes = super()._counted()
        # pages of the file that it has to leave; none if it has written nothing
        self.to_leave = 0
        self.put_bytes = 0

    def cost(self, record: Record, n_bytes: int) -> int:
        # a payload has pages of its own; each of the five trees may split a leaf and the branch above it
        payload = -(-(n_bytes + PAGE_HEADER) // self._page_size)
        tokens = -(-(len(record.tokens) + 256) // self._page_size)
        return (payload + tokens + 10) * self._page_size

    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        self.to_leave = LEFT_BY_PUTS
        self.put_bytes += len(payload)
        # the bytes first, then the record that makes them visible
        self._txn.put(key, payload, db=self._db[b"payloads"])
        self._txn.put(key, usage.pack(), db=self._db[b"usage"])
        place = record.parent, record.form, record.tokens
        stored = self._txn.get(key, db=self._db[b"records"])
        old = place_of(stored) if stored is not None else None
        self._count((record.stored_bytes, record.raw_bytes), instead_of=stored)
        if old != place:
            self._remove_child(key, old)
        self._txn.put(key, record.pack(), db=self._db[b"records"])
        self._siblings(record.parent, record.form).add(key, record.tokens)
        self._lost.discard(key)
        self._changed.append(key)

    def delete(self, key: bytes) -> bool:
        self.to_leave = self.to_leave or LEFT_BY_OTHERS
        stored = self._txn.get(key, db=self._db[b"records"])
        self._count((0, 0), instead_of=stored)
        was_child = self._remove_child(key, place_of(stored) if stored is not None else None)
        found = [self._txn.delete(key, db=self._db[name]) for name in (b"records", b"usage", b"payloads")]
        if any(found):
            self._changed.append(key)
            self._lost |= set() if was_child else {key}
        return any(found)

    def _count(self, sizes: tuple[int, int], *, instead_of: Buffer | None) -> None:
        """Count the sizes of a page, and no longer those in the record that was stored of it."""
        before = sizes_of(instead_of) if instead_of is not None else (0, 0)
        if self._sizes is not None and before is not None:
            self._sizes = self._sizes[0] + sizes[0] - before[0], self._sizes[1] + sizes[1] - before[1]
        else:
            self._sizes = None

    def _counted(self) -> tuple[int, int] | None:
        return self._sizes

    def put_sizes(self, sizes: tuple[int, int] | None) -> None:
        """Store the total sizes of all pages; None if they are not known."""
        put_counted(self._txn, self._db[b"meta"], self._entries(), sizes)

    def _remove_child(self, key: bytes, place: tuple[bytes, int, bytes] | None) -> bool:
        """Remove a page from its siblings; returns whether it was among them."""
        if place is None:
            return False
        parent, form, tokens = place
        return self._siblings(parent, form).remove(key, tokens)

    def order(self, after: bytes, at_most: int) -> bytes | None:
        """Index the next `at_most` pages after this key among their siblings; the last key, None at the end.

        Those that cannot be read are left out.
        """
        cursor = self._txn.cursor(self._db[b"records"])
        found = cursor.set_range(after + b"\0") if after else cursor.first()
        keys = [bytes(key) for key in islice(cursor.iternext(values=False), at_most)] if found else []
        for key in keys:
            if (entry := self._readable(key)) is not None and isinstance(entry.record, Record):
                self._siblings(entry.record.parent, entry.record.form).add(key, entry.record.tokens)
        return keys[-1] if keys else None

    def touch(self, key: bytes, usage: Usage, *, announce: bool = False) -> None:
        self.to_leave = self.to_leave or LEFT_BY_OTHERS
        if self._txn.get(key, db=self._db[b"records"]) is not None:
            self._txn.put(key, usage.pack(), db=self._db[b"usage"])
            self._changed += [key] * announce

    def put_namespace(self, key: bytes, settings: bytes) -> None:
        self.to_leave = self.to_leave or LEFT_BY_OTHERS
        if self._txn.get(key, db=self._db[b"namespaces"]) != settings:
            self._txn.put(key, settings, db=self._db[b"namespaces"])

    def drop_namespace(self, key: bytes) -> None:
        self.to_leave = self.to_leave or LEFT_BY_OTHERS
        self._txn.delete(key, db=self._db[b"namespaces"])

    def put_note(self, name: bytes, value: bytes | None) -> None:
        self.to_leave = self.to_leave or LEFT_BY_OTHERS
        if value is None:
            self._txn.delete(NOTE + name, db=self._db[b"meta"])
        else:
            self._txn.put(NOTE + name, value, db=self._db[b"meta"])

    def forget_changes(self) -> None:
        """Have every process start over: what it has learned from the index of children may be wrong."""
        self._txn.put(b"generation", META_GENERATION.pack(self.generation + 1), db=self._db[b"meta"])
        self._txn.drop(self._db[b"changes"], delete=False)

    def finish(self) -> None:
        """Record what changed, and forget changes that are too old."""
        if not self._changed:
            return
        if self._lost:
            remove_everywhere(self._txn, self._db[b"children"], self._lost)
        # if something was damaged, they are added up
        self.put_sizes(self.sizes if self._sizes is not None or self._entries() <= SUMMED_AT_ONCE else None)
        generation = self.generation + 1
        self._txn.put(b"generation", META_GENERATION.pack(generation), db=self._db[b"meta"])
        self._txn.put(CHANGE_KEY.pack(generation), b"".join(self._changed), db=self._db[b"changes"])
        cursor = self._txn.cursor(self._db[b"changes"])
        while cursor.first() and CHANGE_KEY.unpack(cursor.key())[0] + CHANGES_KEPT <= generation:
            cursor.delete()


class LMDBBackend(Backend):
    """Pages in an LMDB environment.

    Parameters
    ----------
    path
        A directory; created if missing, readable by its owner only.
    max_bytes
        The budget; the file stays within `FILE_FACTOR` times the largest that it was written with, plus `FILE_EXTRA`.
    read_only
        Open an existing store and never write to it.

    Raises
    ------
    LocationError
        If the path is a file, cannot be written, or holds no store to read.
    IncompatibleError
        If the path holds something else, or a newer format.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int, *, read_only: bool = False) -> None:
        self._path = absolute(path)
        self._map_size = (int(max_bytes * FILE_FACTOR) + FILE_EXTRA) // 4096 * 4096
        self._read_only = read_only
        self._closed = False
        self._start()
        self._prepare_directory()
        self._open()
        try:
            self._end_reindex()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """What belongs to this process."""
        self._environment: Environment | None = None
        self._opening = threading.Lock()

    def _prepare_directory(self) -> None:
        try:
            if not self._read_only:
                make_directory(self._path)
            if not self._path.exists():
                raise refusals.missing(self._path, "an LMDB directory")
            if not self._path.is_dir():
                raise LocationError(f"{self._path} is not a directory; an LMDB store is a directory of its own")
        except (FileExistsError, NotADirectoryError):
            raise LocationError(f"{self._path} is a file; an LMDB store is a directory of its own") from None
        except OSError as error:
            done = "read" if self._read_only else "created"
            raise LocationError(f"{self._path} cannot be {done}: {error.strerror}; choose another location") from error
        if not os.access(self._path, os.R_OK | os.X_OK):
            raise LocationError(
                f"{self._path} is not readable for this user; run as its owner, have the owner run: "
                f"chmod g+rx '{self._path}', or choose another location"
            )
        if not self._read_only and not os.access(self._path, os.W_OK):
            raise LocationError(
                f"{self._path} is not writable for this user; run as its owner, have the owner run: "
                f"chmod g+rwx '{self._path}', or choose another location. To read, open it with read_only=True, as "
                "prefixstore ls, tree, show, check and export do"
            )

    def _open(self) -> Environment:
        """The shared environment of this process, opened if necessary."""
        with self._opening:
            if self._closed:
                raise refusals.closed(self._path)
            if self._environment is None:
                self._environment = acquire(self._path, self._map_size, read_only=self._read_only, user=self)
            return self._environment

    def _writable(self) -> Environment:
        environment = self._open()
        if self._read_only:
            raise refusals.read_only(self._path)
        return environment

    @property
    def location(self) -> str:
        return f"lmdb://{self._path}"

    @property
    def is_local(self) -> bool:
        return True

    @contextmanager
    def view(self) -> Iterator[View]:
        environment = self._open()
        with environment.begin(write=False) as txn:
            yield _View(txn, environment)

    @contextmanager
    def update(self) -> Iterator[Transaction]:
        environment = self._writable()
        with closing(WriteBack(environment.file)) as early, environment.begin(write=True) as txn:
            change = _Change(txn, environment)
            yield change
            change.finish()
            environment.require_free(txn, change.to_leave)
            early.start(change.put_bytes)

    def sync(self) -> None:
        environment = self._open()
        # inside a transaction, so the map cannot be replaced nor the process fork
        with environment.begin(write=False):
            environment.env.sync(True)

    def reclaim(self) -> None:
        """Let LMDB reuse what was deleted: remove dead readers, and commit twice (it keeps two earlier states)."""
        environment = self._open()
        environment.free_readers()
        for _ in range(2):
            with environment.begin(write=True) as txn:
                passed = txn.get(b"passed", default=b"\0", db=environment.databases[b"meta"])
                txn.put(b"passed", bytes([passed[0] ^ 1]), db=environment.databases[b"meta"])
                environment.require_free(txn, LEFT_BY_RECLAIM)

    def scrub(self) -> None:
        """Overwrite all free bytes of the file with zeros: free pages, and the gaps inside pages.

        Servers keep running. From here on they write through new handles, because LMDB's buffers of the old ones hold
        what they have written. Views that see what was deleted must end first, for which this waits some seconds.
        """
        environment = self._writable()
        with environment.begin(write=True) as txn:
            scrubs = int.from_bytes(txn.get(SCRUBS, default=b"", db=environment.databases[b"meta"]), "little")
            txn.put(SCRUBS, (scrubs + 1).to_bytes(8, "little"), db=environment.databases[b"meta"])
        self._clear_free_space(erase, gaps=True)

    def compact(self) -> int:
        """Return the free pages of the file to the disk; returns the number of bytes.

        The file keeps its length, and gets holes. Raises `UnavailableError` where files cannot have holes.
        """
        return self._clear_free_space(punch, gaps=False)

    def reindex(self) -> None:
        """Rebuild the index of children from all records, some at a time, and add up their sizes."""
        environment = self._writable()
        mine = MAKER.pack(os.getpid(), os.urandom(8))
        with environment.begin(write=True) as txn:
            txn.drop(environment.databases[b"children"], delete=False)
            txn.put(REINDEXING, mine, db=environment.databases[b"meta"])
            environment.require_free(txn, LEFT_BY_RECLAIM)
        self.reclaim()
        after: bytes | None = b""
        while after is not None:
            with environment.begin(write=True) as txn:
                after = _Change(txn, environment).order(after, RECORDS_AT_ONCE)
                environment.require_free(txn, LEFT_BY_OTHERS)
        self._count_sizes(environment)
        with environment.begin(write=True) as txn:
            _Change(txn, environment).forget_changes()
            # another process may have begun to do the same
            if txn.get(REINDEXING, db=environment.databases[b"meta"]) == mine:
                txn.delete(REINDEXING, db=environment.databases[b"meta"])

    def _end_reindex(self) -> None:
        """Rebuild the index of children if a process has died, or was interrupted, while it did that."""
        environment = self._open()
        with environment.begin(write=False) as txn:
            maker = txn.get(REINDEXING, db=environment.databases[b"meta"])
        if maker is not None and not self._read_only and not _is_at_work(bytes(maker)):
            log.warning("%s: the index of children is incomplete; rebuilding it", self._path)
            try:
                self.reindex()
            except FullError as error:
                log.warning("%s: the index of children cannot be rebuilt: %s", self._path, error)

    def _count_sizes(self, environment: Environment) -> None:
        """Add up the sizes of all pages, while others write if possible."""
        for is_last in (*[False] * SUMS, True):
            with environment.begin(write=False) as txn:
                view = _View(txn, environment)
                generation, sizes = view.generation, view.summed()
            with environment.begin(write=True) as txn:
                change = _Change(txn, environment)
                if change.generation == generation or is_last:
                    change.put_sizes(sizes if change.generation == generation else change.summed())
                    environment.require_free(txn, LEFT_BY_RECLAIM)
                    return

    def _clear_free_space(self, clear: Callable[[int, int, int], int], *, gaps: bool) -> int:
        """Call `clear(handle, start, end)` for all bytes that nothing refers to; returns the sum of its results."""
        environment = self._writable()
        # after this, neither of the two states that LMDB keeps refers to what was deleted before
        self.reclaim()
        self.sync()
        path = self._path / "data.mdb"
        left: list[tuple[int, int]] | None = None
        cleared = 0
        handle = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            while left is None or left:
                # others wait for this transaction, so it is short; the next one reads the layout again
                with self._alone_with_the_newest(environment):
                    layout = read_layout(path)
                    inside = layout.gaps if gaps and left is None else []
                    now, left = split(layout.free if left is None else common(left, layout.free), CLEARED_AT_ONCE)
                    cleared += sum(clear(handle, start, end) for start, end in (*inside, *now))
            os.fsync(handle)
        finally:
            os.close(handle)
        return cleared

    @contextmanager
    def _alone_with_the_newest(self, environment: Environment) -> Iterator[None]:
        """Hold the write lock while there is no reader of a state older than the last commit, which is durable."""
        deadline = time.monotonic() + READERS_WITHIN
        while True:
            with environment.begin(write=True) as txn:
                newest = txn.id() - 1
                readers = [pid for pid, transaction in environment.readers().items() if transaction < newest]
                if not readers:
                    # until it is on disk, a loss of power restores the state before it, which has other free pages
                    environment.env.sync(True)
                    yield
                    return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self._path}: process {readers[0]} still reads deleted pages; try again, or stop it first"
                )
            time.sleep(0.05)
            environment.free_readers()

    def after_fork(self) -> None:
        self._start()

    def close(self) -> None:
        with self._opening:
            self._closed = True
            self._environment = None
        # also if an interrupt has kept the environment from being noted here
        release(self)


def _is_at_work(maker: bytes) -> bool:
    """Whether another process that has left this mark is alive; not, if it may be this one that was interrupted."""
    if len(maker) != MAKER.size or (pid := MAKER.unpack(maker)[0]) == os.getpid() or os.name != "posix" or not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def open_lmdb(location: str, *, max_bytes: int, read_only: bool) -> LMDBBackend:
    """The store in the directory that a path or a URL names."""
    return LMDBBackend(path_of(location), max_bytes, read_only=read_only)
