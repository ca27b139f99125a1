"""A file system that becomes read only under an open store, as Linux makes it after an error of the disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support import PATIENCE, ROOT


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_a_disk_that_becomes_read_only_is_read_and_drops_pages(scheme, tmp_path):
    """`remount,ro` itself is refused while a store is open, since its files are open for writing."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None or shutil.which("unshare") is None:
        pytest.skip("only root may mount a file system, and it has to be ext4")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "tests.attacks.remounts", scheme, tmp_path],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
    )
    if done.returncode and "mounted" not in done.stdout:
        pytest.skip("file systems cannot be mounted here")
    assert done.returncode == 0, done.stderr
    # SQLite can open it, and reads; LMDB cannot open its file for writing
    assert scheme == "sqlite" or "cannot be opened" in done.stdout
    assert done.stdout.endswith("done\n")
