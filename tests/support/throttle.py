"""A port that leads to a server over a slow link: so many bytes a second, and so long on the way."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

from tests.support.proxy import Proxy

__all__ = ["Throttled"]

PIECE = 16 << 10
# what is on the way: a sender that is faster than the link waits
WINDOW = 16


class Throttled(Proxy):
    """A slow link to a server. Its answers are limited, not what is sent there.

    Parameters
    ----------
    path
        The socket of the server, or host and port.
    bytes_per_second
        Of answers; None for no limit. It may be changed at any time.
    seconds
        What a piece takes on the way, in each direction.

    Attributes
    ----------
    cut_after
        End a connection after so many bytes of answers; None for never.
    stall_at
        Let nothing through once `n_bytes` have passed; None for never.
    n_bytes
        How many bytes of answers have passed.
    """

    def __init__(
        self, path: str | tuple[str, int], *, bytes_per_second: float | None = None, seconds: float = 0.0
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self.seconds = seconds
        self.cut_after: int | None = None
        self.stall_at: int | None = None
        self.n_bytes = 0
        super().__init__(path)

    def forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        pieces: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        free = threading.Semaphore(WINDOW)
        threading.Thread(target=self.deliver, args=(pieces, free, source, target, answers), daemon=True).start()
        with suppress(OSError):
            while piece := source.recv(PIECE):
                free.acquire()
                pieces.put((time.monotonic() + self.seconds, piece))
        pieces.put((time.monotonic() + self.seconds, b""))

    def deliver(
        self,
        pieces: SimpleQueue[tuple[float, bytes]],
        free: threading.Semaphore,
        source: socket.socket,
        target: socket.socket,
        answers: bool,
    ) -> None:
        """Pass on what has been long enough on the way."""
        at, n_bytes = 0.0, 0
        with suppress(OSError):
            while True:
                due, piece = pieces.get()
                if not piece:
                    target.shutdown(socket.SHUT_WR)
                    return
                at = max(due, at)
                while answers and self.stall_at is not None and self.n_bytes + len(piece) > self.stall_at:
                    time.sleep(0.01)
                if answers and self.bytes_per_second:
                    at += len(piece) / self.bytes_per_second
                time.sleep(max(at - time.monotonic(), 0.0))
                n_bytes += len(piece)
                if answers and self.cut_after is not None and n_bytes > self.cut_after:
                    for end in (source, target):
                        end.shutdown(socket.SHUT_RDWR)
                    return
                target.sendall(piece)
                self.n_bytes += len(piece) if answers else 0
                free.release()
