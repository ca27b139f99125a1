"""The page table, compared with a dict of pages that is simple enough to be right."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import pytest
from prefixstore.engine.page_columns import BLOCK, ROW_BYTES
from prefixstore.engine.page_table import PageTable
from prefixstore.engine.table_fill import TableFill
from prefixstore.engine.totals import Total

from prefixstore.backends.base import FACTS
from prefixstore.engine import eviction
from prefixstore.engine.eviction import BUSY, Candidates, VictimQueue
from prefixstore.engine.policy import lfu, longest_first, lru, priority

NAMESPACES = [bytes([i]) * 32 for i in range(1, 4)]
SECOND = 10**9


def name(*what):
    return blake2b(repr(what).encode(), digest_size=32).digest()


@dataclass
class Known:
    """A page of the model."""

    key: bytes
    parent: bytes
    namespace: bytes
    end: int = 4
    n_bytes: int = 10
    last_used: int = 0
    uses: int = 1
    expires: int = 0
    priority: int = 0
    pinned: bool = False
    is_stored: bool = True
    may_be_victim: bool = True

    def facts(self):
        values = (0, self.n_bytes - 16, 0, self.last_used, self.expires, self.end - 4, 4, 0, self.uses - 1)
        return (self.key, self.parent, self.namespace, *values, self.priority, 0, self.pinned, True)


class Model:
    """Pages in a dict; everything is worked out when it is asked for."""

    def __init__(self):
        self.pages: dict[bytes, Known] = {}

    def children(self, key):
        return [page for page in self.pages.values() if page.parent == key]

    def ancestors(self, page):
        """The keys of what comes before a page, here or not."""
        found = [page.parent]
        while (above := self.pages.get(found[-1])) is not None:
            found.append(above.parent)
        return found

    def is_fixed(self, page):
        return page.pinned or not page.may_be_victim or any(map(self.is_fixed, self.children(page.key)))

    def is_victim(self, page):
        return page.may_be_victim and not page.pinned and not self.children(page.key)

    def strays(self):
        return {page.key for page in self.pages.values() if page.parent not in {page.namespace, *self.pages}}

    def total(self, namespace):
        total = Total()
        for page in self.pages.values():
            if namespace in (None, page.namespace):
                free = not self.is_fixed(page)
                total.add(Total(1, page.is_stored, page.n_bytes, free, free * page.n_bytes))
        return total


def assert_equal(table: PageTable, model: Model):
    assert len(table) == len(model.pages)
    assert {table.key(slot) for slot in table} == model.pages.keys()
    assert {table.key(slot) for slot in table.strays()} == model.strays()
    for page in model.pages.values():
        slot = table.find(page.key)
        known = table.entry(slot)
        assert table.is_fixed(slot) == model.is_fixed(page)
        assert table.is_victim(slot) == model.is_victim(page)
        assert table.is_leaf(page.key) == (not model.children(page.key))
        for field in ("namespace", "end", "n_bytes", "last_used", "uses", "expires", "priority", "pinned"):
            assert getattr(known, field) == getattr(page, field), field
        assert (known.is_stored, known.may_be_victim) == (page.is_stored, page.may_be_victim)
    for group in (None, *NAMESPACES):
        assert table.totals.of(group) == model.total(group)


def add(table, page):
    fields = {field: value for field, value in vars(page).items() if field not in ("key", "parent", "namespace")}
    return table.add(page.key, page.parent, page.namespace, **fields)


def random_page(chance, model, number):
    namespace = chance.choice(NAMESPACES)
    pages = [page for page in model.pages.values() if page.namespace == namespace]
    # not after a page that waits for it
    above = chance.choice([None, *(page for page in pages if name(number) not in model.ancestors(page))])
    # some follow a page that comes later, or never does
    orphan = chance.random() < 0.1
    parent = name(number + chance.randint(1, 5)) if orphan else above.key if above else namespace
    is_stored = chance.random() < 0.9
    return Known(
        name(number),
        parent,
        namespace,
        end=(above.end if above else 0) + 4,
        n_bytes=chance.randint(16, 99),
        last_used=chance.randint(1, 50),
        uses=chance.randint(1, 4),
        expires=chance.choice([0, chance.randint(1, 50)]),
        priority=chance.randint(-2, 2),
        pinned=chance.random() < 0.1,
        is_stored=is_stored,
        may_be_victim=is_stored and chance.random() < 0.95,
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_changes_leave_what_a_dict_has(seed):
    chance, table, model = random.Random(seed), PageTable(), Model()
    for number in range(400):
        what = chance.random()
        if what < 0.6 or not model.pages:
            page = random_page(chance, model, number)
            model.pages[page.key] = page
            add(table, page)
        elif what < 0.8:
            key = chance.choice(list(model.pages))
            # mostly leaves, as eviction does
            if not model.children(key) or chance.random() < 0.3:
                del model.pages[key]
                assert table.remove(key)
        else:
            page = chance.choice(list(model.pages.values()))
            changes = {
                "pinned": chance.random() < 0.3,
                "expires": chance.randint(0, 9),
                "n_bytes": chance.randint(16, 99),
                "priority": chance.randint(-2, 2),
                "may_be_victim": chance.random() < 0.8,
            }
            changes = {key: value for key, value in changes.items() if chance.random() < 0.5}
            model.pages[page.key] = replace(page, **changes)
            table.change(page.key, **changes)
        if number % 20 == 0:
            assert_equal(table, model)
    assert_equal(table, model)
    for key in chance.sample(list(model.pages), len(model.pages)):
        table.remove(key)
    assert len(table) == 0
    assert table.totals.of(None) == Total()
    assert table.strays() == []


def facts_of(pages):
    return np.array([page.facts() for page in pages], FACTS)


def fill(table, stored, size, between=lambda: None):
    """Fill a table with what is stored when each slice is read."""
    filling = TableFill(table, lru().describe, 10**18)
    after = b""
    while some := sorted((page for page in stored.values() if page.key > after), key=lambda page: page.key)[:size]:
        filling.add(facts_of(some))
        after = some[-1].key
        between()
    for _ in filling.finish():
        between()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [7, 1000])
def test_filled_in_slices_it_has_what_single_pages_make(seed, size):
    chance, table, model = random.Random(seed), PageTable(), Model()
    for number in range(300):
        page = replace(random_page(chance, model, number), is_stored=True, may_be_victim=True)
        model.pages[page.key] = page
    fill(table, dict(model.pages), size)
    assert_equal(table, model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_what_changes_while_it_is_filled_is_not_lost(seed):
    chance, table, model = random.Random(seed), PageTable(), Model()
    for number in range(200):
        page = replace(random_page(chance, model, number), is_stored=True, may_be_victim=True)
        model.pages[page.key] = page
    stored = dict(model.pages)
    # pages that wait for a commit are in the table already, and one of them is stored by another process as well
    for number in range(500, 510):
        page = replace(random_page(chance, model, number), is_stored=False, may_be_victim=False)
        model.pages[page.key] = page
        add(table, page)
    stored[page.key] = replace(page, n_bytes=999, is_stored=True, may_be_victim=True)
    model.pages[page.key] = replace(page, n_bytes=999, is_stored=True)
    kept = page.key
    numbers = iter(range(1000, 10_000))

    def between():
        page = random_page(chance, model, next(numbers))
        model.pages[page.key] = page
        add(table, page)
        here = [page for page in model.pages.values() if page.key in table]
        leaf = chance.choice([page for page in here if not model.children(page.key) and page.key != kept])
        if chance.random() < 0.5:
            del model.pages[leaf.key]
            stored.pop(leaf.key, None)
            table.remove(leaf.key)
        else:
            model.pages[leaf.key] = replace(leaf, pinned=not leaf.pinned)
            table.change(leaf.key, pinned=not leaf.pinned)

    fill(table, stored, 11, between)
    assert_equal(table, model)


def test_a_page_that_is_given_up_here_while_the_table_is_filled_and_stored_by_others_is_in_it():
    table, namespace = PageTable(), NAMESPACES[0]
    parent = Known(name("parent"), namespace, namespace, n_bytes=20)
    page = Known(name("page"), parent.key, namespace, end=8, n_bytes=50, uses=7)
    add(table, replace(page, is_stored=False, may_be_victim=False))
    filling = TableFill(table, lru().describe, SECOND)
    table.remove(page.key)
    filling.add(facts_of(sorted([page, parent], key=lambda one: one.key)))
    list(filling.finish())
    model = Model()
    model.pages = {parent.key: parent, page.key: page}
    assert_equal(table, model)


def test_what_cannot_be_read_is_left_out_and_a_use_in_the_future_is_not_believed():
    table = PageTable()
    facts = np.array(
        [Known(name(i), NAMESPACES[0], NAMESPACES[0], n_bytes=20, last_used=2**62).facts() for i in range(2)], FACTS
    )
    facts["is_readable"][1] = False
    filling = TableFill(table, lru().describe, 5 * SECOND)
    filling.add(facts)
    list(filling.finish())
    assert len(table) == 1
    assert table.entry(table.find(name(0))).last_used == 5 * SECOND


def test_many_pages_are_found_and_take_less_than_100_bytes_each():
    table, n = PageTable(), BLOCK + 5000
    keys = np.random.default_rng(1).integers(0, 256, (n, 32), dtype=np.uint8)
    facts = np.zeros(n, FACTS)
    facts["key"], facts["is_readable"] = keys.view("V32")[:, 0], True
    facts["namespace"] = facts["parent"] = np.frombuffer(NAMESPACES[0], "V32")[0]
    facts = facts[np.lexsort([keys[:, i] for i in range(7, -1, -1)])]
    filling = TableFill(table, lru().describe, SECOND)
    for at in range(0, n, 8192):
        filling.add(facts[at : at + 8192])
    list(filling.finish())
    chance = random.Random(2)
    some = chance.sample([key.tobytes() for key in keys], 2000)
    assert all(table.key(table.find(key)) == key for key in some)
    assert table.find(name("never")) == -1
    # the table is as small after many pages have come and gone
    for i in range(20_000):
        table.add(name(i), NAMESPACES[0], NAMESPACES[0], end=4, n_bytes=1, last_used=i)
        table.remove(some.pop() if some else name(i))
    assert table.n_bytes < 100 * len(table)
    assert ROW_BYTES <= 90


# -- victims -----------------------------------------------------------------------------------------------------------

ORDERS = {
    lru: lambda page: (page.last_used, -page.end),
    lfu: lambda page: (page.uses, page.last_used, -page.end),
    longest_first: lambda page: (-page.end, page.last_used),
    priority: lambda page: (page.priority, page.last_used, -page.end),
}


def grown(chance, table, model, n, first=0):
    for number in range(first, first + n):
        page = random_page(chance, model, number)
        # each time of use once, so that there is one order
        page.last_used = chance.randrange(10**6) * 10**4 + number
        model.pages[page.key] = page
        add(table, page)


@pytest.fixture(params=[False, True])
def small_steps(request, monkeypatch):
    """Few pages are ranked at a time, so that there are many rankings."""
    if request.param:
        monkeypatch.setattr(eviction, "FEWEST", 5)
        monkeypatch.setattr(eviction, "MOST", 7)


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_victims_come_in_the_order_of_the_policy(policy, seed, small_steps):
    chance, table, model = random.Random(seed), PageTable(), Model()
    queue = VictimQueue(table, policy())
    table.on_candidate.append(queue.offer)
    grown(chance, table, model, 200)
    number = 1000
    for slot in queue.victims():
        lowest = min(filter(model.is_victim, model.pages.values()), key=ORDERS[policy])
        assert table.key(slot) == lowest.key
        del model.pages[lowest.key]
        table.remove(lowest.key)
        if chance.random() < 0.3:
            grown(chance, table, model, 1, number)
            number += 1
        elif model.pages:
            used = chance.choice(list(model.pages.values()))
            used.last_used = 10**11 + number
            used.uses += 1
            table.blocks[0].uses[table.use(used.key, used.last_used)] += 1
            number += 1
        if number > 1200:
            break
    else:
        assert not any(map(model.is_victim, model.pages.values()))


def test_a_page_that_was_put_back_is_given_out_again(small_steps):
    table = PageTable()
    candidates = Candidates(table, lru())
    for i in range(20):
        table.add(name(i), NAMESPACES[0], NAMESPACES[0], end=4, n_bytes=1, last_used=i)
    victims = candidates.victims().victims()
    first = next(victims)
    candidates.add(table.key(first))
    assert next(victims) == first
    table.use(table.key(first), 100)
    candidates.add(table.key(first))
    assert [table.key(slot) for slot in victims] == [name(i) for i in [*range(1, 20), 0]]


def test_a_page_that_cannot_be_deleted_is_given_out_once(small_steps):
    table = PageTable()
    candidates = Candidates(table, lru())
    for i in range(40):
        table.add(name(i), NAMESPACES[0], NAMESPACES[0], end=4, n_bytes=1, last_used=i)
    found = [table.key(slot) for slot in candidates.victims().victims()]
    assert found == [name(i) for i in range(40)]
    candidates.add(name(7))
    assert [table.key(slot) for slot in candidates.victims().victims()] == [name(7)]


def test_expiring_pages_come_first_by_expiry(small_steps):
    table = PageTable()
    candidates = Candidates(table, lru())
    for i in range(30):
        table.add(name(i), NAMESPACES[0], NAMESPACES[0], end=4, n_bytes=1, last_used=i, expires=(i * 7) % 30)
    table.change(name(1), expires=100)
    found = [table.entry(slot).expires for slot in candidates.expiring().victims()]
    assert found == [each for each in range(1, 30) if each != 7] + [100]


def test_a_group_has_its_own_victims_and_a_number_that_another_namespace_takes_over_is_not_its():
    table = PageTable()
    candidates = Candidates(table, lru())
    first, second, third = NAMESPACES
    for i in range(30):
        table.add(name(i), NAMESPACES[i % 2], NAMESPACES[i % 2], end=4, n_bytes=1, last_used=i)
    table.totals.set_salt(first, "a")
    table.totals.set_salt(second, "b")
    for group in (second, "b"):
        victims = candidates.victims(group).victims()
        given = [next(victims) for _ in range(3)]
        assert [table.key(slot) for slot in given] == [name(1), name(3), name(5)]
        for slot in given:
            candidates.add(table.key(slot))
    assert [table.key(slot) for slot in candidates.victims("a").victims()] == [name(i) for i in range(0, 30, 2)]
    # the catalog tells the candidates when the last page of a namespace has gone
    for i in range(1, 30, 2):
        table.remove(name(i))
    for group in (second, "b"):
        candidates.forget(group)
    table.totals.forget_if_empty(second)
    table.add(name(99), third, third, end=4, n_bytes=1, last_used=0)
    assert list(candidates.victims(second).victims()) == []
    assert list(candidates.victims("b").victims()) == []
    assert [table.key(slot) for slot in candidates.victims(third).victims()] == [name(99)]


@pytest.mark.slow
def test_a_step_of_a_ranking_looks_at_one_block_and_pages_that_come_meanwhile_are_not_missed(monkeypatch):
    monkeypatch.setattr(eviction, "FEWEST", 10)
    table = PageTable()
    queue = VictimQueue(table, lru())
    table.on_candidate.append(queue.offer)
    n = BLOCK + 500
    for i in range(n):
        table.add(i.to_bytes(4, "little") * 8, NAMESPACES[0], NAMESPACES[0], end=4, n_bytes=1, last_used=i + 1000)
    steps = 0
    while (found := queue.next()) is BUSY:
        steps += 1
        if steps == 3:
            table.add(name("late"), NAMESPACES[0], NAMESPACES[0], end=4, n_bytes=1, last_used=1)
    assert steps >= 2 * len(table.blocks)
    assert table.key(found) == name("late")
    assert table.entry(queue.next()).last_used == 1000
