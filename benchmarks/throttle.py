"""``python -m benchmarks.throttle``: a port of this machine that leads to a server over a slower line.

It prints its port, and ends with its input. A process of its own: threads of the benchmark would wait for it otherwise.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parent.parent
# received at a time, and the longest that a line is reserved ahead
MOST, SHARE, AHEAD = 64 << 10, 0.002, 0.005
# chunks on their way; with their size more than any line here can hold
IN_FLIGHT = 1024
# of one run, so that a proxy never outlives a benchmark that hangs
LONGEST = 3600.0

Forward = Callable[[socket.socket, socket.socket], None]


@dataclass(frozen=True)
class Line:
    """What a line can do."""

    # per second, in each direction, for all connections together
    bits: float
    # seconds that are added to a round trip, half of it in each direction
    round_trip: float = 0.0


class Direction:
    """One direction of a line: what is sent leaves in turn, and arrives later."""

    def __init__(self, line: Line) -> None:
        self.bytes_per_second = line.bits / 8
        self.delay = line.round_trip / 2
        self.at_once = max(int(min(MOST, self.bytes_per_second * SHARE)), 1024)
        self._lock = threading.Lock()
        self._free = 0.0

    def send(self, n_bytes: int) -> tuple[float, float]:
        """When so many bytes have left, and when they arrive."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + n_bytes / self.bytes_per_second
            return self._free, self._free + self.delay

    def forward(self, source: socket.socket, target: socket.socket) -> None:
        """Pass on what one end sends, until it has no more or the other end is gone."""
        chunks: Queue[tuple[float, bytes]] = Queue(IN_FLIGHT)
        threading.Thread(target=self._deliver, args=(chunks, target), daemon=True).start()
        with suppress(OSError):
            while data := source.recv(self.at_once):
                left, arrives = self.send(len(data))
                chunks.put((arrives, data))
                # no more is taken from the sender than the line can hold
                _sleep_until(left - AHEAD)
        chunks.put((time.monotonic() + self.delay, b""))

    def _deliver(self, chunks: Queue[tuple[float, bytes]], target: socket.socket) -> None:
        gone = False
        while True:
            arrives, data = chunks.get()
            if not gone:
                _sleep_until(arrives)
                try:
                    target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
                except OSError:
                    gone = True
            if not data:
                return


def _sleep_until(moment: float) -> None:
    if (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def connected(target: str) -> socket.socket:
    """A connection to ``host:port``, or to the path of a Unix socket."""
    if target.startswith("/"):
        end = socket.socket(socket.AF_UNIX)
        end.connect(target)
        return end
    host, _, port = target.rpartition(":")
    end = socket.create_connection((host, int(port)))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def serve(target: str, line: Line) -> None:
    """Accept connections until the process ends."""
    to_server, to_client = Direction(line), Direction(line)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        relay(listener, target, to_server.forward, to_client.forward)


def relay(listener: socket.socket, target: str, there: Forward, back: Forward) -> None:
    """Accept connections until the process ends, and pass on what each end sends to the other."""
    while True:
        near, _ = listener.accept()
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            far = connected(target)
        except OSError:
            near.close()
            continue
        for forward, source, end in ((there, near, far), (back, far, near)):
            threading.Thread(target=forward, args=(source, end), daemon=True).start()


@contextmanager
def throttling(target: str, line: Line) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process of a proxy to a server, and its port, until the block is left."""
    command = [sys.executable, "-m", "benchmarks.throttle", target, str(line.bits), str(line.round_trip)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="throttle", description=__doc__)
    parser.add_argument("target", help="host:port, or the path of a socket")
    parser.add_argument("bits", type=float, help="per second")
    parser.add_argument("round_trip", type=float, help="seconds")
    given = parser.parse_args()
    serving = threading.Thread(target=serve, args=(given.target, Line(given.bits, given.round_trip)), daemon=True)
    serving.start()
    timer = threading.Timer(LONGEST, os._exit, (1,))
    timer.daemon = True
    timer.start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
