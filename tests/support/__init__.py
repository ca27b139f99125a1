"""What tests share."""

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefixstore.engine.pages import Pages
from prefixstore.testing.together import PATIENCE, in_child

__all__ = ["PATIENCE", "ROOT", "allocated", "in_fork", "in_thread", "keys_of", "outcome", "python", "seeds"]

ROOT = Path(__file__).parents[2]


def in_thread(work: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that runs this, and does not keep the process alive."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def outcome(work: Callable[[], object], what: str = "it") -> object:
    """What `work` returns in another thread, or the error that it raises there; it has to end."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - it is returned
            found.append(error)

    in_thread(run).join(PATIENCE)
    assert found, f"{what} waits for ever"
    return found[0]


def in_fork(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; what it raises fails the test."""
    assert in_child(lambda: (work(), True)[1])


@contextmanager
def allocated() -> Iterator[Callable[[], float]]:
    """What Python and numpy have allocated since, in megabytes."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A process of its own that runs this code."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        **options,
    )


def seeds(n: int, of: int) -> list[Any]:
    """Values for a random test: the first `n` are tried by every run, the others by that of the attacks."""
    import pytest  # processes that tests start need none

    return [seed if seed < n else pytest.param(seed, marks=pytest.mark.attack) for seed in range(of)]


def keys_of(backend: Pages) -> set[bytes]:
    """The keys of all stored pages."""
    with backend.view() as view:
        return {key for key, _, _ in view.scan()}
