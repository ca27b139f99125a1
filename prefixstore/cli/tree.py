"""``prefixstore tree``: the stored prefixes, with the text where they part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import typer

from prefixstore.cli.command import Result
from prefixstore.cli.listing import SHORT, chosen_namespaces, page_facts, text_of_pages
from prefixstore.cli.model import text_of_tokens
from prefixstore.cli.output import DONE, FAILED, Form, ago, columns_shown, listed, rows_of, say, tell
from prefixstore.engine.index import Page
from prefixstore.errors import InvalidParameterError
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.transfer import chosen
from prefixstore.models.file import model_title
from prefixstore.report.labels import Words, divergence, visible
from prefixstore.units import counted, format_bytes, parse_seconds

__all__ = ["tree"]

# between what a text has in common with its neighbours, and what it does not
BAR = "│"
TEXT = 60  # characters shown of a text
CONTEXT = 16  # characters shown of what comes before the place where branches part
NARROW = 24  # with less room than this, a text gets a line of its own
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

    A run of pages without a branch is one line. With a model or a tokenizer its text is shown: the bar │ marks where
    the text differs from that of the sibling branches. --limit counts the branches after each page (in json, csv
    and tsv: the pages). Exit code 1 with --containing: the text is not stored.

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
        shown = _Shown(pages, words, depth, limit, ORDERS[sort] if sort is not None else None)
        where, headings = archive.location, _headings(archive) if form is Form.TEXT else {}
    is_lost = containing is not None and not pages

    def show() -> None:
        if form is not Form.TEXT:
            rows_of(shown.facts(), form)
            return
        shown.print(headings)
        if not is_lost:
            tell(f"{where}: {counted(len(pages), 'page')}")

    if is_lost:
        say(f"{where}: the text is not stored")
    return Result(shown.facts, show, FAILED if is_lost else DONE)


def _headings(archive: Archive) -> dict[bytes, str]:
    """The first digits of each namespace, which say enough for ``--namespace``, and what it is."""
    names, found = archive.history().models, {}
    for one in archive.holdings():
        tenant = one.settings.get("salt")
        known = [model_title(one.settings, names), *([f"tenant {tenant}"] if tenant else [])]
        found[one.key] = visible(f"namespace {one.key.hex()[:SHORT]}  {', '.join(known)}")
    return found


def _leading_to(archive: Archive, pages: list[Page], is_wanted: Callable[[Page], bool]) -> list[Page]:
    """The pages that are wanted, with their ancestors."""
    found: set[bytes] = set()
    for page in pages:
        if is_wanted(page):
            found |= {one.key for one in archive.path(page)}
    return [page for page in pages if page.key in found]


@dataclass
class _Shown:
    """Some pages as a tree.

    Parameters
    ----------
    chosen
        The pages, with their ancestors.
    words
        For texts; None shows none.
    depth, limit, order
        Levels of branches, branches after each page, and their order; None for all, and as they are.
    """

    chosen: list[Page]
    words: Words | None
    depth: int | None
    limit: int | None
    order: Callable[[Page], float] | None
    _keys: set[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._keys = {page.key for page in self.chosen}

    def pages(self) -> list[Page]:
        """The pages down to the depth, in the order of the branches where one is asked for."""
        pages = [page for _, chain, _, _ in self._branches(None) for page in chain] if self.depth else self.chosen
        return sorted(pages, key=self.order) if self.order is not None else pages

    def facts(self) -> list[dict[str, object]]:
        """These pages as data."""
        return [page_facts(page, self.words) for page in self.pages()[: self.limit]]

    def print(self, headings: Mapping[bytes, str]) -> None:
        """Print the tree, under the headings of its namespaces."""
        namespace = b""
        has_bar = False
        for level, chain, shared, left_out in self._branches(self.limit):
            indent = "  " * (level + 1)
            if not chain:
                typer.echo(f"{indent}… {left_out:,} more")
                continue
            if chain[0].namespace != namespace:
                namespace = chain[0].namespace
                tell(headings.get(namespace, f"namespace {namespace.hex()[:SHORT]}"))
            parts = [
                f"{chain[-1].key.hex()[:SHORT]}  tokens {chain[0].start + 1:,}-{chain[-1].end:,}",
                counted(len(chain), "page"),
                format_bytes(sum(page.stored_bytes for page in chain)),
                counted(max(page.hits for page in chain), "use"),
                ago(max(page.last_used for page in chain)),
                "pinned" if all(page.pinned for page in chain) else "",
            ]
            line = "\n".join(listed(parts, columns_shown(), indent))
            has_bar = has_bar or shared > 0
            typer.echo(line if self.words is None else _with_text(line, indent, self._text(chain, shared)))
        if has_bar:
            tell(f"{BAR}: here the text differs from that of the sibling branches")

    def _text(self, chain: list[Page], shared: int) -> str:
        """The text of a chain, from the first token that no branch beside it has, and a little of what is before."""
        tokens = np.frombuffer(b"".join(page.tokens for page in chain), "<i4")
        assert self.words is not None
        # half a character at the start is none
        text = repr(self.words(tokens[shared:].tolist()).lstrip("\ufffd"))[1:-1]
        before = self.words(tokens[max(0, shared - CONTEXT) : shared].tolist()).strip("\ufffd")
        return f"…{repr(before)[1:-1][-CONTEXT:]}{BAR}{text}" if shared else text

    def _branches(self, limit: int | None) -> Iterator[tuple[int, list[Page], int, int]]:
        """Runs of pages without a branch: the branches above, the pages, how many tokens a neighbour has too.

        Without pages: how many branches are left out.
        """
        waiting: list[tuple[int, list[Page], int, int]] = []

        def add(level: int, pages: list[Page]) -> None:
            if self.depth is not None and level >= self.depth:
                return
            tokens = {page.key: np.frombuffer(page.tokens, "<i4") for page in pages}
            shared = divergence(tokens) if self.words is not None else {}
            ordered = sorted(pages, key=self.order) if self.order is not None else pages
            found = [(level, [page], shared.get(page.key, 0), 0) for page in ordered[:limit]]
            left_out = len(ordered) - len(found)
            waiting.extend(reversed([*found, (level, [], 0, left_out)] if left_out else found))

        roots: dict[bytes, list[Page]] = {}
        for page in sorted(self.chosen, key=lambda page: page.namespace):
            if page.parent == page.namespace:
                roots.setdefault(page.namespace, []).append(page)
        for pages in roots.values():
            add(0, pages)
            while waiting:
                level, chain, shared, left_out = waiting.pop()
                children: list[Page] = []
                while chain and len(children := [one for one in chain[-1].children if one.key in self._keys]) == 1:
                    chain += children
                yield level, chain, shared, left_out
                if len(children) > 1:
                    add(level + 1, children)


def _with_text(line: str, indent: str, text: str) -> str:
    """The facts of a branch with its text, which gets a line of its own where the terminal is narrow."""
    room = columns_shown() - len(line) - 4
    if room >= NARROW and "\n" not in line:
        return f'{line}  "{_short(text, room)}"'
    return f'{line}\n{indent}  "{_short(text, max(columns_shown() - len(indent) - 4, NARROW))}"'


def _short(text: str, room: int) -> str:
    size = min(room, TEXT)
    return text if len(text) <= size else f"{text[: size * 2 // 3 - 1]} … {text[-(size // 3 - 2) :]}"
