"""The rows of a location: the index of children against plain lists, whatever is in it."""

import random
from bisect import bisect_left, bisect_right
from contextlib import closing
from dataclasses import replace

import pytest

from prefixstore.backends.contract import LONGEST_KEY, Row
from prefixstore.backends.memory import MemoryBackend
from prefixstore.engine import child_rows, keyspace
from prefixstore.engine.child_rows import ChildRow, child_path, first_node
from prefixstore.engine.keyspace import CHILD
from prefixstore.format.keys import PAGE, SNAPSHOT, as_tokens
from prefixstore.format.record import identity_of
from tests.support.pages import NAMESPACE, make_page

OTHER = bytes(reversed(NAMESPACE))
FAMILIES = [(NAMESPACE, PAGE), (NAMESPACE, SNAPSHOT), (OTHER, PAGE)]
# tokens that many begin with: none, some less than a step, whole steps, and some more
BEGINNINGS = [[], [1], *([1] * n for n in (31, 32, 33, 100, 143, 144, 145, 255, 256)), [2] * 32 + [1] * 112]


def record_of(tokens, parent=NAMESPACE, form=PAGE):
    return replace(make_page(b"", list(tokens), parent=parent)[1], form=form)


def path_of(record):
    return child_path(record.parent, record.form, record.tokens)


def add(draft, *records):
    for record in records:
        draft.put(keyspace.RECORD + record.key, record.pack())
        child_rows.add_child(draft, record.key, path_of(record), b"owner")


def remove(draft, *records):
    for record in records:
        assert child_rows.remove_child(draft, record.key, path_of(record))
        draft.delete(keyspace.RECORD + record.key)


def is_child(view, record):
    """Whether the child rows lead to a page."""
    return child_rows.leads_to(record.key, view.get(path_of(record)))


def tokens_of(view, key):
    # also those of a first page without tokens, which is none
    return identity_of(view.get([keyspace.RECORD + key])[0]).tokens


def children(view, parent=NAMESPACE, form=PAGE, at_most=None):
    """The tokens of the children of a page."""
    [found] = child_rows.children_of(view, [first_node(parent, form)], at_most)
    return [tokens_of(view, key) for key in found]


def around(view, parent, form, tokens):
    """The tokens of the last child that is not above some tokens, and of the first that is."""
    path = child_path(parent, form, tokens)
    found = child_rows.nearest(view, path, view.ranges(child_rows.around(path)))
    known = sorted({tokens_of(view, key) for key in found})
    at = bisect_right(known, tokens)
    return known[max(at - 1, 0) : at + 1]


def expected_around(stored, tokens):
    at = bisect_right(stored, tokens)
    return stored[max(at - 1, 0) : at + 1]


def rows_of_index(view):
    return view.ranges([keyspace.everything(CHILD)])[0]


def some_tokens(chance):
    end = [chance.choice([-1, 0, 1, 2, 256]) for _ in range(chance.choice([0, 0, 1, 2, 100, 150]))]
    return as_tokens(chance.choice(BEGINNINGS) + end).tobytes()


