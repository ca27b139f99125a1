"""``prefixstore doctor``: whether everything around a store is set up well."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import typer

from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.model import silence
from prefixstore.cli.output import DONE, FAILED, tell, visible_lines, wrapped
from prefixstore.config import load_config
from prefixstore.diagnosis.doctor import Finding, Level, examine
from prefixstore.errors import MissingExtraError, ServerError
from prefixstore.units import counted

__all__ = ["doctor"]

MARKS = {Level.GOOD: "ok  ", Level.NOTE: "note", Level.PROBLEM: "FIX "}


def doctor(
    location: str | None = None,
    *,
    config: Path | None = None,
    max_bytes: str | None = None,
    server: str | None = None,
    api_key: str | None = None,
) -> Result:
    """Examine the installation and a store, and say what to change.

    Checks versions, the file system, permissions, free space, the budget, and whether restoring beats computing.
    With --config, the model is loaded, and its settings are compared with those of the stored pages. With --server,
    prefixstore serve is asked whether it stores and restores anything, and has pages for its settings, and if not,
    why. It writes nothing.

    Exit codes: 0 no problems found; 1 something should be changed.

    Example: prefixstore doctor lmdb:///var/cache/kv --config warm.toml
    """
    settings = load_config(config) if config is not None else None
    if settings is not None and not settings.model.get("verbose"):
        silence()
    found = examine(location or os.environ.get("PREFIXSTORE_LOCATION") or None, settings, max_bytes)
    if server is not None:
        found.append(_of_server(server, options.server_key(api_key)))
    n_problems = sum(finding.level is Level.PROBLEM for finding in found)

    def show() -> None:
        width = max(len(finding.name) for finding in found)
        for finding in found:
            before = f"{MARKS[finding.level]}  {finding.name:{width}}  "
            for text in filter(None, (finding.value, finding.advice)):
                typer.echo(wrapped(visible_lines(text), label=before))
                before = " " * len(before)
        tell(f"{counted(n_problems, 'problem')} to fix" if n_problems else "no problems found")

    where = next(finding.value for finding in found if finding.name == "location")
    data = {"location": where, "problems": n_problems, "findings": [asdict(finding) for finding in found]}
    return Result(data, show, FAILED if n_problems else DONE)


def _of_server(url: str, api_key: str | None) -> Finding:
    """Whether a ``prefixstore serve`` uses its store."""
    try:
        from prefixstore.server.client import LlamaServer  # noqa: PLC0415 - the extra "server"
        from prefixstore.server.store_check import ADVICE  # noqa: PLC0415 - as above
    except ImportError as error:
        raise MissingExtraError('--server needs httpx; pip install "prefixstore[server]"') from error
    try:
        with LlamaServer(url, api_key=api_key) as server:
            status = server.proxy_status()
    except ServerError as error:
        return Finding("server", "cannot be asked", Level.PROBLEM, str(error))
    reason = status["passed_through"]
    differ = (status.get("store") or {}).get("other_settings")
    if differ:
        found = f"{url} has no pages for its settings, but for others of its model: {'; '.join(differ)}"
        return Finding("server", found, Level.PROBLEM, ADVICE)
    if reason is None:
        return Finding("server", f"{url} uses its store")
    advice = str(status.get("why") or "docs/servers.md says which servers are not stored.")
    return Finding("server", f"nothing is stored or restored: {reason}", Level.PROBLEM, advice)
