"""Pages are replaced by packed or raw ones only if they are still the same, and only by what holds the same state."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from prefixstore.engine import repack
from prefixstore.engine.pages import open_pages
from prefixstore.engine.repack import Repacker
from prefixstore.errors import UnavailableError
from prefixstore.format.autocodec import AutoCodec, encode
from prefixstore.format.codec import CODECS, PACKINGS, decode
from prefixstore.format.keys import SNAPSHOT, as_tokens, page_key
from prefixstore.format.record import Usage, checksum
from tests.support import PATIENCE
from tests.support.engines import (
    MIB,
    NS,
    A,
    B,
    MemoryPages,
    P,
    Store,
    compressible,
    rest,
    state_of,
    store_of,
    taken,
    two_stores,
)
from tests.support.faults import SlowBackend
from tests.support.pages import make_page
from tests.support.places import SCHEMES, place

SIZE = 24_000  # six pages of an LMDB file, five when it is packed
NO_LIMIT = 2**63


@pytest.fixture(params=["memory", *SCHEMES])
def store(request, tmp_path):
    """A store that holds two sequences of three raw pages, on each backend."""
    url = "memory:" if request.param == "memory" else place(request.param, tmp_path, request)
    backend = open_pages(url, max_bytes=64 * MIB)
    with store_of(backend, codec="auto", state_of=compressible, settings=b'{"n":1}') as one:
        for tokens in (A, B):
            assert one.put(tokens, SIZE) == 3
        one.engine.commit([])
        yield one


def repacker_of(store) -> Repacker:
    return Repacker(store.engine._catalog, store.engine._encode, store.counters)


def prepared(store, repacker):
    """The packed forms of all pages."""
    store.engine._catalog.load_table(store.backend)
    with store.backend.view() as view:
        store.engine._catalog.refresh(view)
        found = repacker.coldest(view)
    return repacker.pack(found)


def replaced(store, repacker, replacements) -> int:
    with store.engine._catalog.update(store.backend) as transaction:
        return repacker.replace(transaction, replacements, NO_LIMIT)


def stored(store):
    with store.backend.view() as view:
        return {key: (record, usage) for key, record, usage in view.scan()}


def test_all_but_the_bytes_of_a_page_stays(store):
    repacker, before = repacker_of(store), stored(store)
    replacements = prepared(store, repacker)
    assert replaced(store, repacker, replacements) == 6
    after = stored(store)
    assert after.keys() == before.keys()
    for key, (record, usage) in after.items():
        old, old_usage = before[key]
        assert usage == old_usage
        assert record.codec == CODECS["planes"]
        assert record.stored_bytes < old.stored_bytes == old.raw_bytes
        assert replace(record, codec=0, stored_bytes=old.stored_bytes, checksum=old.checksum) == old
    assert store.counters["packed"] == 6
    assert [store.fetch(tokens) for tokens in (A, B)] == [3, 3]
    assert prepared(store, repacker) == [], "nothing is left to pack"


def test_and_back(store):
    repacker, before = repacker_of(store), stored(store)
    replaced(store, repacker, prepared(store, repacker))
    path = store.engine.match(NS, as_tokens(A), P)
    repacker.want(NS, path.pages)
    with store.backend.view() as view:
        found = repacker.wanted(view, NO_LIMIT)
    assert replaced(store, repacker, repacker.unpack(found)) == 3
    assert (store.counters["unpacked"], repacker.wants_pages) == (3, False)
    after = stored(store)
    for page in path.pages:
        assert after[page.key][0] == before[page.key][0]
    assert store.fetch(A) == 3


def test_a_page_that_was_deleted_meanwhile_stays_deleted(store):
    repacker = repacker_of(store)
    replacements = prepared(store, repacker)
    store.engine.clear(None)
    assert replaced(store, repacker, replacements) == 0
    assert stored(store) == {}


def test_a_page_that_was_captured_again_meanwhile_is_not_replaced(store):
    repacker = repacker_of(store)
    replacements = prepared(store, repacker)
    store.engine.clear(None)
    store.put(A, SIZE)
    before = stored(store)
    assert replaced(store, repacker, replacements) == 0
    assert stored(store) == before


def test_a_page_that_another_process_packed_meanwhile_is_not_packed_twice(store):
    one, two = repacker_of(store), repacker_of(store)
    mine, other = prepared(store, one), prepared(store, two)
    assert replaced(store, two, other) == 6
    assert replaced(store, one, mine) == 0
    assert store.counters["packed"] == 6


def test_a_use_or_a_pin_meanwhile_is_kept(store):
    repacker = repacker_of(store)
    replacements = prepared(store, repacker)
    store.fetch(A)
    store.engine.commit([])
    store.engine.pin(NS, as_tokens(B), P, pinned=True)
    before = stored(store)
    assert replaced(store, repacker, replacements) == 6
    assert {key: usage for key, (_, usage) in stored(store).items()} == {
        key: usage for key, (_, usage) in before.items()
    }
    assert sum(usage.pinned for _, usage in before.values()) == sum(usage.hits for _, usage in before.values()) == 3


def test_a_failed_transaction_changes_nothing_and_counts_nothing(store):
    repacker, before = repacker_of(store), stored(store)
    replacements = prepared(store, repacker)

    def fail():
        with store.engine._catalog.update(store.backend) as transaction:
            assert repacker.replace(transaction, replacements, NO_LIMIT) == 6
            raise UnavailableError("on purpose")

    with pytest.raises(UnavailableError):
        fail()
    assert stored(store) == before
    assert store.counters["packed"] == 0
    assert [store.fetch(tokens) for tokens in (A, B)] == [3, 3]
    assert replaced(store, repacker, prepared(store, repacker)) == 6


def test_what_an_open_view_reads_stays_as_it_was(store):
    """Payloads that a restore has got, and pages that it has not read yet."""
    repacker = repacker_of(store)
    replacements = prepared(store, repacker)
    path = store.engine.match(NS, as_tokens(A), P)
    done = []

    def other():
        done.append(replaced(store, repacker, replacements))
        # and what was freed is used for other pages
        for number in range(5, 9):
            store.put([number] * 12, SIZE)

    for streamed, along in ((False, False), (True, False), (True, True)):
        with store.engine.fetching(path.pages, streamed=streamed, along=along) as states:
            first = next(states)
            if not done:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join(PATIENCE)
                assert done == [6]
            assert bytes(first) == compressible(path.pages[0].key, SIZE)
            for page, state in zip(path.pages[1:], states, strict=True):
                assert bytes(state) == compressible(page.key, SIZE)
            assert states.verified() == 3
    assert store.counters.group("unreadable") == {}


def test_an_index_that_does_not_know_yet_that_pages_are_packed_restores_them(store):
    path = store.engine.match(NS, as_tokens(A), P)
    repacker = repacker_of(store)
    replaced(store, repacker, prepared(store, repacker))
    for streamed in (False, True):
        with store.engine.fetching(path.pages, streamed=streamed) as states:
            assert [bytes(state) for state in states] == [compressible(page.key, SIZE) for page in path.pages]
            assert states.verified() == 3


# -- never the wrong state ---------------------------------------------------------------------------------------------


def test_a_damaged_page_is_not_packed_but_deleted():
    """Packed, it would have a checksum that matches."""
    with store_of(codec="auto", state_of=compressible) as store:
        store.put(A, SIZE)
        path = store.engine.match(NS, as_tokens(A), P)
        with store.backend.update() as transaction:
            record, usage = transaction.record(path.pages[2].key), transaction.usage(path.pages[2].key)
            transaction.put(path.pages[2].key, record, usage, compressible(b"other", SIZE))
        repacker = repacker_of(store)
        assert replaced(store, repacker, prepared(store, repacker)) == 2
        # without a lookup
        assert store.engine.has_deferred
        store.engine.commit([])
        assert store.counters["corrupt"] == 1
        assert store.fetch(A) == 2
        assert len(stored(store)) == 2


@pytest.mark.parametrize("name", ["planes", "zstd"])
def test_a_page_is_not_replaced_by_one_that_unpacks_to_something_else(name, monkeypatch, caplog):
    packing, pack = PACKINGS[name], PACKINGS[name].pack
    with store_of(codec="auto", state_of=compressible) as store:
        store.put(A, SIZE)
        before = stored(store)
        encode = store.engine._encode
        monkeypatch.setattr(
            encode, "smallest", lambda _, raw: (packing.number, pack(bytes([bytes(raw)[0] ^ 1]) + bytes(raw)[1:]))
        )
        repacker = repacker_of(store)
        assert prepared(store, repacker) == []
        assert "does not unpack to the original bytes" in caplog.text
        assert stored(store) == before
        assert prepared(store, repacker) == []
        assert caplog.text.count("does not unpack") == 3, "not tried again"


def test_a_record_that_claims_another_size_than_was_restored_is_not_unpacked(monkeypatch):
    with store_of(codec="planes", state_of=compressible) as store:
        store.put(A[:P], SIZE)
        (page,) = store.engine.match(NS, as_tokens(A[:P]), P).pages
        store.engine._encode = AutoCodec()
        repacker = repacker_of(store)
        repacker.want(NS, [page])
        # a page of another size under the same key, by another process
        payload = bytes(PACKINGS["planes"].pack(bytes(MIB)))
        with store.backend.update() as transaction:
            record = transaction.record(page.key)
            larger = replace(record, raw_bytes=MIB, stored_bytes=len(payload), checksum=checksum(payload))
            transaction.put(page.key, larger, transaction.usage(page.key), payload)
        with store.backend.view() as view:
            assert repacker.wanted(view, NO_LIMIT) == []


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_pages_of_tokens_only_and_pending_pages_are_not_packed():
    with store_of(codec="auto", state_of=compressible) as store:
        store.put(A, 0)
        store.announce(B, SIZE)
        store.put([7] * P, SIZE)
        assert [one.old.tokens for one in prepared(store, repacker_of(store))] == [as_tokens([7] * P).tobytes()]


def test_a_page_that_waits_here_and_was_stored_by_another_process_is_not_packed(tmp_path):
    with two_stores(tmp_path, codec="auto", state_of=compressible) as (one, two):
        waiting = two.announce(A, SIZE)
        one.put(A, SIZE)
        one.put([7] * P, SIZE)
        assert two.match(A) == 12
        two.engine._catalog.load_table(two.backend)
        assert [page.key for page in two.engine._catalog.coldest(10)] == [page_key(NS, as_tokens([7] * P).tobytes())]
        two.engine.commit(waiting)
        assert len(two.engine._catalog.coldest(10)) == 4


def test_a_page_that_would_be_packed_if_it_were_captured_now_is_not_unpacked(monkeypatch):
    """By a process that has not captured pages yet, from a location that is slow."""
    with store_of(codec="planes", state_of=compressible) as store:
        store.put(A, SIZE)
        encode = store.engine._encode = AutoCodec()
        repacker = repacker_of(store)
        monkeypatch.setattr(type(encode.read_rate), "seconds_per_byte", 1e-3)
        for wanted in (3, 0):  # it is asked for once
            repacker.want(NS, store.engine.match(NS, as_tokens(A), P).pages)
            with store.backend.view() as view:
                found = repacker.wanted(view, NO_LIMIT)
            assert len(found) == wanted
            assert repacker.unpack(found) == []


def test_snapshots_are_packed():
    with store_of(codec="auto", state_of=compressible) as store:
        payload = compressible(b"s", SIZE)
        key, page = make_page(b"", [1, 2], parent=NS, namespace=NS)
        snapshot = replace(make_page(payload, [3])[1], namespace=NS, parent=key, start=2, form=SNAPSHOT)
        with store.backend.update() as transaction:
            transaction.put_namespace(NS, store.settings)
            transaction.put(key, page, Usage(1), b"")
            transaction.put(snapshot.key, snapshot, Usage(1), payload)
        repacker = repacker_of(store)
        assert replaced(store, repacker, prepared(store, repacker)) == 1
        with store.backend.view() as view:
            assert bytes(decode(view.record(snapshot.key), view.payload(snapshot.key))) == payload


def test_a_page_that_gets_hardly_smaller_stays_raw():
    def state(key, size):
        return state_of(key, size - size // 100) + bytes(size // 100)

    with store_of(codec="auto", state_of=state) as store:
        store.put(A, SIZE)
        repacker = repacker_of(store)
        store.engine._encode.may_save = lambda namespace: True
        store.engine._encode.smallest = lambda namespace, raw: encode(raw, "zstd")
        assert prepared(store, repacker) == []


def test_a_step_is_bounded_in_bytes_and_in_pages(monkeypatch):
    with store_of(codec="auto", state_of=compressible) as store:
        for tokens in (A, B):
            store.put(tokens, SIZE)
        repacker = repacker_of(store)
        store.engine._catalog.load_table(store.backend)
        with store.backend.view() as view:
            assert [len(repacker.coldest(view, 2 * SIZE)) for _ in range(4)] == [2, 2, 2, 2]
    monkeypatch.setattr(repack, "STEP_PAGES", 3)
    with store_of(codec="auto", state_of=compressible) as store:
        store.put(list(range(20)), SIZE)
        repacker = repacker_of(store)
        store.engine._catalog.load_table(store.backend)
        with store.backend.view() as view:
            assert len(repacker.coldest(view)) == 3


def test_no_view_and_no_transaction_is_open_while_pages_are_packed(monkeypatch):
    opened = []

    class Watched(SlowBackend):
        """Notes which views and transactions are open."""

        @contextmanager
        def view(self):
            with super().view() as view:
                opened.append(view)
                yield view
                opened.remove(view)

        @contextmanager
        def update(self):
            with super().update() as transaction:
                opened.append(transaction)
                yield transaction
                opened.remove(transaction)

    store = Store(Watched(MemoryPages(), 0.0, ()), 4 * taken(size=SIZE) + 600, codec="auto", state_of=compressible)
    store.put(A, SIZE)
    store.put([7] * P, SIZE)
    encode, during = store.engine._encode, []
    for name in ("smallest", "__call__"):
        method = getattr(type(encode), name)

        def watched(self, namespace, raw, method=method):
            during.append(len(opened))
            assert not store.engine._catalog._lock._is_owned()
            return method(self, namespace, raw)

        monkeypatch.setattr(type(encode), name, watched)
    rest(store.engine)
    assert store.counters["packed"] > 0
    assert set(during) == {0}
    store.close()


def test_used_pages_that_wait_are_bounded_and_the_most_recent_come_first(monkeypatch):
    monkeypatch.setattr(repack, "MAX_WANTED", 2)
    with store_of(codec="planes", state_of=compressible) as store:
        store.put(A, SIZE)
        pages = store.engine.match(NS, as_tokens(A), P).pages
        store.engine._encode = AutoCodec()
        repacker = repacker_of(store)
        repacker.want(NS, pages)
        with store.backend.view() as view:
            assert repacker.wanted(view, 100) == []
            repacker.want(NS, pages)
            found = repacker.wanted(view, NO_LIMIT)
        assert [one.record.key for one in found] == [pages[2].key, pages[1].key]
