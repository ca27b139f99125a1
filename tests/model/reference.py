"""What a store promises, said with plain dictionaries.

The model does not predict which pages are evicted, nor in which order processes write. After each step it is told what
the location holds (`Reference.settle`), and judges whether that step may have led there. What lookups and restores
find follows from what is stored, to the token and to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

P = 4  # tokens in a page
SECOND = 10**9
TTL = 60 * SECOND
SIZES = (16, 900, 5000)
# a page with this token is large, so that a small budget is soon used up
LARGE = 9


class Space(NamedTuple):
    """Whose pages they are: nothing of one space is ever found in another."""

    model: str
    tenant: str

    @property
    def has_snapshots(self) -> bool:
        """Whether the memory of this model cannot step back: it is resumed from snapshots, and pages have no state."""
        return self.model == "recurrent"


class Page(NamedTuple):
    """A page or snapshot, by all tokens from the start of the sequence up to its end."""

    space: Space
    tokens: tuple[int, ...]
    is_snapshot: bool = False

    @property
    def start(self) -> int:
        n = len(self.tokens)
        return n - n % P if self.is_snapshot else (n - 1) // P * P

    @property
    def parent(self) -> Page | None:
        return Page(self.space, self.tokens[: self.start]) if self.start else None

    @property
    def lineage(self) -> list[Page]:
        """The page, and those before it in its sequence."""
        return [self, *(self.parent.lineage if self.parent is not None else ())]

    @property
    def state(self) -> bytes:
        """What is computed for the page: the same whenever it is."""
        if self.space.has_snapshots and not self.is_snapshot:
            return b""
        stream = hashlib.shake_128(repr(self).encode())
        size = SIZES[stream.digest(1)[0] % len(SIZES)] * (20 if LARGE in self.tokens[self.start :] else 1)
        # half of it can be compressed
        return stream.digest(size // 2) * 2


class Facts(NamedTuple):
    """What the location says about a page. `is_whole`: its bytes are the computed ones."""

    n_bytes: int
    is_whole: bool
    pinned: bool
    priority: int
    expires: int


class Used(NamedTuple):
    """The size of one location."""

    n_bytes: int
    entries: int


class Limits(NamedTuple):
    """What a location may hold, and each tenant in it."""

    n_bytes: int = 64 << 20
    entries: int | None = None
    quota: int | None = None


def promise(holds: object, what: str, *about: object) -> None:
    if not holds:
        raise AssertionError(" ".join([what, *map(str, about)]))


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def pages_of(space: Space, tokens: tuple[int, ...]) -> list[Page]:
    """The pages that a capture of a sequence consists of, parents first: the last is a tail, or a snapshot."""
    n = len(tokens)
    if space.has_snapshots:
        return [*(Page(space, tokens[:end]) for end in range(P, n + 1, P)), Page(space, tokens, is_snapshot=True)]
    return [Page(space, tokens[: min(end, n)]) for end in range(P, n + P, P)]


def longest(space: Space, tokens: tuple[int, ...], pages: Iterable[Page]) -> int:
    """The longest prefix of `tokens` that can be resumed: to the token, or where there is a snapshot."""
    if space.has_snapshots:
        wanted = (page for page in pages if page.is_snapshot and tokens[: len(page.tokens)] == page.tokens)
        return max((len(page.tokens) for page in wanted if page.space == space), default=0)
    return max((shared(page.tokens, tokens) for page in pages if page.space == space), default=0)


def continues(page: Page, tail: Page) -> bool:
    """Whether `page` takes the place of a tail: it holds the same tokens and more."""
    is_longer = page.start == tail.start and len(page.tokens) > len(tail.tokens)
    both = not page.is_snapshot and not tail.is_snapshot and page.space == tail.space
    return both and is_longer and page.tokens[: len(tail.tokens)] == tail.tokens


class Reference:
    """What is stored, as far as it was seen, and what may happen to it.

    Attributes
    ----------
    stored
        The pages of the location when it was last looked at.
    waiting
        What each store has captured, and what has not been seen in the location since.
    holding
        Stores whose writers have to wait.
    pinned, damaged
        Pages that were pinned, and whose bytes were changed behind the back of the store.
    mortal
        Whether a page was captured by stores with a time to live only.
    used_at
        When a page was last captured or restored.
    flushed
        Pages that were there at the last flush, and ever since.
    since
        Pages that were there, or were captured, at some time since the last flush.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.stored: dict[Page, Facts] = {}
        self.waiting: dict[int, set[Page]] = {}
        self.holding: set[int] = set()
        self.pinned: set[Page] = set()
        self.damaged: set[Page] = set()
        self.mortal: dict[Page, bool] = {}
        self.used_at: dict[Page, int] = {}
        self.flushed: set[Page] = set()
        self.since: set[Page] = set()

    # -- what lookups and restores find -------------------------------------------------------------------------------

    def found(
        self,
        who: int,
        space: Space,
        tokens: tuple[int, ...],
        n: int,
        now: int,
        here: Sequence[Mapping[Page, Facts]],
    ) -> None:
        """Judge that a store, with these pages in each of its locations, has found the first `n` tokens."""
        here = [{page: facts for page, facts in pages.items() if page.space == space} for pages in here]
        waiting = {page for page in self.waiting.get(who, ()) if page.space == space}
        known = waiting.union(*here)
        alive = {page for page in known if not any(self.has_expired(one, now) for one in page.lineage)}
        promise(
            n <= longest(space, tokens, alive), "a lookup finds only what is stored, in its own space, and alive:", n
        )
        certain = {
            page
            for pages in here
            for page in (*pages, *waiting)
            if all(self.is_certain(one, pages[one], now) if one in pages else one in waiting for one in page.lineage)
        }
        if certain != known and not space.has_snapshots:
            # which of several siblings is found may depend on one that is not certain
            certain = {
                page for page in certain if len(page.tokens) % P == 0 and page.tokens == tokens[: len(page.tokens)]
            }
        promise(n >= longest(space, tokens, certain), "a lookup finds the longest stored prefix:", n, "of", tokens)

    def has_expired(self, page: Page, now: int) -> bool:
        """Whether nobody may have kept a page alive."""
        facts = self.stored.get(page)
        if facts is None or facts.pinned or not facts.expires:
            return False
        return max(facts.expires, self.used_at[page] + TTL) <= now

    def is_certain(self, page: Page, facts: Facts, now: int) -> bool:
        """Whether each lookup has to find a page of which a location has these facts. It may learn late of a use."""
        return page not in self.damaged and (facts.pinned or not facts.expires or facts.expires - TTL // 4 > now)

    def restored(self, space: Space, tokens: tuple[int, ...], n: int, states: Sequence[tuple[Page, bytes]]) -> None:
        """Judge what a restore has given for the first `n` tokens of a prompt."""
        for page, state in states:
            promise(page.space == space, "a restore gives pages of its own space:", page)
            promise(
                shared(page.tokens, tokens) >= min(n, len(page.tokens)), "a restore gives pages of its tokens:", page
            )
            promise(state == page.state, "a restore gives the state bit for bit:", page)

    # -- what is stored -----------------------------------------------------------------------------------------------

    def captured(self, who: int, pages: Iterable[Page], now: int, *, mortal: bool) -> None:
        """A store has taken these pages."""
        for page in pages:
            self.waiting.setdefault(who, set()).add(page)
            # a tail may be stored, and replaced at once by what goes on with it
            self.since.add(page)
            self.used_at[page] = now
            self.mortal[page] = mortal and self.mortal.get(page, True)

    def used(self, pages: Iterable[Page], now: int) -> None:
        for page in pages:
            self.used_at[page] = now

    def settle(
        self,
        seen: Mapping[Page, Facts],
        places: Sequence[tuple[Mapping[Page, Facts], Used]],
        now: int,
        *,
        must: Collection[Page] = (),
        doomed: Collection[Page] = (),
        may_go: Collection[Page] = (),
        evicts: Callable[[Page], bool] = lambda page: False,
        pins: Collection[Page] | None = None,
        imported: Mapping[Page, Facts] | None = None,
        renewed: Collection[Page] = (),
        in_order: bool = False,
    ) -> None:
        """Judge whether a step has led from what was stored to what is seen now.

        Parameters
        ----------
        seen, places
            Everything that is stored, and what each location holds of it.
        must, doomed
            Pages that the step has to have stored, and deleted.
        may_go
            Pages that it may have deleted.
        evicts
            Which pages it may have evicted.
        pins
            Pages along which it has pinned or unpinned; None if that is not what it does.
        imported
            Pages that it has imported.
        renewed
            Pages that a store with a time to live has used, and has written that.
        in_order
            Whether evictions have to be in the order of the priorities.
        """
        imported = imported or {}
        expected = {*self.stored, *imported, *(page for pages in self.waiting.values() for page in pages)}
        gone = self.stored.keys() - seen.keys()
        evicted = set()
        for page in seen:
            promise(page in expected, "nothing is stored that was not captured:", page)
            promise(page.parent is None or page.parent in seen, "parents outlive their children:", page)
        for page in gone:
            facts = self.stored[page]
            has_expired = not facts.pinned and 0 < facts.expires <= now
            is_damaged = any(one in self.damaged for one in page.lineage)
            if not (page in doomed or page in may_go or has_expired or is_damaged or self._is_covered(page, seen)):
                promise(page not in self.pinned, "what is pinned stays:", page)
                promise(evicts(page), "nothing is evicted without need:", page)
                evicted.add(page)
        for page in must:
            is_lost = not self.damaged.isdisjoint(page.lineage)
            promise(is_lost or page in seen or self._is_covered(page, seen), "what was captured is stored:", page)
            # of two locations, the far one has it, too, unless a damaged or mortal page that goes now stood in for it
            if not self.damaged and not any(facts.expires for facts in self.stored.values()):
                far = places[-1][0]
                promise(page in far or self._is_covered(page, far), "what was captured is stored far away:", page)
        for page in doomed:
            promise(page not in seen, "what is deleted is gone:", page)
        self._judge_pins(seen, pins, {page for page in imported if imported[page].pinned and page not in self.stored})
        self._judge_facts(seen, imported)
        for page in renewed:
            is_late = page in seen and 0 < seen[page].expires < self.used_at[page] + TTL - SECOND
            promise(not is_late, "a use renews the time to live:", page)
        for pages, used in places:
            self._judge_limits(pages, used)
        if in_order:
            self._judge_order(seen, evicted)
        self._remember(seen)

    def _is_covered(self, page: Page, seen: Mapping[Page, Facts]) -> bool:
        """Whether a page that holds its tokens, and more, has taken its place, and its pin."""
        return any(continues(one, page) and (seen[one].pinned or page not in self.pinned) for one in seen)

    def _judge_pins(self, seen: Mapping[Page, Facts], along: Collection[Page] | None, new: set[Page]) -> None:
        now = {page for page in seen if seen[page].pinned}
        if along is not None:
            promise(
                now ^ self.pinned <= set(along), "only the prefix is pinned, or unpinned:", now ^ self.pinned, along
            )
            return
        before = {page for page in (*self.pinned, *new) if page in seen}
        for page in before - now:
            promise(not self.damaged.isdisjoint(page.lineage), "pins are kept:", page)
        for page in now - before:
            promise(any(continues(page, tail) for tail in (*self.pinned, *new)), "nothing pins itself:", page)

    def _judge_facts(self, seen: Mapping[Page, Facts], imported: Mapping[Page, Facts]) -> None:
        immortal = {page.parent for page, facts in seen.items() if not facts.expires or facts.pinned}
        for page, facts in seen.items():
            promise(facts.is_whole or page in self.damaged, "what is stored is what was captured:", page)
            if facts.expires and not facts.pinned:
                until = seen[page.parent].expires if page.parent is not None else 0
                promise(not until or seen[page.parent].pinned or until >= facts.expires, "parents expire last:", page)  # type: ignore[index]
            elif page not in self.stored and page not in imported and page not in immortal and not facts.pinned:
                promise(not self.mortal.get(page), "pages of a store with a time to live expire:", page)

    def _judge_limits(self, pages: Mapping[Page, Facts], used: Used) -> None:
        limits = self.limits
        promise(used.n_bytes <= limits.n_bytes, "the budget is kept:", used, limits)
        promise(limits.entries is None or used.entries <= limits.entries, "the budget is kept:", used, limits)
        sizes: dict[object, int] = {}
        for page, facts in pages.items():
            sizes[page.space.tenant] = sizes.get(page.space.tenant, 0) + facts.n_bytes
        for tenant, size in sizes.items():
            promise(limits.quota is None or size <= limits.quota, "quotas are kept:", tenant, size, limits)

    def _judge_order(self, seen: Mapping[Page, Facts], evicted: Collection[Page]) -> None:
        left = self._leaves(self.stored) & self._leaves(seen)
        kept = [self.stored[page].priority for page in left if not seen[page].pinned]
        for page in evicted:
            lowest = min(kept, default=self.stored[page].priority)
            promise(self.stored[page].priority <= lowest, "the lowest priority is evicted first:", page)

    @staticmethod
    def _leaves(pages: Mapping[Page, Facts]) -> set[Page]:
        return pages.keys() - {page.parent for page in pages}

    def _remember(self, seen: Mapping[Page, Facts]) -> None:
        self.stored = dict(seen)
        self.waiting = {who: pages - seen.keys() for who, pages in self.waiting.items() if who in self.holding}
        self.pinned = {page for page, facts in seen.items() if facts.pinned}
        self.damaged = {page for page, facts in seen.items() if not facts.is_whole}
        self.flushed &= seen.keys()
        self.since |= seen.keys()
        self.mortal = {page: is_mortal for page, is_mortal in self.mortal.items() if page in seen}

    # -- durability ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Everything that is stored is durable from now on."""
        self.flushed = set(self.stored)
        self.since = set(self.stored)

    def lose_power(self, seen: Mapping[Page, Facts]) -> None:
        """Judge what is left: at least what was flushed, at most what was ever there since."""
        promise(self.flushed <= seen.keys(), "what was flushed survives a loss of power:", self.flushed - seen.keys())
        promise(seen.keys() <= self.since, "nothing comes back from before the last flush:", seen.keys() - self.since)
        promise(all(facts.is_whole for facts in seen.values()), "what survives is whole")
        promise(all(page.parent is None or page.parent in seen for page in seen), "a state survives as a whole")
        self.stored, self.pinned = dict(seen), {page for page, facts in seen.items() if facts.pinned}
        self.waiting.clear()
        self.flush()
