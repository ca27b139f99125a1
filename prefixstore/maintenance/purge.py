"""What a purge deletes, and what it leaves."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from prefixstore.engine.delete import Choice, beginning_with, subtree
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import TokenSequence, as_tokens
from prefixstore.units import counted, parse_seconds, shown

if TYPE_CHECKING:
    from prefixstore.maintenance.archive import Archive

__all__ = ["choice_of", "string_of", "unmatched"]


def unmatched(archive: Archive, salt: str | None = None) -> list[str]:
    """What a purge, of this tenant or of all, leaves since it is not known whether it matches: sentences."""
    found = [
        f"{counted(one.pages, 'page')} may be of this tenant or of another, since the settings of namespace "
        f"{one.key.hex()} are missing or damaged; to delete them, purge that namespace"
        for one in (archive.holdings() if salt is not None else [])
        if one.namespace is None and one.pages
    ]
    if n := archive.engine.deleter.n_newer():
        found.append(
            f"not deleted: {counted(n, 'page')} of a newer prefixstore, or after such a page, which may match; "
            "purge with that version, or everything"
        )
    return found


def choice_of(
    archive: Archive,
    namespaces: Collection[bytes] | None,
    older_than: float | None,
    tokens: TokenSequence | None,
    page: str | None,
) -> Choice:
    """What pages have to be to be chosen: all of what is given."""
    before, keys = None, None
    if older_than is not None:
        before = time.time_ns() - round(parse_seconds(older_than, "older_than") * 1e9)
    wanted = as_tokens(tokens) if tokens is not None else None
    if wanted is not None and not len(wanted):
        raise InvalidParameterError("tokens is empty, and every sequence begins with it; leave it out for all pages")
    first = archive.find(page).key if page is not None else None
    with archive.view() as view:
        if wanted is not None:
            keys = beginning_with(view, wanted.tobytes(), namespaces)
        if first is not None:
            below = subtree(view, first)
            keys = below if keys is None else keys & below
    return Choice(namespaces, before, keys)


def string_of(value: object, parameter: str) -> str:
    """A value that has to be a string. Raises `InvalidParameterError`."""
    if not isinstance(value, str):
        raise InvalidParameterError(f"{parameter}={shown(value)} must be a string")
    return value
