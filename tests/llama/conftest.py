"""A store for a `Llama`."""

from __future__ import annotations

import pytest

from prefixstore import PrefixStore


@pytest.fixture
def store():
    """A store in memory, not attached, which is checked after the test."""
    with PrefixStore("memory:") as store:
        yield store
        assert store.check() == []
