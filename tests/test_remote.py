"""The benchmark of locations on other machines: its lines, and its tables."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from benchmarks import links, remote
from benchmarks.links import linked
from benchmarks.throttle import Line, throttled

ROOT = Path(__file__).parent.parent


@pytest.fixture(params=["port", "socket"])
def echo(request, tmp_path):
    """Sends back what it gets, until the end of it; as a target of `throttled`."""
    path = str(tmp_path / "s")
    listener = (
        socket.create_server(("127.0.0.1", 0))
        if request.param == "port"
        else socket.create_server(path, family=socket.AF_UNIX)
    )

    def answer(end):
        with end, suppress(OSError):
            while data := end.recv(1 << 16):
                end.sendall(data)

    def accept():
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with closing(listener):
        yield f"127.0.0.1:{listener.getsockname()[1]}" if request.param == "port" else path


def sent(port, data, host="127.0.0.1"):
    """What comes back, and the seconds that it took."""
    with socket.create_connection((host, port), timeout=60) as end:
        started = time.monotonic()

        def send():
            end.sendall(data)
            end.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        found = b""
        while more := end.recv(1 << 16):
            found += more
        thread.join()
        return found, time.monotonic() - started


@pytest.mark.slow
def test_a_line_passes_all_bytes_on_and_is_no_faster_than_it_says(echo):
    data = bytes(range(256)) * 2000
    with throttled(echo, Line(16e6, 0.1)) as port:
        found, seconds = sent(port, data)
        assert found == data
        # half a megabyte at two a second; there and back at the same time
        assert seconds >= 0.1 + len(data) / 2e6
        # connections share it
        results = []
        threads = [threading.Thread(target=lambda: results.append(sent(port, data)[0])) for _ in range(2)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [data, data]
        assert time.monotonic() - started >= 0.1 + 2 * len(data) / 2e6


def test_a_line_to_a_server_that_is_gone_refuses_and_ends(tmp_path):
    with throttled(str(tmp_path / "nobody"), Line(1e9)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as end, suppress(ConnectionResetError):
            assert end.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            pass


@pytest.mark.slow
def test_a_link_passes_all_bytes_on_and_can_be_stopped(echo):
    data = bytes(range(256)) * 2000
    with linked(echo, Line(16e6)) as link:
        assert link.kind in ("proxy", "network namespaces, tc (tbf)")
        host, _, port = link.address.rpartition(":")
        # what may leave at once is more than that of a proxy
        found, seconds = sent(int(port), data, host)
        assert found == data
        assert seconds >= (len(data) - (64 << 10)) / 2e6
        with socket.create_connection((host, int(port)), timeout=60) as end:
            end.sendall(b"a")
            assert end.recv(1) == b"a"
            link.stop()
            end.sendall(b"b")
            end.settimeout(0.2)
            with pytest.raises(TimeoutError):
                end.recv(1)
            end.settimeout(60)
            link.go_on()
            assert end.recv(1) == b"b"
            link.stop()
    assert link.process.poll() is not None


def test_without_rights_or_programs_a_link_is_a_proxy(echo, monkeypatch):
    def refuse(*command):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(links, "_run", refuse)
    with linked(echo, Line(1e9)) as link:
        assert link.kind == "proxy"
        assert sent(int(link.address.rpartition(":")[2]), b"abc")[0] == b"abc"


def test_a_restore_is_worth_it_from_where_its_cost_is_below_computing():
    # 0.1 s and 1 ms a token against 2 ms
    assert remote.break_even(0.6, 500, 4.1, 4000, 0.002) == pytest.approx(100)
    assert remote.break_even(0.6, 500, 4.1, 4000, 0.0009) is None
    # noise: the short one was as fast as its share
    assert remote.break_even(0.4, 500, 4.0, 4000, 0.002) == 0


def measured(n_tokens):
    took = {
        "LMDB": [remote.Took(0.02, 0.03, n_tokens)],
        "PostgreSQL, socket": [remote.Took(0.1, 0.11, n_tokens)],
        "Valkey, socket": [remote.Took(0.04, 0.05, n_tokens)],
    }
    short = {"PostgreSQL, socket": [remote.Took(0.05, 0.06, 512)]}
    far = {"PostgreSQL, socket": [remote.Took(10.0, 11.0, n_tokens // 2)]}
    tiers = {state: [remote.Took(0.1, 0.2, n_tokens)] for state in (remote.EMPTY, remote.WARM, remote.LOST)}
    return {
        "tokens": n_tokens,
        "bytes": 134_000_000,
        "computing": {"p50": 3.0},
        "lines": {
            remote.HERE: {"rounds": 7, "places": remote.figures(took, 3.0, n_tokens, 134_000_000, short)},
            "100 Mbit/s": {
                "rounds": 1,
                "line": "network namespaces, tc (tbf)",
                "places": remote.figures(far, 3.0, n_tokens, 134_000_000),
                "tiers": {"PostgreSQL, socket": remote.figures(tiers, 3.0, n_tokens, 134_000_000)},
            },
        },
    }


def test_the_section_has_every_model_place_and_line():
    lines = remote.section({"models": {"1B": measured(4096), "8B": measured(2048)}})
    here = (
        "| no line | PostgreSQL, socket | 100.0 ms | 110.0 ms | 0.04 |  | 4,096 | 1.34 (reached: at least 1) | 40,960 |"
    )
    assert f"{here} 60 tokens |" in lines
    late = "| 100 Mbit/s | PostgreSQL, socket | 10000.0 ms | 11000.0 ms | 3.67 | 2.83 (missed: at most 0.05) | 2,048 |"
    assert f"{late} 0.007 | 205 |  |" in lines
    states = " | ".join(["100.0 ms; 200.0 ms; 0.07; 4,096"] * 3)
    assert f"| 100 Mbit/s | LMDB, PostgreSQL, socket | {states} |" in lines
    assert "Valkey, socket 0.50 (reached: at least 0.25)" in " ".join(lines)
    assert [line for line in lines if line.startswith("### ")] == ["### 1B", "### 8B"]
    assert "network namespaces, tc (tbf)" in " ".join(lines)
    assert max(len(line) for line in lines if line[:1] != "|") <= 118
    # as it was stored before there were two models
    assert "### 1B" not in remote.section(measured(4096))


@pytest.mark.slow
@pytest.mark.parametrize("how", [["benchmarks/remote.py"], ["-m", "benchmarks.remote"]])
def test_it_runs_as_a_file_and_as_a_module(how):
    done = subprocess.run([sys.executable, *how, "--help"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "--lines" in done.stdout
