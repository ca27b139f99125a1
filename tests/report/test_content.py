"""What a report says of a location."""

from __future__ import annotations

import json

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import read_facts
from prefixstore.report.content import content_of
from prefixstore.report.runs import limited, runs_of
from tests.support.forest import DAY, Tree, chain, lived_in, put, space, wide
from tests.support.newer import make_corrupt
from tests.support.places import SCHEMES, fill, place
from tests.support.places import space as small

NOW = 1_800_000_000
MINE = small("mine")


@pytest.fixture
def backend(tmp_path):
    opened = open_pages(f"lmdb://{tmp_path}/kv", max_bytes=1 << 28)
    yield opened
    opened.close()


def report(backend, **options):
    with backend.view() as view:
        content = content_of(view, backend.location, clock=lambda: NOW * 10**9, **options)
    # what is not JSON fails here
    return json.loads(json.dumps(content))


def rows(content, *names):
    return list(zip(*(content["runs"][name] for name in names), strict=True))


@pytest.mark.parametrize(
    "scheme", ["lmdb", *(pytest.param(scheme, marks=pytest.mark.attack) for scheme in SCHEMES[1:])]
)
def test_every_kind_of_location_has_a_report(scheme, tmp_path, request):
    with Archive(place(scheme, tmp_path, request), create=True) as archive:
        fill(archive.backend, MINE, ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 10], [20, 21, 22]))
        content = report(archive.backend)
    assert content["pages"] == 5
    found = rows(content, "tokens", "pages", "labels")
    assert sorted(found) == [(3, 1, "20 21 22"), (4, 1, "1 2 3 4"), (4, 1, "5 6 7 8"), (5, 2, "9 9 9 9")]
    parents = dict(zip(content["runs"]["labels"], content["runs"]["parent"], strict=True))
    root = content["runs"]["labels"].index("1 2 3 4")
    assert parents == {"1 2 3 4": -1, "20 21 22": -1, "5 6 7 8": root, "9 9 9 9": root}


def test_a_run_ends_where_pages_branch_or_are_used_less_or_are_pinned(backend):
    first, last = chain(list(range(10 * 256)), 9, DAY, DAY)
    more, _ = chain(list(range(256)), 0, DAY, DAY)
    other, _ = chain(list(range(1, 257)), 1, DAY, DAY)
    last.children = [more, other]
    pinned = Tree(list(range(300, 556)), 3, DAY, DAY, pinned=True)
    below = Tree(list(range(600, 700)), 3, DAY, DAY)
    pinned.children.append(below)
    put(backend, space("m"), [first, pinned], size=10, now=NOW)
    content = report(backend)
    found = {(row[0], row[1], row[2], row[3]) for row in rows(content, "pages", "tokens", "hits", "pinned")}
    # the first nine pages have 9 uses from each below them: far more than the last ones
    assert (1, 256, 0, 0) in found
    assert (1, 256, 1, 0) in found
    assert (1, 100, 3, 0) in found
    assert (1, 256, 6, 1) in found
    assert sum(row[0] for row in found) == content["pages"]
    parents = content["runs"]["parent"]
    assert all(parent < i for i, parent in enumerate(parents))


def test_labels_begin_where_siblings_part_even_in_the_middle_of_a_page_or_a_word(backend):
    text = {1: "Tell ", 2: "me ", 3: "ab", 4: "out ", 5: "ove ", 6: "cats", 7: "dogs", 8: "birds", 9: " \n"}

    def words(tokens):
        return "".join(text[token] for token in tokens)

    fill(backend, MINE, ([1, 2, 3, 4, 6, 9, 6], [1, 2, 3, 4, 7], [1, 2, 3, 5, 8], [9, 9, 9, 9]))
    content = report(backend, words=words)
    labels = dict(zip(content["runs"]["labels"], content["runs"]["start"], strict=True))
    assert labels == {"about": 3, "above": 3, "↵ ↵ ↵ ↵": 0, "cats ↵cats": 4, "dogs": 4}
    assert set(report(backend)["runs"]["labels"]) == {"4", "5", "9 9 9 9", "6 9 6", "7"}
    # the vocabulary of one model says nothing about the tokens of another
    fill(backend, small("mine", model="a"), ([1, 2],))
    fill(backend, small("mine", model="b"), ([1, 2],))
    both = report(backend, words=words, is_of="b".__eq__)
    assert sorted(set(both["runs"]["labels"]) - set(labels)) == ["1 2", "Tell me"]


def test_pages_that_lost_their_parent_or_cannot_be_read_do_no_harm(monkeypatch):
    with Archive("memory:", create=True) as archive:
        lost, damaged, _ = fill(archive.backend, MINE, ([1, 2, 3, 4, 5, 6, 7, 8, 9], [21, 22, 23, 24, 25], [30]))
        with archive.backend.update() as transaction:
            transaction.delete(lost[0])
        make_corrupt(archive.backend, damaged[0])
        content = report(archive.backend)
    assert content["unreadable"] == 1
    assert sorted(rows(content, "parent", "pages", "labels")) == [(-1, 1, "25"), (-1, 1, "30"), (-1, 2, "5 6 7 8")]


def test_what_is_too_small_is_counted_together(backend):
    n = wide(backend, 3000)
    with backend.view() as view:
        facts = read_facts(view)
    spaces = [bytes(facts["namespace"][0])]
    runs, _ = runs_of(facts, spaces, NOW * 10**9)
    few = limited(runs, 200)
    assert limited(runs, len(runs)) is runs
    assert int(few["pages"].sum()) == int(runs["pages"].sum()) == n
    assert int(few["bytes"].sum()) == int(runs["bytes"].sum())
    assert int(few["runs"].sum()) == len(runs)
    assert (few["head"] >= 0).sum() == 200
    assert all(parent < i for i, parent in enumerate(few["parent"].tolist()))
    content = report(backend, most_runs=200)
    assert sum(content["runs"]["pages"]) == n
    assert content["runs"]["keys"][-12:].strip() == ""


def test_bands_and_totals_agree_with_the_location(backend):
    n = lived_in(backend, lambda text: [ord(character) for character in text], now=NOW)
    content = report(backend, max_bytes=1 << 40)
    assert content["pages"] == n == sum(content["runs"]["pages"])
    assert sum(content["runs"]["bytes"]) == content["stored_bytes"]
    for band in content["bands"].values():
        assert sum(band["pages"]) == n
        assert sum(band["bytes"]) == content["stored_bytes"]
    assert {(one["model"], one["tenant"]) for one in content["spaces"]} == {
        ("assistant-8B (KV q8_0)", ""),
        ("assistant-8B", ""),
        ("coder-32B (KV q8_0)", "tools"),
        ("coder-32B (KV q8_0)", "research"),
    }
