"""`prefixstore serve STORE --far STORE`, with a real server: hosts with a location each, one behind them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixstore.errors import PrefixStoreError
from tests.support.llama_server import Running
from tests.support.places import KEY, opened, refusal
from tests.support.ports import free_port
from tests.support.served import Serve, Served, cached, own_answers, prompt

pytest.importorskip("valkey")


def n_pages(location: str) -> int:
    """How many pages a location has; 0 if there is none."""
    try:
        with opened(location, read_only=True) as backend, backend.view() as view:
            return view.used.entries
    except PrefixStoreError:
        return 0


@pytest.fixture
def host(serve: Serve, tmp_path: Path) -> Callable[..., Served]:
    """Starts a host that was never here before."""

    def start(far: str) -> Served:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        return serve("-np", "1", options=("--far", far))

    return start


@pytest.mark.slow
@pytest.mark.parametrize("key", ["none", "env:MY_KEY"])
def test_what_one_host_has_computed_another_one_restores(host, tmp_path, new_valkey, alone: Running, key, monkeypatch):
    monkeypatch.setenv("PREFIXSTORE_KEY", key)
    monkeypatch.setenv("MY_KEY", KEY.read())
    far = new_valkey(tcp=True)
    right = own_answers(alone, prompt(1))
    one = host(far)
    cold = one.complete(prompt(1))
    assert (cold["content"] in right, cached(cold)) == (True, 0)
    # it writes to the far location what it has saved when it ends
    assert one.stop() == 0
    assert n_pages(far) == n_pages(str(tmp_path / "store")) > 0
    two = host(far)
    assert ": empty in the nearer one" in two.text()
    warm = two.complete(prompt(1))
    assert warm["content"] in right
    assert cached(warm) > 200
    assert two.stop() == 0
    # what was fetched is kept
    assert n_pages(str(tmp_path / "store")) == n_pages(far)
    assert "refused" not in two.text()
    assert all(("is encrypted" in refusal(one, key="none")) == (key != "none") for one in (far, tmp_path / "store"))


@pytest.mark.slow
def test_a_shared_location_that_is_not_there_yet_does_not_keep_a_server_from_starting(host, alone: Running):
    port = free_port()
    one = host(f"valkey://me:s3cret@127.0.0.1:{port}/0")
    assert one.complete(prompt(1))["content"] in own_answers(alone, prompt(1))
    assert "the far location is tried again later" in one.text()
    assert one.stop() == 0
    assert "s3cret" not in one.text()
