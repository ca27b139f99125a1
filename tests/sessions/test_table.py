"""The session table against a simple model of it, driven at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixstore import BusyError, InvalidParameterError
from prefixstore.format.keys import as_tokens
from prefixstore.sessions.table import Entry, SessionTable, State
from tests.support.models import TORTURE

MAX = 3
names = st.sampled_from("abcdef")


class Machine(RuleBasedStateMachine):
    """What each session holds, in the order of use; the name that is leased, and the numbers of all leases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(MAX)
        self.held: dict[str, list[int] | None] = {}  # None: discarded
        self.generations: dict[str, int] = {}
        self.leased: tuple[str, int] | None = None
        self.old: list[tuple[str, int]] = []

    def forget(self, gone, but):
        """The model of eviction: discarded ones first, then the least recently used."""
        surplus = max(len(self.held) - MAX, 0)
        busy = {but, self.leased[0] if self.leased else but}
        free = [name for name in self.held if name not in busy]
        free.sort(key=lambda name: self.held[name] is not None)
        assert [entry.name for entry in gone] == free[:surplus]
        for name in free[:surplus]:
            del self.held[name], self.generations[name]

    def discard(self, name):
        self.held[name] = None
        self.generations[name] += 1

    @rule(name=names)
    def lease(self, name):
        if self.leased:  # it was abandoned
            self.old.append(self.leased)
            self.discard(self.leased[0])
        entry, gone = self.table.lease(name)
        assert (self.leased or ("", 0))[1] < entry.lease
        self.leased = name, entry.lease
        self.held[name] = self.held.pop(name, None) or []
        self.generations.setdefault(name, 0)
        assert entry.tokens.tolist() == self.held[name]
        self.forget(gone, name)

    @rule(tokens=st.lists(st.integers(0, 9), max_size=3))
    def leave(self, tokens):
        if self.leased:
            entry = self.table.end(*self.leased, is_kept=True)
            entry.hold(as_tokens(tokens), (), entry.set_at + 1)
            name = self.leased[0]
            self.held.pop(name)
            self.held[name] = tokens
            self.old.append(self.leased)
            self.leased = None

    @rule()
    def fail(self):
        if self.leased:
            assert self.table.end(*self.leased, is_kept=False).tokens.tolist() == []
            self.discard(self.leased[0])
            self.old.append(self.leased)
            self.leased = None

    @rule(chance=st.randoms())
    def use_an_ended_lease(self, chance):
        if self.old:
            for is_kept in (True, False):
                assert self.table.end(*chance.choice(self.old), is_kept=is_kept) is None

    @rule(name=names, new=names)
    def fork(self, name, new):
        busy = self.leased and self.leased[0] in (name, new)
        if busy or self.held.get(name) is None or self.held.get(new) is not None:
            with pytest.raises(BusyError if busy else InvalidParameterError):
                self.table.fork(name, new)
            return
        fork, gone = self.table.fork(name, new)
        assert self.table.is_shared(fork) == bool(self.held[name])
        self.held[name] = self.held.pop(name)
        self.held.pop(new, None)
        self.held[new] = self.held[name]
        self.generations.setdefault(new, 0)
        self.forget(gone, new)
        if name in self.held:
            assert fork.tokens is self.table.get(name).tokens

    @rule(name=names)
    def evict(self, name):
        if self.leased and self.leased[0] == name:
            with pytest.raises(BusyError):
                self.table.evict(name)
            return
        entry = self.table.evict(name)
        assert (entry is not None) == (name in self.held)
        self.held.pop(name, None)
        self.generations.pop(name, None)

    @rule()
    def evict_all(self):
        gone = {entry.name for entry in self.table.evict_all()}
        assert gone == self.held.keys() - {self.leased[0] if self.leased else ""}
        for name in gone:
            del self.held[name], self.generations[name]

    @invariant()
    def it_is_as_the_model_says(self):
        assert [entry.name for entry in self.table] == list(self.held)
        assert len(self.table) <= MAX + 1
        for entry in self.table:
            is_leased = self.leased is not None and entry.name == self.leased[0]
            held = self.held[entry.name]
            expected = State.LEASED if is_leased else State.DISCARDED if held is None else State.IDLE
            assert entry.state is expected
            assert entry.tokens.tolist() == (held or [])
            assert entry.generation == self.generations[entry.name]


Machine.TestCase.settings = settings(max_examples=150 * TORTURE, stateful_step_count=40, deadline=None)
TestSessionTable = Machine.TestCase


def test_a_fork_that_continues_shares_no_more():
    table = SessionTable(4)
    table.add(Entry("a", as_tokens([1, 2, 3])))
    table.fork("a", "b")
    table.fork("a", "c")
    a, b, c = (table.get(name) for name in "abc")
    b.hold(as_tokens([1, 2, 3, 4]), (), 1)
    assert [table.is_shared(one) for one in (a, b, c)] == [True, False, True]
    c.hold(np.empty(0, "<i4"), (), 1)
    assert not table.is_shared(a)
