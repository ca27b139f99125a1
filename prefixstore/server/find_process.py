"""The process of a server on this machine: found by its port, its arguments. Linux; nothing elsewhere."""

from __future__ import annotations

import glob
import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"
# the process, its user and its group
PEER = struct.Struct("3i")


@dataclass(frozen=True)
class RunningProcess:
    """A process, as it was started, this many ticks after the system was. Its arguments begin with its name."""

    pid: int
    argv: list[str]
    environ: dict[str, str]
    directory: Path
    ticks: int

    @property
    def started_at(self) -> float:
        """When it was started at the latest, in seconds since the epoch."""
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted + (self.ticks + 1) / os.sysconf("SC_CLK_TCK")

    def path(self, path: str) -> Path | None:
        """A path as it sees it, which may have other mounts and another working directory; None if not known."""
        try:
            seen = PROC / str(self.pid) / "root" / (self.directory / path).relative_to("/")
            seen.stat()
        except (OSError, ValueError):  # ValueError: a working directory "(unreachable)/…", outside of its mounts
            return None
        return seen


def listening_process(port: int) -> int | None:
    """The process that listens on a port of this machine; None if it is not known, or if there are several."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in _read(f"net/{name}").splitlines()[1:]]
    is_there = (fields for fields in lines if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port)
    return _process_with({f"socket:[{fields[9]}]" for fields in is_there})


def process_at(path: Path) -> int | None:
    """The process that listens on a Unix socket of this machine; None if the system does not say. Raises `OSError`."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
        pid: int = PEER.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[0]
    return pid


def _read(name: str) -> str:
    """What the system says; nothing if it does not."""
    try:
        return os.fsdecode((PROC / name).read_bytes())
    except OSError:
        return ""


def _process_with(sockets: set[str]) -> int | None:
    found: set[int] = set()
    for entry in glob.iglob(f"{PROC}/[0-9]*/fd/*") if sockets else ():  # noqa: PTH207 - a process may end meanwhile
        with suppress(OSError):
            if os.readlink(entry) in sockets:  # noqa: PTH115 - as above
                found.add(int(entry.split("/")[2]))
    return found.pop() if len(found) == 1 else None


def running_process(pid: int | None) -> RunningProcess | None:
    """A process as it was started; None if it cannot be read."""
    if pid is None:
        return None
    argv, environ = (_read(f"{pid}/{name}").split("\0")[:-1] for name in ("cmdline", "environ"))
    ticks = start_ticks(pid)
    try:
        directory = (PROC / str(pid) / "cwd").readlink()
    except OSError:
        return None
    if not argv or ticks is None:
        return None
    return RunningProcess(pid, argv, dict(text.split("=", 1) for text in environ if "=" in text), directory, ticks)


def start_ticks(pid: int) -> int | None:
    """When a process was started, in ticks since the system was; None if there is none. The same at each call."""
    # state, parent, group, session, ..., after the name, which may have blanks, brackets, and bytes that are no text
    fields = _read(f"{pid}/stat").rpartition(")")[2].split()
    return None if not fields or fields[0] in ("Z", "X") else int(fields[19])
