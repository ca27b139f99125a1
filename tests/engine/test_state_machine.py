"""A real engine and a simple model of it, driven together at random."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.engine.budget import Budget
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.pages import Pages
from prefixstore.engine.pending import PendingPage
from prefixstore.format.autocodec import pick
from prefixstore.format.keys import as_tokens, page_key
from prefixstore.stats import Counters
from tests.support.engines import MemoryPages, Writer, entry
from tests.support.fragile import known_keys
from tests.support.models import TORTURE

P = 4
NAMESPACES = (b"n" * 32, b"o" * 32)
SIZES = (0, 1, 900, 5000)

prompts = st.lists(st.integers(0, 1), max_size=14).map(tuple)
namespaces = st.sampled_from(NAMESPACES)
whose = st.integers(0, 1)


def state_of(key: bytes) -> bytes:
    """The state of a page, as large as its key says."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(SIZES[key[0] % len(SIZES)])


def shared(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Machine(RuleBasedStateMachine):
    """Without a limit: the model predicts to the token what a match finds."""

    budget = Budget(64 << 20)
    codec = "raw"
    persistent = False
    refuses = False
    engines_at_once = 1

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="prefixstore-machine-"))
        self.memory = None
        self.stored: set[tuple[bytes, tuple[int, ...]]] = set()
        self.pinned: set[bytes] = set()
        self.engines: list[Engine] = []
        self.writers: list[Writer] = []
        for _ in range(self.engines_at_once):
            self.open()

    # -- what is driven -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        counters = Counters()
        backend = Pages(LMDBBackend(self.directory / "kv", 64 << 20)) if self.persistent else MemoryPages()
        engine = Engine(
            backend,
            self.budget,
            POLICIES["lru"](),
            pick(self.codec),
            counters,
            queue_bytes=1 << 20,
            write_behind=False,
            # a pause of the machine must not look like a slow location
            clock=lambda: 0.0,
        )
        self.engines.append(engine)
        # written by the caller, at the next flush or commit: the machine decides when
        self.writers.append(Writer(engine))

    def close(self, which: int) -> None:
        self.writers.pop(which).close()
        engine = self.engines.pop(which)
        assert engine.check() == []
        engine.close()

    def teardown(self) -> None:
        self.flush()
        while self.engines:
            self.close(0)
        shutil.rmtree(self.directory)

    def capture(self, which: int, namespace: bytes, tokens: tuple[int, ...]) -> list[PendingPage]:
        """The pages of a sequence that are wanted, captured."""
        engine, raw = self.engines[which], as_tokens(tokens).tobytes()
        engine.match(namespace, as_tokens(tokens), P)
        parent, news = namespace, []
        for start in range(0, len(raw), 4 * P):
            piece = raw[start : start + 4 * P]
            key = page_key(parent, piece)
            if engine.wants(namespace, parent, piece):
                state = state_of(key)
                buffer = self.writers[which].acquire(len(state))
                buffer.view[:] = state
                new = PendingPage.of(namespace, namespace, parent, start // 4, piece, buffer)
                assert engine.announce(new)
                news.append(new)
            parent = key
        return news

    @rule(which=whose, namespace=namespaces, tokens=prompts)
    def put(self, which, namespace, tokens):
        which %= len(self.engines)
        if any(new.page.namespace == namespace for new in self.waiting):
            # a page that is committed before its parent is an orphan; the queue keeps them in order
            self.flush()
        news = self.capture(which, namespace, tokens)
        assert self.engines[which].commit(news) <= len(news)
        for new in news:
            new.buffer.release()
        self.stored.add((namespace, tokens))

    waiting: list[PendingPage] = []  # noqa: RUF012 - replaced, never changed
    writes = 0

    @rule(which=whose, namespace=namespaces, tokens=prompts)
    def put_later(self, which, namespace, tokens):
        """Announced, found at once by the same engine, committed at the next flush."""
        if not self.waiting:
            self.writes = which % len(self.engines)
        self.waiting = self.waiting + self.capture(self.writes, namespace, tokens)
        found = self.engines[self.writes].match(namespace, as_tokens(tokens), P).n_tokens
        # a page that was refused for lack of space is not captured
        assert found == len(tokens) or self.refuses
        self.later = {*getattr(self, "later", ()), (namespace, tokens)}

    @rule()
    def flush(self):
        self.engines[self.writes].commit(self.waiting)
        for new in self.waiting:
            new.buffer.release()
        self.waiting = []
        self.stored |= getattr(self, "later", set())
        self.later = set()
        for writer in self.writers:
            writer.flush()

    @rule(which=whose, namespace=namespaces, tokens=prompts)
    def restore(self, which, namespace, tokens):
        engine = self.engines[which % len(self.engines)]
        path = engine.match(namespace, as_tokens(tokens), P)
        self.compare(which % len(self.engines), namespace, tokens, path.n_tokens)
        covered = b"".join(page.tokens for page in path.pages)
        assert covered.startswith(as_tokens(tokens[: path.n_tokens]).tobytes())
        with engine.fetching(path.pages) as states:
            for page, state in zip(path.pages, states, strict=True):
                assert bytes(state) == state_of(page.key)
        engine.touch(namespace, path.pages)

    def compare(self, which, namespace, tokens, found):
        known = self.stored | (getattr(self, "later", set()) if which == self.writes else set())
        assert found == max((shared(tokens, other) for ns, other in known if ns == namespace), default=0)

    @rule(which=whose, namespace=st.none() | namespaces)
    def clear(self, which, namespace):
        self.flush()
        before = self.engines[which % len(self.engines)].used()[0].entries
        assert self.engines[which % len(self.engines)].clear(namespace) <= before
        self.stored = {(ns, tokens) for ns, tokens in self.stored if namespace not in (None, ns)}
        self.pinned.clear()

    @rule(which=whose, namespace=namespaces, tokens=prompts, pinned=st.booleans())
    def pin(self, which, namespace, tokens, pinned):
        self.flush()
        engine = self.engines[which % len(self.engines)]
        path = engine.match(namespace, as_tokens(tokens), P)
        assert engine.pin(namespace, as_tokens(tokens), P, pinned=pinned) == path.n_tokens

    @precondition(lambda self: self.persistent)
    @rule(which=whose)
    def reopen(self, which):
        self.flush()
        self.close(which % len(self.engines))
        self.open()

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def every_invariant_holds(self):
        for engine in self.engines:
            assert engine.check() == []
            # the index has the stored and the pending pages
            engine.match(NAMESPACES[0], as_tokens([]), P)
            with engine._backend.view() as view:
                keys = {key for key, _, _ in view.scan()}
            assert known_keys(engine) == keys | set(engine._catalog._pending)
            used, stored, raw = engine.used()
            assert used.entries == len(keys)
            if not engine._catalog._pending:
                sizes = [len(state_of(key)) for key in keys]
                assert raw == sum(sizes)
                assert stored <= raw


class Small(Machine):
    """Within a budget: it holds, and everything that is matched can be restored."""

    budget = Budget(64 << 20, max_entries=5)
    refuses = True

    def compare(self, which, namespace, tokens, found):
        known = self.stored | getattr(self, "later", set())
        assert found <= max((shared(tokens, other) for ns, other in known if ns == namespace), default=0)


class SmallMemory(Small):
    budget = Budget(4 * entry(0, 0) + 6000, max_entries=6)
    codec = "planes"


class LMDB(Machine):
    persistent = True
    codec = "zstd"


class TwoOnLMDB(Machine):
    persistent = True
    engines_at_once = 2


class TwoSmallOnLMDB(Small):
    persistent = True
    engines_at_once = 2


def bounded(machine, examples, steps=25):
    case = machine.TestCase
    case.settings = settings(max_examples=examples * TORTURE, stateful_step_count=steps, deadline=None)
    return case


TestMemoryWithoutLimit = pytest.mark.slow(bounded(Machine, 50))
TestMemoryWithinABudget = bounded(SmallMemory, 50)
TestLMDBWithoutLimit = pytest.mark.slow(bounded(LMDB, 25))
TestTwoEnginesOnOneLocation = pytest.mark.attack(bounded(TwoOnLMDB, 25))
TestTwoEnginesWithinABudget = pytest.mark.attack(bounded(TwoSmallOnLMDB, 25))
