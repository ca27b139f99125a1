"""Models for the tests: real GGUF files, small, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixstore.llama import rate
from tests.support.models import load, write
from tests.support.postgres import new_database, postgres_server, postgres_template, postgres_url  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model once: ``models("llama")``, ``models("llama", seed=1)``."""
    directory = tmp_path_factory.mktemp("models")
    return lambda arch, **options: write(directory, arch, **options)


@pytest.fixture(autouse=True)
def own_cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def no_restore_is_left_out_on_a_busy_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """These models compute a prompt in milliseconds: a restore that waits for a core would seem to lose."""
    if not request.path.name.startswith("test_rate"):
        monkeypatch.setattr(rate, "LOSES_BY", 100.0)


@pytest.fixture
def llama(models: Callable[..., Path]) -> Callable[..., Any]:
    """Loads a model: ``llama("gemma3", swa_full=False)``."""
    return lambda arch="llama", **options: load(models(arch), **options)
