"""`check` finds each kind of violation, in whatever order pages are stored, and in bounded memory."""

from dataclasses import replace

import pytest

from prefixstore.engine import keyspace
from prefixstore.engine.budget import Budget
from prefixstore.engine.invariants import violations
from prefixstore.format.keys import SNAPSHOT
from prefixstore.format.record import Usage
from tests.support.pages import make_page
from tests.support.places import opened, space

AMPLE = Budget(1 << 40)
ONE, TWO = space("one"), space("two")


@pytest.fixture
def backend():
    with opened("memory:") as found:
        yield found


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """So that a few pages are several batches."""
    monkeypatch.setattr(keyspace, "AT_ONCE", 3)


def put(backend, *pages, settings=(ONE, TWO)):
    with backend.update() as transaction:
        for one in settings:
            transaction.put_namespace(one.key, one.canonical)
        for key, record in pages:
            transaction.put(key, record, Usage(1), bytes(8))


def page(tokens, parent=ONE.key, start=0, namespace=ONE.key, form=None):
    _, record = make_page(bytes(8), tokens, parent=parent, start=start, namespace=namespace)
    if form is not None:
        record = replace(record, form=form)
    return record.key, record


def chain(n, settings=ONE):
    pages, parent = [], settings.key
    for i in range(n):
        pages.append(page([i, n], parent, 2 * i, settings.key))
        parent = pages[-1][0]
    return pages


def found(backend, budget=AMPLE):
    with backend.view() as view:
        return sorted((one.rule, one.key, one.message) for one in violations(view, budget))


def test_a_sound_location_has_no_violations(backend):
    assert found(backend) == []
    put(backend, *chain(11), *chain(7, TWO))
    assert found(backend) == []


FIVE = chain(5)
LAST = FIVE[4][0]
TAKEN = page([5], LAST, 10, form=SNAPSHOT)
# what is stored beside a page that is wrong; the rule, and what it says
WRONG = {
    "without a parent": (FIVE[:3], FIVE[4], "parent", f"its parent {FIVE[3][0].hex()} is missing"),
    "elsewhere": (FIVE, page([5], LAST, 11), "position", "starts at 11, but its parent ends at 10"),
    "not at the start": ([], page([6], start=3), "position", "a first page starts at 3, not at 0"),
    "another namespace": (FIVE, page([5], LAST, 10, TWO.key), "namespace", "its parent is in another namespace"),
    "an unknown namespace": (
        [],
        page([6], bytes(32), 0, bytes(32)),
        "namespace",
        f"namespace {bytes(32).hex()} has no settings",
    ),
    "after a snapshot": (
        [*FIVE, TAKEN],
        page([6], TAKEN[0], 11),
        "parent",
        "its parent is a snapshot, which cannot have children",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_page_that_is_out_of_place_is_found(backend, wrong):
    pages, one, rule, message = WRONG[wrong]
    put(backend, *pages, one)
    assert found(backend) == [(rule, one[0].hex(), message)]


def test_a_location_beyond_its_budget_is_found(backend):
    put(backend, *chain(5))
    assert [rule for rule, _, _ in found(backend, Budget(1 << 40, 4))] == ["budget"]
