"""What reads bytes of others, to be fuzzed: ``python -m tests.attacks.fuzz_targets NAME SEEDS -atheris_runs=N ...``.

The result is a valid object or an error of ours; any other exception ends the process, with the input in its output.
Checksums are computed again where a target says so: the point is the code that runs after the check.
"""

from __future__ import annotations

import io
import resource
import struct
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import atheris
import numpy as np
import xxhash

with atheris.instrument_imports(include=["prefixstore"]):
    from prefixstore import PrefixStoreError
    from prefixstore.format.export import (
        END_HEAD,
        ENTRY,
        EXPORT_VERSION,
        HEADER,
        MAGIC,
        PAGE_HEAD,
        ExportReader,
    )
    from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, namespace_key, page_key
    from prefixstore.format.record import CHECKSUM_BYTES, RECORD, RECORD_SEAL, checksum
    from prefixstore.llama.state.parse import parse_sequence
    from prefixstore.llama.state.view import Assembly, zeros
    from prefixstore.maintenance.archive import Archive
    from prefixstore.maintenance.transfer import export_store, import_store

from tests.attacks.exporting import an_export

# what a target may hold: a claim of more is a claim, and no memory
MEMORY = 4 << 30


# -- records, as they are in an export file ---------------------------------------------------------------------------


def sealed(body: bytes) -> tuple[bytes, bytes]:
    """A record with a right checksum and key, whatever is in it: key and stored form."""
    fields = RECORD.unpack_from(body.ljust(RECORD.size, b"\0"))
    form, parent = fields[2], fields[11]
    key = page_key(parent, body[RECORD.size :], form if form == SNAPSHOT else PAGE)
    return key, body + RECORD_SEAL.pack(xxhash.xxh3_64_intdigest(body))


# -- export files -----------------------------------------------------------------------------------------------------


def resealed(data: bytes) -> bytes:
    """An export file in which all seals and keys are right, as far as it is one."""
    out, at = [data[: HEADER.size]], HEADER.size
    n_pages = 0
    for _ in range(64):
        if at + ENTRY.size > len(data):
            break
        kind, head_bytes, n_bytes = ENTRY.unpack_from(data, at)
        at += ENTRY.size
        head, at = data[at : at + head_bytes], at + head_bytes + 8
        body, at = data[at : at + n_bytes], at + n_bytes
        if kind == b"NAME":
            head = namespace_key(head[KEY_BYTES:]) + head[KEY_BYTES:]
        elif kind == b"PAGE" and len(head) > PAGE_HEAD.size + RECORD.size + RECORD_SEAL.size:
            fields = bytearray(head[PAGE_HEAD.size : -RECORD_SEAL.size])
            fields[RECORD.size - CHECKSUM_BYTES : RECORD.size] = checksum(body)
            key, stored = sealed(bytes(fields))
            head = key + head[KEY_BYTES : PAGE_HEAD.size] + stored
            n_pages += 1
        elif kind == b"DONE":
            head = END_HEAD.pack(n_pages)
        start = ENTRY.pack(kind, head_bytes, n_bytes) + head
        out += [start, struct.pack("<Q", xxhash.xxh3_64_intdigest(start)), body]
    return b"".join(out)


def export(data: bytes) -> None:
    """An export file: what was taken from it stands in its place, and can be exported again."""
    file = io.BytesIO(resealed(data[1:]) if data[:1] != b"\0" else data[1:])
    seekable = data[:1] < b"\x80"
    file.seekable = lambda: seekable
    with closing(Archive("memory:", create=True)) as archive:
        try:
            import_store(ExportReader(file, "fuzzed"), archive)
        finally:
            # what a codec makes of a page is seen when it is used
            assert {problem.rule for problem in archive.check()} <= {"payload"}
            assert all(holding.namespace is not None for holding in archive.holdings())
            with suppress(PrefixStoreError):
                export_store(archive, io.BytesIO())
            archive.purge(everything=True)


# -- states -----------------------------------------------------------------------------------------------------------


def state(data: bytes) -> None:
    """What llama.cpp is said to have written: every byte is accounted for, so it can be put together again."""
    blob = parse_sequence(data)
    shape = blob.shape
    for section in blob.sections:
        start, end = (int(section.positions[0]), int(section.positions[-1]) + 1) if section.head else (0, 1)
        blob.cut(start, end, window_from=end - 1)
        blob.holds(start, end)
    recurrent = blob.recurrent.data if blob.recurrent is not None else b""
    assembly = Assembly(shape, blob.positions, recurrent=recurrent)
    joined = bytearray(assembly.size)
    assembly.write(memoryview(joined), [blob])
    assert parse_sequence(joined).shape == shape
    for start, n in ((0, 1), (0, 4), (2**31 - 2, 4), (2**32 - 1, 1), (0, 0), (7, 2**31)):
        assert isinstance(shape.fits(data, start, n), bool)
    if all(section.head for section in shape.sections) and shape.recurrent is None:
        positions = [np.full(1, 3, "<i4")] * len(shape.sections)
        assert shape.fits(zeros(shape, positions)[0], 3, 1)


TARGETS: dict[str, Callable[[bytes], None]] = {target.__name__: target for target in (export, state)}

# -- seeds ------------------------------------------------------------------------------------------------------------


def a_state(n: int, *, transposed: bool = False, recurrent: bool = False) -> bytes:
    """As llama.cpp writes it: two layers."""
    cells = b"".join(struct.pack("<iIi", i, 1, 0) for i in range(n))
    rows = [struct.pack("<iQ", 1, 4) + bytes(4 * n) for _ in range(4)]
    if transposed:
        rows[2:] = [struct.pack("<iII", 1, 2, 2) + bytes(4 * n) for _ in range(2)]
    section = struct.pack("<II", 1, n) + cells + struct.pack("<II", int(transposed), 2) + b"".join(rows)
    tail = struct.pack("<IiIII", 1, n - 1, 0, 0, 2) + struct.pack("<iQ", 0, 8) + bytes(8) if recurrent else b""
    return struct.pack("<II", 0xAF143CD8, 0) + section + tail


def seeds(name: str) -> list[bytes]:
    """Real ones."""
    return {
        "export": [b"\0" + an_export(), b"\1" + an_export(), b"\xff" + HEADER.pack(MAGIC, EXPORT_VERSION, 1)],
        "state": [a_state(3), a_state(1, transposed=True), a_state(2, recurrent=True)],
    }[name]


def run(name: str, directory: Path, options: list[str]) -> None:
    """Fuzz a target, from its seeds in a directory on."""
    target = TARGETS[name]
    for i, seed in enumerate(seeds(name)):
        (directory / f"seed{i}").write_bytes(seed)

    def once(data: bytes) -> None:
        with suppress(PrefixStoreError):
            target(data)

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    atheris.Setup([sys.argv[0], str(directory), f"-artifact_prefix={directory}/", "-rss_limit_mb=1024", *options], once)
    atheris.Fuzz()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
