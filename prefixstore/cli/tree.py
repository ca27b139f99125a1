"""``prefixstore tree``: the stored prefixes, with the text where they part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prefixstore.cli.command import Result
from prefixstore.cli.listing import SHORT, chosen_namespaces, page_facts, text_of_pages
from prefixstore.cli.model import text_of_tokens
from prefixstore.cli.output import DONE, FAILED, Form, ago, rows_of, say, tell
from prefixstore.engine.index import Page
from prefixstore.errors import InvalidParameterError
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import chosen
from prefixstore.models.file import model_title
from prefixstore.report.labels import Words, divergence, label_of
from prefixstore.units import counted, format_bytes, parse_seconds

__all__ = ["tree"]

ORDERS: dict[str, Callable[[Page], float]] = {
    "used": lambda page: -page.last_used,
    "uses": lambda page: -page.hits,
    "stored": lambda page: -page.stored_bytes,
    "tokens": lambda page: -page.end,
    "created": lambda page: page.created,
}


def tree(
    location: str,
    *,
    namespace: str | None = None,
    salt: str | None = None,
    model: Path | None = None,
    tokenizer: Path | None = None,
    containing: str | None = None,
    pinned: bool = False,
    older_than: str | None = None,
    depth: int | None = None,
    limit: int | None = None,
    sort: str | None = None,
    form: Form = Form.TEXT,
) -> Result:
    """Show the stored prefixes as a tree.

    A run of pages without a branch is one line. With a model or a tokenizer its text is shown, from where it differs
    from that of the sibling branches. --limit counts the branches after each page (in json, csv and tsv: the pages).
    Exit code 1 with --containing: the text is not stored.

    Example: prefixstore tree lmdb:///var/cache/kv --model m.gguf --containing "my secret"
    """
    if sort is not None and sort not in ORDERS:
        raise InvalidParameterError(f"--sort {sort} is unknown; choose used, uses, stored, tokens or created")
    seconds = parse_seconds(older_than, "--older-than") if older_than is not None else None
    words = text_of_tokens(model, tokenizer)
    if containing is not None and words is None:
        raise InvalidParameterError("--containing needs --model or --tokenizer, to convert tokens to text")
    with Archive(location, read_only=True) as archive:
        wanted = chosen_namespaces(archive, namespace, salt)
        pages = chosen(archive, wanted)
        if pinned:
            pages = _leading_to(archive, pages, lambda page: page.pinned)
        if seconds is not None:
            before = time.time_ns() - round(seconds * 1e9)
            pages = _leading_to(archive, pages, lambda page: page.last_used < before)
        if containing is not None and words is not None:
            # the text may begin in the parent
            pages = _leading_to(
                archive, pages, lambda page: containing in text_of_pages(archive.path(page)[-2:], words)
            )
        where, headings = archive.location, _headings(archive) if form is Form.TEXT else {}
    is_lost = containing is not None and not pages
    order = ORDERS[sort] if sort is not None else None
    facts = partial(_facts, pages, words, depth, limit, order)

    def show() -> None:
        if form is not Form.TEXT:
            rows_of(facts(), form)
            return
        _print(_branches(pages, depth, limit, order), headings, words)
        if not is_lost:
            tell(f"{where}: {counted(len(pages), 'page')}")

    if is_lost:
        say(f"{where}: the text is not stored")
    return Result(facts, show, FAILED if is_lost else DONE)


def _facts(
    pages: list[Page],
    words: Words | None,
    depth: int | None,
    limit: int | None,
    order: Callable[[Page], float] | None,
) -> list[dict[str, object]]:
    """Pages as data, down to a depth, in the order of the branches where one is asked for."""
    if depth is not None:
        pages = [page for branch in _branches(pages, depth, None, order) for page in branch.pages]
    if order is not None:
        pages = sorted(pages, key=order)
    return [page_facts(page, words) for page in pages[:limit]]


def _headings(archive: Archive) -> dict[bytes, str]:
    """The first digits of each namespace, which say enough for ``--namespace``, and what it is."""
    names, found = archive.history().models, {}
    for one in archive.holdings():
        tenant = one.settings.get("salt")
        known = [model_title(one.settings, names), *([f"tenant {tenant}"] if tenant else [])]
        found[one.key] = f"namespace {one.key.hex()[:SHORT]}  {', '.join(known)}"
    return found


def _leading_to(archive: Archive, pages: list[Page], is_wanted: Callable[[Page], bool]) -> list[Page]:
    """The pages that are wanted, with their ancestors."""
    found: set[bytes] = set()
    for page in pages:
        if is_wanted(page):
            found |= {one.key for one in archive.path(page)}
    return [page for page in pages if page.key in found]


class _Branch(NamedTuple):
    """A run of pages without a branch, or how many of those beside it are left out.

    `level` counts the branches above it, and `shared` the first tokens that a branch beside it has too.
    """

    level: int
    pages: list[Page]
    shared: int = 0
    left_out: int = 0


def _branches(
    pages: list[Page], depth: int | None, limit: int | None, order: Callable[[Page], float] | None
) -> Iterator[_Branch]:
    """The branches of some pages, whose ancestors are among them: each before those that follow it."""
    kept = {page.key for page in pages}
    waiting: list[_Branch] = []

    def add(level: int, siblings: list[Page]) -> None:
        if depth is not None and level >= depth:
            return
        shared = divergence({page.key: np.frombuffer(page.tokens, "<i4") for page in siblings})
        ordered = sorted(siblings, key=order) if order is not None else siblings
        found = [_Branch(level, [page], shared[page.key]) for page in ordered[:limit]]
        if len(found) < len(ordered):
            found.append(_Branch(level, [], left_out=len(ordered) - len(found)))
        waiting.extend(reversed(found))

    firsts = sorted((page for page in pages if page.parent == page.namespace), key=lambda page: page.namespace)
    for _, roots in groupby(firsts, key=lambda page: page.namespace):
        add(0, list(roots))
        while waiting:
            branch = waiting.pop()
            children: list[Page] = []
            while branch.pages and len(children := [one for one in branch.pages[-1].children if one.key in kept]) == 1:
                branch.pages.extend(children)
            yield branch
            if children:
                add(branch.level + 1, children)


def _print(branches: Iterable[_Branch], headings: Mapping[bytes, str], words: Words | None) -> None:
    """Print the tree, under the headings of its namespaces."""
    namespace = b""
    for level, pages, shared, left_out in branches:
        indent = "  " * (level + 1)
        if not pages:
            tell(f"{indent}… {left_out:,} more")
            continue
        if pages[0].namespace != namespace:
            namespace = pages[0].namespace
            tell(headings.get(namespace, f"namespace {namespace.hex()[:SHORT]}"))
        facts = [
            f"{indent}{pages[-1].key.hex()[:SHORT]}  tokens {pages[0].start + 1:,}-{pages[-1].end:,}",
            counted(len(pages), "page"),
            format_bytes(sum(page.stored_bytes for page in pages)),
            counted(max(page.hits for page in pages), "use"),
            ago(max(page.last_used for page in pages)),
            *(["pinned"] if all(page.pinned for page in pages) else []),
        ]
        tokens = np.frombuffer(b"".join(page.tokens for page in pages), "<i4")
        tell(", ".join(facts) + (f'  "{label_of(tokens, shared, words)}"' if words is not None else ""))
