"""Commands that list: ``ls`` the namespaces, ``show`` one page, ``tenants``."""

from __future__ import annotations

import operator
import shlex
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prefixstore.cli.command import Result
from prefixstore.cli.model import text_of_tokens
from prefixstore.cli.named_files import reading
from prefixstore.cli.output import DONE, FAILED, ago, in_words, iso, listed, say, tell
from prefixstore.errors import InvalidParameterError
from prefixstore.format.namespace import model_digits
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import Holding, in_all, keys_in, namespaces_of, read_facts
from prefixstore.models.file import model_title, setting_name, setting_text
from prefixstore.server.tenants import tenant_of_key
from prefixstore.units import counted, format_seconds

SHORT = 12  # digits shown of a key
ORDERS = {
    "used": lambda one: -one.last_used,
    "pages": lambda one: -one.pages,
    "tokens": lambda one: -one.tokens,
    "stored": lambda one: -one.stored_bytes,
    "uses": lambda one: -one.hits,
}
# of lists: what is in each
COLUMNS = {name: name for name in ("namespace", "model", "label", "tenant")} | {"settings": "differs"}
COLUMNS |= {"pages>": "pages", "tokens>": "tokens", "stored>": "stored_bytes", "uses>": "page_uses", "used>": "used"}
OF_TENANTS = {"tenant": "name", "line": "line", "models>": "models", "pages>": "pages", "tokens>": "tokens"}
OF_TENANTS |= {"stored>": "stored_bytes", "used>": "used"}


def chosen_holdings(archive: Archive, namespace: str | None, salt: str | None) -> list[Holding]:
    """What is held of a namespace and a tenant, None for any. A tenant may be mistyped: one without pages is told."""
    found = archive.holdings(namespace, salt)
    if salt is not None and not found:
        say(f"note: there is no tenant {salt!r}; prefixstore tenants lists them")
    return found


def chosen_namespaces(archive: Archive, namespace: str | None, salt: str | None) -> set[bytes] | None:
    """The keys of the namespaces that are chosen; None for all."""
    if namespace is None and salt is None:
        return None
    return {one.key for one in chosen_holdings(archive, namespace, salt)}


def ls(
    location: str,
    *,
    namespace: str | None = None,
    salt: str | None = None,
    sort: str = "used",
    limit: int | None = None,
) -> Result:
    """List the namespaces: models, tenants, and the settings that differ.

    The settings are those in which namespaces of one model differ. Uses count pages: a prompt with ten stored pages
    counts as ten.

    Example: prefixstore ls lmdb:///var/cache/kv --sort stored --limit 10
    """
    if sort not in ORDERS:
        raise InvalidParameterError(f"--sort {sort} is unknown; choose used, pages, tokens, stored or uses")
    with Archive(location, read_only=True) as archive:
        where, names = archive.location, archive.history().models
        holdings = chosen_holdings(archive, namespace, salt)
    shown = sorted(holdings, key=ORDERS[sort])[:limit]
    facts = [_facts(one, names) for one in shown]

    def show() -> None:
        differ = _differences(holdings)
        rows = [
            {
                "namespace": one.key.hex()[:SHORT],
                "model": model_title(one.settings, names),
                "label": one.settings.get("label"),
                "tenant": one.settings.get("salt"),
                "differs": differ[one.key],
                "used": ago(one.last_used),
            }
            for one in shown
        ]
        if rows:
            listed(COLUMNS, map(operator.or_, facts, rows))
        more = f", {len(shown):,} shown" if len(shown) < len(holdings) else ""
        tell(f"{where}: {counted(len(holdings), 'namespace')}{more}")

    return Result(facts, show)


def _differences(holdings: list[Holding]) -> dict[bytes, str]:
    """The settings in which namespaces of one model differ, as text, by the key of each; not what has a column."""
    of_model: dict[object, list[Holding]] = {}
    for one in holdings:
        of_model.setdefault(one.settings.get("model"), []).append(one)
    found = {}
    for same in of_model.values():
        names = {name for one in same for name in one.settings} - {"label", "salt"}
        differ = sorted(name for name in names if len({repr(one.settings.get(name)) for one in same}) > 1)
        for one in same:
            values = [(name, one.settings.get(name)) for name in differ]
            texts = (f"{setting_name(name)} {setting_text(name, value)[:SHORT]}" for name, value in values)
            found[one.key] = ", ".join(texts)
    return found


def _facts(holding: Holding, names: Mapping[str, str]) -> dict[str, object]:
    return {
        "namespace": holding.key.hex(),
        "model_name": names.get(model_digits(holding.settings)),
        "settings": dict(holding.settings) if holding.namespace is not None else None,
        "pages": holding.pages,
        "tokens": holding.tokens,
        "stored_bytes": holding.stored_bytes,
        "raw_bytes": holding.raw_bytes,
        "page_uses": holding.hits,
        "pinned_pages": holding.pinned,
        "created": iso(holding.created),
        "last_used": iso(holding.last_used),
    }


