"""The contract of `prefixstore.backends.contract` as a test class.

A new backend subclasses `BackendContract` in a test module, or `PersistentBackendContract` (`testing.persistent`) if
what it keeps outlives `close`, and says how to open one. pytest finds the tests; nothing here imports it.

>>> class TestMemoryBackend(BackendContract):
...     def open_backend(self, tmp_path):
...         return MemoryBackend()
"""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

from prefixstore.backends.contract import LONGEST_KEY, Backend, ConflictError, Range, Row, Update, View
from prefixstore.errors import UnavailableError
from prefixstore.format.record import Buffer
from prefixstore.testing.together import PATIENCE, in_child, together

# by key: the value of a row, and its payload if it has one
Rows: TypeAlias = "dict[bytes, tuple[bytes, bytes | None]]"

MIB = 1 << 20
# bytes that a location may have to spare before it grows, and may keep when it shrinks: some pages of a file
SLACK = 1 << 16
# before this key are all that the tests write, except itself
LAST = b"\xff" * LONGEST_KEY
ALL = Range(b"", LAST)
# bytes that are compared as signed, as text or as if they ended a string come in the wrong order
KEYS = sorted(
    [*(bytes(part) for n in (1, 2) for part in product((0, 1, 0x61, 0x7F, 0x80, 0xFF), repeat=n))]
    + [b"a" * n for n in (3, 16, LONGEST_KEY - 1, LONGEST_KEY)]
    + ["ä".encode(), b"%", b"_", b"A", b"'", b"\\", LAST[:-1]]
)
# sizes: none at all, around the pages of files and the pieces of databases, and larger
VALUES = [0, 1, 20, 20, 20, 100, 4096, 5000]
LARGE_VALUE = 300 * 1024
PAYLOADS = [0, 1, 2, 15, 100, 2000, 2040, 4079, 4080, 4081, 5000, 65_537, 70_000]
LARGE_PAYLOADS = [MIB - 1, MIB, MIB + 1, 2 * MIB, (5 << 20) + 3]


def bytes_of(seed: object, size: int) -> bytes:
    """Random bytes, the same for the same seed."""
    return random.Random(str(seed)).randbytes(size)


def _copied(pair: tuple[bytes, Buffer | None] | None) -> tuple[bytes, bytes | None] | None:
    return pair and (pair[0], None if pair[1] is None else bytes(pair[1]))


def _pairs(view: View, keys: list[bytes]) -> list[tuple[bytes, bytes | None] | None]:
    """Values and payloads of these rows, copied."""
    return list(map(_copied, view.payloads(keys)))


def read_rows(backend: Backend) -> Rows:
    """All that is stored."""
    with backend.view() as view:
        [rows] = view.ranges([ALL])
        return dict(zip([row.key for row in rows], _pairs(view, [row.key for row in rows]), strict=True))  # type: ignore[arg-type]


