"""How far a restore, and a page on its way to disk, travel through the files: ``python -m benchmarks.trace [--json]``.

Two traces on a tiny model: ``restore`` of four stored pages into an empty context, and one page from ``eval`` until it
is committed. Every call of a Python function of the package is seen, in all threads. A *crossing* is a call, or a
return, from one file (or place) to another; a *place* is a folder of the package, or a module at its top.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import prefixstore
from prefixstore import PrefixStore
from prefixstore.testing.models import TINY, write_model

PACKAGE = Path(prefixstore.__file__).parent
PAGES = 4
PAGE_TOKENS = 64


class Trace:
    """The files of the package that calls pass through, thread by thread."""

    def __init__(self) -> None:
        self._files: dict[str, str | None] = {}
        # by thread: the files of the frames that are open, and all that were entered, in order
        self._stacks: dict[int, list[str]] = {}
        self._routes: dict[int, list[str]] = {}

    def _file(self, path: str) -> str | None:
        if path not in self._files:
            inside = Path(path).is_relative_to(PACKAGE) if path.endswith(".py") else False
            self._files[path] = str(Path(path).relative_to(PACKAGE)) if inside else None
        return self._files[path]

    def __call__(self, frame: Any, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        file = self._file(frame.f_code.co_filename)
        if file is None:
            return
        thread = threading.get_ident()
        stack, route = self._stacks.setdefault(thread, []), self._routes.setdefault(thread, [])
        if event == "call":
            stack.append(file)
        elif stack:
            stack.pop()
        if stack and (not route or route[-1] != stack[-1]):
            route.append(stack[-1])

    def run(self, work: Callable[[], object]) -> dict[str, int]:
        """Trace all threads while this runs, also those that were started after `watch_threads`."""
        _running.append(self)
        sys.setprofile(self)
        try:
            work()
        finally:
            sys.setprofile(None)
            _running.remove(self)
        files = {file for route in self._routes.values() for file in route}
        return {
            "files": len(files),
            "file_crossings": sum(len(route) - 1 for route in self._routes.values() if route),
            "places": len({place(file) for file in files}),
            "place_crossings": sum(crossings([place(file) for file in route]) for route in self._routes.values()),
        }


# the traces that threads report to
_running: list[Trace] = []


def watch_threads() -> None:
    """Have each thread that is started from now on report what it calls while a trace runs."""

    def report(frame: Any, event: str, argument: object) -> None:
        for trace in _running:
            trace(frame, event, argument)

    threading.setprofile(report)


def place(file: str) -> str:
    return file.split("/", 1)[0].removesuffix(".py")


def crossings(route: list[str]) -> int:
    return sum(a != b for a, b in itertools.pairwise(route))


def measure() -> dict[str, dict[str, int]]:
    watch_threads()
    with tempfile.TemporaryDirectory() as directory:
        model = str(write_model(Path(directory) / "tiny.gguf", TINY["llama"]))
        tokens = np.random.default_rng(0).integers(300, 3000, PAGES * PAGE_TOKENS + 1).tolist()
        options: dict[str, Any] = {"page_tokens": PAGE_TOKENS, "codec": "raw"}
        results = {}

        llm = llama_cpp.Llama(model, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
        with PrefixStore(Path(directory) / "kv", llm, **options) as store:
            llm.eval(tokens)
            store.capture()
            store.flush()
            llm.reset()
            llm.eval(tokens[:1])
            llm.reset()
            # one before: threads and connections are there
            assert store.restore(tokens) == len(tokens) - 1
            llm.reset()
            results["restore of four pages"] = Trace().run(lambda: store.restore(tokens))
            assert store.stats().tokens_restored == 2 * (len(tokens) - 1)

        llm = llama_cpp.Llama(model, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
        with PrefixStore(Path(directory) / "kv2", llm, **options) as store:
            llm.eval(tokens[: PAGE_TOKENS - 1])

            def capture() -> None:
                llm.eval(tokens[PAGE_TOKENS - 1 : PAGE_TOKENS])
                store.flush()

            # the thread of the write queue starts in here, and is traced too
            results["one page from eval to commit"] = Trace().run(capture)
            assert store.stats().entries == 1
    return results


def main() -> None:
    results = measure()
    if "--json" in sys.argv[1:]:
        print(json.dumps(results))
        return
    columns = ("files", "file_crossings", "places", "place_crossings")
    print(f"{'':32}" + "".join(f"{name.replace('_', ' '):>18}" for name in columns))
    for name, counts in results.items():
        print(f"{name:32}" + "".join(f"{counts[column]:>18}" for column in columns))


if __name__ == "__main__":
    main()
