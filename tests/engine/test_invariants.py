"""`check` finds each kind of violation, in whatever order pages are stored, and in bounded memory."""

from __future__ import annotations

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


def test_a_page_without_its_parent_is_found(backend):
    pages = chain(10)
    put(backend, *pages[:4], *pages[5:])
    key, parent = pages[5][0].hex(), pages[4][0].hex()
    assert found(backend) == [("parent", key, f"its parent {parent} is missing")]


def test_a_page_that_starts_elsewhere_than_its_parent_ends_is_found(backend):
    pages = chain(9)
    wrong = page([5], pages[7][0], 17)
    first = page([6], start=3)
    put(backend, *pages, wrong, first)
    expected = [
        ("position", wrong[0].hex(), "starts at 17, but its parent ends at 16"),
        ("position", first[0].hex(), "a first page starts at 3, not at 0"),
    ]
    assert found(backend) == sorted(expected)


def test_a_page_of_another_namespace_than_its_parent_or_of_an_unknown_one_is_found(backend):
    pages = chain(5)
    other = page([5], pages[4][0], 10, TWO.key)
    unknown = page([6], bytes(32), 0, bytes(32))
    put(backend, *pages, other, unknown)
    expected = [
        ("namespace", other[0].hex(), "its parent is in another namespace"),
        ("namespace", unknown[0].hex(), f"namespace {bytes(32).hex()} has no settings"),
    ]
    assert found(backend) == sorted(expected)


def test_a_page_after_a_snapshot_is_found(backend):
    pages = chain(5)
    taken = page([5], pages[4][0], 10, form=SNAPSHOT)
    after = page([6], taken[0], 11)
    put(backend, *pages, taken, after)
    assert found(backend) == [("parent", after[0].hex(), "its parent is a snapshot, which cannot have children")]


def test_a_location_beyond_its_budget_is_found(backend):
    put(backend, *chain(5))
    assert [rule for rule, _, _ in found(backend, Budget(1 << 40, 4))] == ["budget"]
