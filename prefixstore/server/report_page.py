"""The report in a server: a page without content, and the content as JSON."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable
from typing import NamedTuple

from prefixstore.engine.engine import Engine
from prefixstore.report.content import content_of
from prefixstore.report.page import live_html

__all__ = ["CONTENT", "HTML", "JSON", "PAGE", "LiveReport", "page_of"]

PAGE = "/prefixstore/"
CONTENT = "/prefixstore/report.json"
HTML = "text/html; charset=utf-8"
JSON = "application/json; charset=utf-8"
# It is made again after that, or after so many times as long as it took: who reloads the page often must not keep the
# process busy.
SECONDS, TIMES = 5.0, 10.0
MOST_RUNS = 50_000
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def page_of() -> tuple[bytes, dict[str, str]]:
    """The page, without content, and its headers. It asks for a key if the content requires one."""
    return live_html().encode(), HEADERS


class _Made(NamedTuple):
    """A report: its JSON, packed by gzip, and until when it is new."""

    packed: bytes
    with_tokens: bool
    until: float


class LiveReport:
    """Generates the content, one at a time and not too often.

    Parameters
    ----------
    source
        The engine of the store, and its location. May raise `PrefixStoreError`.
    """

    def __init__(self, source: Callable[[], tuple[Engine, str]]) -> None:
        self._source = source
        self._made: _Made | None = None
        self._work: asyncio.Task[_Made] | None = None

    async def content(self, *, accepted: str, with_tokens: bool) -> tuple[bytes, dict[str, str]]:
        """The content of the page, and its headers.

        Parameters
        ----------
        accepted
            Encodings that the client accepts.
        with_tokens
            Whether it may have token ids of prompts.

        Raises
        ------
        PrefixStoreError
            If the store cannot be read.
        """
        made = await self._newest(with_tokens=with_tokens)
        if "gzip" in accepted:
            return made.packed, HEADERS | {"content-encoding": "gzip"}
        return gzip.decompress(made.packed), HEADERS

    async def _newest(self, *, with_tokens: bool) -> _Made:
        """The report, made again if it is old; the client may disconnect meanwhile."""
        while True:
            made = self._made
            if made is not None and made.with_tokens == with_tokens and time.monotonic() < made.until:
                return made
            if self._work is None:
                self._work = asyncio.create_task(self._make(with_tokens=with_tokens))
                # there may be no client left to receive the error
                self._work.add_done_callback(lambda done: done.cancelled() or done.exception())
            made = await asyncio.shield(self._work)
            if made.with_tokens == with_tokens:
                return made

    async def _make(self, *, with_tokens: bool) -> _Made:
        try:
            self._made = await asyncio.to_thread(self._read, with_tokens=with_tokens)
            return self._made
        finally:
            self._work = None

    def _read(self, *, with_tokens: bool) -> _Made:
        began = time.monotonic()
        engine, location = self._source()
        with engine.view() as view:
            content = content_of(
                view,
                location,
                with_tokens=with_tokens,
                max_bytes=engine.budget.max_bytes,
                most_runs=MOST_RUNS,
            )
        packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 5)
        ended = time.monotonic()
        return _Made(packed, with_tokens, ended + max(SECONDS, TIMES * (ended - began)))
