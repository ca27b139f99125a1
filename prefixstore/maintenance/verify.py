"""Compares stored states with computed ones by the logits of the next token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prefixstore.format.keys import PAGE, SNAPSHOT
from prefixstore.maintenance.archive import Archive
from prefixstore.store import PrefixStore

if TYPE_CHECKING:
    from llama_cpp import Llama

# The largest allowed difference of two logits, as a share of the distance between the largest and the smallest logit.
# The same tokens in other batches, as a server computes them, differ by rounding; a state of other tokens by tenths.
BOUND = 0.05


@dataclass(frozen=True)
class Comparison:
    """One stored sequence, restored and computed."""

    # the key of its last page
    page: str
    n_tokens: int
    # all but the last one, which is evaluated after them
    restored: int
    # the largest of two logits; also as a share of the distance between the largest and the smallest logit
    difference: float
    share: float
    # whether the most likely next token is the same
    same_token: bool

    def is_within(self, bound: float) -> bool:
        """Whether everything was restored, and the difference is within the bound."""
        return self.restored == self.n_tokens - 1 and self.share <= bound


def compare_computed(
    llm: Llama, store: PrefixStore, archive: Archive, n: int, *, seed: int = 0
) -> Iterator[Comparison]:
    """Compute at most `n` stored sequences of an archive again, chosen at random, and compare the results.

    The context of the model is overwritten. The store, on the same location, is attached to the model; it is detached,
    so that nothing that is computed here is stored.
    """
    from prefixstore.llama.binding import last_logits, n_places  # noqa: PLC0415 - the extra "llama"

    hook, room = store.hook_of(llm), n_places(llm) - 1
    form = SNAPSHOT if hook.kind.has_snapshots else PAGE
    store.detach(llm)
    # a snapshot is restored whole, or not at all
    leaves = [
        page
        for page in archive.pages(hook.context.namespace.key)
        if page.is_leaf and page.form == form and (form == PAGE or page.end <= room)
    ]
    for page in random.Random(seed).sample(leaves, min(n, len(leaves))):
        stored = b"".join(one.tokens for one in archive.path(page))
        tokens = np.frombuffer(stored, "<i4")[:room].tolist()
        # some token, to be evaluated after all that is stored
        tokens.append(tokens[0])
        llm.reset()
        with store.engine.counters.not_serving():
            restored = store.restore(tokens, llm, always=True)
        try:
            llm.eval(tokens[restored:])
            warm = last_logits(llm)
            llm.reset()
            llm.eval(tokens[:-1])
            llm.eval(tokens[-1:])
        except RuntimeError:
            # the model has no such tokens
            yield Comparison(page.key.hex(), len(tokens), restored, 0.0, 1.0, same_token=False)
            continue
        cold = last_logits(llm)
        difference = float(np.abs(warm - cold).max())
        distance = float(cold.max() - cold.min())
        # all of it where a state has values that are no numbers
        share = min(1.0, difference / distance if distance else float(difference > 0))
        same = int(warm.argmax()) == int(cold.argmax())
        yield Comparison(page.key.hex(), len(tokens), restored, share * distance, share, same)
    llm.reset()
