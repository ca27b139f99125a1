"""The stored prefixes, with the text where they part: ``tree``, and ``report``, which writes them as a page."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.listing import SHORT, chosen_namespaces, page_facts
from prefixstore.cli.model import text_of_tokens
from prefixstore.cli.named_files import STANDARD, is_replaced, writing
from prefixstore.cli.output import DONE, FAILED, ago, may_replace, say, tell
from prefixstore.engine.page_view import PageView
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.record import Facts
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import Holding, holdings_of, keys_in, read_facts
from prefixstore.models.file import file_digest, model_parts, model_title
from prefixstore.models.vocabulary import Words
from prefixstore.report.content import BEGIN, content_of, html_of
from prefixstore.report.labels import labels_of, tokens_of_pages, visible
from prefixstore.report.runs import Column, parents_of, runs_of
from prefixstore.units import counted, format_bytes


def tree(
    location: str,
    *,
    namespace: str | None = None,
    salt: str | None = None,
    model: Path | None = None,
    containing: str | None = None,
    pinned: bool = False,
    depth: int | None = None,
    limit: int | None = None,
) -> Result:
    """Show the stored prefixes as a tree.

    A run of pages without a branch is one line. With a model its text is shown, from where it differs
    from that of the sibling branches. --limit counts the branches after each page (in json: the pages).
    Exit code 1 with --containing: the text is not stored.

    Example: prefixstore tree lmdb:///var/cache/kv --model m.gguf --containing "my secret"
    """
    words = text_of_tokens(model)
    if containing is not None and words is None:
        raise InvalidParameterError("--containing needs --model, to convert tokens to text")
    with Archive(location, read_only=True) as archive:
        where, names, wanted = archive.location, archive.history().models, chosen_namespaces(archive, namespace, salt)
        with archive.view() as view:
            facts = _chosen(read_facts(view), wanted, pinned=pinned)
            facts, texts = _with_texts(view, facts, words, containing)
            held = sorted(holdings_of(view, facts), key=lambda one: one.key)
            runs, run = runs_of(facts, [one.key for one in held], time.time_ns(), by_use=False)
            labels = labels_of(view, facts, runs, [words] * len(held))[0] if words is not None else None
    is_lost = containing is not None and not len(facts)
    titles = [_title(one, names) if one.pages else "" for one in held]

    def data() -> list[dict[str, object]]:
        in_order = np.lexsort((facts["start"], keys_in(facts["namespace"])))
        if depth is not None:
            in_order = in_order[runs["level"][run[in_order]] < depth]
        return [page_facts(facts[i], texts[i] if texts is not None else None) for i in in_order[:limit]]

    def show() -> None:
        for line in _lines(runs, titles, depth, limit):
            tell(
                visible(line)
                if isinstance(line, str)
                else _line(facts, runs[line], labels[line] if labels is not None else None)
            )
        if not is_lost:
            tell(f"{where}: {counted(len(facts), 'page')}")

    if is_lost:
        say(f"{where}: the text is in no page of this model; pages of other models are not searched")
    return Result(data, show, FAILED if is_lost else DONE)


def _chosen(facts: Facts, namespaces: Collection[bytes] | None, *, pinned: bool) -> Facts:
    """Readable pages of these namespaces, that are pinned, or lead to such pages."""
    facts = facts[facts["is_readable"]]
    if namespaces is not None:
        facts = facts[np.isin(keys_in(facts["namespace"]), np.array(sorted(namespaces), f"S{KEY_BYTES}"))]
    if pinned:
        facts = facts[_leading_to(facts, facts["pinned"])]
    return facts


def _with_texts(
    view: PageView, facts: Facts, words: Words | None, containing: str | None
) -> tuple[Facts, list[str] | None]:
    """Pages and their texts; with `containing` those that have it, and those that lead to them."""
    if words is None:
        return facts, None
    found = tokens_of_pages(view, list(map(bytes, facts["key"])))
    tokens: list[list[int]] = [one.tolist() if one is not None else [] for one in found]
    is_kept = np.ones(len(facts), bool)
    if containing is not None:
        # the text may begin in the page before
        above = [tokens[at] if at >= 0 else [] for at in parents_of(facts).tolist()]
        has_text = [containing in words(before + own) for before, own in zip(above, tokens, strict=True)]
        is_kept = _leading_to(facts, np.array(has_text, bool))
    return facts[is_kept], [words(tokens[i]) for i in np.flatnonzero(is_kept)]


def _title(held: Holding, names: Mapping[str, str]) -> str:
    """The first digits of a namespace, which say enough for ``--namespace``, and what it is."""
    tenant = held.settings.get("salt")
    known = [model_title(held.settings, names), *([f"tenant {tenant}"] if tenant else [])]
    return f"namespace {held.key.hex()[:SHORT]}  {', '.join(known)}"


def _leading_to(facts: Facts, is_wanted: Column) -> Column:
    """Which pages are wanted, or lead to one that is."""
    parents, is_kept = parents_of(facts), np.array(is_wanted)
    rows = np.flatnonzero(is_wanted)
    while len(rows):
        rows = np.unique(parents[rows])
        rows = rows[(rows >= 0) & ~is_kept[rows]]
        is_kept[rows] = True
    return is_kept


def _lines(runs: Column, titles: Sequence[str], depth: int | None, limit: int | None) -> Iterator[str | int]:
    """The runs, each before those that follow it, under the titles of their namespaces; what is left out is told."""
    after: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for i in range(len(runs)):
        after[int(runs["parent"][i]), int(runs["space"][i])].append(i)

    def some(parent: int, space: int) -> list[str | int]:
        level = int(runs["level"][parent]) + 1 if parent >= 0 else 0
        following = after[parent, space] if depth is None or level < depth else []
        shown, more = following[:limit], len(following[limit:] if limit is not None else [])
        return [*([f"{'  ' * (level + 1)}… {more:,} more"] if more else []), *reversed(shown)]

    for space, title in enumerate(titles):
        if title:
            yield title
        waiting = some(-1, space)
        while waiting:
            yield (one := waiting.pop())
            waiting += some(one, space) if isinstance(one, int) else []


def _line(facts: Facts, run: Any, label: str | None) -> str:
    key, start = facts["key"][run["last"]].tobytes().hex()[:SHORT], int(run["start"])
    shown = [
        f"{'  ' * (int(run['level']) + 1)}{key}  tokens {start + 1:,}-{start + int(run['tokens']):,}",
        *([counted(int(run["pages"]), "page")] if run["pages"] else []),
        *([counted(int(run["snapshots"]), "snapshot")] if run["snapshots"] else []),
        format_bytes(int(run["bytes"])),
        counted(int(run["hits"]), "use"),
        ago(int(run["last_used"])),
        *(["pinned"] if run["pinned"] else []),
    ]
    return ", ".join(shown) + (f'  "{label}"' if label is not None else "")


# -- as a page --------------------------------------------------------------------------------------------------------


def report(
    location: str,
    *,
    out: Path = Path("report.html"),
    model: Path | None = None,
    max_bytes: str | None = None,
    yes: bool = False,
) -> Result | int:
    """Write a page that shows a store: its tree and its use.

    The page is one file that needs no network. With a model it shows the text where prompts diverge;
    otherwise token ids, which anyone with the model can turn into text. Only its owner can read the file. On a terminal
    it asks before it replaces a report; otherwise that needs --yes. A file that is no report is never replaced. Exit
    code 1: nothing was replaced.

    Example: prefixstore report lmdb:///var/cache/kv --out report.html --model m.gguf
    """
    if str(out) != STANDARD and is_replaced(out, (BEGIN.encode(),)) and not may_replace(out, yes=yes):
        return FAILED
    words = text_of_tokens(model)
    with Archive(location, read_only=True) as archive, archive.backend.view() as view:
        content = content_of(
            view,
            archive.location,
            words=words,
            is_of=lambda digest: model is None or digest == "+".join(map(file_digest, model_parts(str(model)))),
            max_bytes=options.max_bytes_of(max_bytes),
        )
    page = html_of(content).encode()
    with writing(str(out)) as file:
        file.write(page)
    held = f"{counted(content['pages'], 'page')}, {format_bytes(content['used_bytes'])}"
    runs = content.pop("runs")
    data = {"out": str(out), "bytes": len(page), "runs": len(runs["parent"])} | content
    return Result(
        data if str(out) != STANDARD else None,
        partial(say, f"{out}: {content['location']}, {held}; open it in a browser"),
    )
