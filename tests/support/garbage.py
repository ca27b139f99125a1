"""Garbage under the keys of pages, and the answers that must come out right all the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from prefixstore import PrefixStore
from prefixstore.llama.state.parse import parse_sequence
from tests.support.models import answer, forget, prompt

SHORT, OTHER = prompt(40, seed=1), prompt(250, seed=2)
NAN = np.uint16(0x7E00)


def rows_replaced(state: bytes, value: Any) -> bytes:
    """A state with this value, or, for None, random bytes, in all rows; everything else as it is."""
    out = bytearray(state)
    parsed = parse_sequence(memoryview(out))
    rng = np.random.default_rng(len(state))
    for section in parsed.sections:
        for tensor in section.tensors:
            fill(tensor.rows, value, rng)
    if parsed.recurrent is not None:
        # the rows of its last tensor
        fill(np.frombuffer(parsed.recurrent.data, np.uint8)[-512:], value, rng)
    return bytes(out)


def fill(rows: Any, value: Any, rng: np.random.Generator) -> None:
    n = rows.size
    data = rng.bytes(n) if value is None else np.full(n // value.nbytes + 1, value).tobytes()[:n]
    rows[...] = np.frombuffer(data, np.uint8).reshape(rows.shape)


class Case(NamedTuple):
    """What is put under the key of a page; None to delete it after it was found."""

    key: bytes
    name: str
    payload: bytes | None


class Victim:
    """A store with the pages of one prompt, and the answers that are right."""

    def __init__(self, store: PrefixStore, llm: llama_cpp.Llama, tokens: list[int]) -> None:
        self.store, self.llm, self.tokens = store, llm, tokens
        self.cold = [self.answer_to(tokens) for tokens in (tokens, SHORT, OTHER)]
        store.attach(llm)
        llm.set_cache(store)
        store._current.context.rate.is_worth = lambda *_: True
        forget(llm)
        assert self.answer_to(tokens) == self.cold[0]
        store.flush()
        self.backend = store._engine._backend
        with self.backend.view() as view:
            # parents before their children, as the engine writes them
            found = sorted(view.scan(), key=lambda one: one[1].start)
            self.pages = {key: (record, usage, bytes(view.payload(key))) for key, record, usage in found}

    def answer_to(self, tokens: list[int]) -> str:
        return answer(self.llm, tokens, 4)

    def put(self, case: Case | None = None) -> None:
        """The pages as they were captured, but for one."""
        # what was found damaged before is judged now, and not when it is written again
        self.store.flush()
        with self.backend.update() as transaction:
            for key, (record, usage, payload) in self.pages.items():
                garbage = payload if case is None or case.key != key or case.payload is None else case.payload
                transaction.put(key, record, usage, garbage)

    def run(self, case: Case, live: int) -> list[str]:
        """The answers that are wrong, with so many tokens of the prompt in the context at first."""
        llm, engine = self.llm, self.store._engine
        self.put(case)
        forget(llm)
        if live:
            llm.eval(self.tokens[:live])
        if case.payload is None:
            real = engine.fetching

            def after_deleting(pages, **options):
                engine.fetching = real
                with self.backend.update() as transaction:
                    transaction.delete(case.key)
                return real(pages, **options)

            engine.fetching = after_deleting
        found = [self.answer_to(self.tokens), self.answer_to(SHORT)]
        llm.reset()
        # computed, all of it
        llm.set_cache(None)
        found.append(self.answer_to(OTHER))
        llm.set_cache(self.store)
        names = ("the answer", "the next answer", "the answer after reset()")
        return [
            f"{case.name}, {live} tokens live: {name} is {text!r}"
            for name, text, right in zip(names, found, self.cold, strict=True)
            if text != right
        ]
