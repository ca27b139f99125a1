"""Several engines on one location, whose steps are interleaved one by one: what they store stays whole.

There is one thread at a time, so that a failure can be repeated. A step of an engine is interrupted at calls of its
backend, where a test with threads would have to hit the moment by chance: there another thread of the same engine acts,
another engine commits, or the location fails.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from prefixstore.engine.budget import Budget
from prefixstore.engine.delete import beginning_with
from prefixstore.engine.engine import Engine
from prefixstore.engine.eviction import POLICIES
from prefixstore.engine.index import Page
from prefixstore.engine.pages import open_pages
from prefixstore.engine.pending import PendingPage
from prefixstore.engine.waiting import DropReason
from prefixstore.errors import UnavailableError
from prefixstore.format.autocodec import pick
from prefixstore.format.keys import as_tokens, page_key, page_keys
from prefixstore.format.record import PAGE, SNAPSHOT, StoredPage
from prefixstore.stats import Counters
from tests.support import PATIENCE, in_thread
from tests.support.engines import MIB, NS, P, state_of
from tests.support.fragile import assert_true, known_keys
from tests.support.models import TORTURE
from tests.support.places import place

ENGINES = 3
TTL = 60.0

# few, and mostly beginnings of each other: the engines are to meet at the same pages
PROMPTS = [
    *((0,) * n for n in (2, 4, 6, 8, 11, 12)),
    *((0, 0, 0, 0) + (1,) * n for n in (1, 4, 6)),
    *((1,) * n for n in (4, 7, 8)),
]
prompts = st.sampled_from(PROMPTS)
engines = st.integers(0, ENGINES - 1)
# at which call of the backend's operations, and what happens there
interruptions = st.lists(
    st.tuples(
        st.sampled_from(
            ["view", "update", "leading", "records", "count", "usage", "cost", "delete", "put", "commit", "end"]
        ),
        st.integers(0, 2),
        st.sampled_from(["match", "capture", "thin", "abandon", "drop", "suspect", "others", "fail"]),
        st.integers(0, 3),
        prompts,
    ),
    max_size=3,
)


class Interrupted:
    """A backend, view or transaction that calls `meanwhile` with the name of each operation, before it."""

    def __init__(self, inner, meanwhile: Callable[[str], None], updating=nullcontext) -> None:
        self._inner = inner
        self._meanwhile = meanwhile
        self._updating = updating

    def __getattr__(self, name):
        self._meanwhile(name)
        return getattr(self._inner, name)

    @contextmanager
    def view(self):
        with self._inner.view() as view:
            self._meanwhile("view")
            yield Interrupted(view, self._meanwhile)

    @contextmanager
    def update(self):
        with self._updating(), self._inner.update() as transaction:
            self._meanwhile("update")
            yield Interrupted(transaction, self._meanwhile)
            self._meanwhile("commit")
        self._meanwhile("end")


class Member:
    """An engine, and the pages that it has announced and not committed yet."""

    def __init__(self, backend, budget: Budget, ttl: float | None) -> None:
        self.backend = backend
        self.due: list[tuple[str, int, Callable[[], None]]] = []
        self.calls: Counter[str] = Counter()
        self.is_updating = False
        wrapped = Interrupted(backend, self.meanwhile, self.updating)
        self.engine = Engine(
            wrapped, budget, POLICIES["lru"](), pick("raw"), Counters(), ttl=ttl, queue_bytes=MIB, write_behind=False
        )
        self.catalog = self.engine._catalog
        self.waiting: list[PendingPage] = []

    def meanwhile(self, operation: str) -> None:
        """Do what is due at this call of the backend."""
        now = operation, self.calls[operation]
        self.calls[operation] += 1
        due = [one for one in self.due if one[:2] == now]
        self.due = [one for one in self.due if one[:2] != now]
        for *_, work in due:
            work()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While a transaction is open."""
        self.is_updating = True
        try:
            yield
        finally:
            self.is_updating = False

    def close(self) -> None:
        self.due = []
        self.engine.close()


