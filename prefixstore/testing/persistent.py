"""The further contract of a backend whose rows outlive `close`, as a test class."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from prefixstore.backends.contract import Backend, Update
from prefixstore.testing.backend_contract import KEYS, BackendContract, Rows, bytes_of, read_rows, update, write_rows
from prefixstore.testing.together import fork_child


def _write_all(keys: list[bytes], number: int, draft: Update) -> None:
    """Write this number to all rows, and one row more; the rows of the last three numbers stay."""
    value = b"%d" % number
    draft.put(b"n" + value, value, value * 50_000)
    # so that every other one has written something before it is committed
    assert number % 2 or draft.used >= 0
    draft.delete(b"n%d" % (number - 3))
    for key in keys:
        draft.put(key, value, value * 2000)


class PersistentBackendContract(BackendContract):
    """The further contract of a backend whose rows outlive `close` and are shared by all who open it.

    Attributes
    ----------
    kills
        How many processes are killed while they write. Fewer, where others have to wait for what a dead one holds.
    """

    is_persistent = True
    kills = 4

    def reopen(self, tmp_path: Path) -> Backend:
        """Open once more what `open_backend` has opened in this directory."""
        return self.open_backend(tmp_path)

    def test_committed_rows_are_there_after_reopening(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            write_rows(backend, {key: (key, bytes_of(i, 5000 * i) if i % 2 else None) for i, key in enumerate(KEYS)})
            write_rows(backend, {KEYS[1]: (None, None), KEYS[3]: (b"new", None)})
            backend.sync()
            before = read_rows(backend)
            with backend.view() as view:
                used = view.used
        for _ in range(2):
            with closing(self.reopen(tmp_path)) as backend:
                assert read_rows(backend) == before
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
                    rows[key] = (b"%d" % turn, bytes_of(turn, 1000 * turn))
                    write_rows(writer, {key: rows[key], b"gone": (b"", b"x" * turn)})
                    write_rows(reader, {b"gone": (None, None)})
                    assert read_rows(one) == read_rows(two) == rows
                    with one.view() as mine, two.view() as theirs:
                        assert mine.used == theirs.used
            write_rows(one, {b"k0": (None, None)})
            del rows[b"k0"]
            with closing(self.reopen(tmp_path)) as three:
                assert read_rows(three) == read_rows(one) == rows

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
                    update(backend, partial(_write_all, keys, number))
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
                rows = read_rows(backend)
                found = int(rows[keys[0]][0])
                assert turn <= found <= turn + 1, "what was committed is lost"
                expected = dict.fromkeys(keys, (b"%d" % found, b"%d" % found * 2000))
                for value in [b"%d" % number for number in range(max(found - 2, 1), found + 1)]:
                    expected[b"n" + value] = value, value * 50_000
                assert rows == expected, "a part of an update is there, or is not"
                turn = found
                write_rows(backend, {b"parent": (b"", None)})
                write_rows(backend, {b"parent": (None, None)})
