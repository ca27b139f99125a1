"""Pages that are evicted after all others: in each order, in a table that is filled, within the budget."""

from __future__ import annotations

import random

import pytest
from prefixstore.engine.page_columns import BLOCK
from prefixstore.engine.page_table import PageTable

from prefixstore.engine.eviction import POLICIES, Candidates
from prefixstore.format.keys import as_tokens, page_keys
from tests.support.engines import NS, A, B, C, MemoryPages, P, Store


def key(i):
    return i.to_bytes(32, "little")


def add(table, i, last_used, parent=NS, **facts):
    table.add(key(i), parent, NS, end=1, n_bytes=100, last_used=last_used, **facts)


def order(candidates, table):
    """The keys of all victims, in order; they are removed."""
    found = []
    for slot in candidates.victims().victims():
        found.append(table.key(slot))
        table.remove(found[-1])
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_they_come_last_in_every_order_the_least_recently_used_first(policy, seed):
    chance, table = random.Random(seed), PageTable()
    candidates = Candidates(table, POLICIES[policy]())
    used = list(range(1, 301))
    chance.shuffle(used)
    kept = chance.sample(range(300), 40)
    early, late = kept[:20], kept[20:]
    table.keep(map(key, early))  # before they come
    for i in range(300):
        add(table, i, used[i], uses=chance.randrange(1, 9), priority=chance.randrange(-9, 9))
    victims = candidates.victims()
    given = [next(victims.victims()) for _ in range(50)]  # ranked, before the others are kept
    assert not {table.key(slot) for slot in given} & set(map(key, early))
    for slot in given:
        candidates.offer(slot)
    table.keep(map(key, late))
    found = order(candidates, table)
    assert len(found) == 300
    assert set(found[-40:]) == set(map(key, kept))
    assert found[-40:] == sorted(found[-40:], key=lambda one: used[int.from_bytes(one, "little")])


def test_one_that_is_not_kept_any_more_takes_its_place_again():
    table = PageTable()
    candidates = Candidates(table, POLICIES["lru"]())
    for i in range(10):
        add(table, i, i + 1)
    table.keep([key(0), key(1), key(1)])
    victims = candidates.victims()
    slots = victims.victims()
    assert table.key(next(slots)) == key(2)
    table.stop_keeping([key(0), key(1)])  # 1 is kept by another
    assert [table.key(next(slots)) for _ in range(2)] == [key(0), key(3)]
    table.stop_keeping([key(1)])
    assert table.key(next(slots)) == key(1)


def test_a_page_in_the_slot_of_one_that_was_kept_is_an_ordinary_one():
    table = PageTable()
    candidates = Candidates(table, POLICIES["lru"]())
    table.keep([key(0)])
    add(table, 0, 1)
    table.remove(key(0))
    add(table, 1, 2)
    add(table, 2, 3)
    add(table, 0, 1)
    assert order(candidates, table) == [key(1), key(2), key(0)]


@pytest.mark.slow
def test_in_a_table_of_several_blocks():
    table = PageTable()
    candidates = Candidates(table, POLICIES["lru"]())
    kept = [3, BLOCK + 3]
    for i in range(BLOCK + 10):
        add(table, i, i + 1)
    table.keep(map(key, kept))
    slots = candidates.victims().victims()
    found = [table.key(next(slots)) for _ in range(8)]
    assert found == [key(i) for i in range(9) if i != 3]
    for i in range(BLOCK + 10):
        if i not in (*kept, BLOCK + 9):
            table.remove(key(i))
    assert order(candidates, table) == [key(BLOCK + 9), *map(key, kept)]


@pytest.mark.parametrize("is_filled", [False, True])
def test_an_engine_evicts_them_last_and_keeps_its_budget(is_filled):
    backend = MemoryPages()
    store = Store(backend, options={"write_behind": False})
    sequences = [A, B, C, *([i] * 12 for i in range(10, 20))]
    for tokens in sequences:
        for page in store.pages(tokens):
            store.engine.submit(page)
    store.engine.flush()
    used = store.engine.used()[0].bytes
    if is_filled:  # with all pages of the location, by another engine
        store.engine._queue.close()
        store.open(write_behind=False)
    for name, tokens in (("a", A), ("b", B)):
        store.engine.keep(name, page_keys(NS, as_tokens(tokens), P))

    def there():
        return [tokens for tokens in sequences if store.engine.match(NS, as_tokens(tokens), P).n_tokens == 12]

    store.engine.evict_to(used * 2 // len(sequences))
    assert there() == [A, B]
    store.engine.keep("a", ())
    store.engine.evict_to(used // len(sequences))
    assert there() == [B]
    store.engine.evict_to(0)
    assert store.engine.used()[0].entries == 0
    store.engine.close()
