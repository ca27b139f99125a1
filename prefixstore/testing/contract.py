"""The contract of `prefixstore.backends.base` as a test class.

A new backend subclasses `BackendContract` in a test module, or `PersistentBackendContract` if what it keeps outlives
`close`, and says how to open one. pytest finds the tests; nothing here imports it.

>>> class TestMemoryBackend(BackendContract):
...     def open_backend(self, tmp_path):
...         return MemoryBackend()
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from prefixstore.backends.base import FACTS, Backend, Transaction, Used, View
from prefixstore.errors import StorageError
from prefixstore.format.keys import KEY_BYTES, PAGE, SNAPSHOT, TOKEN_BYTES, as_tokens, page_key
from prefixstore.format.record import Buffer, Record, Usage, checksum

__all__ = ["BackendContract", "PersistentBackendContract", "make_page"]

NAMESPACE = bytes(range(KEY_BYTES))
SETTINGS = b'{"label":"contract"}'
PATIENCE = 120.0


def make_page(
    payload: bytes, tokens: list[int], *, parent: bytes = NAMESPACE, start: int = 0, namespace: bytes = NAMESPACE
) -> tuple[bytes, Record]:
    """The key and the record of a raw page with these tokens after `parent`."""
    raw = as_tokens(tokens).tobytes()
    size = len(payload)
    record = Record(namespace, parent, start, raw, 0, size, size, checksum(payload), 1000, 1_700_000_000_000_000_000)
    return page_key(parent, raw), record


def _payload(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def _put(transaction: Transaction, number: int, payload: bytes | None = None, *, last_used: int = 1) -> bytes:
    """Put the first page number `number`, and return its key."""
    payload = _payload(number, 100 + number % 50) if payload is None else payload
    key, record = make_page(payload, [number, number + 1])
    transaction.put_namespace(NAMESPACE, SETTINGS)
    transaction.put(key, record, Usage(last_used), payload)
    return key


def _stored(backend: Backend) -> dict[bytes, tuple[Record | StorageError, Usage, bytes]]:
    """All that a backend holds."""
    with backend.view() as view:
        return {key: (record, usage, bytes(view.payload(key) or b"")) for key, record, usage in view.scan()}


def _sizes(view: View) -> tuple[int, int]:
    """What `View.sizes` has to be."""
    records = [record for _, record, _ in view.scan() if isinstance(record, Record)]
    return sum(record.stored_bytes for record in records), sum(record.raw_bytes for record in records)


def _repack(transaction: Transaction, chance: random.Random) -> None:
    """Put one of 30 pages, whose state has its own size, in a form of some size, as packing or unpacking does."""
    number = chance.randrange(30)
    payload = _payload(number, chance.randrange(100 * number + 1))
    key, record = make_page(payload, [number])
    record = replace(record, raw_bytes=100 * number, codec=int(len(payload) < 100 * number))
    transaction.put(key, record, Usage(1), payload)


class _Defaults(View):
    """A view whose calls for many pages are those of `View`: what every backend's own have to agree with."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._pages = list(view.scan())

    @property
    def generation(self) -> int:
        return self._view.generation

    def changes(self, since: int) -> list[bytes] | None:
        return self._view.changes(since)

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        return iter(self._pages)

    def record(self, key: bytes) -> Record | None:
        return self._view.record(key)

    def usage(self, key: bytes) -> Usage | None:
        return self._view.usage(key)

    def payload(self, key: bytes) -> Buffer | None:
        return self._view.payload(key)

    def payload_keys(self) -> Iterator[bytes]:
        return self._view.payload_keys()

    def namespaces(self) -> Mapping[bytes, bytes]:
        return self._view.namespaces()

    @property
    def used(self) -> Used:
        return self._view.used


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
        self.namespaces = [NAMESPACE, bytes(reversed(NAMESPACE))]
        self.seen: list[bytes] = [b""]

    def tokens(self) -> list[int]:
        """Some tokens: others that were chosen before, up to a random place, and then new ones, or none."""
        known = np.frombuffer(self.chance.choice(self.seen), "<i4").tolist()
        shared = known[: self.chance.choice([0, 1, 3, 15, 16, 17, 64, 200, 300, len(known)])]
        more = self.chance.choice([0, 0, 1, 2, 16, 60, 300])
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
        _, record = make_page(_payload(1, 10), tokens, parent=parent, start=start, namespace=namespace)
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
            transaction.put(key, record, usage, _payload(1, 10))
            self.stored[key] = record

    def require_agreement(self, view: View) -> None:
        """Compare a view with what is stored, and with the defaults of `View`."""
        assert list(view.flaws()) == []
        defaults = _Defaults(view)
        parents = [*self.namespaces, *self.stored, bytes(KEY_BYTES)]
        self.chance.shuffle(parents)
        for form in (PAGE, SNAPSHOT):
            for at_most in (None, 2):
                assert view.children(parents, form, at_most) == defaults.children(parents, form, at_most)
        assert len(view.children(parents, PAGE)) + len(view.children(parents, SNAPSHOT)) == len(self.stored)
        wanted = self.chance.sample(self.seen, min(len(self.seen), 6))
        for parent in (*self.namespaces, *parents[:3]):
            for tokens in (*wanted, as_tokens(self.tokens()).tobytes(), b"", b"\xff" * 4 * self.longest):
                assert view.neighbors(parent, tokens) == defaults.neighbors(parent, tokens)
        after, n_facts = b"", 0
        while len(facts := view.facts(after, 7)):
            assert facts.dtype == FACTS
            assert facts.tolist() == defaults.facts(after, 7).tolist()
            after, n_facts = facts["key"][-1].tobytes(), n_facts + len(facts)
        assert n_facts == len(self.stored)
        for asked in (parents, [*parents, *parents[:3]], parents[:1], []):
            assert view.followed(asked) == {record.parent for record in self.stored.values()} & set(asked)
            assert view.followed(asked) == defaults.followed(asked)


