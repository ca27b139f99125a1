"""What all benchmarks share: the model, its prompt, and how times are measured."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from prefixstore.testing.models import DEMO, write_model

N_CTX = 8192
ROOT = Path(__file__).parent.parent
# traces and the trained model: beside the repository, or above, where this is a worktree
SHARED = next((at for at in (up / "shared" for up in ROOT.parents) if at.is_dir()), ROOT.parent / "shared")
CACHE = ROOT / "benchmarks" / ".cache"
# the state of a 1B model, like the demo's, with an eighth of its computation
LIGHT: dict[str, Any] = {"n_embd": 128, "n_ff": 128, "n_head": 8, "n_vocab": 8192}
# the state of an 8B model
LIGHT_8B: dict[str, Any] = {**LIGHT, "n_layer": 32, "n_head_kv": 8, "head_dim": 128}


def model_path(**overrides: Any) -> Path:
    """The demo's model: Llama shape, 16 layers, 32 KiB of state a token; written once."""
    name = "-".join(["demo", *(f"{key}{value}" for key, value in sorted(overrides.items()))])
    path = CACHE / f"{name}.gguf"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        write_model(path, replace(DEMO, **overrides))
    return path


def load(path: Path, **options: Any) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(path), verbose=False, **{"n_ctx": N_CTX, **options})


def prompt_tokens(llm: llama_cpp.Llama, n: int, seed: int = 0) -> list[int]:
    """`n` tokens of the model's vocabulary, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return rng.integers(300, 8000, n).tolist()


def forget(llm: llama_cpp.Llama) -> None:
    """Remove everything that the context holds."""
    llm.reset()
    llm._ctx.kv_cache_clear()


def pointer_of(llm: llama_cpp.Llama) -> Any:
    """The ``llama_context``. Reading ``llm.ctx`` instead would make it unknown to an attached store."""
    return vars(llm._ctx)["ctx"]


def state_of(llm: llama_cpp.Llama) -> ctypes.Array[ctypes.c_uint8]:
    """The whole state of sequence 0, as one buffer."""
    size = llama_cpp.llama_state_seq_get_size(pointer_of(llm), 0)
    buffer = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(pointer_of(llm), buffer, size, 0) == size
    return buffer


def seconds(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def alternate(
    works: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object]
) -> dict[str, list[float]]:
    """Times of each function, measured in turns, so that a noisy moment affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            before()
            times[name].append(seconds(work))
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Percentiles in seconds."""
    ordered = sorted(times)
    return {
        "p50": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))],
        "min": ordered[0],
    }


def ratio(reference: list[float], ours: list[float]) -> float:
    """The median of the ratios of times that were measured next to each other."""
    return statistics.median(r / o for r, o in zip(reference, ours, strict=True))


class Stopwatch:
    """Seconds spent in the methods it watches; nested calls are counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._running:
            yield
            return
        self._running = True
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started
            self._running = False

    def watch(self, owner: Any, *names: str) -> None:
        """Time the calls of these methods of one object from now on."""
        for name in names:
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.running():
                return method(*args, **kwargs)

        return call


def in_child(module: str, *arguments: str) -> str:
    """Run a benchmark module as a process of its own; what it prints."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def peak_rss() -> int:
    """The peak memory of this process, mapped files included, in bytes.

    Not ``ru_maxrss`` on Linux: there a child starts with its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def written_bytes() -> int:
    """Bytes that this process has written to files so far, as the system counts them (Linux; elsewhere 0)."""
    counts = Path("/proc/self/io")
    if not counts.exists():
        return 0
    return int(dict(line.split(": ") for line in counts.read_text().splitlines())["wchar"])


def machine() -> dict[str, Any]:
    """The machine on which the figures are measured."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "llama_cpp_python": llama_cpp.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def tree_bytes(directory: Path) -> int:
    """Disk space of all files below a directory, in bytes."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def write_json(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
