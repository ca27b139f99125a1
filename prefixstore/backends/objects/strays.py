"""Finds unreferenced objects: left by a process that died between its requests, or whose requests failed."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime, timedelta

from prefixstore.backends.objects.client import Client, Listed
from prefixstore.backends.objects.log import Log
from prefixstore.backends.objects.manifest import NONCE_BYTES, PAGES, PROBES, SEGMENTS, payload_of
from prefixstore.backends.objects.pages import Pages
from prefixstore.errors import StorageError

__all__ = ["GRACE_SECONDS", "strays"]

# How old such an object has to be, by the server's clock. A transaction that takes longer than half of this, by the
# clock of its process, is given up: so what it has written is never taken for a stray before it is committed.
GRACE_SECONDS = 3600.0


def strays(client: Client, log: Log, *, read_only: bool) -> list[Listed]:
    """All unreferenced objects that no running transaction can need. Lists the location."""
    listed = [one for folder in (PAGES, SEGMENTS, PROBES) for one in client.list(folder)]
    # after that: what was committed meanwhile is known
    log.refresh()
    pages, segments = log.pages, log.segments()
    with pages.lock:
        found = [one for one in listed if one.name not in segments and not _is_payload(one.name, pages)]
    if not found:
        return []
    now = max(one.written for one in listed) if read_only else _server_time(client)
    return [one for one in found if now - one.written > timedelta(seconds=GRACE_SECONDS)]


def _is_payload(name: str, pages: Pages) -> bool:
    """Whether this is the payload of a page, or waits to be deleted anyway."""
    payload = payload_of(name)
    if payload is None:
        return False
    stored = pages.entries.get(payload[0])
    return (stored is not None and stored.nonce == payload[1]) or payload in pages.dead


def _server_time(client: Client) -> datetime:
    name = PROBES + os.urandom(NONCE_BYTES).hex()
    try:
        client.create(name, b"")
        return client.written(name)
    finally:
        with suppress(StorageError):
            client.delete([name])