def _together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, and raise what the first of them that failed has raised."""
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread waits forever"
    if failures:
        raise failures[0]


def _in_child(work: Callable[[], bool]) -> bool:
    """What `work` answers in a forked child; false if it raises, or if the child does not end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "this process is multi-threaded": that is the point
        pid = os.fork()
    if pid == 0:
        passed = False
        try:
            passed = work()
        except BaseException:  # noqa: BLE001 - the child must not return into the parent's stack
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0 if passed else 1)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


class _Rollback(Exception):  # noqa: N818 - not an error
    """Raised on purpose inside a transaction."""


class BackendContract:
    """The contract of every backend, as tests. Subclass it and say how to open one."""

    def open_backend(self, tmp_path: Path) -> Backend:
        """A new, empty backend with space for at least 64 MiB. Each test gets a directory of its own."""
        raise NotImplementedError

    @contextmanager
    def opened(self, tmp_path: Path) -> Iterator[Backend]:
        """A new backend, closed at the end."""
        with closing(self.open_backend(tmp_path)) as backend:
            yield backend

    # -- reading and writing ------------------------------------------------------------------------------------------

    def test_an_empty_backend_holds_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend, backend.view() as view:
            assert list(view.scan()) == []
            assert list(view.payload_keys()) == []
            assert dict(view.namespaces()) == {}
            assert view.used.entries == 0
            assert view.changes(view.generation) == []

    def test_a_missing_key_is_none_and_not_an_error(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                _put(transaction, 1)
            for opened in (backend.view, backend.update):
                with opened() as view:
                    missing = bytes(KEY_BYTES)
                    assert (view.record(missing), view.usage(missing), view.payload(missing)) == (None, None, None)

    def test_a_page_that_was_put_is_read_back_unchanged(self, tmp_path: Path) -> None:
        payload = _payload(0, 5000)
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
                assert list(view.payload_keys()) == [key]
                assert view.used.entries == 1

    def test_snapshots_and_pages_without_bytes_are_read_back(self, tmp_path: Path) -> None:
        """Where memory cannot step back, pages hold tokens only, and a snapshot may have no tokens of its own."""
        with self.opened(tmp_path) as backend:
            key, page = make_page(b"", [1, 2])
            taken = replace(page, parent=key, start=2, tokens=b"", form=SNAPSHOT)
            with backend.update() as transaction:
                transaction.put_namespace(NAMESPACE, SETTINGS)
                transaction.put(key, page, Usage(1), b"")
                transaction.put(taken.key, taken, Usage(1), b"")
            with backend.view() as view:
                for one in (page, taken):
                    assert view.record(one.key) == one
                    stored = view.payload(one.key)
                    assert stored is not None
                    assert bytes(stored) == b""
                assert {each: record for each, record, _ in view.scan()} == {key: page, taken.key: taken}
                assert set(view.payload_keys()) == {key, taken.key}

    def test_a_walk_finds_all_pages_with_their_payloads(self, tmp_path: Path) -> None:
        payloads = [_payload(i, size) for i, size in enumerate([0, 1, 1 << 20, (1 << 20) + 1, 3_000_000, 10])]
        pages = {make_page(payload, [i])[0]: (i, payload) for i, payload in enumerate(payloads)}
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                for i, payload in pages.values():
                    key, record = make_page(payload, [i])
                    transaction.put(key, record, Usage(1), payload)
            with backend.view() as view:
                found = {}
                for each, read, stored in view.stored():
                    assert stored is not None
                    assert not isinstance(stored, StorageError)
                    found[each] = read, bytes(stored)
            assert found == {key: (make_page(payload, [i])[1], payload) for key, (i, payload) in pages.items()}

    def test_a_second_put_replaces_the_first(self, tmp_path: Path) -> None:
        small, large = _payload(1, 10), _payload(2, 20_000)
        with self.opened(tmp_path) as backend:
            for payload in (small, large, small):
                key, record = make_page(payload, [1, 2])
                with backend.update() as transaction:
                    transaction.put(key, record, Usage(len(payload)), payload)
                assert _stored(backend) == {key: (record, Usage(len(payload)), payload)}
                with backend.view() as view:
                    assert view.used.entries == 1

    def test_a_deleted_page_is_gone_with_its_usage_and_payload(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                gone, kept = _put(transaction, 1), _put(transaction, 2)
            with backend.update() as transaction:
                assert transaction.delete(gone) is True
                assert transaction.delete(gone) is False
                assert transaction.delete(bytes(KEY_BYTES)) is False
            with backend.view() as view:
                assert (view.record(gone), view.usage(gone), view.payload(gone)) == (None, None, None)
                assert list(view.payload_keys()) == [kept]
                assert view.used.entries == 1

    def test_touch_replaces_the_usage_and_nothing_else(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = _put(transaction, 1)
            record, _, payload = _stored(backend)[key]
            with backend.update() as transaction:
                transaction.touch(key, Usage(5, 6, pinned=True, priority=7, expires=8))
                assert transaction.usage(key) == Usage(5, 6, pinned=True, priority=7, expires=8)
            assert _stored(backend) == {key: (record, Usage(5, 6, pinned=True, priority=7, expires=8), payload)}

    def test_touching_a_page_that_is_gone_does_not_bring_it_back(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = _put(transaction, 1)
            with backend.update() as transaction:
                transaction.delete(key)
                transaction.touch(key, Usage(9))
                transaction.touch(bytes(KEY_BYTES), Usage(9))
            assert _stored(backend) == {}
            with backend.view() as view:
                assert view.usage(key) is None

    def test_an_announced_usage_is_a_change_of_the_page(self, tmp_path: Path) -> None:
        """So other processes learn of pins; uses would be too many."""
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key, other = _put(transaction, 1), _put(transaction, 2)
            with backend.view() as view:
                before = view.generation
            with backend.update() as transaction:
                transaction.touch(other, Usage(9))
            with backend.view() as view:
                assert view.generation == before
            with backend.update() as transaction:
                transaction.touch(key, Usage(9, pinned=True), announce=True)
            with backend.view() as view:
                assert view.generation == before + 1
                assert view.changes(before) == [key]
                assert view.usage(key) == Usage(9, pinned=True)
                assert view.usage(other) == Usage(9)

    def test_namespaces_are_remembered_with_their_settings(self, tmp_path: Path) -> None:
        other = bytes(reversed(NAMESPACE))
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                _put(transaction, 1)
                key, record = make_page(b"x", [1], parent=other, namespace=other)
                transaction.put_namespace(other, b"{}")
                transaction.put(key, record, Usage(1), b"x")
                assert transaction.namespace(other) == b"{}"
            with backend.view() as view:
                assert dict(view.namespaces()) == {NAMESPACE: SETTINGS, other: b"{}"}
                assert [view.namespace(key) for key in (NAMESPACE, other, bytes(16))] == [SETTINGS, b"{}", None]

    def test_settings_of_a_namespace_can_be_dropped(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                transaction.put_namespace(NAMESPACE, SETTINGS)
            with backend.update() as transaction:
                transaction.drop_namespace(bytes(KEY_BYTES))
                transaction.drop_namespace(NAMESPACE)
            with backend.view() as view:
                # a backend may keep settings that no page needs
                assert dict(view.namespaces()) in ({}, {NAMESPACE: SETTINGS})

    def test_notes_are_kept_or_forgotten_as_a_whole(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                transaction.put_note(b"name", b"value")
                transaction.put_note(b"other", b"")
            with backend.view() as view:
                generation = view.generation
                kept = view.note(b"name")
                assert kept in (None, b"value")
                assert view.note(b"unknown") is None
            with suppress(_Rollback), backend.update() as transaction:
                transaction.put_note(b"name", b"changed")
                raise _Rollback
            with backend.view() as view:
                assert view.note(b"name") == kept
            with backend.update() as transaction:
                transaction.put_note(b"name", None)
                transaction.put_note(b"unknown", None)
                assert transaction.note(b"name") is None
            with backend.view() as view:
                assert (view.note(b"name"), view.generation) == (None, generation)

    def test_calls_for_many_pages_agree_with_calls_for_one(self, tmp_path: Path) -> None:
        payloads = [_payload(i, 3000 * i) for i in range(5)]
        pages: list[tuple[bytes, Record]] = []
        for i, payload in enumerate(payloads):
            parent = pages[-1][0] if pages else NAMESPACE
            pages.append(make_page(payload, [i, i], parent=parent, start=2 * i))
        keys = [key for key, _ in pages]
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                for (key, record), payload in zip(pages[:4], payloads, strict=False):
                    transaction.put(key, record, Usage(record.start), payload)
            for opened in (backend.view, backend.update):
                with opened() as view:
                    assert view.records([*keys, bytes(KEY_BYTES)]) == {
                        key: (record, Usage(record.start)) for key, record in pages[:4]
                    }
                    assert view.records([]) == {}
                    wanted = [keys[2], keys[0], keys[4], keys[1]]
                    fetched = [(record, bytes(payload)) for record, payload in view.fetch(wanted)]
                    assert fetched == [(pages[2][1], payloads[2]), (pages[0][1], payloads[0])]
                    assert list(view.fetch([])) == []

    # -- lookups and eviction -----------------------------------------------------------------------------------------

    def test_leading_pages_end_at_the_first_that_is_missing(self, tmp_path: Path) -> None:
        pages: list[tuple[bytes, Record]] = []
        for i in range(40):
            pages.append(make_page(b"x", [i], parent=pages[-1][0] if pages else NAMESPACE, start=i))
        keys = [key for key, _ in pages]
        with self.opened(tmp_path) as backend:
            for n_stored in (0, 1, 2, 23, 40):
                with backend.update() as transaction:
                    for key, record in pages[:n_stored]:
                        transaction.put(key, record, Usage(record.start), b"x")
                for opened in (backend.view, backend.update):
                    with opened() as view:
                        for n_wanted in (0, 1, 3, 22, 23, 24, 40):
                            found = view.leading(keys[:n_wanted])
                            expected = [(key, record, Usage(record.start)) for key, record in pages[:n_stored]]
                            assert found == expected[:n_wanted]

    def test_an_empty_backend_has_no_children_and_no_facts(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            for opened in (backend.view, backend.update):
                with opened() as view:
                    assert view.neighbors(NAMESPACE, b"") == []
                    assert view.children([NAMESPACE], PAGE) == []
                    assert view.children([], PAGE) == []
                    assert view.leading([bytes(KEY_BYTES)]) == []
                    assert view.followed([]) == set()
                    assert view.followed([NAMESPACE, bytes(KEY_BYTES)]) == set()
                    assert len(view.facts(b"", 10)) == 0

    def test_children_and_facts_of_random_trees_are_those_that_a_scan_finds(self, tmp_path: Path) -> None:
        for seed, longest in ((1, 4), (2, 40), (3, 2048)):
            family = _Family(seed, longest)
            (tmp_path / str(seed)).mkdir()
            with self.opened(tmp_path / str(seed)) as backend:
                for step in range(9):
                    with backend.update() as transaction:
                        family.change(transaction, family.chance.choice([1, 2, 12]))
                        if step % 4 == 1:
                            family.require_agreement(transaction)
                    before = dict(family.stored)
                    with suppress(_Rollback), backend.update() as transaction:
                        family.change(transaction, 5)
                        if step % 4 == 2:
                            family.require_agreement(transaction)
                        raise _Rollback
                    family.stored = before
                    if step % 3 == 2:
                        with backend.view() as view:
                            family.require_agreement(view)
                while family.stored:
                    with backend.update() as transaction:
                        for _ in range(min(20, len(family.stored))):
                            leaf = family.leaf()
                            assert leaf is not None
                            assert transaction.delete(leaf)
                            del family.stored[leaf]
                    with backend.view() as view:
                        family.require_agreement(view)

    def test_pages_that_are_followed_are_found_among_thousands(self, tmp_path: Path) -> None:
        """By pages, by snapshots, or by both; namespaces count as what first pages follow."""
        pages = [make_page(b"", [number])[1] for number in range(3000)]
        after = [make_page(b"", [1], parent=record.key, start=1)[1] for record in pages]
        taken = [replace(record, tokens=b"", form=SNAPSHOT) for record in after]
        other = bytes(reversed(NAMESPACE))
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                for record in (*pages[:1500], *after[:1500:3], *taken[:1500:5]):
                    transaction.put(record.key, record, Usage(1), b"")
            keys = [record.key for record in pages]
            expected = {record.parent for record in (*after[:1500:3], *taken[:1500:5])}
            for opened in (backend.view, backend.update):
                with opened() as view:
                    assert view.followed(keys) == expected
                    assert view.followed([*keys, *keys, NAMESPACE, other, NAMESPACE]) == {*expected, NAMESPACE}
                    assert view.followed(keys[1500:]) == set()
                    # snapshots and pages at the end of their sequences
                    assert view.followed([record.key for record in (*after, *taken)]) == set()
                    found = {key for key in keys[:20] if view.followed([key])}
                    assert found == expected & set(keys[:20])
            with backend.update() as transaction:
                # of the last one its page goes, and the snapshot stays
                for record in after[:1500:3]:
                    assert transaction.delete(record.key)
                assert transaction.followed(keys) == {record.parent for record in taken[:1500:5]}

    def test_building_indexes_again_changes_no_page(self, tmp_path: Path) -> None:
        family = _Family(9, 300)
        with self.opened(tmp_path) as backend:
            backend.reindex()
            with backend.update() as transaction:
                family.change(transaction, 60)
            before = _stored(backend)
            with backend.view() as view:
                generation = view.generation
            backend.reindex()
            assert _stored(backend) == before
            with backend.view() as view:
                assert view.changes(generation) == ([] if view.generation == generation else None)
                family.require_agreement(view)
                assert view.sizes == _sizes(view)

    def test_neighbors_among_many_siblings_share_the_longest_prefix(self, tmp_path: Path) -> None:
        """Siblings that differ from the start, or only after 200 tokens, of which some begin with all of another's."""
        chance = random.Random(3)
        with self.opened(tmp_path) as backend:
            for beginning in ([], [5] * 200, [6] * 255):
                parent, _ = make_page(b"", beginning or [1])
                siblings = [[*beginning, number] for number in chance.sample(range(10_000), 300)]
                siblings += [[*each, 7] for each in siblings[:100]]
                with backend.update() as transaction:
                    for tokens in siblings:
                        key, record = make_page(b"", tokens, parent=parent, start=1)
                        transaction.put(key, record, Usage(1), b"")
                stored = sorted(as_tokens(tokens).tobytes() for tokens in siblings)
                with backend.view() as view:
                    for _ in range(60):
                        wanted = [*chance.choice(siblings)[: chance.choice([1, 100, 250, 300])], chance.randrange(99)]
                        raw = as_tokens(wanted).tobytes()
                        found = [
                            entry.record.tokens
                            for entry in view.neighbors(parent, raw)
                            if isinstance(entry.record, Record)
                        ]
                        below, above = [each for each in stored if each <= raw], [each for each in stored if each > raw]
                        assert found == below[-1:] + above[:1]

    def test_record_and_payload_of_a_page_that_is_put_again_meanwhile_belong_together(self, tmp_path: Path) -> None:
        """A page may be packed or unpacked while it is restored."""
        forms = [make_page(payload, [1]) for payload in (_payload(1, 3000), _payload(2, 9_000_000))]
        payloads = [_payload(1, 3000), _payload(2, 9_000_000)]
        key = forms[0][0]
        seen: set[int] = set()
        is_done = threading.Event()
        with self.opened(tmp_path) as backend:

            def put() -> None:
                for turn in range(1000):
                    with backend.update() as transaction:
                        transaction.put(key, forms[turn % 2][1], Usage(1), payloads[turn % 2])
                    if (turn >= 6 and len(seen) == 2) or is_done.is_set():
                        break
                is_done.set()

            def read() -> None:
                try:
                    while not is_done.is_set():
                        with backend.view() as view:
                            for record, payload in view.fetch([key]):
                                assert checksum(payload) == record.checksum
                                seen.add(len(payload))
                finally:
                    is_done.set()

            _together(put, read, read)

    def test_scrubbing_changes_nothing_that_is_stored(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                gone, _ = _put(transaction, 1), _put(transaction, 2)
            with backend.update() as transaction:
                transaction.delete(gone)
            before = _stored(backend)
            backend.scrub()
            assert _stored(backend) == before
            assert backend.compact() >= 0
            assert _stored(backend) == before

    def test_payloads_of_any_size_and_buffer_type_are_read_back(self, tmp_path: Path) -> None:
        sizes = [0, 1, 2, 15, 16, 17, 2000, 2040, 4079, 4080, 4081, 4096, 65_537, (5 << 20) + 3]
        payloads = [_payload(size, size) for size in sizes]
        keys: dict[bytes, bytes] = {}
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                for i, payload in enumerate(payloads):
                    key, record = make_page(payload, [i])
                    memory: Buffer = (payload, bytearray(payload), memoryview(payload))[i % 3]
                    transaction.put(key, record, Usage(1), memory)
                    keys[key] = payload
            with backend.view() as view:
                for key, payload in keys.items():
                    stored = view.payload(key)
                    assert stored is not None
                    assert bytes(stored) == payload

    def test_put_copies_the_payload_before_it_returns(self, tmp_path: Path) -> None:
        payload = _payload(1, 10_000)
        memory = bytearray(payload)
        key, record = make_page(payload, [1])
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                transaction.put(key, record, Usage(1), memory)
                memory[:] = bytes(len(memory))
            assert _stored(backend)[key][2] == payload

    # -- transactions -------------------------------------------------------------------------------------------------

    def test_only_the_transaction_itself_sees_its_changes_before_it_commits(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                old = _put(transaction, 1)
            before = _stored(backend)
            with backend.update() as transaction:
                used = transaction.used
                new = _put(transaction, 2, _payload(2, 50_000))
                transaction.delete(old)
                assert transaction.record(new) is not None
                assert transaction.record(old) is None
                assert {key for key, _, _ in transaction.scan()} == set(transaction.payload_keys()) == {new}
                assert transaction.used.entries == used.entries
                assert transaction.used.bytes >= used.bytes + 50_000 - 8192
                seen: list[object] = []
                _together(lambda: seen.append(_stored(backend)))
                assert seen == [before]
            assert set(_stored(backend)) == {new}

    def test_a_transaction_that_fails_leaves_no_trace(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                kept, touched = _put(transaction, 1), _put(transaction, 2)
            with backend.view() as view:
                generation, used, namespaces = view.generation, view.used, dict(view.namespaces())
            before = _stored(backend)
            with suppress(_Rollback), backend.update() as transaction:
                transaction.delete(kept)
                transaction.touch(touched, Usage(99, 99))
                transaction.put_namespace(bytes(KEY_BYTES), b"other")
                _put(transaction, 3, _payload(3, 100_000))
                raise _Rollback
            assert _stored(backend) == before
            with backend.view() as view:
                assert (view.generation, view.used) == (generation, used)
                assert dict(view.namespaces()) == namespaces
                assert view.changes(generation) == []

    def test_transactions_of_threads_take_turns(self, tmp_path: Path) -> None:
        rounds, workers = 20, 4
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = _put(transaction, 1, last_used=0)

            def count() -> None:
                for _ in range(rounds):
                    with backend.update() as transaction:
                        usage = transaction.usage(key)
                        assert usage is not None
                        time.sleep(0)  # let another thread run
                        transaction.touch(key, Usage(usage.last_used + 1))

            _together(*[count] * workers)
            with backend.view() as view:
                assert view.usage(key) == Usage(rounds * workers)

    def test_many_threads_read_whole_transactions_while_others_write(self, tmp_path: Path) -> None:
        """What is read of a page was written in one piece, and is not older than its record."""
        done = threading.Event()
        rounds = {checksum(_payload(i, 3000)): i for i in range(60)}
        a, b = make_page(b"a", [1])[0], make_page(b"b", [2])[0]
        with self.opened(tmp_path) as backend:

            def write() -> None:
                try:
                    for i in rounds.values():
                        with backend.update() as transaction:
                            for tokens in ([1], [2]):
                                payload = _payload(i, 3000)
                                key, record = make_page(payload, tokens)
                                transaction.put(key, record, Usage(i), payload)
                        with backend.update() as transaction:
                            transaction.delete(a)
                            transaction.delete(b)
                finally:
                    done.set()

            def read() -> None:
                while not done.is_set():
                    with backend.view() as view:
                        for key, record, _ in view.scan():
                            payload = view.payload(key)
                            if isinstance(record, Record) and payload is not None:
                                assert rounds[checksum(payload)] >= rounds[record.checksum]

            _together(write, read, read, read)
            assert _stored(backend) == {}

    # -- views ----------------------------------------------------------------------------------------------------

    def test_a_payload_does_not_change_while_its_view_is_open(self, tmp_path: Path) -> None:
        payload = _payload(1, 300_000)
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = _put(transaction, 1, payload)
            with backend.view() as view:
                stored = view.payload(key)
                assert stored is not None

                def overwrite() -> None:
                    with backend.update() as transaction:
                        transaction.delete(key)
                    backend.reclaim()
                    for i in range(2, 12):
                        with backend.update() as transaction:
                            _put(transaction, i, _payload(i, 300_000))

                _together(overwrite)
                assert bytes(stored) == payload
            with backend.view() as view:
                assert view.payload(key) is None

    def test_a_view_may_be_handed_to_another_thread(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = _put(transaction, 1)
            with backend.view() as view:
                read: list[object] = []
                _together(lambda: read.append(view.record(key)))
                assert read == [view.record(key)]
                assert read != [None]

    # -- generations --------------------------------------------------------------------------------------------------

    def test_the_generation_counts_transactions_that_put_or_delete(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:

            def step(work: Callable[[Transaction], object]) -> int:
                with backend.view() as view:
                    before = view.generation
                with backend.update() as transaction:
                    work(transaction)
                with backend.view() as view:
                    return view.generation - before

            key, _ = make_page(_payload(1, 101), [1, 2])
            assert step(lambda transaction: transaction.record(key)) == 0
            assert step(lambda transaction: _put(transaction, 1)) == 1
            assert step(lambda transaction: transaction.touch(key, Usage(3))) == 0
            assert step(lambda transaction: transaction.put_namespace(bytes(KEY_BYTES), b"{}")) == 0
            assert step(lambda transaction: transaction.delete(bytes(KEY_BYTES))) == 0
            assert step(lambda transaction: [_put(transaction, i) for i in range(2, 5)]) == 1
            assert step(lambda transaction: transaction.delete(key)) == 1

    def test_changes_are_complete_or_none(self, tmp_path: Path) -> None:
        done: list[tuple[int, set[bytes]]] = []
        with self.opened(tmp_path) as backend:
            for i in range(12):
                changed: set[bytes] = set()
                with backend.update() as transaction:
                    changed |= {_put(transaction, 10 * i + j) for j in range(3)}
                    if i:
                        gone = make_page(_payload(10 * i - 10, 100 + (10 * i - 10) % 50), [10 * i - 10, 10 * i - 9])[0]
                        assert transaction.delete(gone)
                        changed.add(gone)
                with backend.view() as view:
                    done.append((view.generation, changed))
            with backend.view() as view:
                assert view.changes(done[-1][0]) == []
                assert view.changes(done[-1][0] + 1) is None
                assert view.changes(2**40) is None
                known = [view.changes(generation) for generation, _ in done]
            for i, keys in enumerate(known):
                if keys is not None:
                    assert set(keys) == set().union(*(changed for _, changed in done[i + 1 :]))
            # what is known about an older generation is known about a newer one
            assert [keys is not None for keys in known] == sorted(keys is not None for keys in known)
            assert known[-2] is not None, "nothing is known of the generation before the last"

    def test_changes_come_oldest_first(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                first = _put(transaction, 1)
            with backend.view() as view:
                since = view.generation
            keys = []
            for i in range(2, 6):
                with backend.update() as transaction:
                    keys.append(_put(transaction, i))
            with backend.update() as transaction:
                transaction.delete(first)
            with backend.view() as view:
                assert view.changes(since) == [*keys, first]

    # -- space --------------------------------------------------------------------------------------------------------

    def test_sizes_are_those_of_all_pages_whatever_was_done_to_them(self, tmp_path: Path) -> None:
        """Pages are put, put again in another form, deleted, put after they were deleted, and rolled back."""
        chance = random.Random(5)
        with self.opened(tmp_path) as backend:
            for step in range(25):
                with suppress(_Rollback), backend.update() as transaction:
                    for _ in range(chance.choice([1, 3, 20])):
                        _repack(transaction, chance)
                        if chance.random() < 0.3:
                            transaction.delete(make_page(b"", [chance.randrange(30)])[0])
                    assert transaction.sizes == _sizes(transaction)
                    if step % 4 == 3:
                        raise _Rollback
                with backend.view() as view:
                    assert view.sizes == _sizes(view)
                    assert list(view.flaws()) == []
            with backend.update() as transaction:
                for key, _, _ in list(transaction.scan()):
                    transaction.delete(key)
                assert transaction.sizes == (0, 0)
            with backend.view() as view:
                assert view.sizes == (0, 0)
            with backend.update() as transaction:
                _repack(transaction, chance)
            with backend.view() as view:
                assert view.sizes == _sizes(view)

    def test_used_grows_by_no_more_than_the_cost(self, tmp_path: Path) -> None:
        chance = random.Random(5)
        keys: list[bytes] = []
        with self.opened(tmp_path) as backend:
            for i in range(150):
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

    def test_used_is_at_least_the_payloads_and_shrinks_when_they_are_deleted(self, tmp_path: Path) -> None:
        sizes = [10, 1000, 100_000, 1 << 20]
        with self.opened(tmp_path) as backend:
            with backend.view() as view:
                empty = view.used
            with backend.update() as transaction:
                keys = [_put(transaction, i, _payload(i, size)) for i, size in enumerate(sizes)]
            with backend.view() as view:
                full = view.used
                assert full.bytes - empty.bytes >= sum(sizes)
                assert full.entries == len(sizes)
            with backend.update() as transaction:
                for key in keys:
                    transaction.delete(key)
            with backend.view() as view:
                assert view.used.entries == 0
                assert view.used.bytes - empty.bytes <= 32_768

    def test_reclaim_and_sync_change_nothing_that_is_stored(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                keys = [_put(transaction, i) for i in range(5)]
                transaction.delete(keys[0])
            before = _stored(backend)
            with backend.view() as view:
                generation = view.generation
            backend.sync()
            backend.reclaim()
            backend.sync()
            assert _stored(backend) == before
            with backend.view() as view:
                assert view.generation == generation

    # -- life ---------------------------------------------------------------------------------------------------------

    def test_closing_twice_does_nothing(self, tmp_path: Path) -> None:
        backend = self.open_backend(tmp_path)
        with backend.update() as transaction:
            _put(transaction, 1)
        location = backend.location
        backend.close()
        backend.close()
        assert backend.location == location
        assert ":" in location

    def test_a_forked_child_reads_and_writes_and_leaves_the_parent_alone(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = _put(transaction, 1)
            before = _stored(backend)

            def child() -> bool:
                backend.after_fork()
                found = _stored(backend) == before
                with backend.update() as transaction:
                    new = _put(transaction, 2)
                wrote = set(_stored(backend)) == {key, new}
                backend.close()
                return found and wrote

            assert _in_child(child)
            assert _stored(backend)[key] == before[key]
            with backend.update() as transaction:
                another = _put(transaction, 3)
            assert another in _stored(backend)

    def test_a_child_forked_while_another_thread_writes_does_not_hang(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            stop = threading.Event()
            answers: list[bool] = []

            def write() -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    with backend.update() as transaction:
                        _put(transaction, number % 20, _payload(number % 7, 2000))
                    backend.sync()

            def child() -> bool:
                backend.after_fork()
                with backend.update() as transaction:
                    key = _put(transaction, 100)
                return key in _stored(backend)

            def fork() -> None:
                try:
                    answers.extend(_in_child(child) for _ in range(5))
                finally:
                    stop.set()

            _together(write, fork)
            assert answers == [True] * 5


class PersistentBackendContract(BackendContract):
    """The further contract of a backend whose pages outlive `close` and are shared by all who open it."""

    def reopen(self, tmp_path: Path) -> Backend:
        """Open once more what `open_backend` has opened in this directory."""
        return self.open_backend(tmp_path)

    def test_committed_pages_are_there_after_reopening(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                keys = [_put(transaction, i, _payload(i, 10_000 * i)) for i in range(5)]
                transaction.touch(keys[0], Usage(7, 8, pinned=True))
            with backend.update() as transaction:
                transaction.delete(keys[1])
            before = _stored(backend)
            with backend.view() as view:
                assert view.sizes == _sizes(view)
                state = (view.generation, view.used, view.sizes, dict(view.namespaces()), view.changes(1))
            backend.sync()
        with closing(self.reopen(tmp_path)) as backend:
            assert _stored(backend) == before
            with backend.view() as view:
                assert (view.generation, view.used, view.sizes, dict(view.namespaces()), view.changes(1)) == state

    def test_two_backends_on_one_location_see_what_the_other_commits(self, tmp_path: Path) -> None:
        with closing(self.open_backend(tmp_path)) as one, closing(self.reopen(tmp_path)) as two:
            with one.view() as view:
                since = view.generation
            with one.update() as transaction:
                first = _put(transaction, 1)
            with two.update() as transaction:
                assert transaction.record(first) is not None
                second = _put(transaction, 2)
                transaction.delete(first)
                two_sizes = transaction.sizes
            with one.view() as view:
                assert view.record(first) is None
                assert view.record(second) is not None
                assert view.changes(since) == [first, second, first]
                assert view.sizes == _sizes(view) == two_sizes

    def test_one_backend_may_close_while_another_stays_open(self, tmp_path: Path) -> None:
        one, two = self.open_backend(tmp_path), self.reopen(tmp_path)
        with one.update() as transaction:
            key = _put(transaction, 1)
        one.close()
        one.close()
        assert set(_stored(two)) == {key}
        with two.update() as transaction:
            transaction.delete(key)
        two.close()
        with closing(self.reopen(tmp_path)) as three:
            assert _stored(three) == {}

    def test_what_a_forked_child_commits_the_parent_sees(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            key, _ = make_page(_payload(2, 102), [2, 3])

            def child() -> bool:
                backend.after_fork()
                with backend.update() as transaction:
                    _put(transaction, 2)
                backend.close()
                return True

            assert _stored(backend) == {}
            assert _in_child(child)
            assert set(_stored(backend)) == {key}
