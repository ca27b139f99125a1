"""A command that writes much keeps the memory that it frees; where the C library cannot, it works all the same."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from prefixstore.cli import transfer
from tests.support import ROOT

FREED = """
import ctypes, os
from prefixstore.cli.transfer import keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
before = resident()
blocks = [libc.malloc(8 << 20) for _ in range(8)]
for block in blocks:
    ctypes.memset(block, 1, 8 << 20)
for block in blocks:
    libc.free(block)
print(resident() - before >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="a property of glibc")
def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", FREED], cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(done.stdout) >= 60


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_c_library_is_left_alone(monkeypatch, error):
    def without(name):
        raise error

    monkeypatch.setattr(transfer.ctypes, "CDLL", without)
    transfer.keep_freed_memory()