def update(backend: Backend, work: Callable[[Update], object]) -> None:
    """Do work in an update; again if another process was faster."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with backend.update() as draft:
                work(draft)
            return
        except ConflictError:
            assert time.monotonic() < until, "conflicts never end"


def write_rows(backend: Backend, rows: Mapping[bytes, tuple[bytes | None, Buffer | None]]) -> None:
    """Write rows, or delete those without a value."""

    def work(draft: Update) -> None:
        for key, (value, payload) in rows.items():
            draft.delete(key) if value is None else draft.put(key, value, payload)

    update(backend, work)


def _expected(keys: list[bytes], wanted: Range) -> list[bytes]:
    """Which of these keys, in order, are in a range."""
    found = keys[bisect_left(keys, wanted.start) : bisect_left(keys, wanted.stop)]
    return (found[::-1] if wanted.reverse else found)[: wanted.limit]


def _require(view: View, rows: Rows, chance: random.Random) -> None:
    """Compare a view with the rows that it has to see."""
    keys = sorted(rows)
    bounds = [b"", LAST, *chance.choices(KEYS, k=6), *chance.choices(keys or KEYS, k=6)]
    wanted = [
        Range(chance.choice(bounds), chance.choice(bounds), chance.choice([None, None, 1, 2, 5, 0]), reverse=reverse)
        for _ in range(12)
        for reverse in (False, True)
    ]
    for found, one in zip(view.ranges([*wanted, ALL]), [*wanted, ALL], strict=True):
        assert found == [Row(key, rows[key][0]) for key in _expected(keys, one)], one
    asked = [*KEYS, *chance.choices(KEYS, k=3)]
    chance.shuffle(asked)
    values = view.get(asked)
    assert values == [rows[key][0] if key in rows else None for key in asked]
    assert {type(value) for value in values} <= {bytes, type(None)}
    held, expected = list(view.payloads(asked)), [rows.get(key) for key in asked]
    # no more than was asked for has to be taken
    assert _copied(next(iter(view.payloads(asked[-3:])))) == expected[-3]
    assert list(map(_copied, held)) == expected, "a payload stays as it is until the view closes"
    assert (view.get([]), view.ranges([]), list(view.payloads([]))) == ([], [], [])


def _change(draft: Update, rows: Rows, memory: list[bytearray], chance: random.Random) -> None:
    """A random change, of a draft and of the rows that it has to show; the memory of its payload is noted."""
    key, action = chance.choice(KEYS), chance.choice(["put", "put", "with payload", "delete", "delete and put"])
    if action.startswith("delete"):
        draft.delete(key)
        rows.pop(key, None)
    if action != "delete":
        value = bytes_of(chance.random(), LARGE_VALUE if chance.random() < 0.02 else chance.choice(VALUES))
        kept, given = rows.get(key, (b"", None))[1], None
        if action == "with payload":
            kept = bytes_of(chance.random(), chance.choice(LARGE_PAYLOADS if chance.random() < 0.1 else PAYLOADS))
            memory.append(bytearray(kept))
            forms: list[Buffer] = [kept, memory[-1], memoryview(memory[-1])]
            given = chance.choice(forms)
        draft.put(key, value, given)
        rows[key] = value, kept


class _Rollback(Exception):  # noqa: N818 - not an error
    """Raised on purpose inside an update."""


class BackendContract:
    """The contract of every backend, as tests. Subclass it and say how to open one."""

    is_persistent = False

    def open_backend(self, tmp_path: Path) -> Backend:
        """A new, empty backend with space for at least 64 MiB. Each test gets a directory of its own."""
        raise NotImplementedError

    @contextmanager
    def opened(self, tmp_path: Path) -> Iterator[Backend]:
        """A new backend, closed at the end."""
        with closing(self.open_backend(tmp_path)) as backend:
            yield backend

    # -- reading and writing ------------------------------------------------------------------------------------------

    def test_thousands_of_rows_are_written_read_and_deleted_at_once(self, tmp_path: Path) -> None:
        rows = {key: (key[:9], key if i % 30 == 0 else None) for i in range(3000) for key in [bytes_of(i, 33)]}
        keys = sorted(rows)
        ends = [Range(keys[1], keys[-1], limit, reverse=reverse) for limit in (7, None) for reverse in (False, True)]
        with self.opened(tmp_path) as backend:
            write_rows(backend, rows)
            with backend.view() as view:
                assert view.get([*keys, *(key[:-1] for key in keys)]) == [key[:9] for key in keys] + [None] * len(keys)
                assert _pairs(view, list(rows)) == list(rows.values())
                for one, found in zip(ends, view.ranges(ends), strict=True):
                    assert [row.key for row in found] == _expected(keys, one)
            write_rows(backend, dict.fromkeys(keys[10:-10], (None, None)))
            assert list(read_rows(backend)) == keys[:10] + keys[-10:]

    # -- updates ------------------------------------------------------------------------------------------------------

    def test_random_updates_show_and_leave_what_a_dictionary_would(self, tmp_path: Path) -> None:
        """And one that fails leaves nothing, and keeps nobody waiting."""
        chance = random.Random(7)
        rows: Rows = {}
        with self.opened(tmp_path) as backend:
            for step in range(60):
                before = dict(rows)
                memory: list[bytearray] = []
                with suppress(_Rollback), backend.view() as view:
                    used = view.used
                    _require(view, rows, chance)
                    raise _Rollback
                with suppress(_Rollback, KeyboardInterrupt), backend.update() as draft:
                    for _ in range(chance.choice([0, 1, 5, 40])):
                        _change(draft, rows, memory, chance)
                        if chance.random() < 0.1:
                            assert draft.used >= 0
                        if chance.random() < 0.1:
                            _require(draft, rows, chance)
                        if chance.random() < 0.03:
                            self._read_and_change(draft, rows, memory, chance)
                    if step % 4 == 3:
                        rows = before
                        raise chance.choice([_Rollback, KeyboardInterrupt])
                # the caller may change it when the update has closed
                for buffer in memory:
                    buffer[:] = bytes(len(buffer))
                if rows == before:
                    with backend.view() as view:
                        assert view.used == used
                    together(lambda: write_rows(backend, {b"none": (None, None)}))

    def _read_and_change(self, draft: Update, rows: Rows, memory: list[bytearray], chance: random.Random) -> None:
        """Read payloads, which what is written meanwhile does not change."""
        asked = chance.choices(KEYS, k=5)
        expected = [rows.get(key) for key in asked]
        held = []
        for pair in draft.payloads(asked):
            held.append(pair)
            _change(draft, rows, memory, chance)
        assert draft.used >= 0
        assert list(map(_copied, held)) == expected

    def test_a_view_neither_waits_for_an_update_nor_sees_it_before_it_closes(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            write_rows(backend, {b"a": (b"1", b"old"), b"b": (b"1", None)})
            before = read_rows(backend)
            seen: list[Rows] = []
            with backend.update() as draft:
                draft.delete(b"b")
                draft.put(b"a", b"2", bytes_of(1, MIB))
                together(lambda: seen.append(read_rows(backend)))
                assert draft.used >= 0
                draft.put(b"c", b"2")
                together(lambda: seen.append(read_rows(backend)))
            assert seen == [before, before]
            assert read_rows(backend) == {b"a": (b"2", bytes_of(1, MIB)), b"c": (b"2", None)}

    def test_an_update_is_visible_as_a_whole_and_payloads_belong_to_their_values(self, tmp_path: Path) -> None:
        """One call never sees a part of an update, and a later call never less."""
        keys = [b"%c%d" % (65 + i % 26, i) for i in range(30)]
        done = threading.Event()
        with self.opened(tmp_path) as backend:

            def keep_writing() -> None:
                try:
                    for turn in range(1, 21):
                        value = None if turn % 5 == 0 else b"%d" % turn
                        payloads = [
                            (value or b"") * (3 * MIB if i == turn % 7 == 0 else turn) for i in range(len(keys))
                        ]
                        write_rows(
                            backend, {key: (value, payload) for key, payload in zip(keys, payloads, strict=True)}
                        )
                finally:
                    done.set()

            def keep_reading() -> None:
                newest, is_last = 0, False
                while not is_last:
                    is_last = done.is_set()
                    with backend.view() as view:
                        for _ in range(3):
                            [rows] = view.ranges([ALL])
                            assert len(rows) in (0, len(keys))
                            for values in ({row.value for row in rows}, set(view.get(keys))):
                                assert len(values) <= 1, values
                                for number in [int(value) for value in values if value]:
                                    assert number >= newest
                                    newest = number
                            for value, payload in filter(None, view.payloads(keys)):
                                assert bytes(payload or b"") in (value * int(value), value * 3 * MIB)
                assert read_rows(backend) == {}

            together(keep_writing, keep_reading, keep_reading)

    def test_updates_of_threads_lose_no_increment(self, tmp_path: Path) -> None:
        rounds, workers = 20, 4
        with self.opened(tmp_path) as backend:
            self._count(rounds, *[backend] * workers)

    def _count(self, rounds: int, *backends: Backend) -> None:
        """Have threads add to two rows, by a value and by a range."""

        def add(draft: Update) -> None:
            [value], [rows] = draft.get([b"a"]), draft.ranges([Range(b"b", b"c", 1)])
            time.sleep(0)  # let another thread run
            draft.put(b"a", b"%d" % (int(value or 0) + 1))
            draft.put(b"b", b"%d" % (int(rows[0].value if rows else 0) + 1))

        def count(backend: Backend) -> None:
            for _ in range(rounds):
                update(backend, add)

        together(*[lambda backend=backend: count(backend) for backend in backends])
        total = b"%d" % (rounds * len(backends))
        for backend in backends:
            assert read_rows(backend) == {b"a": (total, None), b"b": (total, None)}

    # -- views --------------------------------------------------------------------------------------------------------

    def test_a_payload_does_not_change_while_its_view_is_open(self, tmp_path: Path) -> None:
        """Nor if another thread reads it."""
        with self.opened(tmp_path) as backend:
            self._overwrite(backend, backend)

    def _overwrite(self, reader: Backend, writer: Backend) -> None:
        """Have a writer delete and replace payloads that a reader holds, while another one reads."""
        payloads = {b"k%d" % i: bytes_of(i, size) for i, size in enumerate([300_000, 100, 2 * MIB])}
        write_rows(writer, {key: (b"", payload) for key, payload in payloads.items()})
        with reader.view() as view:
            held: list[Buffer | None] = []
            together(lambda: held.extend(pair and pair[1] for pair in view.payloads(list(payloads))))

            def overwrite() -> None:
                write_rows(writer, {b"k0": (None, None), b"k1": (b"", b"other"), b"k2": (None, None)})
                writer.reclaim()
                for i in range(10):
                    write_rows(writer, {b"n%d" % i: (b"", bytes(300_000))})
                read_rows(reader)

            together(overwrite)
            assert [bytes(payload or b"") for payload in held] == list(payloads.values())
        assert set(read_rows(reader)) == {b"k1"} | {b"n%d" % i for i in range(10)}

    # -- space --------------------------------------------------------------------------------------------------------

    def test_used_follows_what_is_stored_and_grows_by_no_more_than_the_costs(self, tmp_path: Path) -> None:
        chance = random.Random(5)
        keys = [chance.randbytes(chance.choice([8, 33, 33, 300])) for _ in range(60)]
        # value, and size of the payload
        stored: dict[bytes, tuple[bytes, int | None]] = {}
        with self.opened(tmp_path) as backend:
            with backend.update() as draft:
                draft.put(b"other", b"")
                costs = draft.costs
            with backend.view() as view:
                empty = before = view.used
            for i in range(60):
                some = chance.sample(keys, chance.choice([1, 1, 2, 5]))
                # what is overwritten or deleted may leave something
                most = before + (SLACK if stored.keys() & set(some) else 0)
                with backend.update() as draft:
                    for key in some:
                        if i % 4 == 3 or i >= 45:
                            draft.delete(key)
                            stored.pop(key, None)
                            continue
                        value = bytes(chance.choice([0, 50, 150, 2000, 5000, 16_000]))
                        size = chance.choice([None, 0, 1, 100, 2000, 2100, 4081, 20_000, MIB // 4])
                        size = 2_300_000 if i % 10 == 0 else size
                        draft.put(key, value, None if size is None else bytes(size))
                        stored[key] = value, stored.get(key, (b"", None))[1] if size is None else size
                        most += costs.of(key, value, size)
                        if i % 3 == 0:
                            assert draft.used <= most
                    expected = draft.used
                with backend.view() as view:
                    before = view.used
                assert before <= most
                assert before <= expected + SLACK, "a draft shows what its changes make of the location"
                # a backend need not count each small row
                n_bytes = sum(size or 0 for _, size in stored.values())
                cost = sum(costs.of(key, *one) for key, one in stored.items())
                assert n_bytes - SLACK <= before - empty <= cost + SLACK
            write_rows(backend, dict.fromkeys(keys, (None, None)))
            with backend.view() as view:
                assert view.used - empty <= SLACK

    def test_upkeep_changes_nothing_that_is_stored(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            write_rows(backend, {b"k%d" % i: (b"%d" % i, bytes_of(i, 100_000 * i)) for i in range(6)})
            write_rows(backend, {b"k%d" % i: (None, None) for i in (1, 3, 5)})
            before = read_rows(backend)
            for work in (backend.sync, backend.reclaim, backend.check, backend.sync):
                work()
                assert read_rows(backend) == before
            for erase in (False, True):
                assert backend.compact(erase=erase) >= 0
                assert read_rows(backend) == before
            write_rows(backend, {b"k0": (b"new", None)})
            assert read_rows(backend) == before | {b"k0": (b"new", b"")}

    # -- life ---------------------------------------------------------------------------------------------------------

    def test_a_closed_backend_says_so_and_may_be_closed_again(self, tmp_path: Path) -> None:
        backend = self.open_backend(tmp_path)
        write_rows(backend, {b"k": (b"v", b"payload")})
        location = backend.location
        assert ":" in location
        backend.close()
        backend.close()
        assert backend.location == location
        for opened in (backend.view, backend.update):
            with suppress(UnavailableError), opened() as view:
                view.get([b"k"])
                raise AssertionError("a closed backend can be used")

    def test_a_child_forked_while_a_thread_writes_uses_it_and_leaves_the_parent_alone(self, tmp_path: Path) -> None:
        keys = [b"%d" % i for i in range(10)]
        answers: list[bool] = []
        done = threading.Event()
        with self.opened(tmp_path) as backend:

            def write_slowly(turn: int, draft: Update) -> None:
                for key in keys:
                    draft.put(key, b"%d" % turn, bytes_of(turn, 500))
                time.sleep(0.002)  # so that most forks come in the middle

            def keep_writing() -> None:
                turn = 0
                while not done.is_set():
                    turn += 1
                    update(backend, partial(write_slowly, turn))
                    backend.sync()

            def child() -> bool:
                backend.after_fork()
                with backend.view() as view:
                    is_whole = len(set(view.get(keys)) - {None}) == 1
                write_rows(backend, {b"child": (b"", b"payload")})
                wrote = read_rows(backend)[b"child"] == (b"", b"payload")
                backend.close()
                return is_whole and wrote

            def fork() -> None:
                try:
                    for _ in range(5):
                        answers.append(in_child(child))
                        assert (b"child" in read_rows(backend)) == self.is_persistent
                        write_rows(backend, {b"child": (None, None)})
                finally:
                    done.set()

            write_rows(backend, {key: (b"0", bytes_of(0, 500)) for key in keys})
            together(keep_writing, fork)
            assert answers == [True] * 5
