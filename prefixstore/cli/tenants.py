"""The command ``tenants``."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from prefixstore.cli.command import Result
from prefixstore.cli.output import ago, iso, table, tell
from prefixstore.errors import InvalidParameterError
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import Holding, in_all
from prefixstore.report.labels import visible
from prefixstore.server.tenants import tenant_of_key
from prefixstore.units import counted, format_bytes

__all__ = ["tenants"]


def tenants(location: str, *, api_key_file: Path | None = None, limit: int | None = None) -> Result:
    """List the tenants: what each has stored, and the name by which purge deletes it.

    The largest come first. What all share, as with a server without --salt-from, is (shared); purge deletes it by its
    namespaces. Of API keys only hashes are stored: --api-key-file shows which tenants given keys belong to.

    Example: prefixstore tenants lmdb:///var/cache/kv --api-key-file alice.txt
    """
    lines = None if api_key_file is None else _lines_of_keys(api_key_file)
    with Archive(location, read_only=True) as archive:
        where, holdings = archive.location, archive.holdings()
    found: defaultdict[str | None, list[Holding]] = defaultdict(list)
    n_unknown = 0
    for one in holdings:
        if one.namespace is None:
            n_unknown += one.pages
        elif lines is None or one.namespace.salt in lines:
            found[one.namespace.salt].append(one)
    facts = [_facts(name, held, lines or {}) for name, held in found.items()]
    facts = sorted(facts, key=lambda one: -one["stored_bytes"])[:limit]

    def show() -> None:
        if facts:
            # without keys, there is no line
            table(["tenant", "line", "models>", "pages>", "tokens>", "stored>", "used>"], map(_row, facts))
        n_tenants = sum(one["tenant"] is not None for one in facts)
        tell(f"{where}: {counted(n_tenants, 'tenant')}; prefixstore purge LOCATION --salt TENANT deletes one")
        for one in found.get(None, ()):
            tell(f"{where}: prefixstore purge LOCATION --namespace {one.key.hex()[:16]} deletes what is (shared)")
        if n_unknown:
            tell(f"{where}: the tenants of {counted(n_unknown, 'page')} are unknown: their settings are damaged")

    return Result([one | {"last_used": iso(one["last_used"])} for one in facts], show)


def _lines_of_keys(file: Path) -> dict[str, int]:
    """The tenants of the keys in a file, as llama-server reads it, and the line of each."""
    try:
        read = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise InvalidParameterError(f"--api-key-file {file}: {error.strerror or error}") from error
    return {tenant_of_key(key): i for i, key in enumerate(read.splitlines(), 1) if key}


def _facts(name: str | None, held: list[Holding], lines: dict[str, int]) -> dict[str, Any]:
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


def _row(facts: dict[str, Any]) -> list[str]:
    return [
        "(shared)" if facts["tenant"] is None else visible(facts["tenant"]),
        str(facts.get("line", "")),
        f"{facts['models']:,}",
        f"{facts['pages']:,}",
        f"{facts['tokens']:,}",
        format_bytes(facts["stored_bytes"]),
        ago(facts["last_used"]),
    ]
