"""What every location promises of pages, as test classes: what `prefixstore.engine.pages` says.

What does not depend on pages (commits, forks, threads, what a view sees) is tested of rows, in
`prefixstore.testing.contract`.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from heapq import nsmallest
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixstore.backends.encrypted_rows import EncryptedView
from prefixstore.engine.facts import FACTS
from prefixstore.engine.index import shared_tokens
from prefixstore.engine.keyspace import record_row
from prefixstore.engine.page_checks import flaws
from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import View, path_of, tokens_of
from prefixstore.engine.pages import Pages
from prefixstore.engine.trie import Entry
from prefixstore.errors import StorageError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, TOKEN_BYTES, as_tokens
from prefixstore.format.record import Record, Usage
from tests.support.pages import NAMESPACE, make_page

__all__ = ["PagesContract"]

SETTINGS = b'{"label":"contract"}'
OTHER = bytes(reversed(NAMESPACE))
MISSING = bytes(KEY_BYTES)


class Rollback(Exception):  # noqa: N818 - not an error
    """Raised on purpose inside a transaction."""


def payload_of(seed: int, size: int) -> bytes:
    """Bytes that occur nowhere else."""
    return np.random.default_rng(seed).bytes(size)


def put(transaction: Transaction, number: int, payload: bytes | None = None) -> bytes:
    """Put the first page number `number`, and return its key."""
    payload = payload_of(number, 100 + number % 50) if payload is None else payload
    key, record = make_page(payload, [number, number + 1])
    transaction.put_namespace(NAMESPACE, SETTINGS)
    transaction.put(key, record, Usage(1), payload)
    return key


def stored(backend: Pages) -> dict[bytes, tuple[Record | StorageError, Usage, bytes]]:
    """All that a location holds."""
    with backend.view() as view:
        return {key: (record, usage, bytes(view.payload(key) or b"")) for key, record, usage in view.scan()}


def _sizes(view: View) -> tuple[int, int]:
    """What `View.sizes` has to be."""
    records = [record for _, record, _ in view.scan() if isinstance(record, Record)]
    return sum(record.stored_bytes for record in records), sum(record.raw_bytes for record in records)


def shared_with(tokens: bytes) -> Callable[[Entry], int]:
    """How many tokens a page has in common with these, from the first on."""
    return lambda entry: shared_tokens(tokens_of(entry), tokens)


def _page_at(parent: bytes, tokens: bytes) -> Entry:
    key, record = make_page(b"", np.frombuffer(tokens, "<i4").tolist(), parent=parent)
    return Entry(key, record, Usage(1))


def _facts_of(entry: Entry) -> tuple[object, ...]:
    """The values of `FACTS` for one page."""
    key, record, usage = entry
    if not isinstance(record, Record):
        return key, b"", b"", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, False, False
    return (
        key,
        record.parent,
        record.namespace,
        record.raw_bytes,
        record.stored_bytes,
        record.created,
        usage.last_used,
        usage.expires,
        record.start,
        len(record.tokens) // TOKEN_BYTES,
        min(record.compute_us, 2**32 - 1),
        min(usage.hits, 2**32 - 1),
        usage.priority,
        record.form,
        usage.pinned,
        True,
    )


class _Scanned:
    """What a view has to answer, found by reading all pages."""

    def __init__(self, view: View) -> None:
        self._entries = [Entry(*each) for each in view.scan()]
        # where rows are; an encrypted location has names of its own for them
        self._place = view.rows._cipher.stored_key if isinstance(view.rows, EncryptedView) else bytes

    def place(self, entry: Entry) -> list[bytes]:
        """Where a page is among its siblings."""
        assert isinstance(entry.record, Record)
        return list(map(self._place, path_of(entry.record)))

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        found: dict[bytes, list[Entry]] = {parent: [] for parent in parents}
        for entry in self._entries:
            record = entry.record
            if isinstance(record, Record) and record.form == form and record.parent in found:
                found[record.parent].append(entry)
        count = len(self._entries) if at_most is None else at_most
        return [each for siblings in found.values() for each in nsmallest(count, siblings, key=self.place)]

    def require_nearest(self, found: Sequence[Entry], parent: bytes, tokens: bytes) -> None:
        """Check what `View.neighbors` has found."""
        children = self.children([parent], PAGE)
        assert [each for each in children if each in found] == list(found)
        assert len(found) <= 3
        assert max(map(shared_with(tokens), found), default=0) == max(map(shared_with(tokens), children), default=0)
        # those that have all tokens come next, and a page that these continue just before
        for one in (each for each in children if tokens_of(each).startswith(tokens)):
            assert any(tokens_of(each).startswith(tokens) for each in found), one
        at = bisect_right(children, self.place(_page_at(parent, tokens)), key=self.place)
        assert all(one in found for one in children[max(at - 1, 0) : at + 1])

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        wanted, found = set(keys), set[bytes]()
        for _, record, _ in self._entries:
            if not isinstance(record, Record):
                # it may follow any of them
                return wanted
            found |= {record.parent} & wanted
        return found

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        def place(key: bytes) -> bytes:
            return self._place(record_row(key))

        left = (each for each in self._entries if not after or place(each.key) > place(after))
        first = nsmallest(at_most, left, key=lambda each: place(each.key))
        return np.array([_facts_of(each) for each in first], FACTS)


class _Family:
    """Random pages that share beginnings of every length with their siblings.

    Parameters
    ----------
    seed
        Of the random numbers.
    longest
        The most tokens of a page.
    """

    def __init__(self, seed: int, longest: int) -> None:
        self.chance = random.Random(seed)
        self.longest = longest
        # what is stored, by key; namespaces are parents that end at position 0
        self.stored: dict[bytes, Record] = {}
        self.namespaces = [NAMESPACE, OTHER]
        self.seen: list[bytes] = [b""]

    def tokens(self) -> list[int]:
        """Some tokens: others that were chosen before, up to a random place, and then new ones, or none."""
        known = np.frombuffer(self.chance.choice(self.seen), "<i4").tolist()
        shared = known[: self.chance.choice([0, 1, 3, 15, 16, 17, 64, 200, 300, len(known)])]
        more = self.chance.choice([0, 1, 2, 16, 60, 300, 300])
        tokens = (shared + [self.chance.randrange(-3, 3) for _ in range(more)])[: self.longest]
        self.seen.append(as_tokens(tokens).tobytes())
        return list(tokens)

    def page(self) -> tuple[bytes, Record]:
        """A page or a snapshot that may be stored: after a namespace, or after a page that is stored."""
        pages = [key for key, record in self.stored.items() if record.form == PAGE]
        parent = self.chance.choice([*self.namespaces, *self.namespaces, *pages[-3:], *pages[:3]])
        tokens, form = self.tokens(), self.chance.choice([PAGE, PAGE, PAGE, SNAPSHOT])
        before = self.stored.get(parent)
        namespace = parent if before is None else before.namespace
        start = 0 if before is None else before.start + len(before.tokens) // TOKEN_BYTES
        if form == PAGE and not tokens:
            tokens = [7]
        _, record = make_page(payload_of(1, 10), tokens, parent=parent, start=start, namespace=namespace)
        record = replace(record, form=form)
        return record.key, record

    def leaf(self) -> bytes | None:
        """A page without children."""
        parents = {record.parent for record in self.stored.values()}
        leaves = sorted(key for key in self.stored if key not in parents)
        return self.chance.choice(leaves) if leaves else None

    def change(self, transaction: Transaction, n_times: int) -> None:
        """Put and delete pages, in a transaction."""
        for _ in range(n_times):
            leaf = self.leaf() if self.chance.random() < 0.3 else None
            if leaf is not None:
                assert transaction.delete(leaf)
                del self.stored[leaf]
                continue
            key, record = self.page()
            if self.stored and self.chance.random() < 0.1:
                key, record = self.chance.choice(sorted(self.stored.items()))  # once more
            usage = Usage(self.chance.randrange(1, 9), 2, pinned=key[0] % 2 == 0, priority=-5, expires=key[1])
            transaction.put_namespace(record.namespace, SETTINGS)
            transaction.put(key, record, usage, payload_of(1, 10))
            self.stored[key] = record

    def require_agreement(self, view: View) -> None:
        """Compare a view with what is stored, and with what a scan finds."""
        assert list(flaws(view)) == []
        assert view.sizes == _sizes(view)
        scanned = _Scanned(view)
        parents = [*self.namespaces, *self.stored, MISSING]
        self.chance.shuffle(parents)
        for form in (PAGE, SNAPSHOT):
            for at_most in (None, 2):
                assert view.children(parents, form, at_most) == scanned.children(parents, form, at_most)
        assert len(view.children(parents, PAGE)) + len(view.children(parents, SNAPSHOT)) == len(self.stored)
        wanted = self.chance.sample(self.seen, min(len(self.seen), 6))
        for parent in (*self.namespaces, *parents[:3]):
            for tokens in (*wanted, as_tokens(self.tokens()).tobytes(), b"", b"\xff" * 4 * self.longest):
                scanned.require_nearest(view.neighbors(parent, tokens), parent, tokens)
        after, n_facts = b"", 0
        while len(facts := view.facts(after, 7)):
            assert facts.dtype == FACTS
            assert facts.tolist() == scanned.facts(after, 7).tolist()
            after, n_facts = facts["key"][-1].tobytes(), n_facts + len(facts)
        assert n_facts == len(self.stored)
        for asked in (parents, [*parents, *parents[:3]], parents[:1], []):
            assert view.followed(asked) == {record.parent for record in self.stored.values()} & set(asked)
            assert view.followed(asked) == scanned.followed(asked)


class PagesContract:
    """What every location promises of pages. Subclass it and say how to open one."""

    def open_backend(self, tmp_path: Path) -> Pages:
        """A new, empty location with space for at least 64 MiB. Each test gets a directory of its own."""
        raise NotImplementedError

    @contextmanager
    def opened(self, tmp_path: Path) -> Iterator[Pages]:
        """A new location, closed at the end."""
        with closing(self.open_backend(tmp_path)) as backend:
            yield backend

    # -- reading and writing ------------------------------------------------------------------------------------------

    def test_an_empty_location_has_no_pages(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            for opened in (backend.view, backend.update):
                with opened() as view:
                    assert list(view.scan()) == list(view.stored()) == list(flaws(view)) == []
                    assert (dict(view.namespaces()), view.used.entries, view.sizes) == ({}, 0, (0, 0))
                    assert (view.record(MISSING), view.usage(MISSING), view.payload(MISSING)) == (None, None, None)
                    assert view.neighbors(NAMESPACE, b"") == view.children([NAMESPACE], PAGE) == []
                    assert view.children([], PAGE) == view.leading([MISSING]) == view.leading([]) == []
                    assert view.followed([]) == view.followed([NAMESPACE, MISSING]) == set()
                    assert len(view.facts(b"", 10)) == 0

    def test_a_page_that_was_put_is_read_back_unchanged(self, tmp_path: Path) -> None:
        payload = payload_of(0, 5000)
        key, record = make_page(payload, [7, 8, 2**31 - 1, -(2**31)])
        usage = Usage(2**63 - 1, 2**32 - 1, pinned=True, priority=-(2**15), expires=2**63 - 1)
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                transaction.put_namespace(NAMESPACE, SETTINGS)
                transaction.put(key, record, usage, payload)
            with backend.view() as view:
                assert view.record(key) == record
                assert view.usage(key) == usage
                stored = view.payload(key)
                assert stored is not None
                assert bytes(stored) == payload
                assert list(view.scan()) == [(key, record, usage)]
                assert view.used.entries == 1

    def test_a_pin_is_a_change_of_the_page(self, tmp_path: Path) -> None:
        """Which may make space; uses would be too many."""
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key, other = put(transaction, 1), put(transaction, 2)
            with backend.view() as view:
                before = view.generation
            with backend.update() as transaction:
                transaction.touch(other, Usage(9))
            with backend.view() as view:
                assert view.generation == before
            with backend.update() as transaction:
                transaction.touch(key, Usage(9, pinned=True))
            with backend.view() as view:
                assert view.generation == before + 1
                assert view.usage(key) == Usage(9, pinned=True)
                assert view.usage(other) == Usage(9)

    def test_namespaces_are_remembered_with_their_settings_as_long_as_they_have_pages(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                put(transaction, 1)
                key, record = make_page(b"x", [1], parent=OTHER, namespace=OTHER)
                transaction.put_namespace(OTHER, b"{}")
                transaction.put(key, record, Usage(1), b"x")
                assert transaction.namespace(OTHER) == b"{}"
            with backend.view() as view:
                assert dict(view.namespaces()) == {NAMESPACE: SETTINGS, OTHER: b"{}"}
                assert [view.namespace(key) for key in (NAMESPACE, OTHER, MISSING)] == [SETTINGS, b"{}", None]
            with backend.update() as transaction:
                transaction.delete(key)
                # no page comes
                transaction.put_namespace(MISSING, b"{}")
            with backend.view() as view:
                assert dict(view.namespaces()) == {NAMESPACE: SETTINGS, MISSING: b"{}"}
            with backend.update() as transaction:
                transaction.drop_empty_namespaces()
            with backend.view() as view:
                assert dict(view.namespaces()) == {NAMESPACE: SETTINGS}

    def test_notes_are_kept_until_they_are_deleted_and_are_no_change_of_pages(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.view() as view:
                generation = view.generation
            with backend.update() as transaction:
                transaction.put_note(b"name", b"value")
                transaction.put_note(b"other", b"")
            with backend.view() as view:
                assert [view.note(name) for name in (b"name", b"other", b"unknown")] == [b"value", b"", None]
            with backend.update() as transaction:
                transaction.put_note(b"name", None)
                transaction.put_note(b"unknown", None)
                assert transaction.note(b"name") is None
            with backend.view() as view:
                assert (view.note(b"name"), view.note(b"other"), view.generation) == (None, b"", generation)

    # -- lookups and eviction ------------------------------------------------------------------------------------------

    def test_children_and_facts_of_random_trees_are_those_that_a_scan_finds(self, tmp_path: Path) -> None:
        for seed, longest in ((1, 4), (3, 2048)):
            family = _Family(seed, longest)
            (tmp_path / str(seed)).mkdir()
            with self.opened(tmp_path / str(seed)) as backend:
                for step in range(9):
                    with backend.update() as transaction:
                        family.change(transaction, family.chance.choice([1, 2, 12]))
                        if step % 4 == 1:
                            family.require_agreement(transaction)
                    before = dict(family.stored)
                    with suppress(Rollback), backend.update() as transaction:
                        family.change(transaction, 5)
                        if step % 4 == 2:
                            family.require_agreement(transaction)
                        raise Rollback
                    family.stored = before
                    if step % 3 == 2:
                        with backend.view() as view:
                            family.require_agreement(view)
                before_all = stored(backend)
                backend.reindex()
                assert stored(backend) == before_all
                while family.stored:
                    with backend.update() as transaction:
                        for _ in range(min(20, len(family.stored))):
                            leaf = family.leaf()
                            assert leaf is not None
                            assert transaction.delete(leaf)
                            del family.stored[leaf]
                    with backend.view() as view:
                        family.require_agreement(view)

    # -- generations ---------------------------------------------------------------------------------------------------

    def test_the_generation_counts_transactions_that_put_or_delete(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:

            def step(work: Callable[[Transaction], object]) -> int:
                with backend.view() as view:
                    before = view.generation
                with backend.update() as transaction:
                    work(transaction)
                with backend.view() as view:
                    return view.generation - before

            assert step(lambda transaction: put(transaction, 9)) == 1
            key, _ = make_page(payload_of(1, 101), [1, 2])
            assert step(lambda transaction: transaction.record(key)) == 0
            assert step(lambda transaction: put(transaction, 1)) == 1
            assert step(lambda transaction: transaction.touch(key, Usage(3))) == 0
            assert step(lambda transaction: transaction.put_namespace(MISSING, b"{}")) == 0
            assert step(lambda transaction: transaction.delete(MISSING)) == 0
            assert step(lambda transaction: [put(transaction, i) for i in range(2, 5)]) == 1
            assert step(lambda transaction: transaction.delete(key)) == 1

    def test_pages_that_are_followed_are_found_among_many(self, tmp_path: Path) -> None:
        """By pages, by snapshots, or by both; namespaces count as what first pages follow."""
        pages = [make_page(b"", [number])[1] for number in range(600)]
        after = [make_page(b"", [1], parent=record.key, start=1)[1] for record in pages]
        taken = [replace(record, tokens=b"", form=SNAPSHOT) for record in after]
        other = OTHER
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                for record in (*pages[:300], *after[:300:3], *taken[:300:5]):
                    transaction.put(record.key, record, Usage(1), b"")
            keys = [record.key for record in pages]
            expected = {record.parent for record in (*after[:300:3], *taken[:300:5])}
            for opened in (backend.view, backend.update):
                with opened() as view:
                    assert view.followed(keys) == expected
                    assert view.followed([*keys, *keys, NAMESPACE, other, NAMESPACE]) == {*expected, NAMESPACE}
                    assert view.followed(keys[300:]) == set()
                    # snapshots and pages at the end of their sequences
                    assert view.followed([record.key for record in (*after, *taken)]) == set()
                    found = {key for key in keys[:20] if view.followed([key])}
                    assert found == expected & set(keys[:20])
            with backend.update() as transaction:
                # of the last one its page goes, and the snapshot stays
                for record in after[:300:3]:
                    assert transaction.delete(record.key)
                assert transaction.followed(keys) == {record.parent for record in taken[:300:5]}

    def test_neighbors_among_many_siblings_share_the_longest_prefix(self, tmp_path: Path) -> None:
        """Siblings that differ from the start, or only after 200 tokens, of which some begin with all of another's."""
        chance = random.Random(3)
        with self.opened(tmp_path) as backend:
            for beginning in ([], [5] * 200, [6] * 255):
                parent, _ = make_page(b"", beginning or [1])
                siblings = [[*beginning, number] for number in chance.sample(range(10_000), 60)]
                siblings += [[*each, 7] for each in siblings[:20]]
                with backend.update() as transaction:
                    for tokens in siblings:
                        key, record = make_page(b"", tokens, parent=parent, start=1)
                        transaction.put(key, record, Usage(1), b"")
                there = sorted(as_tokens(tokens).tobytes() for tokens in siblings)
                with backend.view() as view:
                    scanned = _Scanned(view)
                    assert sorted(tokens_of(entry) for entry in view.children([parent], PAGE)) == there
                    for _ in range(12):
                        wanted = [*chance.choice(siblings)[: chance.choice([1, 100, 250, 300])], chance.randrange(99)]
                        raw = as_tokens(wanted).tobytes()
                        scanned.require_nearest(view.neighbors(parent, raw), parent, raw)

    # -- space ---------------------------------------------------------------------------------------------------------

    def test_used_grows_by_no_more_than_the_cost(self, tmp_path: Path) -> None:
        chance = random.Random(5)
        keys: list[bytes] = []
        with self.opened(tmp_path) as backend:
            for i in range(60):
                with backend.view() as view:
                    before = view.used
                cost = 0
                with backend.update() as transaction:
                    transaction.put_namespace(NAMESPACE, SETTINGS)
                    for _ in range(chance.choice([1, 1, 2, 5])):
                        payload = bytes(chance.choice([0, 1, 100, 1500, 2000, 2100, 4081, 20_000]))
                        parent = chance.randbytes(KEY_BYTES)
                        key, record = make_page(payload, [i] * chance.choice([1, 16, 256, 1024]), parent=parent)
                        cost += transaction.cost(record, len(payload))
                        within = transaction.used
                        transaction.put(key, record, Usage(1), payload)
                        assert transaction.used.entries == within.entries + 1
                        keys.append(key)
                    if i % 3 == 0:
                        transaction.delete(keys.pop(chance.randrange(len(keys))))
                with backend.view() as view:
                    assert view.used.bytes - before.bytes <= cost
                    assert view.used.entries == len(keys)
