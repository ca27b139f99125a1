"""Warns once if a store is queried for one prompt after another and never does anything."""

from __future__ import annotations

import logging
from collections import Counter

from prefixstore.stats import Counters

__all__ = ["PROMPTS", "Inactivity"]

log = logging.getLogger("prefixstore")

PROMPTS = 10

# any of these says that the store works
ACTIVITY = ("hits", "live_hits", "resume:hits", "pages_captured", "snapshots_captured", "miss:slow")
# of the captured ones, what was given up later
GIVEN_UP = ("dropped:budget", "dropped:quota", "dropped:full", "dropped:unavailable")

ADVICE = {
    "attached_late": "call llm.reset() before the first prompt, or store.restore(tokens) before each",
    "loaded_state": "llm.load_state() loads states with unknown tokens; with a store it is not needed",
    "changed": "something uses llm.ctx, llm._ctx or the library directly, which makes the context unknown",
    "stepped_back": "call store.restore(tokens) before llm.generate() or llm.eval(), so that the context fits",
    "sequence_in_use": "sequence 1 of the context is in use, which the store needs; remove it",
    "context_replaced": "llm has a different context from when the store was attached; attach a new store",
    "multimodal": "the chat handler adds images or audio, which are not part of the tokens",
    "encoder": "states of this model cannot be stored",
    "streams": "n_seq_max is above 1 without kv_unified; set kv_unified=True",
    "no_memory": "this model keeps no state that could be stored",
    "read_only": "the store is open with read_only=True, and has no prefix of these prompts",
    "short": "the prompts share fewer than min_tokens tokens with stored ones",
    "logprobs": "echo with logprobs needs every token of the prompt to be evaluated",
    "budget": "a page is larger than max_bytes, or the rest is pinned; raise max_bytes",
    "quota": "a page is larger than the tenant's quota, or the rest is pinned; raise quota",
    "not_asked": "no prompt is looked up: call llm.set_cache(store), or store.restore(tokens) before llm.generate()",
    "queue_full": "pages do not fit into queue_bytes; set a larger one",
    "incomplete": "a sliding window moves past pages before they can be captured",
}


class Inactivity:
    """Counts prompts in a row for which nothing was captured or restored.

    Parameters
    ----------
    counters
        Of the engine.
    read_only
        Whether the store never captures anything.
    """

    def __init__(self, counters: Counters, *, read_only: bool) -> None:
        self._counters = counters
        self._read_only = read_only
        self._n_prompts = 0
        self._activity = 0
        self._reasons: Counter[str] = Counter()
        # whether any of these prompts was looked up
        self._is_asked = False
        self._warned = False

    def prompt(self, *, is_looked_up: bool) -> None:
        """Note that a prompt begins; warn if nothing was done for the last `PROMPTS` prompts."""
        if self._warned:
            return
        activity = sum(self._counters[name] for name in ACTIVITY) - sum(self._counters[name] for name in GIVEN_UP)
        if activity != self._activity or not self._n_prompts:
            self._activity, self._n_prompts, self._reasons = activity, 0, self._counted()
            self._is_asked = False
        self._is_asked = self._is_asked or is_looked_up
        self._n_prompts += 1
        if self._n_prompts > PROMPTS:
            self._warned = True
            reason = self._reason()
            log.warning(
                "nothing of the last %d prompts was stored or restored; reason: %s (%s). stats() has all counts",
                PROMPTS,
                reason,
                ADVICE.get(reason, "see docs/operations.md"),
            )

    def _counted(self) -> Counter[str]:
        return Counter(self._counters.group("miss")) + Counter(self._counters.group("dropped"))

    def _reason(self) -> str:
        """The reason that was counted most often since the last activity."""
        if not self._is_asked:
            return "not_asked"
        if self._read_only:
            return "read_only"
        counted = self._counted() - self._reasons
        # what is not found is only the consequence of what is not stored
        del counted["not_found"]
        return max(counted, key=lambda name: counted[name], default="unknown")
