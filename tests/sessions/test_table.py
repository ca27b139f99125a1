"""Which sessions there are and what each of them holds, against a simple model of it, driven at random."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from prefixstore import BusyError, PrefixStore, StaleLeaseError
from tests.support.models import TORTURE, forget

MAX = 3
names = st.sampled_from("abcdef")


class Machine(RuleBasedStateMachine):
    """What each session holds, in the order of use; the one that has the Llama, and all that had it."""

    llm = None

    def __init__(self) -> None:
        super().__init__()
        forget(self.llm)
        # so short that nothing is stored: what counts is what this process knows
        self.store = PrefixStore("memory:", self.llm, min_tokens=10_000)
        self.sessions = self.store.sessions(max_sessions=MAX)
        self.held: dict[str, list[int]] = {}
        self.generations: dict[str, int] = {}
        self.leased = None
        self.old = []

    def teardown(self):
        if self.leased is not None:
            self.leased.leave()
        self.store.close()

    def forget(self, but):
        """The model of eviction: those that hold nothing first, then the least recently used."""
        surplus = max(len(self.held) - MAX, 0)
        busy = {but, self.leased.name if self.leased else but}
        free = sorted((name for name in self.held if name not in busy), key=lambda name: bool(self.held[name]))
        for name in free[:surplus]:
            del self.held[name], self.generations[name]

    def end(self):
        session, self.leased = self.leased, None
        self.old.append(session)
        return session.name

    @rule(name=names)
    def admit(self, name):
        if self.leased is None:
            self.held[name] = self.held.pop(name, [])
            self.generations.setdefault(name, 0)
            self.leased = self.sessions.admit(name)
            assert not self.old or self.old[-1].lease < self.leased.lease
            assert (self.leased.tokens.tolist(), self.leased.generation) == (self.held[name], self.generations[name])
            self.forget(name)

    @rule(tokens=st.lists(st.integers(5, 9), max_size=3))
    def leave(self, tokens):
        if self.leased is not None:
            assert self.leased.tokens.tolist() == self.held[self.leased.name]
            if tokens:
                self.leased.eval(tokens)
            self.leased.leave()
            self.held[self.end()] += tokens

    @rule(is_used=st.booleans(), is_dropped=st.booleans())
    def fail(self, is_used, is_dropped):
        if self.leased is None:
            return
        if is_used:
            self.leased.eval([5])
        if is_dropped:
            name, self.leased = self.leased.name, None
            gc.collect()
            self.sessions.stats()
        else:
            self.leased.leave(discard=True)
            name = self.end()
        if is_used or not is_dropped:
            self.held[name] = []
            self.generations[name] += 1

    @rule(chance=st.randoms())
    def use_an_ended_lease(self, chance):
        if self.old:
            session = chance.choice(self.old)
            session.leave(discard=True)
            with pytest.raises(StaleLeaseError):
                session.eval([5])

    @rule(name=names)
    def evict(self, name):
        if self.leased and self.leased.name == name:
            with pytest.raises(BusyError):
                self.sessions.evict(name)
            return
        assert self.sessions.evict(name) == (name in self.held)
        self.held.pop(name, None)
        self.generations.pop(name, None)

    @rule()
    def evict_all(self):
        gone = self.held.keys() - {self.leased.name if self.leased else ""}
        assert self.sessions.evict_all() == len(gone)
        for name in gone:
            del self.held[name], self.generations[name]

    @invariant()
    def it_is_as_the_model_says(self):
        leased = {self.leased.name} if self.leased else set()
        assert self.sessions.names() == sorted(leased | {name for name, tokens in self.held.items() if tokens})
        assert self.sessions.stats().sessions == len(self.held) <= MAX + 1


def test_sessions_are_as_a_simple_model_of_them(llm):
    Machine.llm = llm
    checks = settings(max_examples=30 * TORTURE, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Machine, settings=settings(checks, suppress_health_check=list(HealthCheck)))
