"""Relatives of stored pages: descendants, ancestors, and siblings with which a page overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prefixstore.engine.page import Page
from prefixstore.engine.page_view import PageView, tokens_of
from prefixstore.engine.trie import Entry
from prefixstore.errors import CorruptError
from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES
from prefixstore.format.record import Record, Usage


def with_descendants(view: PageView, keys: Iterable[bytes], at_once: int | None = None) -> Iterator[Entry]:
    """These pages and their descendants, children before their parents.

    Of a page with `at_once` children or more, only the first `at_once` are returned, and not the page itself.
    """
    waiting = [(entry, False) for entry in _entries(view, keys)]
    seen: set[bytes] = set()
    while waiting:
        entry, is_done = waiting.pop()
        if is_done:
            yield entry
        elif entry.key not in seen:
            seen.add(entry.key)
            after: list[Entry] = []
            if view.followed([entry.key]):
                after = [one for form in (PAGE, SNAPSHOT) for one in view.children([entry.key], form, at_once)]
            if at_once is None or len(after) < at_once:
                waiting.append((entry, True))
            waiting += [(one, False) for one in after]


def _entries(view: PageView, keys: Iterable[bytes]) -> list[Entry]:
    """An entry for each key; where there is no record, other rows of the page may be left."""
    keys = list(keys)
    found = view.records(keys)
    nothing = CorruptError("it has no record"), Usage(0)
    return [Entry(key, *found.get(key, nothing)) for key in keys]


def pinned_with(view: PageView, key: bytes, *, pinned: bool) -> list[bytes]:
    """The pages that are pinned or unpinned with a stored page: its descendants and its ancestors.

    An ancestor stays pinned if it leads to another pinned page.
    """
    changed = [entry.key for entry in with_descendants(view, [key])]
    known = set(changed)
    while (found := view.records([key]).get(key)) is not None and isinstance(record := found[0], Record):
        key = record.parent
        if key == record.namespace or key in known:
            break
        beside = [one for form in (PAGE, SNAPSHOT) for one in view.children([key], form)]
        if not pinned and any(one.usage.pinned and one.key not in known for one in beside):
            break
        changed.append(key)
        known.add(key)
    return changed


def overlaps_of(view: PageView, page: Page) -> tuple[Page | None, bool]:
    """The stored tail that a page continues, if any, and whether a longer stored page begins with all its tokens."""
    if page.form == SNAPSHOT:
        return None, False
    near = view.neighbors(page.parent, page.tokens)
    if any(tokens_of(one) == page.tokens for one in near):
        # the page itself is stored: a tail that it continues comes just before it
        near += view.neighbors(page.parent, page.tokens[:-TOKEN_BYTES])
    others = [(one, tokens_of(one)) for one in near if tokens_of(one) != page.tokens]
    tail = next((one for one, tokens in others if tokens and page.tokens.startswith(tokens)), None)
    is_covered = any(tokens.startswith(page.tokens) for _, tokens in others)
    if tail is None:
        return None, is_covered
    assert isinstance(tail.record, Record)
    return Page.stored(tail.key, tail.record, tail.usage), is_covered
