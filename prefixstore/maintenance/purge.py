"""What a purge deletes, and what it leaves."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from prefixstore.engine.delete import Choice, beginning_with, of_namespaces, subtree, unused_since
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import TokenSequence, as_tokens
from prefixstore.units import counted, parse_seconds, shown

if TYPE_CHECKING:
    from prefixstore.maintenance.archive import Archive

__all__ = ["choices_of", "string_of", "unmatched"]


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


def choices_of(
    archive: Archive,
    namespaces: Collection[bytes] | None,
    older_than: float | None,
    tokens: TokenSequence | None,
    page: str | None,
) -> list[Choice]:
    """What pages have to be to be chosen: all of what is given."""
    choices: list[Choice] = []
    if namespaces is not None:
        choices.append(partial(of_namespaces, namespaces=namespaces))
    if older_than is not None:
        before = time.time_ns() - round(parse_seconds(older_than, "older_than") * 1e9)
        choices.append(partial(unused_since, before=before))
    if tokens is not None:
        wanted = as_tokens(tokens)
        if not len(wanted):
            raise InvalidParameterError(
                "tokens is empty, and every sequence begins with it; leave it out for all pages"
            )
        choices.append(partial(beginning_with, tokens=wanted.tobytes(), namespaces=namespaces))
    if page is not None:
        choices.append(partial(subtree, key=archive.find(page).key))
    return choices


def string_of(value: object, parameter: str) -> str:
    """A value that has to be a string. Raises `InvalidParameterError`."""
    if not isinstance(value, str):
        raise InvalidParameterError(f"{parameter}={shown(value)} must be a string")
    return value
