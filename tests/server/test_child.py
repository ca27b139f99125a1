"""A llama-server that dies, or cannot be reached any longer, is started again; a stop ends any."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefixstore.errors import ServerError
from prefixstore.server.child import Child, ServerCommand
from prefixstore.server.find_process import start_ticks
from prefixstore.server.upstream import Upstream
from tests.support.llama_server import binary


def test_the_names_of_processes_need_not_be_text():
    # as one is whose fifteenth byte is in the middle of a letter
    name_it = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'prozess \\xc3', 0, 0, 0);"
    command = [sys.executable, "-c", name_it + "print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        named.stdout.readline()
        assert b"\xc3" in Path(f"/proc/{named.pid}/comm").read_bytes()
        assert start_ticks(named.pid) is not None
        named.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_child_that_dies_or_cannot_be_reached_is_started_again(is_killed: bool, docs_model: Path, tmp_path: Path):
    argv = [str(binary()), "-m", str(docs_model), "--no-warmup", "-t", "1", "-np", "1", "-c", "512"]
    (private := tmp_path / "private").mkdir(mode=0o700)
    command = ServerCommand(argv, os.environ, private)
    started: list[int] = []
    n_down = 0

    async def scene() -> None:
        two = asyncio.Event()

        async def ready() -> None:
            assert child.process is not None
            started.append(child.process.pid)
            if len(started) > 1:
                two.set()
            elif is_killed:
                os.kill(started[0], signal.SIGKILL)
            else:
                # with the socket in it: nobody can ask the server any longer
                shutil.rmtree(private)
                asyncio.get_running_loop().call_later(0.1, child.lost)

        def down() -> None:
            nonlocal n_down
            n_down += 1

        upstream = Upstream(command.socket, timeout=5)
        child = Child(command, upstream.is_healthy, ready, down)
        running = asyncio.create_task(child.run())
        await asyncio.wait((running, asyncio.ensure_future(two.wait())), return_when=asyncio.FIRST_COMPLETED)
        await child.stop()
        await running
        await upstream.close()

    asyncio.run(scene())
    assert len(set(started)) == 2
    assert n_down == 2
    assert private.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_another_has_put_there_is_not_used(tmp_path: Path):
    (private := tmp_path / "private").mkdir(mode=0o700)
    command = ServerCommand(["llama-server"], {}, private)
    shutil.rmtree(private)
    (tmp_path / "open").mkdir()
    private.symlink_to(tmp_path / "open")
    with pytest.raises(ServerError, match="replaced"):
        command.prepare()
    private.unlink()
    private.mkdir(mode=0o755)
    with pytest.raises(ServerError, match="replaced"):
        command.prepare()


class Program:
    """A program in the place of llama-server."""

    def __init__(self, socket: Path, *argv: str) -> None:
        self.socket = socket
        self._argv, self.environ = [*argv], dict(os.environ)

    def argv(self) -> list[str]:
        return self._argv

    def prepare(self) -> None:
        self.socket.unlink(missing_ok=True)


async def healthy() -> bool:
    return True


async def nothing() -> None: ...


def test_a_child_that_is_being_started_is_ended_by_a_stop_as_well(tmp_path: Path):
    async def scene() -> None:
        child = Child(Program(tmp_path / "socket", "sleep", "1000"), healthy, nothing, lambda: None)
        running = asyncio.create_task(child.run())
        await asyncio.sleep(0)
        assert child.process is None
        await child.stop()
        try:
            await asyncio.wait_for(asyncio.shield(running), 120)
            assert child.process is not None
            assert child.process.returncode == -signal.SIGTERM
        finally:
            child.kill()

    asyncio.run(scene())
