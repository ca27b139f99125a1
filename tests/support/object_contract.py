"""What object storage promises besides what every location does: it keeps pages itself, and no rows.

Of all other backends `prefixstore.testing.contract` proves the same, of rows.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from prefixstore.errors import UnavailableError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import Buffer, Record, Usage, checksum
from prefixstore.testing.together import in_child, together
from tests.support.page_contract import PersistentPagesContract, Rollback, payload_of, put, stored
from tests.support.pages import make_page

__all__ = ["ObjectsContract"]


class ObjectsContract(PersistentPagesContract):
    """Commits, views, threads, forks and processes. Subclass it and say how to open a location."""

    def test_payloads_of_any_size_and_buffer_type_are_read_back(self, tmp_path: Path) -> None:
        sizes = [0, 1, 2, 15, 16, 17, 2000, 2040, 4079, 4080, 4081, 4096, 65_537, (5 << 20) + 3]
        payloads = [payload_of(size, size) for size in sizes]
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

    # -- transactions --------------------------------------------------------------------------------------------------

    def test_only_the_transaction_itself_sees_its_changes_before_it_commits(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                old = put(transaction, 1)
            before = stored(backend)
            with backend.update() as transaction:
                used = transaction.used
                new = put(transaction, 2, payload_of(2, 50_000))
                transaction.delete(old)
                assert transaction.record(new) is not None
                assert transaction.record(old) is None
                assert {key for key, _, _ in transaction.scan()} == {new}
                assert transaction.used.entries == used.entries
                assert transaction.used.bytes >= used.bytes + 50_000 - 8192
                seen: list[object] = []
                together(lambda: seen.append(stored(backend)))
                assert seen == [before]
            assert set(stored(backend)) == {new}

    def test_a_transaction_that_fails_leaves_no_trace(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                kept, touched = put(transaction, 1), put(transaction, 2)
            with backend.view() as view:
                generation, used, namespaces = view.generation, view.used, dict(view.namespaces())
            before = stored(backend)
            with suppress(Rollback), backend.update() as transaction:
                transaction.delete(kept)
                transaction.touch(touched, Usage(99, 99))
                transaction.put_namespace(bytes(KEY_BYTES), b"other")
                put(transaction, 3, payload_of(3, 100_000))
                raise Rollback
            assert stored(backend) == before
            with backend.view() as view:
                assert (view.generation, view.used) == (generation, used)
                assert dict(view.namespaces()) == namespaces
                assert view.changes(generation) == []

    def test_transactions_of_threads_take_turns(self, tmp_path: Path) -> None:
        rounds, workers = 20, 4
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = put(transaction, 1)

            def count() -> None:
                for _ in range(rounds):
                    with backend.update() as transaction:
                        usage = transaction.usage(key)
                        assert usage is not None
                        time.sleep(0)  # let another thread run
                        transaction.touch(key, Usage(usage.last_used + 1))

            together(*[count] * workers)
            with backend.view() as view:
                assert view.usage(key) == Usage(1 + rounds * workers)

    def test_many_threads_read_whole_transactions_while_others_write(self, tmp_path: Path) -> None:
        """What is read of a page was written in one piece, and is not older than its record."""
        done = threading.Event()
        rounds = {checksum(payload_of(i, 3000)): i for i in range(60)}
        a, b = make_page(b"a", [1])[0], make_page(b"b", [2])[0]
        with self.opened(tmp_path) as backend:

            def write() -> None:
                try:
                    for i in rounds.values():
                        with backend.update() as transaction:
                            for tokens in ([1], [2]):
                                payload = payload_of(i, 3000)
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

            together(write, read, read, read)
            assert stored(backend) == {}

    def test_record_and_payload_of_a_page_that_is_put_again_meanwhile_belong_together(self, tmp_path: Path) -> None:
        """A page may be packed or unpacked while it is restored."""
        forms = [make_page(payload, [1]) for payload in (payload_of(1, 3000), payload_of(2, 9_000_000))]
        payloads = [payload_of(1, 3000), payload_of(2, 9_000_000)]
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

            together(put, read, read)

    # -- views and space -----------------------------------------------------------------------------------------------

    def test_a_payload_does_not_change_while_its_view_is_open(self, tmp_path: Path) -> None:
        """Nor if another thread reads it."""
        payload = payload_of(1, 300_000)
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = put(transaction, 1, payload)
            with backend.view() as view:
                held: list[Buffer | None] = []
                together(lambda: held.append(view.payload(key)))

                def overwrite() -> None:
                    with backend.update() as transaction:
                        transaction.delete(key)
                    backend.reclaim()
                    for i in range(2, 12):
                        with backend.update() as transaction:
                            put(transaction, i, payload_of(i, 300_000))

                together(overwrite)
                assert [bytes(found or b"") for found in held] == [payload]
            with backend.view() as view:
                assert view.payload(key) is None

    def test_used_is_at_least_the_payloads_and_shrinks_when_they_are_deleted(self, tmp_path: Path) -> None:
        sizes = [10, 1000, 100_000, 1 << 20]
        with self.opened(tmp_path) as backend:
            with backend.view() as view:
                empty = view.used
            with backend.update() as transaction:
                keys = [put(transaction, i, payload_of(i, size)) for i, size in enumerate(sizes)]
            with backend.view() as view:
                full = view.used
                # an empty location may have space for some rows
                assert full.bytes - empty.bytes >= sum(sizes) - 65_536
                assert full.entries == len(sizes)
            with backend.update() as transaction:
                for key in keys:
                    transaction.delete(key)
            with backend.view() as view:
                assert view.used.entries == 0
                assert view.used.bytes - empty.bytes <= 32_768

    def test_upkeep_changes_nothing_that_is_stored(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                keys = [put(transaction, i) for i in range(5)]
                transaction.delete(keys[0])
            before = stored(backend)
            with backend.view() as view:
                generation = view.generation
            for work in (backend.sync, backend.reclaim, backend.compact, backend.scrub, backend.sync):
                work()
                assert stored(backend) == before
            with backend.view() as view:
                assert view.generation == generation

    # -- life ----------------------------------------------------------------------------------------------------------

    def test_a_closed_location_says_so_and_may_be_closed_again(self, tmp_path: Path) -> None:
        backend = self.open_backend(tmp_path)
        with backend.update() as transaction:
            put(transaction, 1)
        location = backend.location
        backend.close()
        backend.close()
        assert backend.location == location
        assert ":" in location
        for use in (backend.view, backend.update):
            with pytest.raises(UnavailableError, match="closed"), use():
                raise AssertionError("it opened")

    def test_a_forked_child_reads_and_writes_and_leaves_the_parent_alone(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            with backend.update() as transaction:
                key = put(transaction, 1)
            before = stored(backend)

            def child() -> bool:
                backend.after_fork()
                found = stored(backend) == before
                with backend.update() as transaction:
                    new = put(transaction, 2)
                wrote = set(stored(backend)) == {key, new}
                backend.close()
                return found and wrote

            assert in_child(child)
            after = stored(backend)
            assert after.pop(key) == before[key]
            assert len(after) == 1, "the parent sees what the child committed"
            with backend.update() as transaction:
                another = put(transaction, 3)
            assert another in stored(backend)

    def test_a_child_forked_while_another_thread_writes_does_not_hang(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as backend:
            stop = threading.Event()
            answers: list[bool] = []

            def write() -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    with backend.update() as transaction:
                        put(transaction, number % 20, payload_of(number % 7, 2000))
                    backend.sync()

            def child() -> bool:
                backend.after_fork()
                with backend.update() as transaction:
                    key = put(transaction, 100)
                return key in stored(backend)

            def fork() -> None:
                try:
                    answers.extend(in_child(child) for _ in range(5))
                finally:
                    stop.set()

            together(write, fork)
            assert answers == [True] * 5

    def test_one_backend_may_close_while_another_stays_open(self, tmp_path: Path) -> None:
        one, two = self.open_backend(tmp_path), self.reopen(tmp_path)
        with one.update() as transaction:
            key = put(transaction, 1)
        one.close()
        one.close()
        assert set(stored(two)) == {key}
        with two.update() as transaction:
            transaction.delete(key)
        two.close()
        with closing(self.reopen(tmp_path)) as three:
            assert stored(three) == {}
