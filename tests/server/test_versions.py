"""A llama-server whose slot files have a version that is not known: it answers as it does alone, and that is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixstore.cli import main
from prefixstore.server import slot_file
from tests.server.test_slots import N, opened
from tests.support.llama_server import Running, binary
from tests.support.models import prompt
from tests.support.served import launch, own_answers
from tests.support.served import prompt as text

SAID = "this llama-server writes slot files of version 3, and prefixstore knows 2: nothing is stored or restored"
# the command, as it will be when llama-server is newer than it is
OUTDATED = """
import sys
from prefixstore.cli import main
from prefixstore.server import slot_file

slot_file.STATE_VERSION = 2
main(sys.argv[1:])
"""


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


@pytest.mark.slow
def test_serve_and_doctor_say_that_the_version_is_unknown(
    tmp_path: Path, docs_model: Path, alone: Running, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "outdated.py").write_text(OUTDATED)
    store = str(tmp_path / "store")
    server = [str(binary()), "-m", str(docs_model), "--no-warmup", "-t", "1", "-np", "2", "-c", "4096"]
    served = launch(tmp_path, "served", [store, "--port", "0", "--", *server], program=tmp_path / "outdated.py")
    try:
        served.wait_ready()
        status = served.status()
        assert (status["passed_through"], SAID in status["why"]) == ("version", True)
        assert f"nothing is stored or restored: version ({SAID}" in served.text()
        for _ in range(2):
            assert served.complete(text(1))["content"] in own_answers(alone, text(1))
        assert served.counts(2, "prefixstore_requests_passed_total", endpoint="/completion", reason="version")
        assert served.counts(1, "prefixstore_dropped_pages_total", reason="version")
        assert main(["doctor", store, "--server", served.url, "--json"]) == 1
        findings = {found["name"]: found for found in json.loads(capsys.readouterr().out)["findings"]}
        assert findings["server"]["level"] == "problem"
        assert SAID in findings["server"]["advice"]
        assert served.stop() == 0
    finally:
        served.end()
    assert main(["doctor", store, "--server", served.url, "--json"]) == 1
    findings = {found["name"]: found for found in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["server"]["value"] == "cannot be asked"
