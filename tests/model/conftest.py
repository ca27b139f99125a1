"""Processes for stores, started once for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.attacks.power import shim
from tests.model.process import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(Processes()) as started:
        yield started


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[Processes]:
    """As `processes`, and what they write to files is recorded."""
    with closing(Processes(shim(tmp_path_factory.mktemp("shim")))) as started:
        yield started
