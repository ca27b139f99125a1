"""The contract of `prefixstore.backends.contract` as a test class.

A new backend subclasses `BackendContract` in a test module, or `PersistentBackendContract` if what it keeps outlives
`close`, and says how to open one. pytest finds the tests; nothing here imports it.

>>> class TestMemoryBackend(BackendContract):
...     def open_backend(self, tmp_path):
...         return MemoryBackend()
"""

from __future__ import annotations

import os
import random
import signal
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
from prefixstore.testing.together import PATIENCE, fork_child, in_child, together

__all__ = ["BackendContract", "PersistentBackendContract"]

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


def _bytes(seed: object, size: int) -> bytes:
    return random.Random(str(seed)).randbytes(size)


def _stored(view: View) -> Rows:
    """All that a view sees."""
    [rows] = view.ranges([ALL])
    return dict(zip([row.key for row in rows], _pairs(view, [row.key for row in rows]), strict=True))  # type: ignore[arg-type]


def _pairs(view: View, keys: list[bytes]) -> list[tuple[bytes, bytes | None] | None]:
    """Values and payloads of these rows, copied."""
    return [pair and (pair[0], None if pair[1] is None else bytes(pair[1])) for pair in view.payloads(keys)]


def _read(backend: Backend) -> Rows:
    with backend.view() as view:
        return _stored(view)


