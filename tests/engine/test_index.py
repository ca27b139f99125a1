"""The trie of pages, compared with brute force, while pages are added and removed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixstore.engine.index import Index, Page, Unknown, branches
from prefixstore.format.keys import as_tokens, page_key

P = 3
NS, OTHER = b"n" * 32, b"o" * 32

sequences = st.lists(st.integers(0, 2), max_size=11)
# 256 and -1 are next to 1 and 0 in another byte order
wide = st.lists(st.sampled_from([0, 1, 256, 65536, -1, 2**31 - 1]), max_size=11)


def chain(tokens, namespace=NS):
    """The pages of a sequence, the tail included."""
    pages, parent = [], namespace
    for start in range(0, len(tokens), P):
        raw = as_tokens(tokens[start : start + P]).tobytes()
        key = page_key(parent, raw)
        pages.append(Page(key, parent, namespace, start, raw, 10, 7, 0, 0, 0))
        parent = key
    return pages


def insert(index, tokens, namespace=NS):
    """Add what is missing of a sequence, as the catalog does."""
    for page in chain(tokens, namespace):
        if page.key in index or index.covers(page):
            continue
        older = index.superseded_by(page)
        if older is not None:
            index.remove(older.key)
        assert index.add(page)


def path_to(index, page):
    tokens = list(as_tokens_of(page))
    while page.parent != page.namespace:
        page = index.get(page.parent)
        tokens[:0] = as_tokens_of(page)
    return tokens


def as_tokens_of(page):
    return [int.from_bytes(page.tokens[i : i + 4], "little", signed=True) for i in range(0, len(page.tokens), 4)]


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check(index):
    """Every invariant of the index."""
    for page in index:
        assert index.has_parent_of(page)
        parent = index._node(page.parent, page.namespace)
        assert page in parent.dependents
        assert page.start == parent.end
    for node in [*index, *index._roots.values()]:
        assert node.child_tokens == [child.tokens for child in node.children] == sorted(node.child_tokens)
        assert len(node.sealed) == len(node.children) + 1
        for a, b in zip(node.child_tokens, node.child_tokens[1:], strict=False):
            assert not b.startswith(a)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([sequences, wide]))
def test_a_match_is_the_longest_common_prefix_with_anything_stored(data, kind):
    index = Index()
    for tokens in data.draw(st.lists(kind, max_size=12)):
        insert(index, tokens)
        check(index)
    for key in data.draw(st.lists(st.sampled_from(sorted(index.pages)), max_size=3)) if index.pages else []:
        before = set(index.pages)
        gone = index.remove(key)
        assert {page.key for page in gone} | set(index.pages) == before
        check(index)
    stored = [path_to(index, page) for page in index]
    for wanted in data.draw(st.lists(kind, min_size=1, max_size=5)):
        path = index.match(NS, as_tokens(wanted), P)[0]
        assert path.n_tokens == max((shared(wanted, tokens) for tokens in stored), default=0)
        assert len(path.pages) == -(-path.n_tokens // P)
        covered = [token for page in path.pages for token in as_tokens_of(page)]
        assert covered[: path.n_tokens] == wanted[: path.n_tokens]
        assert [page.parent for page in path.pages] == [NS, *(page.key for page in path.pages)][: len(path.pages)]
        assert index.match(OTHER, as_tokens(wanted), P)[0].pages == ()


def test_removed_pages_are_returned_deepest_first():
    index = Index()
    insert(index, [1] * 9)
    insert(index, [1] * 6 + [2] * 3)
    first = index.match(NS, as_tokens([1]), P)[0].pages[0]
    gone = index.remove(first.key)
    assert [page.start for page in gone] == [6, 6, 3, 0]
    assert len(index) == 0
    assert index.remove(first.key) == []


def test_a_page_without_its_parent_is_not_added():
    index = Index()
    first, second = chain([1] * 6)
    assert not index.add(second)
    assert index.add(first)
    assert not index.add(first)
    assert index.add(second)
    assert not first.is_leaf
    assert second.is_leaf


def test_the_tail_that_a_page_continues_and_the_page_that_covers_it_are_found():
    index = Index()
    insert(index, [1, 2])
    insert(index, [3])
    (longer,), (other,), (shorter,), (same,) = (chain(tokens) for tokens in ([1, 2, 9], [1, 3, 9], [1], [1, 2]))
    assert index.superseded_by(longer) is index.get(same.key)
    assert index.superseded_by(other) is None
    assert index.superseded_by(same) is None
    assert index.covers(shorter)
    assert not index.covers(same)
    assert not index.covers(longer)
    assert not index.covers(other)
    assert not Index().covers(shorter)
    assert Index().superseded_by(longer) is None


def test_the_nearest_of_thousands_of_siblings_is_found():
    index = Index()
    for a in range(60):
        for b in range(60):
            insert(index, [a, b, a])
    for a, b in ((0, 0), (17, 59), (59, 31)):
        assert index.match(NS, as_tokens([a, b, 99]), P)[0].n_tokens == 2
        assert index.match(NS, as_tokens([a, 99, a]), P)[0].n_tokens == 1
        assert index.match(NS, as_tokens([a, b, a, 5]), P)[0].n_tokens == 3
    assert index.match(NS, as_tokens([99, 0, 0]), P)[0].n_tokens == 0


def snapshot(tokens, namespace=NS):
    """A snapshot after these tokens."""
    full = len(tokens) - len(tokens) % P
    parent = chain(tokens[:full], namespace)[-1].key if full else namespace
    raw = as_tokens(tokens[full:]).tobytes()
    return Page(page_key(parent, raw, 1), parent, namespace, full, raw, 10, 7, 0, 0, 0, form=1)


@settings(deadline=None)
@given(st.lists(sequences.filter(bool), max_size=8), st.lists(sequences.filter(bool), max_size=8), sequences)
def test_snapshots_are_found_if_their_tokens_are_a_prefix_of_the_prompt(stored, taken, prompt):
    index = Index()
    for tokens in stored:
        insert(index, tokens)
    expected = set()
    for tokens in taken:
        page = snapshot(tokens)
        if index.add(page) and prompt[: len(tokens)] == tokens:
            expected.add(len(tokens))
        assert index.superseded_by(page) is None
        assert not index.covers(page)
    found, _ = index.snapshots_along(NS, as_tokens(prompt), P)
    assert [path.n_tokens for path in found] == sorted(expected, reverse=True)
    for path in found:
        assert [tuple(as_tokens_of(page)) for page in path.pages[:-1]] == [
            tuple(prompt[i : i + P]) for i in range(0, path.n_tokens - path.n_tokens % P, P)
        ]
        assert path.pages[-1].is_leaf
        assert path.pages[-1].end == path.n_tokens
    check(index)
    # pages are found as if there were no snapshots
    without = Index()
    for tokens in stored:
        insert(without, tokens)
    assert index.match(NS, as_tokens(prompt), P)[0].n_tokens == without.match(NS, as_tokens(prompt), P)[0].n_tokens


def test_a_page_is_removed_with_its_snapshots():
    index = Index()
    insert(index, [0] * 6)
    first, second = chain([0] * 6)
    late, later = snapshot([0] * 4), snapshot([0] * 6)
    assert index.add(late)
    assert index.add(later)
    assert not index.add(late)
    assert not index.get(first.key).is_leaf
    assert index.remove(late.key) == [late]
    assert not index.get(second.key).is_leaf
    assert [page.key for page in index.remove(first.key)] == [later.key, second.key, first.key]
    assert len(index) == 0


def test_the_first_node_of_a_namespace_may_be_a_snapshot():
    index = Index()
    assert index.add(snapshot([1, 2]))
    assert [path.n_tokens for path in index.snapshots_along(NS, as_tokens([1, 2, 0]), P)[0]] == [2]
    assert index.remove(snapshot([1, 2]).key)
    assert index.snapshots_along(NS, as_tokens([1, 2, 0]), P)[0] == []


def test_branches_are_the_positions_at_which_sequences_branch_off():
    zero, one, two = ([as_tokens(tokens).tobytes()] for tokens in ([0, 0, 0], [0, 0, 1], [0, 2]))
    after = [(0, zero + one), (3, zero + two), (6, [as_tokens([0]).tobytes(), as_tokens([1]).tobytes()])]
    assert branches(after, as_tokens([0] * 7)) == [2, 4, 6]
    assert branches([(0, zero + one)], as_tokens([0, 0, 1])) == [2]
    # what is a beginning of the other does not branch off
    assert branches([(0, [as_tokens([0, 0]).tobytes(), b""])], as_tokens([0, 0, 1])) == []


def test_a_gap_between_siblings_is_known_until_a_page_is_forgotten():
    index = Index()
    assert index.match(NS, as_tokens([5]), P)[1] == Unknown(NS, 0)
    insert(index, [3, 3, 3])
    insert(index, [7, 7, 7])
    (wanted,) = chain([5, 5, 5])
    assert index.match(NS, as_tokens([5]), P)[1] == Unknown(NS, 0)
    index.seal(NS, NS, wanted.tokens, is_stored=False)
    assert index.match(NS, as_tokens([5]), P)[1] is None
    assert index.match(NS, as_tokens([9]), P)[1] == Unknown(NS, 0)
    # a page that is there needs no other one
    assert index.match(NS, as_tokens([3, 3, 3]), P)[1] is None
    assert index.match(NS, as_tokens([3, 3, 3, 1]), P)[1] == Unknown(chain([3, 3, 3])[0].key, 3)
    # both sides of a page that comes into a gap are known
    assert index.add(wanted)
    assert index.match(NS, as_tokens([4]), P)[1] is None
    assert index.match(NS, as_tokens([6]), P)[1] is None
    # a page that is deleted leaves a gap, and one that is forgotten may still be stored
    index.remove(wanted.key)
    assert index.match(NS, as_tokens([5]), P)[1] is None
    assert index.add(wanted)
    index.remove(wanted.key, is_deleted=False)
    assert index.match(NS, as_tokens([5]), P)[1] == Unknown(NS, 0)


def test_the_pages_that_were_looked_up_last_stay():
    index = Index(limit=64)
    for number in range(100):
        insert(index, [number, 0, 0, number])
        for page in index:
            page.is_stored = True
        index.used(index.match(NS, as_tokens([number, 0, 0, number]), P)[0].pages)
        index.used(index.match(NS, as_tokens([0, 0, 0, 0]), P)[0].pages)
        index.trim(set())
        check(index)
        assert len(index) <= 64
    assert index.match(NS, as_tokens([0, 0, 0, 0]), P)[0].n_tokens == 4
    assert index.match(NS, as_tokens([99, 0, 0, 99]), P)[0].n_tokens == 4
    path, unknown = index.match(NS, as_tokens([1, 0, 0, 1]), P)
    assert (path.n_tokens, unknown) == (0, Unknown(NS, 0))
    # what must stay does
    kept = {page.key for page in index}
    insert(index, [200, 0, 0, 1])
    index.trim(kept)
    assert kept <= {page.key for page in index}


@pytest.mark.slow
def test_forgetting_takes_no_longer_for_each_page_that_stays():
    def times():
        """What forgetting takes of a core, in units of what adding takes."""
        index = Index(1000)
        pages = [
            Page(i.to_bytes(32, "big"), NS, NS, 0, i.to_bytes(8, "big"), 10, 7, 0, 0, 0, is_stored=True)
            for i in range(60_000)
        ]
        started = time.thread_time()
        assert all(index.add(page) for page in pages)
        adding = time.thread_time() - started
        started = time.thread_time()
        index.trim({page.key for page in pages[:-100]})
        assert len(index) == 59_900
        return (time.thread_time() - started) / adding

    # less than one time; tens of times, each time, where the first item of a dict is looked for again and again
    assert any(times() < 4 for _ in range(5))


@pytest.mark.parametrize(
    ("page", "other", "lasts"),
    [
        ((True, 5), (False, 0), False),  # unpinned later, it expires and the other does not
        ((True, 5), (True, 9), True),
        ((True, 5), (False, 3), True),
        ((False, 5), (True, 3), False),
        ((False, 0), (True, 9), True),
        ((False, 9), (False, 5), True),
    ],
)
def test_a_page_lasts_as_long_as_another_whether_it_stays_pinned_or_not(page, other, lasts):
    one, two = (SimpleNamespace(pinned=pinned, expires=expires) for pinned, expires in (page, other))
    assert Page.lasts_until(one, two) is lasts
