"""Residents: sequences whose rows stay in a context, by tags, beside the one in which the ``Llama`` computes.

A resident is a note (a name, a sequence, its tokens) and the tags of its cells. Notes may be removed in any thread;
tags are changed only by the thread that uses the ``Llama``. A sequence without a note is removed by that thread later,
so an interrupt between the two leaves cells that are freed later, and never rows under a wrong name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llama_cpp

from prefixstore.format.keys import Tokens, common_prefix

__all__ = ["END", "SCRATCH", "SEQUENCE", "Resident", "Residents"]

SEQUENCE = 0  # the sequence in which Llama computes
SCRATCH = 1
FIRST = 2
END = -1


@dataclass(frozen=True, eq=False)
class Resident:
    """A parked sequence, and its tokens from position 0 on."""

    sequence: int
    tokens: Tokens

    def is_whole(self, mem: Any) -> bool:
        """Whether the context still has all of its cells."""
        first = llama_cpp.llama_memory_seq_pos_min(mem, self.sequence)
        last = llama_cpp.llama_memory_seq_pos_max(mem, self.sequence)
        return bool(first == 0 and last == len(self.tokens) - 1)


class Residents:
    """The residents of one context, the least recently parked one first."""

    def __init__(self) -> None:
        self._named: dict[str, Resident] = {}
        # may have tags; noted before they do
        self._used: set[int] = set()
        # how many cells some residents have at least
        self._least: tuple[tuple[Resident, ...], int] = (), 0

    def __len__(self) -> int:
        return len(self._named)

    def __contains__(self, name: object) -> bool:
        return name in self._named

    @property
    def has_tags(self) -> bool:
        """Whether sequences beside the live one may have cells."""
        return bool(self._used)

    # -- notes: in any thread -----------------------------------------------------------------------------------------

    def cells(self) -> dict[str, int]:
        """How many cells each of them has, by name. Cells with the tags of several count for each."""
        return {name: len(resident.tokens) for name, resident in list(self._named.items())}

    def forget(self, name: str) -> None:
        """Forget one; its cells are freed later."""
        self._named.pop(name, None)

    def forget_oldest(self, *, but: str) -> None:
        """Forget the one parked longest ago, other than `but`."""
        for name in list(self._named):
            if name != but:
                self.forget(name)
                return

    def forget_all(self) -> None:
        """Forget all of them; their cells are freed later."""
        self._named.clear()

    def lost(self) -> None:
        """Note that the whole memory was cleared."""
        self._named.clear()
        self._used.clear()

    def least_cells(self, live: Tokens) -> int:
        """The least number of cells that they and the live sequence have, as if they shared each common beginning."""
        residents = tuple(self._named.values())
        if self._least[0] != residents:
            self._least = residents, _least([resident.tokens for resident in residents])
        shared = max((common_prefix(live, resident.tokens) for resident in residents), default=0)
        return self._least[1] + len(live) - shared

    # -- tags: in the thread that uses the Llama ----------------------------------------------------------------------

    def add(self, mem: Any, name: str, tokens: Tokens) -> bool:
        """Tag the cells of these tokens, with which the live sequence begins; false if no sequence is free."""
        self.forget(name)
        self.sweep(mem)
        free = range(FIRST, llama_cpp.llama_max_parallel_sequences())
        for sequence in free:
            if sequence not in self._used and llama_cpp.llama_memory_seq_pos_max(mem, sequence) == -1:
                self._used.add(sequence)
                llama_cpp.llama_memory_seq_cp(mem, SEQUENCE, sequence, 0, len(tokens))
                self._named[name] = Resident(sequence, tokens)
                return True
        return False

    def longest(self, mem: Any, tokens: Tokens, preferred: str) -> tuple[str, int]:
        """The one that shares the most tokens with a sequence from its start, and how many; of equals, `preferred`."""
        best, most = preferred, 0
        for name, resident in list(self._named.items()):
            n = common_prefix(resident.tokens, tokens)
            if (n > most or (n == most and name == preferred)) and resident.is_whole(mem):
                best, most = name, n
        return best, most

    def bring(self, mem: Any, name: str, n: int, *, keep: bool) -> bool:
        """Give the live sequence the first `n` cells of one, instead of its own; unless `keep`, that one is dropped.

        False if the live sequence does not hold exactly these cells after it.
        """
        resident = self._named.get(name)
        if resident is None:
            return False
        if not keep:
            self.forget(name)
        llama_cpp.llama_memory_seq_rm(mem, SEQUENCE, END, END)
        llama_cpp.llama_memory_seq_cp(mem, resident.sequence, SEQUENCE, 0, n)
        is_live = Resident(SEQUENCE, resident.tokens[:n]).is_whole(mem)
        self.sweep(mem)
        return is_live

    def sweep(self, mem: Any) -> bool:
        """Free the cells of those that were forgotten; whether there were any."""
        held = {resident.sequence for resident in list(self._named.values())}
        left = self._used - held
        for sequence in left:
            llama_cpp.llama_memory_seq_rm(mem, sequence, END, END)
            self._used.discard(sequence)
        return bool(left)

    def drop_oldest(self, mem: Any) -> bool:
        """Free the cells of forgotten residents, or else of the one parked longest ago; whether there was any."""
        if self.sweep(mem):
            return True
        for name in list(self._named):
            self.forget(name)
            return self.sweep(mem)
        return False

    def make_room(self, mem: Any, live: Tokens, need: int, capacity: int) -> None:
        """Drop the oldest ones until there is space for so many more cells beside them and the live sequence."""
        if len(self._used) != len(self._named):
            self.sweep(mem)
        while sum(self.cells().values()) + len(live) + need > capacity:
            if self.least_cells(live) + need <= capacity or not self.drop_oldest(mem):
                return


def _least(held: list[Tokens]) -> int:
    return sum(
        len(tokens) - max((common_prefix(tokens, other) for other in held[:i]), default=0)
        for i, tokens in enumerate(held)
    )