class Interleaving(RuleBasedStateMachine):
    """Engines with a small common budget. What is stored is checked after each step."""

    budget = Budget(64 * MIB, max_entries=3)

    # -- the engines --------------------------------------------------------------------------------------------------

    @initialize()
    def open(self):
        self.opened = ExitStack()
        directory = Path(tempfile.mkdtemp(prefix="prefixstore-interleaving-"))
        self.opened.callback(shutil.rmtree, directory)
        self.clock = time.time_ns()
        patch = self.opened.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("time.time_ns", self.now)
        url = self.location(directory)
        self.members = []
        for which in range(ENGINES):
            backend = open_pages(url, max_bytes=64 * MIB)
            # one of them has pages that expire
            self.members.append(Member(backend, self.budget, TTL if which == 2 else None))
            self.opened.callback(self.members[-1].close)
        self.exported: list[StoredPage] = []

    def location(self, directory: Path) -> str:
        """An empty one."""
        raise NotImplementedError

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def teardown(self) -> None:
        if hasattr(self, "opened"):
            with self.opened:
                for which in range(ENGINES):
                    self.look_at_all(which)

    # -- steps of one engine, interrupted -----------------------------------------------------------------------------

    @contextmanager
    def interrupted(self, which: int, interruptions) -> Iterator[Member]:
        """Let these things happen at these calls of the engine's backend, in the block."""
        member = self.members[which]
        member.calls.clear()
        member.due = [
            (operation, at, partial(getattr(self, what), member, choice, tokens))
            for operation, at, what, choice, tokens in interruptions
        ]
        try:
            yield member
        except UnavailableError:
            pass  # what an interruption has asked for
        finally:
            member.due = []

    @rule(which=engines, tokens=prompts, form=st.sampled_from([PAGE, SNAPSHOT]))
    def announce(self, which, tokens, form):
        self.capture(self.members[which], form, tokens)

    @rule(which=engines, steps=interruptions)
    def commit(self, which, steps):
        with self.interrupted(which, steps) as member:
            batch, member.waiting = member.waiting, []
            member.engine.commit(batch)
            assert not member.catalog._writing

    @rule(which=engines, tokens=prompts, form=st.sampled_from([PAGE, SNAPSHOT]), steps=interruptions)
    def put(self, which, tokens, form, steps):
        self.capture(self.members[which], form, tokens)
        self.commit(which, steps)

    @rule(which=engines, tokens=prompts, steps=interruptions)
    def restore(self, which, tokens, steps):
        with self.interrupted(which, steps) as member:
            path = member.engine.match(NS, as_tokens(tokens), P)
            loaded = []
            with member.engine.fetching(path.pages) as states:
                for page, state in zip(path.pages, states, strict=False):
                    assert bytes(state) == state_of(page.key, 10)
                    loaded.append(page)
            member.engine.touch(NS, loaded)

    @rule(which=engines, steps=interruptions)
    def evict(self, which, steps):
        with self.interrupted(which, steps) as member:
            member.engine.evict(0)

    @rule(which=engines, tokens=prompts, steps=interruptions)
    def purge(self, which, tokens, steps):
        with self.interrupted(which, steps) as member:
            wanted = as_tokens(tokens).tobytes()
            member.engine.delete([partial(beginning_with, tokens=wanted, namespaces=None)])

    @rule(which=engines, tokens=prompts, pinned=st.booleans(), steps=interruptions)
    def pin(self, which, tokens, pinned, steps):
        with self.interrupted(which, steps) as member:
            member.engine.pin(NS, as_tokens(tokens), P, pinned=pinned)

    @rule(which=engines)
    def export(self, which):
        with self.members[which].backend.view() as view:
            found = sorted(view.scan(), key=lambda one: one[1].start)
            self.exported = [StoredPage(key, record, usage, bytes(view.payload(key))) for key, record, usage in found]

    @rule(which=engines, steps=interruptions)
    def import_again(self, which, steps):
        with self.interrupted(which, steps) as member:
            member.engine.importer.import_pages(self.exported, {NS: b"{}"})

    @rule(seconds=st.sampled_from([1, int(TTL)]))
    def wait(self, seconds):
        self.clock += int(seconds * 1e9)

    # -- what may happen meanwhile ------------------------------------------------------------------------------------

    def elsewhere(self, work: Callable[..., object], *arguments: object) -> None:
        """Run it in another thread, which waits for no lock of a transaction."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised again here
                raised.append(error)

        thread = in_thread(run)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        for error in raised:
            raise error

    def match(self, member, choice, tokens) -> None:
        self.elsewhere(member.engine.match, NS, as_tokens(tokens), P)

    def capture(self, member, form, tokens) -> None:
        """Announce the pages of a sequence, its end as a snapshot if `form` says so."""
        raw, parent = as_tokens(tokens).tobytes(), NS
        for start in range(0, len(raw), 4 * P):
            piece = raw[start : start + 4 * P]
            last = SNAPSHOT if form % 2 and len(piece) < 4 * P else PAGE
            key = page_key(parent, piece, last)
            if not member.engine.needs_no_capture(key):
                buffer = member.engine.acquire(10)
                if buffer is None:
                    return
                buffer.view[:] = state_of(key, 10)
                new = PendingPage.of(NS, b"{}", parent, start // 4, piece, buffer, 0, last)
                if member.engine.announce(new):
                    member.waiting.append(new)
                else:
                    new.release()
            parent = key

    def thin(self, member, choice, tokens) -> None:
        snapshots = [page for page in self.known(member) if page.form == SNAPSHOT]
        if snapshots:
            member.catalog.discard_snapshot(snapshots[choice % len(snapshots)])

    def abandon(self, member, choice, tokens) -> None:
        """A page is given up, as when the thread that submits it is interrupted."""
        member.catalog.abandon(self.pending(member)[choice : choice + 1])

    def drop(self, member, choice, tokens) -> None:
        """A page is given up, as when another batch fails."""
        member.catalog.drop(self.pending(member)[choice : choice + 1], DropReason.UNAVAILABLE)

    def pending(self, member) -> list[PendingPage]:
        """The pending pages."""
        return list(member.catalog._pending.values())

    def known(self, member):
        """What is stored."""
        with member.backend.view() as view:
            return [Page.stored(key, record, usage) for key, record, usage in view.scan()]

    def suspect(self, member, choice, tokens) -> None:
        """A restore takes a page for damaged, though it is not."""
        pages = self.known(member)
        if pages and choice == 3:
            member.catalog.mark_damaged(pages[-1])

    def others(self, member, choice, tokens) -> None:
        """The other engines commit what they have, unless they would wait for this one."""
        if member.is_updating:
            return
        for other in self.members:
            if other is not member:
                batch, other.waiting = other.waiting, []
                self.elsewhere(other.engine.commit, batch)

    def fail(self, member, choice, tokens) -> None:
        if member.is_updating:
            raise UnavailableError("the location does not answer")

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def what_is_stored_is_whole(self):
        if not hasattr(self, "members"):
            return
        problems = self.members[0].engine.check()
        assert problems == [], list(map(str, problems))

    @rule(which=engines, tokens=prompts)
    def look(self, which, tokens=()):
        """What an engine knows is what is stored, and what is pending; and a prompt finds all of its pages."""
        member = self.members[which]
        found = {page.key for page in member.engine.match(NS, as_tokens(list(tokens)), P).pages}
        assert_true(member.engine)
        with member.backend.view() as view:
            stored = {
                key
                for key, _, usage in view.scan()
                # that others have used a page is announced from time to time only
                if usage.pinned or not usage.expires or usage.expires > time.time_ns() + TTL * 0.5e9
            }
        waiting = member.catalog._pending
        pending = {key for key, new in waiting.items() if not new.page.has_expired(time.time_ns())}
        # what was taken for damaged is hidden until the next commit
        if not member.catalog._deferred.damaged:
            wanted = itertools.takewhile((stored | pending).__contains__, page_keys(NS, as_tokens(list(tokens)), P))
            assert found >= set(wanted)

    def look_at_all(self, which):
        """Once an engine has read everything, it knows all that is stored, and what is pending."""
        member = self.members[which]
        self.look(which)
        known, pending = known_keys(member.engine), set(member.catalog._pending)
        with member.backend.view() as view:
            stored = {key for key, _, _ in view.scan()}
        # what waits, and follows a page that is gone, is not found
        assert stored <= known <= stored | pending


def interleave(machine, examples, steps=30):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )


@pytest.mark.attack
@pytest.mark.parametrize(("scheme", "examples"), [("lmdb", 60), ("sqlite", 20), ("postgresql", 3)])
def test_engines_whose_steps_are_interleaved_leave_a_sound_store(scheme, examples, request):
    class Here(Interleaving):
        def location(self, directory):
            return place(scheme, directory, request)

    interleave(Here, examples * TORTURE)
