"""Codecs: ratio, speed, and the effect on a restore, on pages of a trained model and of a random one."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.common import SHARED, load, model_path, prompt_tokens, ratio, seconds, state_of, summary
from benchmarks.tables import milliseconds, paragraph, table
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.buffers import BufferPool
from prefixstore.counters import Counters
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import PendingPage
from prefixstore.format.autocodec import Encoder
from prefixstore.format.codec import CODECS, PACKINGS
from prefixstore.format.keys import as_tokens
from prefixstore.llama.paged_memory import PagedMemory

PAGE_TOKENS = 256
N_PAGES = 16
N_TOKENS = PAGE_TOKENS * N_PAGES
# each codec is measured on this much: the pages repeated, or some of them
MEASURED_BYTES = 16 << 20
ROUNDS = 7
CORES = os.cpu_count() or 1
NAMESPACE = b"n" * 32
ROOT = Path(__file__).parent.parent
TRAINED = SHARED / "models" / "docs-6m.gguf"
Q8_0 = llama_cpp.GGML_TYPE_Q8_0

OURS = ("raw", "zstd", "zstd:9", "planes", "planes:3")
RESTORED = ("raw", "zstd", "planes")


@dataclass
class Codec:
    """A way to pack, and to unpack into given memory."""

    pack: Callable[[bytes], Any]
    unpack: Callable[[Any, memoryview], object]


# -- codecs ------------------------------------------------------------------------------------------------------------


def ours(name: str) -> Codec:
    codec, _, level = name.partition(":")
    packing, buffers = PACKINGS[codec], BufferPool(1 << 40)
    levels = (int(level),) if level else ()
    return Codec(
        lambda raw: memoryview(packing.pack(raw, *levels)), lambda stored, out: packing.unpack(stored, out, buffers)
    )


def median_seconds(work: Callable[[], object], rounds: int = 3) -> float:
    return statistics.median(seconds(work) for _ in range(rounds))


def measure(codec: Codec, pages: list[bytes]) -> dict[str, float]:
    size = sum(map(len, pages))
    packed = [codec.pack(page) for page in pages]
    # touched once before: a restore has its buffers already
    memory = [np.zeros(len(pages[0]), np.uint8).data for _ in range(CORES)]

    def by_all() -> None:
        shares = [pool.submit(lambda i=i: [codec.unpack(p, memory[i]) for p in packed[i::CORES]]) for i in range(CORES)]
        for share in shares:
            share.result()

    with ThreadPoolExecutor(CORES) as pool:
        return {
            "ratio": size / sum(len(stored) for stored in packed),
            "pack": size / median_seconds(lambda: [codec.pack(page) for page in pages]),
            "unpack": size / median_seconds(lambda: [codec.unpack(stored, memory[0]) for stored in packed], 5),
            "unpack_all_cores": size / median_seconds(by_all, 5),
        }


# -- restores ----------------------------------------------------------------------------------------------------------


@dataclass
class Restores:
    """The pages of one context, stored once with each codec, and their restores into it."""

    llm: llama_cpp.Llama
    tokens: Any
    pages: list[bytes]
    root: Path

    def write(self, codec: str) -> None:
        with self.engine(codec) as engine:
            parent, buffers = NAMESPACE, BufferPool(1 << 40)
            for i, state in enumerate(self.pages):
                buffer = buffers.acquire(len(state))
                assert buffer is not None
                buffer.view[:] = state
                tokens = self.tokens[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS].tobytes()
                new = PendingPage.of(NAMESPACE, b"{}", parent, i * PAGE_TOKENS, tokens, buffer)
                assert engine.write_queue.announce(new)
                assert engine.commit([new]) == 1
                buffer.release()
                parent = new.page.key
            engine.sync()

    @contextmanager
    def engine(self, codec: str) -> Iterator[Engine]:
        backend = Pages(LMDBBackend(self.root / codec, 1 << 30))
        engine = Engine(backend, Budget(1 << 30, None), POLICIES["lru"](), Encoder(codec), Counters())
        try:
            yield engine
        finally:
            engine.close()

    def restore(self, engine: Engine) -> float:
        path = engine.match(NAMESPACE, self.tokens, PAGE_TOKENS)
        memory = PagedMemory(self.llm)
        memory.cut(0)
        started = time.perf_counter()
        with engine.fetching(path.pages, streamed=True) as states:
            taken = [memory.load(state) for state in states]
        memory.cut(N_TOKENS)
        assert taken == [True] * N_PAGES
        return time.perf_counter() - started

    def cold(self, codec: str) -> float:
        """A restore with nothing of the file in memory. The kernel keeps mapped pages, so the store is opened after."""
        descriptor = os.open(self.root / codec / "data.mdb", os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        with self.engine(codec) as engine:
            return self.restore(engine)

    def run(self) -> dict[str, Any]:
        for codec in RESTORED:
            self.write(codec)
        state = state_of(self.llm)
        warm: dict[str, list[float]] = {codec: [] for codec in RESTORED}
        cold: dict[str, list[float]] = {codec: [] for codec in RESTORED}
        with ExitStack() as stack:
            for _ in range(ROUNDS):
                for codec in RESTORED:
                    cold[codec].append(self.cold(codec))
            engines = {codec: stack.enter_context(self.engine(codec)) for codec in RESTORED}
            for turn in range(ROUNDS + 1):
                for codec, engine in engines.items():
                    taken = self.restore(engine)
                    if turn:
                        warm[codec].append(taken)
            assert bytes(state_of(self.llm)) == bytes(state)
        return {
            codec: {
                "warm": summary(warm[codec]),
                "warm_of_raw": ratio(warm["raw"], warm[codec]),
                "cold": summary(cold[codec]),
                "cold_of_raw": ratio(cold["raw"], cold[codec]),
            }
            for codec in RESTORED
        }


# -- the models --------------------------------------------------------------------------------------------------------


def text_tokens(llm: llama_cpp.Llama) -> list[int]:
    """Real text, of the kind the model was trained on."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokens = llm.tokenize(text.encode())
    return (tokens * (1 + N_TOKENS // len(tokens)))[:N_TOKENS]


def cases() -> Iterator[tuple[str, llama_cpp.Llama, list[int]]]:
    quantized = {"type_k": Q8_0, "type_v": Q8_0}
    if TRAINED.exists():
        for name, options in (("trained model, f16", {}), ("trained model, q8_0", quantized)):
            llm = load(TRAINED, n_ctx=N_TOKENS + PAGE_TOKENS, flash_attn=True, **options)
            yield name, llm, text_tokens(llm)
    llm = load(model_path(), flash_attn=True)
    yield "random weights, f16", llm, prompt_tokens(llm, N_TOKENS)


def pages_of(llm: llama_cpp.Llama) -> list[bytes]:
    pages: list[bytes] = []
    buffers = BufferPool(1 << 40)

    def accept(start: int, end: int, got: Any) -> None:
        pages.append(bytes(got.view))
        got.release()

    PagedMemory(llm).take([(p, p + PAGE_TOKENS) for p in range(0, N_TOKENS, PAGE_TOKENS)], buffers.acquire, accept)
    return pages


def picked(pages: list[bytes]) -> str:
    """What `auto` chooses for pages in a location from which nothing has been read yet."""
    number, _ = Encoder()(NAMESPACE, pages[0])
    return next(name for name in CODECS if CODECS[name] == number)


def run() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, llm, tokens in cases():
        llm.eval(tokens)
        pages = pages_of(llm)
        n_some = max(1, MEASURED_BYTES // len(pages[0]))
        some = (pages * (1 + n_some // N_PAGES))[:n_some]
        with tempfile.TemporaryDirectory() as directory:
            results[name] = {
                "page_bytes": len(pages[0]),
                "auto": picked(pages),
                "codecs": {codec: measure(ours(codec), some) for codec in OURS},
                "restores": Restores(llm, as_tokens(tokens), pages, Path(directory)).run(),
            }
        llm.close()
    return results


def section(result: dict[str, Any]) -> list[str]:
    """The figures as Markdown."""
    lines = ["## Codecs", ""]
    lines += paragraph(
        f"""Pages of {PAGE_TOKENS} tokens. MB/s are of the state, not of what is stored; unpacked by one thread and by
        {CORES}. A restore is of {N_PAGES} pages from LMDB into a context, with the file in memory ("warm") and with
        none of it there ("cold"); in parentheses its speed relative to raw pages in the same round; medians.
        The codec that `auto` chooses is marked."""
    )
    rows = []
    for name, figures in result.items():
        for codec, of in figures["codecs"].items():
            restore = figures["restores"].get(codec)
            if restore is None:
                continue
            rows.append(
                [
                    f"{name}, {figures['page_bytes'] / 1e6:.2f} MB",
                    f"{codec} (`auto`)" if codec == figures["auto"] else codec,
                    f"{of['ratio']:.3f}",
                    *(f"{of[key] / 1e6:,.0f}" for key in ("pack", "unpack", "unpack_all_cores")),
                    *(
                        f"{milliseconds(restore[how]['p50'])} ({restore[f'{how}_of_raw']:.2f})"
                        for how in ("warm", "cold")
                    ),
                ]
            )
    head = ["states, page", "codec", "ratio", "pack", "unpack", f"{CORES} threads", "restore, warm", "restore, cold"]
    lines += table(head, rows)
    return lines
