"""The time of an engine."""

import time

import pytest


@pytest.fixture
def clock(monkeypatch):
    """Nanoseconds, moved by hand."""
    now = [time.time_ns()]
    monkeypatch.setattr("time.time_ns", lambda: now[0])
    return now
