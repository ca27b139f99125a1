"""Water marks: above the upper one new pages are packed; what a page needs is evicted by the commit that writes it."""

from __future__ import annotations

from contextlib import contextmanager

from prefixstore.format.codec import CODECS
from tests.support.engines import MemoryPages, P, Store, compressible, entry, store_of

SIZE = 24_000  # six pages of an LMDB file, five when it is packed
ENTRY = entry(P, SIZE)


def single(number):
    """A sequence of one page."""
    return [number] * P


def codecs(store) -> list[str]:
    """The codec of each stored page, the least recently used first."""
    names = {number: name for name, number in CODECS.items()}
    with store.backend.view() as view:
        pages = sorted((usage.last_used, names[record.codec]) for _, record, usage in view.scan())
    return [name for _, name in pages]


def used(store):
    with store.backend.view() as view:
        return view.used


def filled(n, *, full=True, **options):
    """A store with `n` single pages, the first one the least recently used, in a budget for as many and a half."""
    options = {"state_of": compressible, "codec": "auto", **options}
    store = Store(MemoryPages(), int((n + 0.5 if full else 2 * n) * ENTRY), **options)
    for number in range(n):
        assert store.put(single(number), SIZE) == 1
    store.engine.commit([])
    return store


def test_beyond_the_high_mark_new_pages_are_packed_until_no_more_than_the_low_mark_is_in_use():
    store = filled(20)
    assert set(codecs(store)) == {"raw"}
    for number in range(20, 60):
        store.put(single(number), SIZE)
    assert set(codecs(store)) == {"planes"}
    assert store.counters["packed"] == 40
    assert used(store).bytes <= store.max_bytes
    # more are here than would be without packing
    assert used(store).entries > 20
    assert store.fetch(single(59)) == 1
    store.engine.evictor.evict(int(0.9 * store.max_bytes))
    store.put(single(60), SIZE)
    assert codecs(store)[-1] == "planes"
    store.engine.evictor.evict(5 * ENTRY)
    for number in range(61, 63):
        store.put(single(number), SIZE)
    assert codecs(store)[-1] == "raw"
    store.close()


def test_a_smaller_budget_is_respected_in_short_transactions(monkeypatch):
    deleted = []

    class Counting(MemoryPages):
        @contextmanager
        def update(self):
            with super().update() as transaction:
                before = transaction.used.entries
                yield transaction
                deleted.append(before - transaction.used.entries)

    monkeypatch.setattr("prefixstore.engine.space.PAGES_AT_ONCE", 8)
    with store_of(Counting()) as store:
        for number in range(100):
            store.put([number] * P)
        store.max_bytes = 20 * entry()
        store.open()
        deleted.clear()
        store.put([100] * P)
        assert max(deleted) <= 8
        assert store.match([100] * P) == P
        with store.backend.view() as view:
            assert view.used.bytes <= store.max_bytes
