"""Attacks: what prefixstore has to survive. `make attack` runs a bounded form, `make torture` a long one."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT


def in_child(module: str, *arguments: object, seconds: float) -> str:
    """What a module of this directory prints; if it crashed, its last line names the case."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.attacks.{module}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{done.returncode} at {done.stdout.splitlines()[-1:]}: {done.stderr[-4000:]}"
    return done.stderr + done.stdout
