"""Helpers of the tests that would fail without being noticed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support import PATIENCE, ROOT

STARTS = """
import subprocess, sys
from tests.support.signals import ends_with_us
sleeps = [sys.executable, "-c", "import time; time.sleep(300)"]
subprocess.Popen(sleeps, stdin=subprocess.DEVNULL, preexec_fn=ends_with_us())
print("started", flush=True)
input()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_a_server_does_not_outlive_tests_that_are_killed():
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == "started\n"
        tests.send_signal(signal.SIGKILL)
        # its end is that of the last process that has the pipe
        assert tests.communicate(timeout=PATIENCE)[0] == ""
