"""Which page goes first."""

from __future__ import annotations

import random

from prefixstore.eviction import Ordering, VictimQueue, lru
from prefixstore.index import Index, Page

NS = b"n" * 16


def page(key, parent=NS, last_used=0, start=0, *, pinned=False):
    return Page(key, parent, NS, start, key, 1, 1, 0, 0, last_used, pinned=pinned)


def queue_of(*pages):
    index = Index()
    for each in pages:
        assert index.add(each)
    queue = VictimQueue(index, Ordering(lru))
    for each in pages:
        queue.push(each)
    return index, queue


def drain(index, queue):
    """Evict all that may be evicted, as the committer does."""
    order = []
    for victim in queue.victims():
        order.append(victim.key)
        index.remove(victim.key)
        parent = index.get(victim.parent)
        if parent is not None and parent.is_leaf:
            queue.push(parent)
    return order


def test_the_oldest_use_goes_first_and_of_one_use_the_deepest():
    assert lru(page(b"a", last_used=1)) < lru(page(b"b", last_used=2))
    assert lru(page(b"a", last_used=1, start=256)) < lru(page(b"b", last_used=1, start=0))


def test_children_go_before_their_parents():
    index, queue = queue_of(
        page(b"a", last_used=1),
        page(b"b", b"a", last_used=9, start=4),
        page(b"c", b"a", last_used=5, start=4),
        page(b"d", last_used=7),
    )
    assert drain(index, queue) == [b"c", b"d", b"b", b"a"]


def test_a_page_that_was_used_meanwhile_goes_later():
    pages = [page(bytes([i]), last_used=i) for i in range(4)]
    index, queue = queue_of(*pages)
    pages[0].last_used = 10
    assert drain(index, queue) == [b"\1", b"\2", b"\3", b"\0"]


def test_pinned_pages_are_passed_by_and_remembered():
    pages = [page(bytes([i]), last_used=i, pinned=i < 2) for i in range(4)]
    index, queue = queue_of(*pages)
    assert drain(index, queue) == [b"\2", b"\3"]
    assert drain(index, queue) == []
    pages[1].pinned = False
    assert drain(index, queue) == [b"\1"]


def test_a_page_that_was_given_back_comes_again():
    _index, queue = queue_of(page(b"a"), page(b"b", last_used=1))
    victims = queue.victims()
    first = next(victims)
    first.last_used = 5
    queue.push(first)
    assert [next(victims).key, next(victims).key] == [b"b", b"a"]


def test_what_is_gone_or_has_children_now_is_passed_by():
    a, b, c = page(b"a"), page(b"b", last_used=1), page(b"c", last_used=2)
    index, queue = queue_of(a, b, c)
    index.remove(b"b")
    index.add(page(b"d", b"a", last_used=3, start=4))
    assert [victim.key for victim in queue.victims()] == [b"c"]


def test_the_queue_does_not_grow_with_uses():
    pages = [page(bytes([i]), last_used=i) for i in range(10)]
    index, queue = queue_of(*pages)
    chance = random.Random(1)
    for now in range(10, 5000):
        used = chance.choice(pages)
        used.last_used = now
        queue.push(used)
    assert len(queue._heap) <= 64 + 4 * len(pages)
    assert drain(index, queue) == [each.key for each in sorted(pages, key=lru)]
