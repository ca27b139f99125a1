"""Fixtures of all tests: real GGUF files, small, with random weights; databases; no timeouts."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from prefixstore.engine import breaker, compute_rate, tiers
from prefixstore.server import rates
from tests.support.browser import browser, chromium  # noqa: F401 - fixtures
from tests.support.llama_server import docs_model, llama_server  # noqa: F401 - fixtures
from tests.support.models import TORTURE, load, write
from tests.support.postgres import new_database, postgres_server, postgres_template, postgres_url  # noqa: F401 - fixtures
from tests.support.s3 import credentials, moto, new_prefix, seaweedfs  # noqa: F401 - fixtures
from tests.support.served import alone, serve, shared_proxy  # noqa: F401 - fixtures
from tests.support.timeouts import disable_timeouts, usual_limits
from tests.support.valkey import new_valkey, valkey_server  # noqa: F401 - as above

# the tests that measure speed, and what measures it
MEASURES = {
    "test_breaker": breaker,
    "test_outages": breaker,
    "test_compute_rate": compute_rate,
    "test_deadline": compute_rate,
    "test_proxy_parts": rates,
    "test_tiers": tiers,
}


def pytest_configure() -> None:
    """Signals reach the processes that tests start, also from a background job of a shell, which ignores SIGINT.

    And no example of Hypothesis is too slow. The examples are the same in each run; `make torture` looks for new ones.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile(
        "ours", deadline=None, derandomize=TORTURE == 1, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("ours")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in tests/attacks is an attack; others are marked one by one."""
    for item in items:
        if "attacks" in item.path.parts:
            item.add_marker(pytest.mark.attack)


def pytest_collection_finish() -> None:
    """What is there when the first test starts stays until the last: a collection of garbage need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model once: ``models("llama")``, ``models("llama", seed=1)``."""
    directory = tmp_path_factory.mktemp("models")
    return lambda arch, **options: write(directory, arch, **options)


@pytest.fixture(autouse=True)
def own_cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session", autouse=True)
def no_timeouts() -> None:
    """No test depends on how fast the machine is, and no fixture of a module or a session either."""
    disable_timeouts()


@pytest.fixture(autouse=True)
def usual_timeouts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures speed has its limits in the tests that are about it."""
    module = MEASURES.get(request.path.stem)
    for name, value in usual_limits(module):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def llama(models: Callable[..., Path]) -> Callable[..., Any]:
    """Loads a model: ``llama("gemma3", swa_full=False)``."""
    return lambda arch="llama", **options: load(models(arch), **options)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command in this process: exit code, stdout, stderr."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> tuple[int, str, str]:
        from prefixstore.cli import main

        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    yield call
    signal.signal(signal.SIGTERM, before)
