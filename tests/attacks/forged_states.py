"""States whose checksum is right and whose content lies, under the key of a good one: ``python -m`` this, in a child.

Each case is announced before it runs, so that a crash names itself. What came out is the last line, as JSON.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from prefixstore import PrefixStore
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.format.codec import decode
from prefixstore.format.record import checksum
from prefixstore.llama.state.parse import parse_sequence
from tests.support.models import answer, caching, forget, load, prompt
from tests.support.timeouts import disable_timeouts

SETTINGS = {"page_tokens": 64, "min_tokens": 16, "namespace": "forged"}
VALUES = (0, 1, 2, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
WORD = struct.Struct("<I")


def structure(state: bytes) -> list[int]:
    """Where the words of a state are that are no rows."""
    blob = parse_sequence(state)
    base = np.frombuffer(state, np.uint8).ctypes.data
    words = set(range(0, 16, 4))
    for section in blob.sections:
        heads = [tensor.rows.ctypes.data - base - len(tensor.head) for tensor in section.tensors]
        words.update(head + i for head in heads for i in (0, 4, 8))
        if not heads:
            continue
        cells = heads[0] - 8 - 12 * len(section.positions)
        # counts before the cells, the first and the last cell, and what follows them
        words.update(range(cells - 8, cells + 12, 4))
        words.update(range(heads[0] - 20, heads[0], 4))
    if blob.recurrent is not None:
        start = len(state) - len(blob.recurrent.data)
        words.update(range(start, start + 32, 4))
    return sorted(words)


def forgeries(state: bytes) -> Iterator[tuple[str, bytes]]:
    """Every word of the structure with other values, lengths that do not fit, and positions that lie."""
    for at in structure(state):
        for value in VALUES:
            if WORD.pack(value) != state[at : at + 4]:
                yield f"word {at} is {value}", state[:at] + WORD.pack(value) + state[at + 4 :]
    for size in (0, 1, 16, len(state) // 2, len(state) - 1):
        yield f"cut at {size}", state[:size]
    yield "longer", state + b"\0" * 64
    yield "zeros", bytes(len(state))
    for by in (1, -1, 64, -64, 100_000):
        yield f"positions moved by {by}", moved(state, by)


def moved(state: bytes, by: int) -> bytes:
    """A state whose positions lie."""
    moved = bytearray(state)
    base = np.frombuffer(state, np.uint8).ctypes.data
    for section in parse_sequence(state).sections:
        n = len(section.positions)
        if n:
            cells = section.tensors[0].rows.ctypes.data - base - 20 - 12 * n
            for at in range(cells, cells + 12 * n, 12):
                struct.pack_into("<i", moved, at, struct.unpack_from("<i", moved, at)[0] + by)
    return bytes(moved) if bytes(moved) != state else state[:-1]


@contextmanager
def replaced(backend: Pages, key: bytes, payload: bytes) -> Iterator[None]:
    """Other bytes under a key, with a checksum that fits them; the old ones again afterwards."""
    with backend.view() as view:
        record, usage, good = view.record(key), view.usage(key), bytes(view.payload(key))
    forged = replace(record, codec=0, raw_bytes=len(payload), stored_bytes=len(payload), checksum=checksum(payload))
    with backend.update() as transaction:
        transaction.put(key, forged, usage, payload)
    try:
        yield
    finally:
        with backend.update() as transaction:
            transaction.put(key, record, usage, good)


def forge(*, model: str, location: str, options: dict[str, Any], first: int, step: int) -> dict[str, Any]:
    """Go on with a prompt over forgeries of the pages that it needs: every `step` of them, from the `first`."""
    llm = load(model, n_ctx=512, n_batch=64, **options)
    with caching(location, llm, **SETTINGS) as store:
        answer(llm, prompt(180), 4)
        tokens = [*llm.input_ids[: llm.n_tokens].tolist(), 7, 8, 9]
        store.flush()
        problems = [str(problem) for problem in store.check()]
    llm.set_cache(None)
    forget(llm)
    cold = answer(llm, tokens, 4)
    wrong: list[str] = []
    ran = 0
    backend = open_pages(location, max_bytes=1 << 30)
    with PrefixStore(location, llm, **SETTINGS, read_only=True) as store, closing(backend):
        llm.set_cache(store)
        with backend.view() as view:
            states = {key: bytes(decode(record, view.payload(key))) for key, record, _ in view.scan()}
        cases = [(key, *case) for key, state in sorted(states.items()) if state for case in forgeries(state)]
        for key, name, payload in cases[first::step]:
            print(f"{key.hex()}: {name}", flush=True)
            forget(llm)
            if ran % 2:
                store._current.context.memory.shape = None  # as in a process that has just begun
            ran += 1
            with replaced(backend, key, payload):
                try:
                    text = answer(llm, tokens, 4)
                except Exception as error:  # noqa: BLE001 - this is what must not be
                    text = repr(error)
            if text != cold:
                wrong.append(f"{key.hex()}: {name}: {text!r}")
        stats = store.stats()
        forget(llm)
        answer(llm, tokens, 1)
        last = store.stats().tokens_restored - stats.tokens_restored
    return {"ran": ran, "wrong": wrong, "unreadable": stats.unreadable, "check": problems, "last": last}


if __name__ == "__main__":
    disable_timeouts()
    print(json.dumps(forge(**json.loads(sys.argv[1]))))
