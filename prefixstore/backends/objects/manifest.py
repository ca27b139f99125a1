"""The objects that say which pages a location in object storage has: one head, and segments of changes.

A segment is the effect of one commit, or of several that follow each other; it is never changed. The head lists the
segments in their order, and is replaced as a whole by each commit. Their bytes are defined in this module only;
``docs/format.md`` describes them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import xxhash
import zstandard

from prefixstore.backends.base import CHANGES_KEPT
from prefixstore.errors import CorruptError, IncompatibleError, StorageError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import USAGE, Buffer, Record, Usage

__all__ = [
    "CHANGED_KEYS_KEPT",
    "HEAD",
    "NONCE_BYTES",
    "PAGES",
    "PROBES",
    "SEGMENTS",
    "Head",
    "Part",
    "Payload",
    "Segment",
    "Stored",
    "name_of",
    "new_segment_name",
    "payload_of",
]

HEAD = "prefixstore.json"
SEGMENTS = "log/"
PAGES = "pages/"
PROBES = "probes/"
OBJECTS_VERSION = 1
NONCE_BYTES = 8
# how many commits a head names: by these a writer whose connection broke finds out whether it has committed
RECENT = 64

SEGMENT_MAGIC = b"pfxslog\x01"
ITEM = struct.Struct("<cI")  # kind, and the bytes that follow
PUT, DELETED, USED, SPACE, NOTE, GROUP, BURIED, REMOVED, WHOLE = (bytes([letter]) for letter in b"PDUSNGBRW")
# keys in the log of changes, beside the number of its generations
CHANGED_KEYS_KEPT = 1 << 16
# the largest segment when it is unpacked
LARGEST_SEGMENT = 4 << 30


@dataclass(frozen=True, slots=True)
class Stored:
    """A page: its record (or why it cannot be read, and its bytes), its usage, and which object is its payload."""

    record: Record | StorageError
    usage: Usage
    nonce: bytes
    packed: bytes = b""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payload."""
        return self.record.stored_bytes if isinstance(self.record, Record) else 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of the state."""
        return self.record.raw_bytes if isinstance(self.record, Record) else 0

    def pack(self) -> bytes:
        """The record as it is stored."""
        return self.record.pack() if isinstance(self.record, Record) else self.packed


# which payload: key of the page, and the nonce of the writing
Payload = tuple[bytes, bytes]


def name_of(key: bytes, nonce: bytes) -> str:
    """The name of the object that is this payload."""
    return f"{PAGES}{key.hex()}-{nonce.hex()}"


def payload_of(name: str) -> Payload | None:
    """The payload that has this name; None for another object."""
    key, dash, nonce = name.removeprefix(PAGES).partition("-")
    try:
        found = bytes.fromhex(key), bytes.fromhex(nonce)
    except ValueError:
        return None
    return found if dash and (len(found[0]), len(found[1])) == (KEY_BYTES, NONCE_BYTES) else None


def new_segment_name() -> str:
    """A name that no other segment has."""
    return SEGMENTS + os.urandom(NONCE_BYTES).hex()


@dataclass
class Segment:
    """What one commit, or several, have done. A key is in at most one of `puts`, `deleted` and `usages`.

    Attributes
    ----------
    puts, deleted, usages
        Pages that were put, that were deleted, and whose usage alone was replaced.
    namespaces, notes
        Settings and values; None for those that were dropped.
    groups
        For each generation, the keys of the pages that it changed.
    buried
        Payloads that belong to no page any more, and that are not among those of pages that are replaced here.
    removed
        Payloads that belonged to no page, and that are deleted.
    is_whole
        Whether it is the complete state, and not a change.
    """

    puts: dict[bytes, Stored] = field(default_factory=dict)
    deleted: dict[bytes, None] = field(default_factory=dict)
    usages: dict[bytes, Usage] = field(default_factory=dict)
    namespaces: dict[bytes, bytes | None] = field(default_factory=dict)
    notes: dict[bytes, bytes | None] = field(default_factory=dict)
    groups: list[list[bytes]] = field(default_factory=list)
    buried: dict[Payload, None] = field(default_factory=dict)
    removed: dict[Payload, None] = field(default_factory=dict)
    is_whole: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not any((self.puts, self.deleted, self.usages, self.namespaces, self.notes, self.groups, self.removed))

    def followed_by(self, later: Segment) -> None:
        """Add what a later one has done."""
        for key, stored in later.puts.items():
            self._bury(key)
            self.deleted.pop(key, None)
            self.usages.pop(key, None)
            self.puts[key] = stored
        for key in later.deleted:
            self._bury(key)
            self.puts.pop(key, None)
            self.usages.pop(key, None)
            self.deleted[key] = None
        for key, usage in later.usages.items():
            if key in self.puts:
                self.puts[key] = replace(self.puts[key], usage=usage)
            elif key not in self.deleted:
                self.usages[key] = usage
        self.namespaces.update(later.namespaces)
        self.notes.update(later.notes)
        self.groups += later.groups
        self.buried.update(later.buried)
        for payload in later.removed:
            if payload in self.buried:
                del self.buried[payload]
            else:
                self.removed[payload] = None

    def forget(self) -> None:
        """Leave out what only a change needs, and the oldest generations."""
        self.deleted, self.usages, self.removed = {}, {}, {}
        self.namespaces = {key: value for key, value in self.namespaces.items() if value is not None}
        self.notes = {name: value for name, value in self.notes.items() if value is not None}
        n_keys = list(accumulate(map(len, reversed(self.groups[-CHANGES_KEPT:]))))
        n_kept = max(sum(n <= CHANGED_KEYS_KEPT for n in n_keys), 1)
        self.groups = self.groups[-n_kept:]

    def _bury(self, key: bytes) -> None:
        if key in self.puts:
            self.buried[key, self.puts[key].nonce] = None

    def pack(self) -> bytes:
        """The stored form."""
        body = b"".join(part for kind, value in self._items() for part in (ITEM.pack(kind, len(value)), value))
        packed = zstandard.ZstdCompressor(level=1).compress(body)
        return SEGMENT_MAGIC + xxhash.xxh3_64_digest(packed) + packed

    def _items(self) -> Iterator[tuple[bytes, bytes]]:
        if self.is_whole:
            yield WHOLE, b""
        for key, stored in self.puts.items():
            yield PUT, key + stored.nonce + stored.usage.pack() + stored.pack()
        for key in self.deleted:
            yield DELETED, key
        for key, usage in self.usages.items():
            yield USED, key + usage.pack()
        for key, settings in self.namespaces.items():
            yield SPACE, key + _optional(settings)
        for name, value in self.notes.items():
            yield NOTE, struct.pack("<H", len(name)) + name + _optional(value)
        for group in self.groups:
            yield GROUP, b"".join(group)
        for key, nonce in self.buried:
            yield BURIED, key + nonce
        for key, nonce in self.removed:
            yield REMOVED, key + nonce

    @classmethod
    def unpack(cls, where: str, stored: Buffer) -> Segment:
        """Read the stored form.

        Raises
        ------
        CorruptError
            If a byte differs from what was written.
        IncompatibleError
            If a newer version wrote it.
        """
        view = memoryview(stored)
        magic, seal, packed = bytes(view[:8]), bytes(view[8:16]), view[16:]
        if magic[:7] == SEGMENT_MAGIC[:7] and magic[7:] > SEGMENT_MAGIC[7:]:
            raise IncompatibleError(f"{where} was written by a newer prefixstore; upgrade prefixstore")
        if magic != SEGMENT_MAGIC or xxhash.xxh3_64_digest(packed) != seal:
            raise CorruptError(f"{where} is damaged; delete the store: its pages will be computed again")
        try:
            # a size that is claimed, or none, is not memory that is reserved
            if zstandard.frame_content_size(packed) not in range(LARGEST_SEGMENT + 1):
                raise CorruptError("its size is not valid for a segment")
            body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=LARGEST_SEGMENT)
            segment = cls()
            at, spaces = 0, dict[bytes, bytes]()
            while at < len(body):
                kind, n = ITEM.unpack_from(body, at)
                at += ITEM.size + n
                segment._add(kind, body[at - n : at], spaces)
        except (zstandard.ZstdError, struct.error, CorruptError) as error:
            raise CorruptError(f"{where} is damaged: {error}") from None
        return segment

    def _add(self, kind: bytes, value: bytes, spaces: dict[bytes, bytes]) -> None:
        key, rest = value[:KEY_BYTES], value[KEY_BYTES:]
        if kind == PUT:
            self.puts[key] = _stored(key, rest, spaces)
        elif kind == DELETED:
            self.deleted[key] = None
        elif kind == USED:
            self.usages[key] = Usage.unpack(rest)
        elif kind == SPACE:
            self.namespaces[key] = _option(rest)
        elif kind == NOTE:
            (n,) = struct.unpack_from("<H", value)
            self.notes[value[2 : 2 + n]] = _option(value[2 + n :])
        elif kind == GROUP:
            self.groups.append([value[i : i + KEY_BYTES] for i in range(0, len(value), KEY_BYTES)])
        elif kind == BURIED:
            self.buried[key, rest] = None
        elif kind == REMOVED:
            self.removed[key, rest] = None
        elif kind == WHOLE:
            self.is_whole = True
        else:
            raise CorruptError(f"it has an item of an unknown kind, {kind!r}")


def _stored(key: bytes, rest: bytes, spaces: dict[bytes, bytes]) -> Stored:
    nonce, rest = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
    usage, packed = Usage.unpack(rest[: USAGE.size]), rest[USAGE.size :]
    try:
        record = Record.unpack(key, packed)
    except (CorruptError, IncompatibleError) as error:
        return Stored(error, usage, nonce, packed)
    # pages of one namespace share its key: it is half a hundred bytes for each of them
    namespace = spaces.setdefault(record.namespace, record.namespace)
    parent = spaces.get(record.parent, record.parent)
    return Stored(replace(record, namespace=namespace, parent=parent), usage, nonce)


def _optional(value: bytes | None) -> bytes:
    return b"\0" if value is None else b"\1" + value


def _option(stored: bytes) -> bytes | None:
    return stored[1:] if stored[:1] == b"\1" else None


@dataclass(frozen=True)
class Part:
    """A segment in the list of a head: its name, its first and last commit, the generation after these, its size."""

    name: str
    first: int
    last: int
    generation: int
    n_bytes: int


@dataclass(frozen=True)
class Head:
    """Which segments a store has.

    Attributes
    ----------
    store
        A random id: a store that was deleted and made again is another one.
    parts
        The segments, oldest first; the first commit in each follows the last one of the one before.
    recent
        Names of the last commits' segments, including those merged into a larger one since.
    tried
        Servers that are known to keep to conditional writes, as hashes.
    """

    store: str
    parts: Sequence[Part] = ()
    recent: Sequence[str] = ()
    tried: Sequence[str] = ()

    @property
    def last(self) -> int:
        """The number of commits."""
        return self.parts[-1].last if self.parts else 0

    @property
    def generation(self) -> int:
        """The number of commits that have changed pages."""
        return self.parts[-1].generation if self.parts else 0

    def with_commit(self, name: str, n_bytes: int, n_generations: int) -> Head:
        """After one more commit."""
        part = Part(name, self.last + 1, self.last + 1, self.generation + n_generations, n_bytes)
        return replace(self, parts=[*self.parts, part], recent=[*self.recent, name][-RECENT:])

    def with_merged(self, begin: int, end: int, name: str, n_bytes: int) -> Head:
        """With one segment in place of those from index `begin` to before `end`."""
        old = self.parts[begin:end]
        part = Part(name, old[0].first, old[-1].last, old[-1].generation, n_bytes)
        return replace(self, parts=[*self.parts[:begin], part, *self.parts[end:]])

    def pack(self) -> bytes:
        """The stored form, different each time: the server's tag of an object may be a hash of its bytes."""
        value = {
            "magic": "prefixstore",
            "format": OBJECTS_VERSION,
            "store": self.store,
            "write": os.urandom(NONCE_BYTES).hex(),
            "generation": self.generation,
            "segments": [[one.name, one.first, one.last, one.generation, one.n_bytes] for one in self.parts],
            "recent": list(self.recent),
            "tried": list(self.tried),
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, where: str, stored: Buffer) -> Head:
        """Read the stored form.

        Raises
        ------
        CorruptError
            If it is damaged.
        IncompatibleError
            If it is another application's, or of another version.
        """
        try:
            value = json.loads(bytes(stored))
            magic, version = value["magic"], value["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CorruptError(f"{where}: {HEAD} is damaged, or another application's; choose another prefix") from None
        if magic != "prefixstore" or not isinstance(version, int):
            raise IncompatibleError(f"{where} holds another application's {HEAD}; choose another prefix")
        if version != OBJECTS_VERSION:
            raise IncompatibleError(
                f"{where} has format {version}, this prefixstore reads {OBJECTS_VERSION} only; "
                "upgrade prefixstore, or choose another prefix"
            )
        try:
            parts = [Part(str(one[0]), *map(int, one[1:5])) for one in value["segments"]]
            head = cls(str(value["store"]), parts, list(map(str, value["recent"])), list(map(str, value["tried"])))
        except (ValueError, KeyError, TypeError, IndexError, OverflowError):
            raise CorruptError(
                f"{where}: {HEAD} is damaged; delete the store: its pages will be computed again"
            ) from None
        if not _is_chain(parts):
            raise CorruptError(f"{where}: {HEAD} has gaps between its segments; delete the store")
        return head


def _is_chain(parts: Sequence[Part]) -> bool:
    """Whether each segment begins with the commit after the last one of the segment before."""
    ends = [0, *(part.last for part in parts)]
    return all(end + 1 == part.first <= part.last for end, part in zip(ends, parts, strict=False))
