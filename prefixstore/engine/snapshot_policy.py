"""Thins the snapshots along a sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from prefixstore.engine.catalog import Catalog
from prefixstore.engine.located import Located
from prefixstore.engine.page import Page, shared_tokens
from prefixstore.engine.page_view import PageView
from prefixstore.format.keys import PAGE, SNAPSHOT, TOKEN_BYTES, Tokens
from prefixstore.format.record import Record

# how many children of each page are compared to find out where sequences fork; many children fork in few places
SIBLINGS_COMPARED = 64


def too_many(
    view: PageView, catalog: Catalog, found: Located, keep: int, interval: int, valued: Collection[int] = ()
) -> list[Page]:
    """The snapshots along a prompt to delete so that `keep` are left; pinned ones are not among them.

    Snapshots from which other prompts branch off, and those at `valued` positions, are deleted last.
    """
    snapshots = [path.pages[-1] for path in reversed(found.to_snapshots())]
    there = [page for page in snapshots if not catalog.is_thinned(page.key)]
    if len(there) <= keep:
        return []
    namespace, tokens = found.prompt.namespace, found.prompt.tokens
    ends = {namespace: 0} | {page.key: page.end for page in found.path().pages if page.end <= len(tokens)}
    others = {key: [page.tokens for page in catalog.pending_after(key)[:SIBLINGS_COMPARED]] for key in ends}
    for form in (PAGE, SNAPSHOT):
        for entry in view.children(list(ends), form, SIBLINGS_COMPARED):
            if isinstance(entry.record, Record):
                others[entry.record.parent].append(entry.record.tokens)
    positions = [page.end for page in there]
    forks = branches([(end, others[key]) for key, end in ends.items()], tokens)
    # other sequences start from the last snapshot before the fork
    shared = {max((n for n in positions if n <= fork), default=0) for fork in forks}
    doomed = thin(positions, keep, interval, shared.union(valued))
    return [page for page in there if page.end in doomed and not page.pinned]


def thin(taken: Sequence[int], keep: int, interval: int, valued: Collection[int] = ()) -> set[int]:
    """Which of the positions `taken`, ascending, to give up so that `keep` are left.

    The newest stays. Of the others, the one whose loss leaves the smallest gap goes first, measured by the logarithm of
    the distance from the newest: so they stay dense near the newest, and older ones are spaced further apart. Distances
    much smaller than `interval` do not matter. Positions that are `valued` go last.
    """
    left = list(taken)
    while len(left) > keep:
        newest = left[-1] + interval

        def loss(i: int, newest: int = newest) -> tuple[bool, float, int]:
            before = left[i - 1] if i else 0
            return left[i] in valued, (newest - before) / (newest - left[i + 1]), i

        del left[min(range(len(left) - 1), key=loss)]
    return set(taken) - set(left)


def branches(path: Iterable[tuple[int, Iterable[bytes]]], tokens: Tokens) -> list[int]:
    """The positions along `tokens` at which stored sequences branch off, to the token.

    `path` has, for the start of the sequence and for each page along it, where it ends and the tokens of its children.
    """
    raw = tokens.tobytes()
    found: list[int] = []
    for end, others in path:
        wanted = raw[end * TOKEN_BYTES :]
        found += [
            end + shared_tokens(wanted[: len(other)], other)
            for other in others
            if not (wanted.startswith(other) or other.startswith(wanted))
        ]
    return found
