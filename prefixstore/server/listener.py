"""The listening sockets of a server, and the signals that end it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from prefixstore.errors import InvalidParameterError


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets with an address, one for each that the host has; they do not listen yet.

    Made before a model is loaded: a port in use is then reported immediately.

    Raises
    ------
    InvalidParameterError
        If the host has no address here, or the port is in use.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidParameterError(f"--host {host!r} is not an address of this machine: {error.strerror}") from None
    with ExitStack() as opened:
        sockets = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listener = opened.enter_context(socket.socket(family, kind, protocol))
            except OSError:
                continue  # this machine does not speak that family
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                with suppress(OSError):
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind(address)
            except OSError as error:
                raise InvalidParameterError(
                    f"cannot listen on {address[0]}:{port}: {os.strerror(error.errno or 0)}; choose another --host or "
                    "--port (0: any port that is free)"
                ) from None
            sockets.append(listener)
        yield sockets


def address_of(listener: socket.socket) -> str:
    """The URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def stopped_by_signals(stop: Callable[[int], object]) -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGHUP call this; they are a clean stop, and not raised again afterwards.

    Once one has come, and the block has ended, nothing is left that takes long: signals are ignored until the process
    ends.
    """
    has_come = False

    def come(number: int, _: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        stop(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)
    # of a terminal that is closed; nohup has it ignored
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_DFL:
        numbers.append(hangup)
    before = {number: signal.signal(number, come) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if has_come else handler)
