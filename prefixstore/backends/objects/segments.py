"""The objects that say which rows a location in object storage has: one head, and segments of changes.

A segment is the effect of one update, or of several that follow each other; it is never changed. The head lists the
segments in their order, and is replaced as a whole by each commit. Their bytes are defined in this module only;
``docs/format.md`` describes them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash
import zstandard

from prefixstore.backends import refusals
from prefixstore.backends.contract import Change, Costs
from prefixstore.errors import CorruptError, IncompatibleError
from prefixstore.format.record import Buffer

__all__ = [
    "COSTS",
    "HEAD",
    "NO_PAYLOAD",
    "PAYLOADS",
    "PROBES",
    "RECENT",
    "SEGMENTS",
    "Head",
    "Part",
    "add",
    "cost_of",
    "name_in",
    "name_of",
    "new_reference",
    "pack",
    "size_of",
    "unpack",
]

HEAD = "prefixstore.json"
SEGMENTS = "log/"
PAYLOADS = "payloads/"
PROBES = "probes/"
OBJECTS_VERSION = 2
NONCE_BYTES = 16
# how many commits a head names: by these a writer whose connection broke finds out whether it has committed
RECENT = 64

SEGMENT_MAGIC = b"pfxslog\x02"
# bytes of a key, bytes of a value or -1 for a row that is deleted, bytes of what refers to its payload or -1 if it
# keeps the one that it has
ITEM = struct.Struct("<Hib")
# the largest segment when it is unpacked
LARGEST_SEGMENT = 4 << 30

# What a row has in place of its payload: the random part of an object's name, and the size of the object.
REFERENCE = struct.Struct(f"<{NONCE_BYTES}sQ")
# of a row that has none, whatever it had before
NO_PAYLOAD = b""

COSTS = Costs(row=ITEM.size, payload=REFERENCE.size)


def name_in(folder: str) -> str:
    """A name that no other object has."""
    return folder + os.urandom(NONCE_BYTES).hex()


def new_reference(size: int) -> bytes:
    """Refers to a new object for a payload of this size."""
    return REFERENCE.pack(os.urandom(NONCE_BYTES), size)


def name_of(reference: Buffer) -> str:
    """The name of the object that this refers to."""
    return PAYLOADS + bytes(reference[:NONCE_BYTES]).hex()


def size_of(reference: Buffer | None) -> int:
    """The size of the object that this refers to; 0 if there is none, since the payload has no bytes or is none."""
    return REFERENCE.unpack(reference)[1] if reference else 0


def cost_of(row: Change) -> int:
    """How many bytes of the budget a row takes."""
    return COSTS.of(row.key, row.value or b"", size_of(row.payload) if row.payload else None)


def add(segment: dict[bytes, Change], change: Change) -> None:
    """Add to a segment what was done next: by its key, the one change that has the effect of all."""
    before = segment.get(change.key)
    if before is not None and change.value is not None and change.payload is None:
        change = change._replace(payload=NO_PAYLOAD if before.value is None else before.payload)
    segment[change.key] = change


def pack(changes: Iterable[Change]) -> bytes:
    """The stored form of a segment."""
    parts: list[bytes] = []
    for key, value, reference in changes:
        n_value, n_reference = (-1 if part is None else len(part) for part in (value, reference))
        parts += ITEM.pack(len(key), n_value, n_reference), key, value or b"", bytes(reference or b"")
    packed = zstandard.ZstdCompressor(level=1).compress(b"".join(parts))
    return SEGMENT_MAGIC + xxhash.xxh3_64_digest(packed) + packed


def unpack(where: str, stored: Buffer) -> list[Change]:
    """Read the stored form of a segment.

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
        return list(_changes(zstandard.ZstdDecompressor().decompress(packed, max_output_size=LARGEST_SEGMENT)))
    except (zstandard.ZstdError, struct.error, CorruptError) as error:
        raise CorruptError(f"{where} is damaged: {error}") from None


def _changes(body: bytes) -> Iterator[Change]:
    at = 0
    while at < len(body):
        n_key, n_value, n_reference = ITEM.unpack_from(body, at)
        key_at = at + ITEM.size
        value_at = key_at + n_key
        reference_at = value_at + max(n_value, 0)
        at = reference_at + max(n_reference, 0)
        if at > len(body) or n_reference not in (-1, 0, REFERENCE.size):
            raise CorruptError("it ends in the middle of a row, or has one that is none")
        value, reference = body[value_at:reference_at], body[reference_at:at]
        yield Change(body[key_at:value_at], value if n_value >= 0 else None, reference if n_reference >= 0 else None)


@dataclass(frozen=True)
class Part:
    """A segment in the list of a head: its name, the number of its last commit, its size."""

    name: str
    last: int
    n_bytes: int


@dataclass(frozen=True)
class Head:
    """Which segments a store has.

    Attributes
    ----------
    store
        A random id: a store that was deleted and made again is another one.
    parts
        The segments, oldest first; each begins with the commit after the last one of the one before.
    recent
        Names of the last commits' segments, including those merged into a larger one since.
    tried
        Servers that are known to keep to conditional writes, as hashes.
    turn
        Which writer the others wait for; empty if they do not.
    """

    store: str
    parts: Sequence[Part] = ()
    recent: Sequence[str] = ()
    tried: Sequence[str] = ()
    turn: str = ""

    @property
    def last(self) -> int:
        """The number of commits."""
        return self.parts[-1].last if self.parts else 0

    def with_commit(self, name: str, n_bytes: int) -> Head:
        """After one more commit, which ends the turn of its writer."""
        parts = [*self.parts, Part(name, self.last + 1, n_bytes)]
        return replace(self, parts=parts, recent=[*self.recent, name][-RECENT:], turn="")

    def with_merged(self, begin: int, end: int, name: str, n_bytes: int) -> Head:
        """With one segment in place of those from index `begin` to before `end`."""
        merged = Part(name, self.parts[end - 1].last, n_bytes)
        return replace(self, parts=[*self.parts[:begin], merged, *self.parts[end:]])

    def pack(self) -> bytes:
        """The stored form, different each time: the server's tag of an object may be a hash of its bytes."""
        value = {
            "magic": "prefixstore",
            "format": OBJECTS_VERSION,
            "store": self.store,
            "write": os.urandom(NONCE_BYTES).hex(),
            "segments": [[one.name, one.last, one.n_bytes] for one in self.parts],
            "recent": list(self.recent),
            "tried": list(self.tried),
            "turn": self.turn,
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
            raise refusals.foreign(where, HEAD)
        if version != OBJECTS_VERSION:
            raise refusals.other_format(where, version, OBJECTS_VERSION)
        try:
            parts = [Part(str(one[0]), *map(int, one[1:3])) for one in value["segments"]]
            if any(
                part.last <= before for part, before in zip(parts, [0, *(part.last for part in parts)], strict=False)
            ):
                raise ValueError("commits that are not in order")
            recent, tried = (list(map(str, value[name])) for name in ("recent", "tried"))
            return cls(str(value["store"]), parts, recent, tried, str(value["turn"]))
        except (ValueError, KeyError, TypeError, IndexError, OverflowError):
            raise CorruptError(
                f"{where}: {HEAD} is damaged; delete the store: its pages will be computed again"
            ) from None
