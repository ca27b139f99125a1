"""A line between two network namespaces: a pair of virtual interfaces that the kernel makes slow (``tc``).

``python -m benchmarks.links`` is the end in the other namespace: what connects there is passed on to a server. Where
the kernel lacks something for it, or the user a right, a line is the proxy of `benchmarks.throttle`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.throttle import LONGEST, ROOT, Line, relay, throttling

__all__ = ["Link", "linked"]

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/var/run/netns")
# how long a packet may wait for the line, and what may leave at once
QUEUE, BURST = "100ms", 0.002
_numbers = iter(range(1 << 14))


@dataclass(frozen=True)
class Link:
    """A line to a server."""

    # where to connect to, ``host:port``
    address: str
    # what it is made of
    kind: str
    process: subprocess.Popen[str]

    def stop(self) -> None:
        """Let nothing through, as a line that is cut: nobody is told."""
        self.process.send_signal(signal.SIGSTOP)
        # it stops a moment later
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Let what waits through, and what comes."""
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def linked(target: str, line: Line) -> Iterator[Link]:
    """A line to a server, until the block is left."""
    with ExitStack() as stack:
        try:
            namespace, host = stack.enter_context(_interfaces(line))
        except (OSError, subprocess.CalledProcessError):
            process, port = stack.enter_context(throttling(target, line))
            link = Link(f"127.0.0.1:{port}", "proxy", process)
        else:
            command = [sys.executable, "-m", "benchmarks.links", target, namespace, host]
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            stack.callback(process.wait, 60)
            stack.callback(process.stdin.close)
            link = Link(f"{host}:{process.stdout.readline().strip()}", _kind(line), process)
        # whatever has stopped it
        stack.callback(link.go_on)
        yield link


def _kind(line: Line) -> str:
    return "network namespaces, tc (tbf, netem)" if line.round_trip else "network namespaces, tc (tbf)"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def _interfaces(line: Line) -> Iterator[tuple[str, str]]:
    """A namespace, and the address of the other end of a line to it."""
    number = (os.getpid() * 7 + next(_numbers)) % (1 << 14)
    name = f"psb{number}"
    here, there = (f"10.213.{number >> 6}.{((number & 63) << 2) + end}" for end in (1, 2))
    with ExitStack() as stack:
        _run("ip", "netns", "add", name)
        # the interfaces go with it
        stack.callback(_run, "ip", "netns", "del", name)
        _run("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        stack.callback(lambda: subprocess.run(["ip", "link", "del", f"{name}a"], check=False, capture_output=True))
        for inside, end, address in (((), f"{name}a", here), (("-n", name), f"{name}b", there)):
            _run("ip", *inside, "address", "add", f"{address}/30", "dev", end)
            _run("ip", *inside, "link", "set", end, "up")
            _slow_down(line, end, *inside)
        yield name, there


def _slow_down(line: Line, interface: str, *inside: str) -> None:
    burst = str(max(int(line.bits / 8 * BURST), 64 << 10))
    rate = ["tbf", "rate", f"{line.bits:.0f}bit", "burst", burst, "latency", QUEUE]
    _run("tc", *inside, "qdisc", "add", "dev", interface, "root", "handle", "1:", *rate)
    if line.round_trip:
        delay = ["netem", "delay", f"{line.round_trip * 500:.3f}ms", "limit", "100000"]
        _run("tc", *inside, "qdisc", "add", "dev", interface, "parent", "1:1", "handle", "10:", *delay)


# -- the other end ----------------------------------------------------------------------------------------------------


def _listener(namespace: str, host: str) -> socket.socket:
    """A socket of another namespace. It stays there, while the process is in its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as own, (NAMESPACES / namespace).open() as other:
        if libc.setns(other.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        try:
            return socket.create_server((host, 0))
        finally:
            libc.setns(own.fileno(), CLONE_NEWNET)


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def main() -> None:
    parser = argparse.ArgumentParser(prog="links", description=__doc__)
    parser.add_argument("target", help="host:port, or the path of a socket")
    parser.add_argument("namespace")
    parser.add_argument("host", help="the address there")
    given = parser.parse_args()
    listener = _listener(given.namespace, given.host)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=relay, args=(listener, given.target, _forward, _forward), daemon=True).start()
    timer = threading.Timer(LONGEST, os._exit, (1,))
    timer.daemon = True
    timer.start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
