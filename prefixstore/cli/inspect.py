"""Commands that read a location: ``stats``, ``ls``, ``tree``, ``show``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any

import numpy as np
import typer

from prefixstore.cli.arguments import (
    AsJson,
    Location,
    ModelFile,
    NamespaceName,
    PageKey,
    Text,
    TokenizerFile,
    text_of_tokens,
)
from prefixstore.cli.output import FAILED, ago, emit, fields, say, table
from prefixstore.engine.index import Page
from prefixstore.errors import InvalidParameterError
from prefixstore.maintenance.archive import Archive, Holding
from prefixstore.units import format_bytes

__all__ = ["ls", "show", "stats", "tree"]

SHORT = 12  # digits shown of a key
TEXT = 60  # characters shown of a text


def stats(location: Location, *, as_json: AsJson = False) -> None:
    """Show the size and usage of a store.

    Example: prefixstore stats lmdb:///var/cache/kv
    """
    with Archive(location, read_only=True) as archive:
        holdings, pages, used = archive.holdings(), archive.pages(), archive.used()
        now = time.time_ns()
        numbers: dict[str, Any] = {
            "location": archive.location,
            "used_bytes": used.bytes,
            "pages": used.entries,
            "tokens": sum(page.n_tokens for page in pages),
            "stored_bytes": sum(page.stored_bytes for page in pages),
            "raw_bytes": sum(page.raw_bytes for page in pages),
            "namespaces": len(holdings),
            "tenants": len({one.namespace.salt for one in holdings if one.namespace and one.namespace.salt}),
            "sequences": sum(page.is_leaf for page in pages),
            "pinned_pages": sum(page.pinned for page in pages),
            "expired_pages": sum(0 < page.expires <= now and not page.pinned for page in pages),
            "hits": sum(page.hits for page in pages),
            "last_used": _iso(max((page.last_used for page in pages), default=0)),
        }
    if as_json:
        emit(numbers)
    else:
        sizes = {name: format_bytes(number) for name, number in numbers.items() if name.endswith("_bytes")}
        shown = {name.replace("_", " "): f"{n:,}" if isinstance(n, int) else n for name, n in (numbers | sizes).items()}
        fields(dict(shown))


def ls(location: Location, *, as_json: AsJson = False) -> None:
    """List the namespaces, with their models and tenants.

    Example: prefixstore ls lmdb:///var/cache/kv
    """
    with Archive(location, read_only=True) as archive:
        holdings = archive.holdings()
    if as_json:
        emit([_namespace_json(holding) for holding in holdings])
        return
    rows = []
    for holding in holdings:
        settings = holding.namespace.settings if holding.namespace is not None else {}
        model = str(settings.get("model") or "")[:SHORT]
        rows.append(
            [
                holding.key.hex()[:SHORT],
                model,
                str(settings.get("label") or ""),
                str(settings.get("salt") or ""),
                f"{holding.pages:,}",
                f"{holding.tokens:,}",
                format_bytes(holding.stored_bytes),
                f"{holding.hits:,}",
                ago(holding.last_used),
            ]
        )
    columns = ["namespace", "model", "label", "tenant", "pages>", "tokens>", "stored>", "hits>", "used>"]
    table(columns, rows)


def _namespace_json(holding: Holding) -> dict[str, object]:
    return {
        "namespace": holding.key.hex(),
        "settings": dict(holding.namespace.settings) if holding.namespace is not None else None,
        "pages": holding.pages,
        "tokens": holding.tokens,
        "stored_bytes": holding.stored_bytes,
        "raw_bytes": holding.raw_bytes,
        "hits": holding.hits,
        "pinned_pages": holding.pinned,
        "created": _iso(holding.created),
        "last_used": _iso(holding.last_used),
    }


def tree(
    location: Location,
    *,
    namespace: NamespaceName = None,
    model: ModelFile = None,
    tokenizer: TokenizerFile = None,
    containing: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Only sequences that contain this text; needs --model or --tokenizer."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the stored prefixes as a tree.

    A run of pages without a branch is one line. With a model or a tokenizer, the text is shown too. Exit code 1 with
    --containing: the text is not stored.

    Example: prefixstore tree lmdb:///var/cache/kv --model m.gguf --containing "my secret"
    """
    words = text_of_tokens(model, tokenizer)
    if containing is not None and words is None:
        raise InvalidParameterError("--containing needs --model or --tokenizer, to convert tokens to text")
    with Archive(location, read_only=True) as archive:
        key = archive.namespace(namespace).key if namespace is not None else None
        pages = archive.pages(key)
        if containing is not None and words is not None:
            pages = _containing(archive, pages, words, containing)
        if as_json:
            emit([_page_json(page, words) for page in pages])
        else:
            _print_tree(pages, words)
    if containing is not None and not pages:
        say(f"{location}: the text is not stored")
        return FAILED
    return 0