def show(location: str, digits: str, *, model: Path | None = None) -> Result:
    """Show one page, and whether its bytes are intact.

    Exit code 1: the page is damaged.

    Example: prefixstore show lmdb:///var/cache/kv 4f9c1b --model m.gguf
    """
    words = text_of_tokens(model)
    with Archive(location, read_only=True) as archive:
        with archive.view() as view:
            facts_of_all = read_facts(view)
            page = archive.find_in(view, facts_of_all, digits)
            space = namespaces_of(view).get(page.namespace)
        damage = archive.damage(page.key)
        path = archive.path(page)
        settings = space.settings if space is not None else {}
        row = facts_of_all[np.searchsorted(keys_in(facts_of_all["key"]), page.key)]
        children = facts_of_all["key"][keys_in(facts_of_all["parent"]) == page.key.rstrip(b"\0")]
        model_called = model_title(settings, archive.history().models)
        named = {"model": model_called, "tenant": settings.get("salt"), "label": settings.get("label")}
        facts: dict[str, object] = {
            **page_facts(row, words and words(np.frombuffer(page.tokens, "<i4").tolist())),
            "path": [one.key.hex() for one in path],
            "children": [one.tobytes().hex() for one in children],
            "damage": damage,
        }
        shown = {"location": archive.location, **named, **facts}
        keys = {name: ", ".join(key[:SHORT] for key in one) for name, one in facts.items() if isinstance(one, list)}
        shown |= keys | {"compute_us": "", "damage": damage or "none: its bytes are intact"}
        shown["computed in"] = format_seconds(int(row["compute_us"]) / 1e6)
        texts = {name.replace("_", " "): in_words(name, value) for name, value in shown.items()}
        return Result(facts, {name: text for name, text in texts.items() if text}, FAILED if damage else DONE)


def page_facts(page: Any, text: str | None) -> dict[str, object]:
    """A page as data, by a row of its facts."""
    parent, namespace = page["parent"].tobytes(), page["namespace"].tobytes()
    facts: dict[str, object] = {
        "page": page["key"].tobytes().hex(),
        "parent": parent.hex() if parent != namespace else None,
        "namespace": namespace.hex(),
        "start": int(page["start"]),
        "tokens": int(page["n_tokens"]),
        "stored_bytes": int(page["stored_bytes"]),
        "raw_bytes": int(page["raw_bytes"]),
        "compute_us": int(page["compute_us"]),
        "page_uses": int(page["hits"]),
        "pinned": bool(page["pinned"]),
        "priority": int(page["priority"]),
        "created": iso(int(page["created"])),
        "last_used": iso(int(page["last_used"])),
        "expires": iso(int(page["expires"])),
    }
    return facts | ({"text": text} if text is not None else {})


# -- tenants ----------------------------------------------------------------------------------------------------------


def tenants(location: str, *, api_key_file: Path | None = None, limit: int | None = None) -> Result:
    """List the tenants: what each has stored, and the name by which purge deletes it.

    The largest come first. What all share, as with a server without --salt-from, is (shared); purge deletes it by its
    namespaces. Of API keys only hashes are stored: --api-key-file shows which tenants given keys belong to.

    Example: prefixstore tenants lmdb:///var/cache/kv --api-key-file alice.txt
    """
    lines: dict[str, int] | None = None
    if api_key_file is not None:
        # the tenants of the keys, as llama-server reads them, and the line of each
        with reading(str(api_key_file)) as opened:
            lines = {tenant_of_key(key): i for i, key in enumerate(opened.read().splitlines(), 1) if key}
    with Archive(location, read_only=True) as archive:
        where, holdings = archive.location, archive.holdings()
    found: defaultdict[str | None, list[Holding]] = defaultdict(list)
    n_unknown = 0
    for one in holdings:
        if one.namespace is None:
            n_unknown += one.pages
        elif lines is None or one.namespace.salt in lines:
            found[one.namespace.salt].append(one)
    facts = [_tenant_facts(name, held, lines or {}) for name, held in found.items()]
    facts = sorted(facts, key=lambda one: -one["stored_bytes"])[:limit]

    def show() -> None:
        if facts:
            names = ["(shared)" if one["tenant"] is None else one["tenant"] for one in facts]
            # without keys, there is no line
            more = ({"name": name, "used": ago(one["last_used"])} for name, one in zip(names, facts, strict=True))
            listed(OF_TENANTS, map(operator.or_, facts, more))
        n_tenants = sum(one["tenant"] is not None for one in facts)
        purge = f"prefixstore purge {shlex.quote(where)}"
        tell(f"{counted(n_tenants, 'tenant')}{f'; {purge} --salt TENANT deletes one' if n_tenants else ''}")
        for one in found.get(None, ()):
            tell(f"{purge} --namespace {one.key.hex()[:16]} deletes what is (shared)")
        if n_unknown:
            tell(f"{where}: the tenants of {counted(n_unknown, 'page')} are unknown: their settings are damaged")

    return Result([one | {"last_used": iso(one["last_used"])} for one in facts], show)


def _tenant_facts(name: str | None, held: list[Holding], lines: dict[str, int]) -> dict[str, Any]:
    total = in_all(held)
    return {
        "tenant": name,
        "models": len({one.settings.get("model") for one in held}),
        "pages": total.pages,
        "tokens": total.tokens,
        "stored_bytes": total.stored_bytes,
        "last_used": total.last_used,
        **({"line": line} if (line := lines.get(name or "")) else {}),
    }
