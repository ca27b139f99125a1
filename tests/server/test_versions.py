"""A llama-server whose slot files have a version that is not known: it answers as it does alone, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixstore.server import slot_file
from tests.server.test_slots import N, opened
from tests.support.llama_server import Running
from tests.support.models import prompt

SAID = "this llama-server writes slot files of version 3, and prefixstore knows 2: nothing is stored or restored"


@pytest.mark.slow
def test_an_unknown_version_is_said_once_and_nothing_is_stored(
    models: Callable[..., Path],
    llama_server: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    running = llama_server(models("llama", n_head=2))
    monkeypatch.setattr(slot_file, "STATE_VERSION", 2)
    with caplog.at_level(logging.WARNING), opened(running, "memory:") as slots:
        for _ in range(2):
            running.complete(prompt(N), n=2)
            assert slots.save(0).reason == slots.restore(0, prompt(N)).reason == slots.reason == "version"
        assert SAID in slots.why
        assert slots.store.stats().dropped == {"version": 1}
        assert running.complete(prompt(N), n=2)["timings"]["cache_n"] == N - 1, "the slot is as it was"
    assert [SAID in record.getMessage() for record in caplog.records] == [True]
