"""The caches that are compared, with one interface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from benchmarks.common import Stopwatch
from prefixstore import PrefixStore

# more than any workload stores: no cache evicts
CAPACITY = 64 << 30


class Peer:
    """A cache of one ``Llama``.

    Attributes
    ----------
    watch
        Foreground time that completions spend on the cache: for lookups, restores and saving.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.watch = Stopwatch()

    def before(self, prompt: list[int]) -> None:
        """Called before a completion, for caches that llama-cpp-python does not call itself."""

    def after(self) -> None:
        """Called after a completion."""

    def settle(self) -> None:
        """Return when nothing is done in the background any more."""

    def close(self) -> None:
        """Write everything that is to survive the process."""


class NoCache(Peer):
    """What llama-cpp-python does by itself: reuse the prefix that the context still holds."""


class Stock(Peer):
    """A cache that comes with llama-cpp-python."""

    def __init__(self, llm: Any, cache: Any) -> None:
        super().__init__(llm)
        self.cache = cache
        self.watch.watch(llm, "save_state", "load_state")
        llm.set_cache(_Watched(cache, self.watch))


class _Watched:
    def __init__(self, cache: Any, watch: Stopwatch) -> None:
        self._cache = cache
        self._watch = watch

    def __getitem__(self, key: Any) -> Any:
        with self._watch.running():
            return self._cache[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._watch.running():
            self._cache[key] = value


class StateFiles(Peer):
    """What a careful user writes by hand with ``llama_state_save_file`` and ``llama_state_load_file``.

    One file for each sequence that was computed, written under a temporary name and renamed, without a flush of the
    disk. Files whose tokens a new one begins with are deleted. The tokens are at the head of each file; they are read
    once and kept in memory. Before a completion the prompt is compared with all of them, and the file with the longest
    common prefix is loaded if that is longer than what the context holds; llama-cpp-python continues from there.
    """

    # magic and version, before the number of tokens
    HEAD = 8

    def __init__(self, llm: Any, directory: Path) -> None:
        super().__init__(llm)
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._files = {path: self._tokens(path) for path in directory.glob("*.state")}

    def _tokens(self, path: Path) -> np.ndarray:
        count = np.fromfile(path, np.uint32, 1, offset=self.HEAD)[0]
        return np.fromfile(path, np.int32, count, offset=self.HEAD + 4)

    def before(self, prompt: list[int]) -> None:
        with self.watch.running():
            wanted, llm = np.asarray(prompt, np.int32), self.llm
            shared = {path: common(tokens, wanted) for path, tokens in self._files.items()}
            best = max(shared, key=shared.__getitem__, default=None)
            if best is not None and shared[best] > common(llm.input_ids[: llm.n_tokens], wanted):
                self._load(best)

    def _load(self, path: Path) -> None:
        llm, count = self.llm, ctypes.c_size_t()
        tokens = (ctypes.c_int32 * llm.n_ctx())()
        if not llama_cpp.llama_state_load_file(llm.ctx, bytes(path), tokens, len(tokens), ctypes.byref(count)):
            raise OSError(f"llama.cpp cannot load {path}")
        llm.input_ids[: count.value] = tokens[: count.value]
        llm.n_tokens = count.value
        llm._requires_eval = True

    def after(self) -> None:
        with self.watch.running():
            tokens = self.llm.input_ids[: self.llm.n_tokens].astype(np.int32)
            if any(common(known, tokens) == len(tokens) for known in self._files.values()):
                return
            path = self._directory / f"{blake2b(tokens.tobytes(), digest_size=8).hexdigest()}.state"
            temporary = path.with_suffix(".tmp")
            array = (ctypes.c_int32 * len(tokens)).from_buffer(tokens)
            if not llama_cpp.llama_state_save_file(self.llm.ctx, bytes(temporary), array, len(tokens)):
                raise OSError(f"llama.cpp cannot write {temporary}")
            temporary.rename(path)
            for old in [old for old, known in self._files.items() if common(known, tokens) == len(known)]:
                del self._files[old]
                old.unlink()
            self._files[path] = tokens


class Ours(Peer):
    """A prefixstore. Its completions pay for lookups, restores, and copies of pages."""

    def __init__(self, llm: Any, location: str, codec: str) -> None:
        super().__init__(llm)
        self.store = PrefixStore(location, llm, codec=codec, max_bytes=CAPACITY)
        self.watch.watch(self.store._current, "lookup")
        self.watch.watch(self.store._current.strategy, "capture")
        llm.set_cache(self.store)

    def settle(self) -> None:
        self.store.engine.drain()

    def close(self) -> None:
        self.store.close()


def common(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


NOTHING, RAM, DISK, FILES = "no cache", "LlamaRAMCache", "LlamaDiskCache", "state files"
LMDB_RAW, LMDB_AUTO, SQLITE = "prefixstore, LMDB, raw", "prefixstore, LMDB, auto", "prefixstore, SQLite, raw"
PEERS: dict[str, Callable[[Any, Path], Peer]] = {
    NOTHING: lambda llm, _: NoCache(llm),
    RAM: lambda llm, _: Stock(llm, LlamaRAMCache(capacity_bytes=CAPACITY)),
    DISK: lambda llm, at: Stock(llm, LlamaDiskCache(str(at / "disk"), capacity_bytes=CAPACITY)),
    FILES: lambda llm, at: StateFiles(llm, at / "states"),
    LMDB_RAW: lambda llm, at: Ours(llm, str(at / "kv"), "raw"),
    LMDB_AUTO: lambda llm, at: Ours(llm, str(at / "kv"), "auto"),
    SQLITE: lambda llm, at: Ours(llm, f"sqlite:///{at}/kv.db", "raw"),
}
