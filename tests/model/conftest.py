"""Processes for stores, started once for the tests of a module; and where their files are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakValueDictionary

import pytest

from prefixstore.backends import memory
from prefixstore.backends.memory import Memory, MemoryBackend
from tests.attacks.power import shim
from tests.model.process import Processes

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path) -> Iterator[Path]:
    """In memory, where that is possible: what a loss of power leaves is computed, and nobody waits for a disk."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(prefix="pfxs-model-", dir=MEMORY) as directory:
        yield Path(directory)


@pytest.fixture
def shared_memory(monkeypatch) -> None:
    """Have ``memory://name`` be one memory for all stores that name it, until the last one is closed."""
    memories: WeakValueDictionary[str, Memory] = WeakValueDictionary()

    def open_memory(location: str, **_: object) -> MemoryBackend:
        return MemoryBackend(memories.setdefault(location, Memory()) if "//" in location else None)

    monkeypatch.setattr(memory, "open_memory", open_memory)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(Processes()) as started:
        yield started


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[Processes]:
    """As `processes`, and what they write to files is recorded."""
    with closing(Processes(shim(tmp_path_factory.mktemp("shim")))) as started:
        yield started
