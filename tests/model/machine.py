"""What users and accidents do to a store, in random order; `Reference` judges each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.attacks.power import MODES
from tests.model.driver import CLOCK, Store, contents_of_export, driven_time
from tests.model.process import Disks, Process
from tests.model.reference import (
    LARGE,
    SECOND,
    TTL,
    Facts,
    Limits,
    Page,
    Reference,
    Space,
    continues,
    longest,
    pages_of,
    promise,
    shared,
)

Job: TypeAlias = tuple[Space, tuple[int, ...]]

SPACES = [Space("a", "one"), Space("a", "two"), Space("b", "one"), Space("recurrent", "two")]
# many begin alike
FEW = [(0,) * 4, (0,) * 6, (0,) * 8, (0,) * 11, (0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1, 1), (1,) * 7, (LARGE,) * 9]
LIMITS = {
    "none": Limits(),
    "entries": Limits(entries=8),
    "bytes": Limits(n_bytes=1 << 20),
    "quotas": Limits(quota=90_000),
}


class Like(NamedTuple):
    """A prompt that begins as a stored page does: without its last tokens, and with others after it."""

    which: int
    without: int
    more: tuple[int, ...]


# in the middle of what another process is killed
KILLED = ("capture", "evict", "clear", "rebuild")

spaces = st.sampled_from(SPACES)
tails = st.lists(st.integers(0, 1), max_size=5).map(tuple)
jobs = st.tuples(spaces, st.sampled_from(FEW) | st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple))
prompts = st.builds(Like, st.integers(0, 40), st.integers(0, 3), tails) | jobs
works = st.lists(prompts, min_size=1, max_size=4)
stores = st.integers(0, 2)


class Place(NamedTuple):
    """Where the stores of a machine are.

    Attributes
    ----------
    locations
        Called for each example; returns what makes the locations of each of its stores, given its number.
    is_shared
        Whether they are the same for all stores.
    process
        Makes a process for another store; None if only this process can use the location.
    disks
        Makes the disks whose power fails; then there is only the store in the other process.
    limits, policy
        Those of `Machine.open`, if they are not to be drawn.
    """

    locations: Callable[[], Callable[[int], list[str]]]
    is_shared: bool = True
    process: Callable[[], Process] | None = None
    disks: Callable[[], Disks] | None = None
    limits: str = ""
    policy: str = ""


class Machine(RuleBasedStateMachine):
    """Up to three stores at one place: two in this process, and one in another, each with options of its own."""

    place: Place
    n_examples = 0

    @initialize(
        limits=st.sampled_from(list(LIMITS)),
        policy=st.sampled_from(["lru", "priority", "adaptive", "lfu"]),
        codec=st.sampled_from(["raw", "planes", "auto"]),
    )
    def open(self, limits: str, policy: str, codec: str) -> None:
        Machine.n_examples += 1
        self.limits, self.policy = LIMITS[self.place.limits or limits], self.place.policy or policy
        common = {
            "max_bytes": self.limits.n_bytes,
            "max_entries": self.limits.entries,
            "policy": self.policy,
            "codec": codec,
            "quota": self.limits.quota,
            "queue_bytes": 4 << 20,
        }
        self.options = [
            common | {"write_behind": True},
            common | {"write_behind": False, "ttl": TTL / SECOND, "priority": 1},
            common | {"write_behind": True, "ttl": TTL / SECOND, "priority": -1},
        ]
        self.disks = self.place.disks() if self.place.disks is not None else None
        self.locations = self.place.locations()
        self.process = self.place.process() if self.place.process is not None else None
        self.numbers = [2] if self.disks is not None else [0, 1, 2] if self.process is not None else [0, 1]
        self.stores = [self.start(number) for number in self.numbers]
        self.model = Reference(self.limits)
        self.expected: dict[str, Any] = {}
        self.exported: tuple[bytes, dict[Page, Facts]] | None = None

    def start(self, number: int) -> Any:
        if number < 2:
            return Store(self.locations(number), self.options[number])
        journal = self.disks.journal if self.disks is not None else None
        locations = [
            each.format(root=self.disks.root) if self.disks is not None else each for each in self.locations(2)
        ]
        self.process.open(locations, self.options[2], journal)
        return self.process

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            # after a failure it may be beyond use
            with suppress(Exception):
                store.close()

    def job(self, prompt: Job | Like) -> Job:
        if not isinstance(prompt, Like):
            return prompt
        pages = sorted(self.model.stored)
        if not pages:
            return SPACES[0], (0, *prompt.more)
        page = pages[prompt.which % len(pages)]
        return page.space, page.tokens[: max(len(page.tokens) - prompt.without, 1)] + prompt.more

    def jobs(self, work: Iterable[Job | Like]) -> list[Job]:
        return [self.job(prompt) for prompt in work]

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def what_is_stored_is_legal(self) -> None:
        self.looks = [store.look() for store in (self.stores[:1] if self.place.is_shared else self.stores)]
        seen = _together([pages for look in self.looks for pages, _ in look])
        # the number of pages is limited in the nearest location only
        places = [
            (pages, used if i == 0 else used._replace(entries=0))
            for look in self.looks
            for i, (pages, used) in enumerate(look)
        ]
        self.used = self.looks[0][0][1]
        expected, self.expected = self.expected, {}
        self.model.settle(seen, places, CLOCK.now, **expected)

    @invariant()
    def stores_find_nothing_wrong(self) -> None:
        problems = self.stores[0].problems()
        promise(problems == [], "a store finds nothing wrong with itself:", problems)

    # -- prompts ------------------------------------------------------------------------------------------------------

    @rule(who=stores, prompt=prompts)
    def match(self, who: int, prompt: Job | Like) -> None:
        who, (space, tokens) = who % len(self.stores), self.job(prompt)
        self.judge(who, space, tokens, self.stores[who].match(space, tokens))

    def judge(self, who: int, space: Space, tokens: tuple[int, ...], n: int) -> None:
        here = self.looks[0 if self.place.is_shared else who]
        self.model.found(who, space, tokens, n, CLOCK.now, [pages for pages, _ in here])

    @rule(who=stores, prompt=prompts)
    def restore(self, who: int, prompt: Job | Like) -> None:
        who, (space, tokens) = who % len(self.stores), self.job(prompt)
        n, states = self.stores[who].restore(space, tokens)
        self.judge(who, space, tokens, n)
        self.model.restored(space, tokens, n, states)
        used = {one for page, _ in states for one in page.lineage}
        self.model.used(used, CLOCK.now)
        reached = max((len(page.tokens) for page, _ in states), default=0)
        promise(reached >= n or self.model.damaged, "what is found is restored:", reached, n)
        self.stores[who].settle()
        if reached >= n and "ttl" in self.options[self.numbers[who]]:
            self.expected["renewed"] = used
        if not self.place.is_shared and self.limits != LIMITS["none"]:
            # what comes from the far location is kept in the near one, which makes space for it
            self.expected["evicts"] = lambda page: True

    @rule(who=stores)
    def restore_all(self, who: int) -> None:
        for page in sorted(self.model.stored):
            self.restore(who, (page.space, page.tokens))
            self.what_is_stored_is_legal()

    # -- capturing ----------------------------------------------------------------------------------------------------

    @rule(who=stores, work=works)
    def capture(self, who: int, work: list[Job | Like]) -> None:
        who, wanted = who % len(self.stores), self.jobs(work)
        self.took(who, self.stores[who].capture(*wanted), wanted)
        # with quotas, a tenant evicts its own pages first
        self.expected["in_order"] = self.policy == "priority" and self.limits != LIMITS["quotas"] and len(work) == 1

    @rule(who=stores, prompt=prompts)
    def complete(self, who: int, prompt: Job | Like) -> None:
        """What a completion does: restore what is stored of a prompt, and capture all of it."""
        job = self.job(prompt)
        self.restore(who, job)
        self.what_is_stored_is_legal()
        self.capture(who, [job])

    def took(self, who: int, taken: Collection[Page], work: list[Job], *, alone: bool = True) -> None:
        """A store has taken these pages of some sequences: they have to be stored, unless there is too little space."""
        wanted = {page for space, tokens in work for page in pages_of(space, tokens)}
        here = {*self.model.stored, *taken}
        self.model.captured(who, taken, CLOCK.now, mortal="ttl" in self.options[self.numbers[who]])
        self.model.used(wanted, CLOCK.now)
        if self.limits == LIMITS["quotas"]:
            self.expected["evicts"] = lambda page: page.space.tenant in {space.tenant for space, _ in work}
        elif self.limits.n_bytes < Limits().n_bytes or len(here | wanted) > (self.limits.entries or 1 << 20):
            self.expected["evicts"] = lambda page: True
        elif alone:
            missing = {page for page in wanted - here if not any(continues(one, page) for one in here)}
            promise(not missing or self.model.damaged, "what is missing is captured:", missing)
            self.expected["must"] = taken

    @precondition(lambda self: len(self.stores) > 2)
    @rule(who=st.integers(0, 1), mine=works, others=works)
    def race(self, who: int, mine: list[Job | Like], others: list[Job | Like]) -> None:
        """Two processes write, and evict, at the same time."""
        here, there = self.jobs(mine), self.jobs(others)
        self.process.begin("capture", *there)
        taken = self.stores[who].capture(*here)
        self.took(2, self.process.end(), [*here, *there], alone=False)
        self.took(who, taken, [*here, *there], alone=False)

    @precondition(lambda self: len(self.stores) > 2)
    @rule(work=works, after=st.integers(0, 150), what=st.sampled_from(KILLED))
    def kill(self, work: list[Job | Like], after: int, what: str = "capture") -> None:
        """The other process is killed in the middle of something, or after it."""
        what = what if self.place.is_shared else "capture"
        wanted = self.jobs(work)
        space = wanted[0][0]
        self.process.fail("dies", after, 0)
        self.process.begin(what, *{"capture": wanted, "evict": [0], "clear": [space], "rebuild": []}[what])
        self.has_died = False
        try:
            self.process.end()
        except (EOFError, ConnectionResetError):
            self.has_died = True
        self.process.kill()
        self.stores[0].wait_for_the_dead()
        if what == "capture":
            pages = {page for space, tokens in wanted for page in pages_of(space, tokens)}
            self.took(2, pages, wanted, alone=False)
        elif what == "evict":
            self.expected["evicts"] = lambda page: True
        elif what == "clear":
            self.expected["may_go"] = {page for page in self.model.stored if page.space == space}
        self.process = self.place.process()
        self.stores[2] = self.start(2)

    # -- users and operators ------------------------------------------------------------------------------------------

    @rule(who=stores, prompt=prompts, pinned=st.booleans())
    def pin(self, who: int, prompt: Job | Like, pinned: bool) -> None:
        space, tokens = self.job(prompt)
        n = self.stores[who % len(self.stores)].pin(space, tokens, pinned=pinned)
        stored = {page for page in self.model.stored if page.space == space}
        along = {page for page in stored if shared(page.tokens, tokens) > page.start}
        along |= {page for page in stored if page.is_snapshot and page.tokens == tokens[: len(page.tokens)]}
        self.expected["pins"] = along
        # without a snapshot, pages that hold tokens only
        expected = longest(space, tokens, stored) or max(
            (shared(page.tokens, tokens) for page in stored if not page.is_snapshot), default=0
        )
        # of two locations, one may lack it
        is_known = self.place.is_shared and not self.model.damaged
        promise(n == expected or not is_known, "the longest stored prefix is pinned, or unpinned:", n, expected)

    @rule(who=stores, share=st.sampled_from([0.0, 0.5, 0.9]))
    def evict(self, who: int, share: float) -> None:
        store = self.stores[who % len(self.stores)]
        is_enough = store.evict(round(self.used.n_bytes * share))
        left = store.look()[0][0]
        needed = {one for page, facts in left.items() if facts.pinned for one in page.lineage}
        promise(is_enough or left.keys() <= needed, "all that is not pinned can be evicted:", left.keys() - needed)
        self.expected["evicts"] = lambda page: True

    @rule(who=stores, what=prompts | prompts | spaces | st.sampled_from(["one", "two", None]))
    def delete(self, who: int, what: Job | Like | Space | str | None) -> None:
        """Clear a space, or purge the prompts that begin with some tokens, a tenant, or everything."""
        stored = self.model.stored
        if isinstance(what, Space):
            doomed = {page for page in stored if page.space == what}
            work = lambda store: store.clear(what)  # noqa: E731
        elif isinstance(what, str):
            doomed = {page for page in stored if page.space.tenant == what}
            work = lambda store: store.purge(salt=what)  # noqa: E731
        elif what is None:
            doomed = set(stored)
            work = lambda store: store.purge(everything=True)  # noqa: E731
        else:
            _, tokens = self.job(what)
            doomed = {page for page in stored if page.tokens[: len(tokens)] == tokens}
            # pages that led only to them
            self.expected["may_go"] = {page for page in stored if page.tokens == tokens[: len(page.tokens)]}
            work = lambda store: store.purge(tokens=list(tokens))  # noqa: E731
        # each machine has its own near location
        for store in [self.stores[who % len(self.stores)]] if self.place.is_shared else self.stores:
            work(store)
        self.expected["doomed"] = doomed

    @rule(who=stores)
    def export(self, who: int) -> None:
        """Another store holds the same after an import."""
        store = self.stores[who % len(self.stores)]
        seen, exported = store.look()[-1][0], store.export()
        whole = {page for page in seen if not any(one in self.model.damaged for one in page.lineage)}
        found = contents_of_export(exported)
        promise(found.keys() == whole, "an export has everything:", found.keys() ^ whole)
        promise(all(found[page] == seen[page] for page in found), "an imported page is the same")
        self.exported = exported, found

    @precondition(lambda self: self.exported is not None and self.limits == LIMITS["none"])
    @rule(who=stores)
    def import_(self, who: int) -> None:
        exported, pages = self.exported
        self.stores[who % len(self.stores)].import_(exported)
        self.model.used(pages, CLOCK.now)
        self.expected = {"imported": pages, "must": pages}

    @rule(who=stores, work=works)
    def reopen(self, who: int, work: list[Job | Like]) -> None:
        who, wanted = who % len(self.stores), self.jobs(work)
        self.took(who, self.stores[who].reopen(*wanted), wanted)

    @rule(who=stores)
    def flush(self, who: int) -> None:
        promise(self.stores[who % len(self.stores)].flush(), "a flush succeeds")
        self.what_is_stored_is_legal()
        self.model.flush()

    @rule(seconds=st.sampled_from([1, 50, 61]))
    def wait(self, seconds: int) -> None:
        CLOCK.now += seconds * SECOND

    # -- accidents ----------------------------------------------------------------------------------------------------

    @rule(
        who=stores,
        kind=st.sampled_from(["down", "full"]),
        after=st.integers(0, 20),
        where=st.integers(0, 1),
        work=works,
    )
    def fail(self, who: int, kind: str, after: int, where: int, work: list[Job | Like]) -> None:
        """A location fails for a while: all that is lost is what was to be written meanwhile."""
        who, wanted = who % len(self.stores), self.jobs(work)
        store = self.stores[who]
        store.fail(kind, after, where)
        taken = set(store.capture(*wanted))
        for space, tokens in wanted:
            found = store.restore(space, tokens)
            if found is not None:
                self.model.restored(space, tokens, *found)
        taken.update(store.capture(*wanted))
        store.flush()
        store.heal()
        self.took(who, taken, wanted, alone=False)
        if kind == "full":
            self.expected["evicts"] = lambda page: True
        self.what_is_stored_is_legal()
        self.capture(who, wanted)

    @precondition(lambda self: len(self.stores) > 1)
    @rule(work=works, others=works, deleted=st.none() | spaces)
    def hang(self, work: list[Job | Like], others: list[Job | Like], deleted: Space | None) -> None:
        """Writers of the first store have to wait. It finds what it has captured, and the other store goes on."""
        wanted, first = self.jobs(work), self.stores[0]
        first.fail("hangs", 0, 0)
        self.model.holding.add(0)
        taken = first.capture(*wanted)
        self.took(0, taken, wanted)
        # not those that continue a page which may be deleted meanwhile
        mortal = {page for page, facts in self.model.stored.items() if facts.expires}
        must = {page for page in self.expected.pop("must", ()) if deleted is None and mortal.isdisjoint(page.lineage)}
        self.what_is_stored_is_legal()
        for space, tokens in wanted:
            self.judge(0, space, tokens, first.match(space, tokens))
            self.model.restored(space, tokens, *first.restore(space, tokens))
        first.settle()
        self.capture(1, others)
        self.what_is_stored_is_legal()
        if deleted is not None and self.place.is_shared:
            self.delete(1, deleted)
            self.what_is_stored_is_legal()
        first.heal()
        self.model.holding.clear()
        self.took(0, taken, wanted, alone=False)
        self.expected["must"] = must if "evicts" not in self.expected else ()

    @rule(who=stores)
    def rebuild(self, who: int) -> None:
        self.stores[who % len(self.stores)].rebuild()

    @precondition(lambda self: self.disks is None)
    @rule(which=st.integers(0, 100))
    def damage(self, which: int) -> None:
        pages = sorted(page for page in self.model.stored if page.state)
        if pages:
            self.model.damaged.add(pages[which % len(pages)])
            self.stores[0].damage(pages[which % len(pages)])

    @precondition(lambda self: self.disks is not None)
    @rule(moment=st.floats(0, 1), mode=st.sampled_from(MODES), seed=st.integers(0, 9))
    def lose_power(self, moment: float, mode: str, seed: int) -> None:
        self.disks.lose_power(self.process, moment, mode, seed)
        self.stores = [self.start(2)]
        self.model.lose_power(self.stores[0].look()[0][0])


def _together(looks: list[dict[Page, Facts]]) -> dict[Page, Facts]:
    """What several locations have: a page is pinned if it is in one of them, and lives as long as in any."""
    found: dict[Page, Facts] = {}
    for pages in looks:
        for page, facts in pages.items():
            other = found.get(page, facts)
            expires = max(facts.expires, other.expires) if facts.expires and other.expires else 0
            found[page] = facts._replace(
                pinned=facts.pinned or other.pinned, expires=expires, is_whole=facts.is_whole and other.is_whole
            )
    return found


def run(place: Place, examples: int, steps: int = 30, **options: Any) -> None:
    """Drive stores at a place through so many examples."""
    machine = type("At", (Machine,), {"place": place})
    bounds = settings(max_examples=examples, stateful_step_count=steps, deadline=None, **options)
    with driven_time():
        run_state_machine_as_test(machine, settings=bounds)


def play(place: Place, steps: Iterable[tuple[Any, ...]]) -> None:
    """Take given steps: each the name of a rule, and its arguments."""
    machine = type("At", (Machine,), {"place": place})()
    with driven_time():
        try:
            for name, *arguments in [("open", "none", "lru", "raw"), *steps]:
                getattr(machine, name)(*arguments)
                machine.what_is_stored_is_legal()
                machine.stores_find_nothing_wrong()
        finally:
            machine.teardown()


def kill_everywhere(place: Place, step: int) -> int:
    """Kill the other process at every so-many-th moment of each thing that it does; how often it died."""
    machine, n_deaths = type("At", (Machine,), {"place": place})(), 0
    with driven_time():
        try:
            machine.open("none", "lru", "raw")
            for what in KILLED:
                for after in itertools.count(0, step):
                    for act in (
                        # something to evict, to clear and to build again
                        lambda: machine.capture(0, [(SPACES[0], (0,) * 6), (SPACES[1], (1,) * 9)]),
                        lambda after=after, what=what: machine.kill([(SPACES[0], (0, 0, after))], after, what),
                    ):
                        act()
                        machine.what_is_stored_is_legal()
                        machine.stores_find_nothing_wrong()
                    if not machine.has_died:
                        break
                    n_deaths += 1
        finally:
            machine.teardown()
    return n_deaths
