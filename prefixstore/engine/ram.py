"""A tier of RAM in front of a backend: states of hot pages, decoded and verified."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixstore.backends.base import Backend, Transaction, View
from prefixstore.format.record import Buffer

__all__ = ["TieredBackend"]

# What Python holds for a state beside its bytes and tokens: array, key, dictionary slot (measured on 3.11).
ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class _State:
    tokens: bytes
    array: npt.NDArray[np.uint8]

    @property
    def bytes(self) -> int:
        return _cost(len(self.tokens), self.array.nbytes)


def _cost(n_token_bytes: int, n_bytes: int) -> int:
    return n_token_bytes + n_bytes + ENTRY_BYTES


class TieredBackend(Backend):
    """Passes everything on to another backend, and keeps states of pages that are stored there at hand.

    It never holds the only copy of a page. What leaves the location leaves the tier when this process next looks.

    Parameters
    ----------
    backend
        Has the pages.
    ram_bytes
        How much the tier may hold; the least recently used states go first.
    """

    keeps_states = True

    def __init__(self, backend: Backend, ram_bytes: int) -> None:
        self._backend = backend
        self._limit = ram_bytes
        self._forget_all()

    def _forget_all(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[bytes, _State] = OrderedDict()
        self._used = 0
        self._generation: int | None = None

    @property
    def location(self) -> str:
        return self._backend.location

    @property
    def ram_used(self) -> int:
        """Bytes that the tier holds."""
        return self._used

    def state(self, key: bytes, tokens: bytes) -> memoryview | None:
        with self._lock:
            found = self._states.get(key)
            # the hash nominated it; the tokens prove it
            if found is None or found.tokens != tokens:
                return None
            self._states.move_to_end(key)
            return found.array.data

    def keep(self, key: bytes, tokens: bytes, state: Buffer) -> None:
        size = _cost(len(tokens), len(state))
        with self._lock:
            if key in self._states or size > self._limit:
                return
            while self._states and self._used + size > self._limit:
                self._drop(next(iter(self._states)))
            if self._used + size > self._limit:
                return  # others are making copies at this moment
            # room is taken before the copy is made, so that the tier is never larger than it says
            self._used += size
        kept = None
        try:
            kept = _State(tokens, np.frombuffer(state, np.uint8).copy())
        finally:
            with self._lock:
                if kept is None or key in self._states:
                    self._used -= size
                else:
                    self._states[key] = kept

    def _drop(self, key: bytes) -> None:
        self._used -= self._states.pop(key).bytes

    def _follow(self, view: View) -> None:
        """Drop what has left the location."""
        generation = view.generation
        known, self._generation = self._generation, max(generation, self._generation or 0)
        if known is None or generation <= known or not self._states:
            return
        changed = view.changes(known)
        with self._lock:
            suspects = list(self._states if changed is None else self._states.keys() & set(changed))
        there = view.records(suspects)
        with self._lock:
            for key in suspects:
                if key not in there and key in self._states:
                    self._drop(key)

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._backend.view() as view:
            self._follow(view)
            yield view

    def update(self) -> AbstractContextManager[Transaction]:
        return self._backend.update()

    def sync(self) -> None:
        self._backend.sync()

    def reclaim(self) -> None:
        self._backend.reclaim()

    def scrub(self) -> None:
        self._backend.scrub()

    def compact(self) -> int:
        return self._backend.compact()

    def after_fork(self) -> None:
        # another thread of the parent may have been in the middle of a change
        self._forget_all()
        self._backend.after_fork()

    def close(self) -> None:
        with self._lock:
            self._states.clear()
            self._used = 0
        self._backend.close()
