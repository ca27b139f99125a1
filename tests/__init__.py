"""The tests."""

import os

# Threads of llama.cpp that wait for each other would spin: beside other processes, for longer than they compute.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
