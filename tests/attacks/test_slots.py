"""What slots have to survive: a full tmpfs, a server killed while it saves or restores, a store killed in a restore."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefixstore.errors import FullError, ServerError, StorageError
from prefixstore.server import SlotStore
from prefixstore.server import slot_files as slot_files_module
from prefixstore.server.namespace import ServerIdentity
from prefixstore.server.slot_files import PART
from tests.support import PATIENCE, python
from tests.support.llama_server import Running
from tests.support.models import TORTURE, prompt

N = 700
RESTORE = """
import os, sys
from prefixstore.server import LlamaServer, SlotStore
from prefixstore.server.namespace import ServerIdentity
from tests.support.models import prompt
url, slots_dir, location, n = sys.argv[1:]
server = LlamaServer(url)
server.restore = lambda *_: (print("written", flush=True), sys.stdin.read())
identity = ServerIdentity.of_process(url, server.props())
SlotStore(location, server, slots_dir, identity).restore(1, prompt(int(n)))
"""


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """The slot directory, with room for one file of a prompt, and not for two."""
    slots_dir = tmp_path / "slots"
    slots_dir.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(slots_dir)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk needs the right to mount one")
    yield slots_dir
    subprocess.run(["umount", "-l", str(slots_dir)], check=True)


def opened(running: Running, location: str = "memory:") -> SlotStore:
    identity = ServerIdentity.of_command(running.argv, os.environ, running.client.props())
    return SlotStore(location, running.client, running.slots_dir, identity)


def test_a_full_tmpfs_is_an_error_and_nothing_else(
    small_tmpfs: Path, models: Callable[..., Path], llama_server: Callable[..., Running]
):
    running = llama_server(models("llama", n_head=2))
    tokens = prompt(N)
    cold = running.complete(tokens, slot=0)["content"]
    with opened(running) as slots:
        assert slots.save(0).reason is None
        stuffing = small_tmpfs / "stuffing"
        for size in (1_000_000, 600_000, 1_228_800):
            with suppress(OSError):
                stuffing.write_bytes(bytes(size))
            for _ in range(3):
                with pytest.raises(FullError, match="no space"):
                    slots.restore(1, tokens)
                with pytest.raises((ServerError, StorageError)):
                    slots.save(0)
                assert [path.name for path in small_tmpfs.iterdir()] == ["stuffing"]
                assert running.is_alive()
            stuffing.unlink()
        assert slots.save(0).reason is None
        assert slots.restore(1, tokens).n_tokens == N
        assert running.complete(tokens, slot=1)["content"] == cold


@pytest.mark.parametrize("seed", range(3 * TORTURE))
def test_a_server_killed_while_it_saves_and_restores(
    seed: int, models: Callable[..., Path], llama_server: Callable[..., Running], tmp_path: Path
):
    location = str(tmp_path / "kv")
    model = models("llama", n_head=2)
    running = llama_server(model)
    tokens = prompt(N)
    cold = running.complete(tokens, slot=0)["content"]
    with opened(running, location) as slots:
        assert slots.save(0).reason is None
        faults: list[BaseException] = []

        def work(slot: int) -> None:
            while True:
                try:
                    slots.restore(slot, tokens)
                    slots.save(slot)
                except ServerError:
                    return
                except StorageError as error:
                    # the file may be cut where the server was killed
                    faults.append(error)
                    return

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.05 + 0.013 * seed)
        running.process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert faults == []
        assert [path for path in running.slots_dir.iterdir() if path.suffix != PART] == []
        assert slots.engine.check() == []
    assert list(running.slots_dir.iterdir()) == []
    running = llama_server(model)
    with opened(running, location) as slots:
        assert slots.restore(1, tokens).n_tokens >= N
        again = running.complete(tokens, slot=1)
        assert (again["timings"]["cache_n"], again["content"]) == (N - 1, cold)


def test_what_a_killed_process_has_left_is_swept(
    models: Callable[..., Path],
    llama_server: Callable[..., Running],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    location = str(tmp_path / "kv")
    running = llama_server(models("llama", n_head=2))
    running.complete(prompt(N), n=2, slot=0)
    with opened(running, location) as slots:
        assert slots.save(0).reason is None
    process: Any = python(RESTORE, running.url, running.slots_dir, location, N)
    assert process.stdout.readline() == "written\n"
    process.kill()
    process.communicate()
    assert len(list(running.slots_dir.iterdir())) == 1
    monkeypatch.setattr(slot_files_module, "STALE_SECONDS", -1.0)
    with opened(running, location) as slots:
        assert list(running.slots_dir.iterdir()) == []
        assert slots.restore(1, prompt(N)).n_tokens == N
