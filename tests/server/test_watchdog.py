"""A llama-server that hangs or dies is started again; one that computes is left alone; a stop ends any."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixstore.server import child as child_module
from prefixstore.server.child import Child, hangs
from prefixstore.server.command import ServerCommand
from prefixstore.server.upstream import Upstream
from tests.support.llama_server import binary


def asked(answers: list[bool], work: Callable[[int], int | None], questions: int) -> int:
    """How often a server that answers so, and works so, is asked until it counts as hanging; -1 if it does not."""
    n_asked = 0

    async def ask(_: float) -> bool:
        nonlocal n_asked
        n_asked += 1
        return answers[n_asked - 1]

    async def watch() -> int:
        await hangs(ask, lambda: work(n_asked))
        return n_asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_module, "INTERVAL", 0)
        patch.setattr(child_module, "QUESTIONS", questions)
        try:
            return asyncio.run(watch())
        except IndexError:
            return -1


def test_a_server_hangs_if_it_neither_answers_nor_works_several_times_in_a_row():
    assert asked([True, False, False, False, False], lambda _: 7, 2) == 4
    assert asked([False, False, True, False, False, False], lambda _: 7, 2) == 6
    # one that computes, or whose work is not known, never hangs
    assert asked([False] * 50, lambda n: n, 2) == -1
    assert asked([False] * 50, lambda _: None, 2) == -1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, None])
def test_a_child_that_hangs_is_started_again(
    number: int | None, docs_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(child_module, "INTERVAL", 0.1)
    monkeypatch.setattr(child_module, "QUESTIONS", 3)
    argv = [str(binary()), "-m", str(docs_model), "--no-warmup", "-t", "1", "-np", "1", "-c", "512"]
    (private := tmp_path / "private").mkdir(mode=0o700)
    command = ServerCommand(argv, {}, private)
    started: list[int] = []
    n_down = 0

    async def scene() -> None:
        two = asyncio.Event()

        async def ready() -> None:
            assert child.process is not None
            started.append(child.process.pid)
            if len(started) > 1:
                two.set()
            elif number is not None:
                os.kill(started[0], number)
            else:
                # with the socket in it: nobody can ask the server any longer
                shutil.rmtree(private)

        def down() -> None:
            nonlocal n_down
            n_down += 1

        child = Child(command, dict(os.environ), ready, down)
        running = asyncio.create_task(child.run())
        await asyncio.wait((running, asyncio.ensure_future(two.wait())), return_when=asyncio.FIRST_COMPLETED)
        await child.stop()
        await running

    asyncio.run(scene())
    assert len(set(started)) == 2
    assert n_down == 2
    assert private.stat().st_mode & 0o777 == 0o700


class Program:
    """A program in the place of llama-server."""

    key = "none"

    def __init__(self, socket: Path, *argv: str) -> None:
        self.socket = socket
        self._argv = [*argv]

    def argv(self) -> list[str]:
        return self._argv

    def prepare(self) -> None:
        self.socket.unlink(missing_ok=True)


# it is healthy, answers one question, and as soon as it is asked another one it hangs up, and ends a while later
DIES = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
one, _ = listener.accept()
one.recv(65536)
one.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\nconnection: close\\r\\n\\r\\n{}")
one.close()
two, _ = listener.accept()
listener.close()
two.close()
time.sleep(0.5)
sys.exit(7)
"""


@pytest.mark.slow
def test_a_child_that_dies_while_it_is_met_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child_module, "DYING_SECONDS", 0.05)
    monkeypatch.setattr(child_module, "LOST_SECONDS", 120.0)
    path = tmp_path / "socket"
    n_met = 0

    async def scene() -> None:
        three = asyncio.Event()

        async def ready() -> None:
            nonlocal n_met
            n_met += 1
            if n_met == 1:
                assert child.process is not None
                child.process.kill()
            elif n_met == 2:
                server = Upstream("http://child", timeout=60, socket=path)
                try:
                    await server.ask("/props", timeout=60)
                finally:
                    await server.close()
            else:
                three.set()

        child = Child(Program(path, sys.executable, "-c", DIES, str(path)), dict(os.environ), ready, lambda: None)
        running = asyncio.create_task(child.run())
        await asyncio.wait((running, asyncio.ensure_future(three.wait())), return_when=asyncio.FIRST_COMPLETED)
        await child.stop()
        await running

    asyncio.run(scene())
    assert n_met == 3
