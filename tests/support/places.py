"""Locations of every backend, and pages in them without a model."""

import base64
import subprocess
from contextlib import closing, contextmanager

import numpy as np
import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import PrefixStoreError
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Usage
from tests.support.pages import make_page

# where writers wait for each other by a lock
LOCKING = ("lmdb", "sqlite", "postgresql", "valkey")
SCHEMES = (*LOCKING, "s3")
MIB = 1 << 20
# where a small disk is mounted
DISK = "disk"


class _Key:
    """A key that needs no file."""

    def read(self):
        return base64.b64encode(bytes(range(32))).decode()

    def __str__(self):
        return "the tests' key"


KEY = _Key()


def place(scheme, tmp_path, request, name="kv"):
    """A location; with PostgreSQL there is an empty store in it already."""
    if scheme == "lmdb":
        return f"lmdb://{tmp_path / name}"
    if scheme == "sqlite":
        return f"sqlite:///{tmp_path / name}.db"
    if scheme == "memory":
        return "memory:"
    return request.getfixturevalue({"postgresql": "new_database", "valkey": "new_valkey", "s3": "new_prefix"}[scheme])()


@contextmanager
def small_disk(directory, megabytes):
    """A file system of this size in a directory, until the block is left."""
    disk = directory / DISK
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", disk]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def opened(url, **options):
    """The backend of a location, closed at the end of the block."""
    return closing(open_pages(url, max_bytes=64 * MIB, **options))


def refusal(url, **options):
    """Class and message of the error with which a location is refused."""
    try:
        open_pages(url, max_bytes=MIB, **options).close()
    except PrefixStoreError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def space(salt=None, **more):
    return Namespace({"label": None, "salt": salt, "page_tokens": 4, **more})


def fill(backend, settings, sequences, *, last_used=0, size=1000, pinned=False):
    """Put sequences of tokens, in pages of four; the keys of the pages of each."""
    paths = []
    with backend.update() as transaction:
        transaction.put_namespace(settings.key, settings.canonical)
        for tokens in sequences:
            parent, path = settings.key, []
            for start in range(0, len(tokens), 4):
                some = tokens[start : start + 4]
                payload = np.random.default_rng([*settings.key, len(path), *some]).bytes(size)
                key, record = make_page(payload, some, parent=parent, start=start, namespace=settings.key)
                if transaction.record(key) is None:
                    usage = Usage(last_used or record.created, pinned=pinned)
                    transaction.put(key, record, usage, payload)
                path.append(key)
                parent = key
            paths.append(path)
    return paths


def contents(backend):
    """All pages: record, usage, bytes."""
    with backend.view() as view:
        return {key: (record, usage, bytes(view.payload(key))) for key, record, usage in view.scan()}


def write_rows(backend, *rows):
    """Write rows as no engine would; None deletes one."""
    with backend.rows.update() as draft:
        for row, value in rows:
            if value is None:
                draft.delete(row)
            else:
                draft.put(row, value)