def _update(backend: Backend, work: Callable[[Update], object]) -> None:
    """Do work in an update; again if another process was faster."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with backend.update() as draft:
                work(draft)
            return
        except ConflictError:
            assert time.monotonic() < until, "conflicts never end"


def _write(backend: Backend, rows: Mapping[bytes, tuple[bytes | None, Buffer | None]]) -> None:
    """Write rows, or delete those without a value."""

    def work(draft: Update) -> None:
        for key, (value, payload) in rows.items():
            draft.delete(key) if value is None else draft.put(key, value, payload)

    _update(backend, work)


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
    assert view.get(asked) == [rows[key][0] if key in rows else None for key in asked]
    assert _pairs(view, asked) == [rows.get(key) for key in asked]


def _change(draft: Update, rows: Rows, chance: random.Random) -> None:
    """A random change, of a draft and of the rows that it has to show."""
    key, action = chance.choice(KEYS), chance.choice(["put", "put", "with payload", "delete", "delete and put"])
    if action.startswith("delete"):
        draft.delete(key)
        rows.pop(key, None)
    if action != "delete":
        value, payload = _bytes(chance.random(), chance.choice([0, 1, 20, 20, 20, 5000])), None
        if action == "with payload":
            payload = _bytes(chance.random(), chance.choice([0, 1, 100, 5000, 5000, 70_000, 2 * MIB]))
        draft.put(key, value, payload)
        rows[key] = value, rows.get(key, (None, None))[1] if payload is None else payload


def _write_all(keys: list[bytes], number: int, draft: Update) -> None:
    """Write this number to all rows, and one row more; the rows of the last three numbers stay."""
    value = b"%d" % number
    draft.put(b"n" + value, value, value * 50_000)
    # so that every other one has written something before it is committed
    assert number % 2 or draft.used >= 0
    draft.delete(b"n%d" % (number - 3))
    for key in keys:
        draft.put(key, value, value * 2000)


class _Rollback(Exception):  # noqa: N818 - not an error
    """Raised on purpose inside an update."""


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

    def test_an_empty_backend_has_no_rows_and_missing_keys_are_none(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            for opened in (backend.view, backend.update):
                with opened() as view:
                    assert view.get(KEYS) == [None] * len(KEYS)
                    assert list(view.payloads(KEYS)) == [None] * len(KEYS)
                    assert view.ranges([ALL, ALL._replace(reverse=True), Range(b"a", b"a")]) == [[], [], []]
                    assert (view.get([]), view.ranges([]), list(view.payloads([]))) == ([], [], [])

    def test_rows_of_every_key_and_value_are_read_back_in_the_order_of_bytes(self, tmp_path: Path) -> None:
        rows = {key: _bytes(i, (0, 1, 100, 4096)[i % 4]) for i, key in enumerate(KEYS) if i % 3}
        rows[LAST] = _bytes(LAST, 300 * 1024)
        keys, asked = sorted(rows), [*KEYS[::-1], LAST, *KEYS[:5]]
        ends = [b"", *KEYS[::3], *KEYS[:4], b"a" * (LONGEST_KEY - 2), LAST]
        wanted = [
            Range(start, stop, limit, reverse=reverse)
            for start, stop, limit, reverse in product(ends, ends, (None, 0, 1, 2, 1000), (False, True))
        ]
        with self.opened(tmp_path) as backend:
            _write(backend, {key: (value, None) for key, value in rows.items()})
            for opened in (backend.view, backend.update):
                with opened() as view:
                    found = view.get(asked)
                    assert found == [rows.get(key) for key in asked]
                    assert {type(value) for value in found} == {bytes, type(None)}
                    assert list(view.payloads(asked)) == [(rows[key], None) if key in rows else None for key in asked]
                    for i in range(0, len(wanted), 100):
                        some = wanted[i : i + 100]
                        for one, in_it in zip(some, view.ranges(some), strict=True):
                            assert in_it == [(key, rows[key]) for key in _expected(keys, one)], one

    def test_thousands_of_rows_are_written_read_and_deleted_at_once(self, tmp_path: Path) -> None:
        rows = {key: (key[:9], key if i % 30 == 0 else None) for i in range(3000) for key in [_bytes(i, 33)]}
        keys = sorted(rows)
        ends = [Range(keys[1], keys[-1], limit, reverse=reverse) for limit in (7, None) for reverse in (False, True)]
        with self.opened(tmp_path) as backend:
            _write(backend, rows)
            with backend.view() as view:
                assert view.get([*keys, *(key[:-1] for key in keys)]) == [key[:9] for key in keys] + [None] * len(keys)
                assert _pairs(view, list(rows)) == list(rows.values())
                for one, found in zip(ends, view.ranges(ends), strict=True):
                    assert [row.key for row in found] == _expected(keys, one)
            _write(backend, dict.fromkeys(keys[10:-10], (None, None)))
            assert list(_read(backend)) == keys[:10] + keys[-10:]

    def test_payloads_of_any_size_and_buffer_type_are_read_back_in_order(self, tmp_path: Path) -> None:
        sizes = [0, 1, 2, 15, 2000, 2040, 4079, 4080, 4081, 65_537, MIB - 1, MIB, MIB + 1, 2 * MIB, (5 << 20) + 3]
        rows = {b"p%d" % size: (b"%d" % size, _bytes(size, size)) for size in sizes}
        # each in a kind of memory, which the caller may change when the update has closed
        buffers: list[tuple[bytes, bytearray]] = [(key, bytearray(payload)) for key, (_, payload) in rows.items()]
        memories: list[Callable[[bytearray], Buffer]] = [bytes, lambda memory: memory, memoryview]
        with self.opened(tmp_path) as backend:
            _write(backend, {key: (rows[key][0], memories[i % 3](b)) for i, (key, b) in enumerate(buffers)})
            for _, buffer in buffers:
                buffer[:] = bytes(len(buffer))
            with backend.view() as view:
                asked = [b"p1", *reversed(rows), b"none", *rows, b"p1"]
                # a payload of 0 bytes is one, too
                assert _pairs(view, asked) == [rows.get(key) for key in asked]
                # no more than was asked for has to be taken
                assert next(iter(view.payloads(asked))) == rows[b"p1"]
                assert view.get([b"p1"]) == [b"1"]

    # -- updates ------------------------------------------------------------------------------------------------------

    def test_random_updates_show_and_leave_what_a_dictionary_would(self, tmp_path: Path) -> None:
        chance = random.Random(7)
        rows: Rows = {}
        with self.opened(tmp_path) as backend:
            for step in range(60):
                before = dict(rows)
                with suppress(_Rollback), backend.update() as draft:
                    for _ in range(chance.choice([0, 1, 5, 40])):
                        _change(draft, rows, chance)
                        if chance.random() < 0.1:
                            assert draft.used >= 0
                        if chance.random() < 0.1:
                            _require(draft, rows, chance)
                    if step % 4 == 3:
                        rows = before
                        raise _Rollback
                with backend.view() as view:
                    _require(view, rows, chance)

    def test_payloads_that_an_update_reads_are_unchanged_by_what_it_writes_meanwhile(self, tmp_path: Path) -> None:
        rows = {b"k%d" % i: (b"%d" % i, _bytes(i, 40_000)) for i in range(8)}
        with self.opened(tmp_path) as backend:
            _write(backend, rows)
            expected = [*list(rows.values())[:3], (b"staged", b"mine"), (b"renamed", rows[b"k4"][1]), None]
            expected += list(rows.values())[6:]
            with backend.update() as draft:
                held = []
                draft.put(b"k3", b"staged", b"mine")
                draft.put(b"k4", b"renamed")
                draft.delete(b"k5")
                for key, pair in zip(rows, draft.payloads(list(rows)), strict=True):
                    held.append(pair)
                    draft.delete(key)
                    draft.put(b"new" + key, b"", bytes(40_000))
                    assert draft.used >= 0
                assert [pair and (pair[0], bytes(pair[1] or b"")) for pair in held] == expected
            assert set(_read(backend)) == {b"new" + key for key in rows}

    def test_an_update_that_fails_leaves_nothing_and_keeps_nobody_waiting(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            _write(backend, {b"a": (b"1", b"payload"), b"b": (b"1", None), b"c": (b"1", _bytes(1, MIB))})
            before = _read(backend)
            for error, is_flushed in product((_Rollback, KeyboardInterrupt), (False, True)):
                with backend.view() as view:
                    used = view.used
                with suppress(error), backend.update() as draft:
                    draft.delete(b"a")
                    draft.put(b"b", b"2")
                    draft.put(b"c", b"2", b"other")
                    draft.put(b"d", b"2", _bytes(2, MIB))
                    assert not is_flushed or draft.used >= 0
                    draft.put(b"e", b"2")
                    raise error
                assert _read(backend) == before
                with backend.view() as view:
                    assert view.used == used
                with suppress(error), backend.view() as view:
                    assert view.get([b"a"]) == [b"1"]
                    raise error
                together(lambda: _write(backend, {b"a": (b"1", None)}))

    def test_a_view_neither_waits_for_an_update_nor_sees_it_before_it_closes(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            _write(backend, {b"a": (b"1", b"old"), b"b": (b"1", None)})
            before = _read(backend)
            seen: list[Rows] = []
            with backend.update() as draft:
                draft.delete(b"b")
                draft.put(b"a", b"2", _bytes(1, MIB))
                together(lambda: seen.append(_read(backend)))
                assert draft.used >= 0
                draft.put(b"c", b"2")
                together(lambda: seen.append(_read(backend)))
            assert seen == [before, before]
            assert _read(backend) == {b"a": (b"2", _bytes(1, MIB)), b"c": (b"2", None)}

    def test_an_update_is_visible_as_a_whole_and_payloads_belong_to_their_values(self, tmp_path: Path) -> None:
        """One call never sees a part of an update, and a later call never less."""
        keys = [b"%c%d" % (65 + i % 26, i) for i in range(30)]
        done = threading.Event()
        with self.opened(tmp_path) as backend:

            def write() -> None:
                try:
                    for turn in range(1, 21):
                        value = None if turn % 5 == 0 else b"%d" % turn
                        payloads = [
                            (value or b"") * (3 * MIB if i == turn % 7 == 0 else turn) for i in range(len(keys))
                        ]
                        _write(backend, {key: (value, payload) for key, payload in zip(keys, payloads, strict=True)})
                finally:
                    done.set()

            def read() -> None:
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
                assert _read(backend) == {}

            together(write, read, read)

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
                _update(backend, add)

        together(*[lambda backend=backend: count(backend) for backend in backends])
        total = b"%d" % (rounds * len(backends))
        for backend in backends:
            assert _read(backend) == {b"a": (total, None), b"b": (total, None)}

    # -- views --------------------------------------------------------------------------------------------------------

    def test_a_payload_does_not_change_while_its_view_is_open(self, tmp_path: Path) -> None:
        """Nor if another thread reads it."""
        with self.opened(tmp_path) as backend:
            self._overwrite(backend, backend)

    def _overwrite(self, reader: Backend, writer: Backend) -> None:
        """Have a writer delete and replace payloads that a reader holds."""
        payloads = {b"k%d" % i: _bytes(i, size) for i, size in enumerate([300_000, 100, 2 * MIB])}
        _write(writer, {key: (b"", payload) for key, payload in payloads.items()})
        with reader.view() as view:
            held: list[Buffer | None] = []
            together(lambda: held.extend(pair and pair[1] for pair in view.payloads(list(payloads))))

            def overwrite() -> None:
                _write(writer, {b"k0": (None, None), b"k1": (b"", b"other"), b"k2": (None, None)})
                writer.reclaim()
                for i in range(10):
                    _write(writer, {b"n%d" % i: (b"", bytes(300_000))})

            together(overwrite)
            assert [bytes(payload or b"") for payload in held] == list(payloads.values())
        assert set(_read(reader)) == {b"k1"} | {b"n%d" % i for i in range(10)}

    # -- space --------------------------------------------------------------------------------------------------------

    def test_used_grows_by_what_is_written_and_by_no_more_than_the_costs(self, tmp_path: Path) -> None:
        chance = random.Random(5)
        keys: list[bytes] = []
        with self.opened(tmp_path) as backend:
            with backend.view() as view:
                empty = view.used
            n_bytes = 0
            for i in range(60):
                with backend.view() as view:
                    before = view.used
                cost = 0
                with backend.update() as draft:
                    for _ in range(chance.choice([1, 1, 2, 5])):
                        keys.append(chance.randbytes(chance.choice([8, 33, 33, 300])))
                        value = bytes(chance.choice([0, 50, 150, 2000, 5000, 16_000]))
                        size = chance.choice([None, 0, 1, 100, 2000, 2100, 4081, 20_000, MIB // 4])
                        draft.put(keys[-1], value, None if size is None else bytes(size))
                        cost += draft.costs.of(keys[-1], value, size)
                        # a backend need not count each small row
                        n_bytes += size or 0
                        if i % 3 == 0:
                            assert draft.used <= before + cost
                    expected = draft.used
                with backend.view() as view:
                    assert view.used - before <= cost
                    assert view.used <= expected + SLACK, "a draft shows what its changes make of the location"
                    assert view.used - empty >= n_bytes - SLACK
            _write(backend, dict.fromkeys(keys, (None, None)))
            with backend.view() as view:
                assert view.used - empty <= SLACK

    def test_used_shrinks_when_values_or_payloads_become_smaller(self, tmp_path: Path) -> None:
        value, payload = bytes(1000), bytes(2_300_000)
        large = {b"k": (value, payload), b"l": (bytes(200_000), None)}
        with self.opened(tmp_path) as backend:
            with backend.update() as draft:
                draft.put(b"other", b"")
                costs = draft.costs
            with backend.view() as view:
                empty = view.used
            for small in (
                {b"k": (b"", None), b"l": (b"", None)},
                {b"k": (value, b""), b"l": (None, None)},
                {b"k": (None, None)},
                {b"k": (None, None), b"l": (None, None)},
            ):
                for written in (large, small):
                    _write(backend, written)
                    rows = _read(backend)
                    sizes = {key: None if payload is None else len(payload) for key, (_, payload) in rows.items()}
                    cost = sum(costs.of(key, rows[key][0], size) for key, size in sizes.items())
                    with backend.view() as view:
                        assert sum(filter(None, sizes.values())) - SLACK <= view.used - empty <= cost + SLACK

    def test_upkeep_changes_nothing_that_is_stored(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            _write(backend, {b"k%d" % i: (b"%d" % i, _bytes(i, 100_000 * i)) for i in range(6)})
            _write(backend, {b"k%d" % i: (None, None) for i in (1, 3, 5)})
            before = _read(backend)
            for work in (backend.sync, backend.reclaim, backend.check, backend.sync):
                work()
                assert _read(backend) == before
            for erase in (False, True):
                assert backend.compact(erase=erase) >= 0
                assert _read(backend) == before
            _write(backend, {b"k0": (b"new", None)})
            assert _read(backend) == before | {b"k0": (b"new", b"")}

    # -- life ---------------------------------------------------------------------------------------------------------

    def test_a_closed_backend_says_so_and_may_be_closed_again(self, tmp_path: Path) -> None:
        backend = self.open_backend(tmp_path)
        _write(backend, {b"k": (b"v", b"payload")})
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

            def write() -> None:
                turn = 0
                while not done.is_set():
                    turn += 1
                    _write(backend, {key: (b"%d" % turn, _bytes(turn, 500)) for key in keys})
                    backend.sync()

            def child() -> bool:
                backend.after_fork()
                with backend.view() as view:
                    is_whole = len(set(view.get(keys)) - {None}) == 1
                _write(backend, {b"child": (b"", b"payload")})
                wrote = _read(backend)[b"child"] == (b"", b"payload")
                backend.close()
                return is_whole and wrote

            def fork() -> None:
                try:
                    for _ in range(5):
                        answers.append(in_child(child))
                        assert (b"child" in _read(backend)) == isinstance(self, PersistentBackendContract)
                        _write(backend, {b"child": (None, None)})
                finally:
                    done.set()

            _write(backend, {key: (b"0", _bytes(0, 500)) for key in keys})
            together(write, fork)
            assert answers == [True] * 5


class PersistentBackendContract(BackendContract):
    """The further contract of a backend whose rows outlive `close` and are shared by all who open it.

    Attributes
    ----------
    kills
        How many processes are killed while they write. Fewer, where others have to wait for what a dead one holds.
    """

    kills = 4

    def reopen(self, tmp_path: Path) -> Backend:
        """Open once more what `open_backend` has opened in this directory."""
        return self.open_backend(tmp_path)

    def test_committed_rows_are_there_after_reopening(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            _write(backend, {key: (key, _bytes(i, 5000 * i) if i % 2 else None) for i, key in enumerate(KEYS)})
            _write(backend, {KEYS[1]: (None, None), KEYS[3]: (b"new", None)})
            backend.sync()
            before = _read(backend)
            with backend.view() as view:
                used = view.used
        for _ in range(2):
            with closing(self.reopen(tmp_path)) as backend:
                assert _read(backend) == before
                with backend.view() as view:
                    assert view.used == used

    def test_backends_on_one_location_see_what_the_others_commit(self, tmp_path: Path) -> None:
        """Also when others close."""
        rows: Rows = {}
        with closing(self.open_backend(tmp_path)) as one:
            with closing(self.reopen(tmp_path)) as two:
                for turn in range(10):
                    writer, reader = (one, two) if turn % 2 else (two, one)
                    key = b"k%d" % (turn % 4)
                    rows[key] = (b"%d" % turn, _bytes(turn, 1000 * turn))
                    _write(writer, {key: rows[key], b"gone": (b"", b"x" * turn)})
                    _write(reader, {b"gone": (None, None)})
                    assert _read(one) == _read(two) == rows
                    with one.view() as mine, two.view() as theirs:
                        assert mine.used == theirs.used
            _write(one, {b"k0": (None, None)})
            del rows[b"k0"]
            with closing(self.reopen(tmp_path)) as three:
                assert _read(three) == _read(one) == rows

    def test_updates_of_two_backends_lose_no_increment(self, tmp_path: Path) -> None:
        with closing(self.open_backend(tmp_path)) as one, closing(self.reopen(tmp_path)) as two:
            self._count(30, one, two)

    def test_a_payload_does_not_change_while_another_backend_writes(self, tmp_path: Path) -> None:
        with closing(self.open_backend(tmp_path)) as one, closing(self.reopen(tmp_path)) as two:
            self._overwrite(one, two)

    def test_a_process_killed_while_it_writes_leaves_whole_updates_only(self, tmp_path: Path) -> None:
        keys = [b"%c" % i for i in range(0, 250, 10)]
        chance = random.Random(1)
        turn = 0
        self.open_backend(tmp_path).close()
        for _ in range(self.kills):
            reading, writing = os.pipe()

            def child(first: int = turn, pipe: int = writing) -> bool:
                backend = self.reopen(tmp_path)
                for number in range(first + 1, first + 100_000):
                    _update(backend, partial(_write_all, keys, number))
                    os.write(pipe, b"%d\n" % number)
                return True

            pid = fork_child(child)
            os.close(writing)
            with os.fdopen(reading) as lines:
                for _ in range(3):
                    turn = int(lines.readline())
                time.sleep(chance.random() * 0.05)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                turn = int(([*lines] or [turn])[-1])
            with closing(self.reopen(tmp_path)) as backend:
                backend.check()
                rows = _read(backend)
                found = int(rows[keys[0]][0])
                assert turn <= found <= turn + 1, "what was committed is lost"
                expected = dict.fromkeys(keys, (b"%d" % found, b"%d" % found * 2000))
                for value in [b"%d" % number for number in range(max(found - 2, 1), found + 1)]:
                    expected[b"n" + value] = value, value * 50_000
                assert rows == expected, "a part of an update is there, or is not"
                turn = found
                _write(backend, {b"parent": (b"", None)})
                _write(backend, {b"parent": (None, None)})