def _containing(archive: Archive, pages: list[Page], words: Text, wanted: str) -> list[Page]:
    """The pages that contain a text, or the beginning of it, with their ancestors."""
    found: set[bytes] = set()
    for page in pages:
        path = archive.path(page)
        # the text may begin in the parent
        if wanted in words.text(_tokens(path[-2:])):
            found |= {one.key for one in path}
    return [page for page in pages if page.key in found]


def _tokens(pages: list[Page]) -> list[int]:
    tokens: list[int] = np.frombuffer(b"".join(page.tokens for page in pages), "<i4").tolist()
    return tokens


def _chains(pages: list[Page]) -> Iterator[tuple[int, list[Page]]]:
    """Runs of pages without a branch, each with the number of branches above it."""
    shown = {page.key for page in pages}
    waiting = [(0, page) for page in reversed(pages) if page.parent == page.namespace]
    while waiting:
        depth, page = waiting.pop()
        chain = [page]
        while len(children := [child for child in chain[-1].dependents if child.key in shown]) == 1:
            chain += children
        yield depth, chain
        waiting += [(depth + 1, child) for child in reversed(children)]


def _print_tree(pages: list[Page], words: Text | None) -> None:
    namespace = b""
    for depth, chain in _chains(sorted(pages, key=lambda page: page.namespace)):
        if chain[0].namespace != namespace:
            namespace = chain[0].namespace
            typer.echo(f"namespace {namespace.hex()}")
        parts = [
            f"{chain[-1].key.hex()[:SHORT]}  tokens {chain[0].start:,}-{chain[-1].end:,}",
            f"{len(chain)} page{'s' * (len(chain) > 1)}",
            format_bytes(sum(page.stored_bytes for page in chain)),
            f"{max(page.hits for page in chain)} hits",
            ago(max(page.last_used for page in chain)),
            "pinned" if all(page.pinned for page in chain) else "",
        ]
        text = f"  {_short(words.text(_tokens(chain)))}" if words is not None else ""
        typer.echo("  " * (depth + 1) + ", ".join(part for part in parts if part) + text)


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return f'"{shown}"' if len(shown) <= TEXT else f'"{shown[: TEXT // 2]} … {shown[-TEXT // 2 :]}"'


def show(
    location: Location,
    digits: PageKey,
    *,
    model: ModelFile = None,
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> int:
    """Show one page, and whether its bytes are intact.

    Exit code 1: the page is damaged.

    Example: prefixstore show lmdb:///var/cache/kv 4f9c1b --model m.gguf
    """
    words = text_of_tokens(model, tokenizer)
    with Archive(location, read_only=True) as archive:
        page = archive.find(digits)
        damage = archive.damage(page)
        facts = _page_json(page, words) | {
            "path": [one.key.hex() for one in archive.path(page)],
            "children": [one.key.hex() for one in page.dependents],
            "damage": damage,
        }
    if as_json:
        emit(facts)
    else:
        sizes = {name: format_bytes(getattr(page, name)) for name in ("stored_bytes", "raw_bytes")}
        plain = {name: value for name, value in facts.items() if name not in ("path", "children")}
        plain |= sizes | {"children": len(page.dependents), "damage": damage or "none"}
        fields({name.replace("_", " "): value for name, value in plain.items()})
    return FAILED if damage else 0


def _page_json(page: Page, words: Text | None) -> dict[str, object]:
    facts: dict[str, object] = {
        "page": page.key.hex(),
        "parent": page.parent.hex() if page.parent != page.namespace else None,
        "namespace": page.namespace.hex(),
        "start": page.start,
        "tokens": page.n_tokens,
        "stored_bytes": page.stored_bytes,
        "raw_bytes": page.raw_bytes,
        "compute_us": page.compute_us,
        "hits": page.hits,
        "pinned": page.pinned,
        "priority": page.priority,
        "created": _iso(page.created),
        "last_used": _iso(page.last_used),
        "expires": _iso(page.expires),
    }
    return facts | ({"text": words.text(_tokens([page]))} if words is not None else {})


def _iso(nanoseconds: int) -> str | None:
    return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).isoformat() if nanoseconds else None
