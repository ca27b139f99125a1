"""Faults inside llama.cpp's functions, and a comparison of all that a store holds with what a model computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import llama_cpp
import numpy as np

from prefixstore import PrefixStore
from tests.support.models import forget, logits

# both are the same functions: llama-cpp-python looks them up in the one, prefixstore in the other
MODULES = (llama_cpp, llama_cpp.llama_cpp)
WATCHED = ("llama_decode", "llama_encode", "llama_memory_", "llama_state_", "llama_synchronize", "llama_perf_context")
# logits differ by rounding if batches are split in another way, and by whole units after other tokens
CLOSE = 0.1


class Injected(BaseException):
    """Raised in the middle of something, as Ctrl-C is: no ``except Exception`` holds it."""


@dataclass
class Steps:
    """How many steps were made."""

    made: int = 0


@contextlib.contextmanager
def failing(k: int, *, after: bool, error: BaseException | None = None) -> Iterator[Steps]:
    """The `k`-th call of a function of llama.cpp raises, before or after its work. A step is a call."""
    steps = Steps()
    error = error or Injected()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            mine, steps.made = steps.made, steps.made + 1
            if mine == k and not after:
                raise error
            result = function(*args)
            if mine == k and after:
                raise error
            return result

        return call

    with contextlib.ExitStack() as stack:
        for module in MODULES:
            for name, function in list(vars(module).items()):
                if name.startswith(WATCHED) and callable(function) and not isinstance(function, type):
                    stack.enter_context(mock.patch.object(module, name, wrap(function)))
        yield steps


def stored_sequences(store: PrefixStore) -> list[list[int]]:
    """The tokens of every sequence that a store holds."""
    engine = store.engine
    engine.drain()
    leaves = [page for page in engine.lookups.pages() if page.is_leaf and page.end > 1]
    return [np.frombuffer(b"".join(one.tokens for one in engine.lookups.path(leaf)), "<i4").tolist() for leaf in leaves]


def assert_right(store: PrefixStore, warm: llama_cpp.Llama, cold: llama_cpp.Llama) -> int:
    """Compare every stored sequence with the same tokens computed in another context; how many there are."""
    sequences = stored_sequences(store)
    for tokens in sequences:
        forget(warm)
        forget(cold)
        n = store.restore([*tokens, 7], warm, always=True)
        warm.eval([*tokens[n:], 7])
        cold.eval(tokens)
        cold.eval([7])
        assert np.allclose(logits(warm), logits(cold), atol=CLOSE), f"{n} of {len(tokens)} tokens were restored"
    return len(sequences)
