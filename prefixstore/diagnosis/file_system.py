"""What kind of file system a path is on, as far as the system tells."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["NETWORK", "VOLATILE", "existing", "mount_of"]

MOUNTS = Path("/proc/self/mountinfo")
# where several machines may have the same files, or memory maps are not shared
NETWORK = frozenset(
    """
    nfs nfs4 cifs smb smb2 smb3 smbfs afs ceph glusterfs fuse.glusterfs lustre gpfs beegfs ocfs2 gfs2 9p virtiofs drvfs
    fuse.sshfs fuse.s3fs fuse.rclone fuse.gcsfuse fuse.blobfuse2 fuse.mount-s3 fuse.juicefs davfs fuse.davfs2 acfs
    """.split()  # noqa: SIM905 - to be read at a glance
)
VOLATILE = {"tmpfs": "memory, which is lost when the machine restarts", "ramfs": "memory, which is lost at a restart"}
VOLATILE |= {"overlay": "the layer of a container, which is deleted with the container"}
ESCAPED = re.compile(r"\\([0-7]{3})")


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists, as far as this user may know."""
    path = path.absolute()
    return next((one for one in (path, *path.parents) if os.path.exists(one)), path)  # noqa: PTH110 - never raises


def mount_of(path: Path) -> tuple[str, str] | None:
    """The type of the file system that a path is on, or would be created on, and where that is mounted.

    None where the system does not say.
    """
    try:
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(existing(path))
    found: tuple[str, str] | None = None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        columns, kinds = fields.split(), rest.split()
        if len(columns) < 6 or not kinds:
            continue
        point = ESCAPED.sub(lambda digits: chr(int(digits[1], 8)), columns[4])
        is_inside = real == point or real.startswith(point.rstrip("/") + "/")
        # of several mounts on one directory, the last one is seen
        if is_inside and (found is None or len(point) >= len(found[1])):
            found = kinds[0], point
    return found
