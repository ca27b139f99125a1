"""Ports for servers that are told where to listen.

A port that was bound to 0, and closed, is free for everybody: until the server listens on it, the system may give it to
another process, or to a connection. It gives nobody one from below its own range.
"""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

LOWEST = 10_240
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _highest() -> int:
    """The first port that the system gives away."""
    try:
        return int(RANGE.read_text().split()[0])
    except OSError:
        return 32_768


# each process begins elsewhere, and takes none twice
_candidates = itertools.count(os.getpid() * 127)


def free_port(other: int = 0) -> int:
    """A port of this machine that nobody listens on, and that the system gives to nobody.

    A server that listens on a second one, so many above the first, has that as well.
    """
    n = _highest() - LOWEST - other
    for i in itertools.islice(_candidates, n):
        port = LOWEST + i % n
        if _is_free(port) and _is_free(port + other):
            return port
    raise AssertionError("no port is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # where a server has ended, connections may linger
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
