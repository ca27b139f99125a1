"""A port on this machine that leads to a server's socket, for tests of what goes wrong on the way."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Line:
    """A port that leads to a Unix socket, or to another port, and may fail in the middle of an answer.

    Parameters
    ----------
    path
        The socket, or host and port.

    Attributes
    ----------
    port
        Of this machine.
    left
        Bytes of answers that still pass; None for all.
    stalls
        Whether what is left over is swallowed, or the line cut.
    passed
        Bytes of answers that have come.
    """

    def __init__(self, path: str | tuple[str, int]) -> None:
        self.path = path
        self.left: int | None = None
        self.stalls = False
        self.passed = 0
        self.ends: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        """Accept connections until `close`."""
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.socket(socket.AF_UNIX if isinstance(self.path, str) else socket.AF_INET)
                try:
                    far.connect(self.path)
                except OSError:
                    # the server is down
                    near.close()
                    far.close()
                    continue
                self.ends += [near, far]
                for source, target, answers in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self.forward, args=(source, target, answers), daemon=True).start()

    def forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        """Pass on as many bytes of answers as are left, then cut the line or swallow the rest."""
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers:
                    self.passed += len(data)
                    if self.left is not None:
                        data, rest = data[: self.left], data[self.left :]
                        self.left -= len(data)
                        if rest and not self.stalls:
                            target.sendall(data)
                            break
                target.sendall(data)
        # the client sees the end, and the server too
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End the connections that there are."""
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections, and take no more."""
        for end in (self.listener, *self.ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