class Family:
    """What is stored, in lists."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.stored = {family: [] for family in FAMILIES}

    def change(self, draft):
        parent, form = family = self.chance.choice(FAMILIES)
        stored = self.stored[family]
        if stored and self.chance.random() < 0.4:
            tokens = stored.pop(self.chance.randrange(len(stored)))
            remove(draft, record_of(as_ints(tokens), parent, form))
            return
        tokens = self.chance.choice(stored) if stored and self.chance.random() < 0.1 else some_tokens(self.chance)
        add(draft, record_of(as_ints(tokens), parent, form))
        if tokens not in stored:
            stored.insert(bisect_left(stored, tokens), tokens)

    def require(self, view):
        for (parent, form), stored in self.stored.items():
            for at_most in (None, 1, 3):
                assert children(view, parent, form, at_most) == stored[:at_most]
            for tokens in [some_tokens(self.chance) for _ in range(10)] + stored[:3]:
                assert around(view, parent, form, tokens) == expected_around(stored, tokens)
            for tokens in stored:
                record = record_of(as_ints(tokens), parent, form)
                assert is_child(view, record)
            absent = record_of([5, 5], parent, form)
            assert not is_child(view, absent)


def as_ints(tokens):
    return memoryview(tokens).cast("i").tolist()


@pytest.fixture
def backend():
    with closing(MemoryBackend()) as opened:
        yield opened


# -- children ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_children_are_those_of_plain_lists_after_any_changes(backend, seed):
    family = Family(seed)
    for _ in range(40):
        with backend.update() as draft:
            for _ in range(family.chance.choice([1, 2, 8])):
                family.change(draft)
                # now and then what was changed is in the view already
                assert family.chance.random() < 0.7 or draft.used >= 0
            family.require(draft)
        with backend.view() as view:
            family.require(view)
            assert max(len(row.key) for row in [*rows_of_index(view), Row(b"", b"")]) <= LONGEST_KEY
    with backend.update() as draft:
        for (parent, form), stored in family.stored.items():
            family.chance.shuffle(stored)
            remove(draft, *(record_of(as_ints(tokens), parent, form) for tokens in stored))
        assert rows_of_index(draft) == []


@pytest.mark.parametrize("n_shared", [0, 250])
def test_among_thousands_of_siblings_a_few_rows_lead_to_the_nearest(backend, n_shared):
    chance = random.Random(n_shared)
    records = [record_of([9] * n_shared + [number, number]) for number in chance.sample(range(100_000), 1500)]
    with backend.update() as draft:
        add(draft, *records)
    stored = sorted(record.tokens for record in records)
    with backend.view() as view:
        read = []
        ranges = view.ranges
        view.ranges = lambda wanted: read.append(found := ranges(wanted)) or found
        for _ in range(50):
            tokens = as_tokens([9] * n_shared + [chance.randrange(100_000)]).tobytes()
            assert around(view, NAMESPACE, PAGE, tokens) == expected_around(stored, tokens)
            assert sum(len(rows) for answer in read for rows in answer) <= 12
            assert len(read) <= 4
            read.clear()
        assert children(view, at_most=5) == stored[:5]
        assert children(view) == stored


@pytest.mark.slow
def test_two_long_pages_that_part_late_are_parted_in_one_pass(backend, monkeypatch):
    hashed = []
    node = child_rows._node
    monkeypatch.setattr(child_rows, "_node", lambda *given: hashed.append(given) or node(*given))
    records = [record_of([*range(460_000), last]) for last in (1, 2)]
    with backend.update() as draft:
        add(draft, *records)
        assert len(hashed) < 4 * 4107, "of so many steps"
        assert children(draft) == sorted(record.tokens for record in records)


# -- stale and damaged rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [1, 100, 250])
@pytest.mark.parametrize("value", [b"", b"\0", b"\0short", b"\2" + bytes(32), b"\0" + bytes(32) + b"long", bytes(65)])
def test_a_damaged_row_is_none_and_is_replaced_by_the_next_page(backend, value, n_tokens):
    assert ChildRow.unpack(value) is None
    gone, new, other = record_of([5] * n_tokens), record_of([5] * n_tokens + [1]), record_of([6])
    with backend.update() as draft:
        add(draft, gone, other)
        damaged = path_of(gone)[0]
        draft.put(damaged, value)
        assert children(draft) == [other.tokens]
        for tokens in (b"", gone.tokens, new.tokens, other.tokens):
            # it may hide the one beyond it
            assert around(draft, NAMESPACE, PAGE, tokens) in ([], [other.tokens])
        assert not is_child(draft, gone)
        assert not child_rows.remove_child(draft, gone.key, path_of(gone))
        child_rows.mend_child(draft, damaged)
        assert draft.get([damaged]) == [value]
        add(draft, new, gone)
        assert children(draft) == [gone.tokens, new.tokens, other.tokens]


@pytest.mark.parametrize("n_tokens", [1, 100, 250])
def test_a_row_that_names_a_page_that_is_gone_or_elsewhere_is_taken_over(backend, n_tokens):
    new = record_of([5] * n_tokens)
    elsewhere = record_of([5] * n_tokens, parent=OTHER)
    for stale in (bytes(32), elsewhere.key):
        with backend.update() as draft:
            add(draft, elsewhere)
            draft.put(path_of(new)[0], ChildRow(stale).pack())
            assert not is_child(draft, new)
            assert not child_rows.remove_child(draft, new.key, path_of(new))
            add(draft, new)
            assert children(draft) == [new.tokens]
            assert children(draft, OTHER) == [elsewhere.tokens]
            remove(draft, new, elsewhere)
            assert rows_of_index(draft) == []
