"""The proxy's own endpoints: health, status, metrics, and the report, which the Python server has, too."""

from __future__ import annotations

import asyncio
import gzip
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from prefixstore.engine.engine import Engine
from prefixstore.errors import ClosedError, PrefixStoreError, UnavailableError
from prefixstore.report.content import content_of, live_html
from prefixstore.server.exchange import Exchange
from prefixstore.server.refusals import RefusedError
from prefixstore.server.session import ServerSession
from prefixstore.server.slots import SlotStore
from prefixstore.server.tenants import Admission, api_key_of
from prefixstore.server.upstream import UpstreamError

__all__ = ["CONTENT", "HEADERS", "HTML", "JSON", "PAGE", "LiveReport", "OwnEndpoints"]

HEALTH, STATUS, METRICS = "/prefixstore/health", "/prefixstore/status", "/metrics"
JSON = "application/json; charset=utf-8"
PAGE = "/prefixstore/"
CONTENT = "/prefixstore/report.json"
HTML = "text/html; charset=utf-8"
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


class OwnEndpoints:
    """The endpoints that the proxy answers itself.

    All need what the server asks of its clients, but ``/prefixstore/health`` and ``/prefixstore/``, a page without
    content that asks for the key. With `admin_key`, that is needed instead. Without one they are off if tenants are
    `separated`, since they show data of all of them.
    """

    paths = frozenset({HEALTH, STATUS, METRICS, PAGE, PAGE.rstrip("/"), CONTENT})

    def __init__(
        self,
        session: ServerSession,
        admission: Admission,
        render: Callable[[], tuple[bytes, str]],
        *,
        admin_key: str | None = None,
        separated: bool = False,
    ) -> None:
        self._session, self._admission, self._render = session, admission, render
        self._admin_key, self._separated = admin_key, separated
        self._report = LiveReport(self._source)

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request to one of `paths`."""
        if exchange.method not in ("GET", "HEAD"):
            exchange.refuse(405, "this endpoint is read-only", allow="GET, HEAD")
        elif exchange.path == HEALTH:
            is_ready = self._session.is_ready
            text = {"status": "ok" if is_ready else "starting"}
            exchange.answer(200 if is_ready else 503, json.dumps(text).encode(), JSON)
        elif exchange.path == PAGE:
            exchange.answer(200, live_html().encode(), HTML, **HEADERS)
        elif exchange.path == PAGE.rstrip("/"):
            # relative, for those who have put it below a path of their own
            exchange.answer(308, b"", "text/plain", location="prefixstore/")
        else:
            await self._check_key(exchange)
            if exchange.path == STATUS:
                exchange.answer(200, json.dumps(await self._status()).encode(), JSON, cache_control="no-store")
            elif exchange.path == CONTENT:
                await self._content(exchange)
            else:
                await self._metrics(exchange)

    async def _check_key(self, exchange: Exchange) -> None:
        """Raise `RefusedError` if the client may not read what is not public."""
        if self._admin_key is not None:
            given = api_key_of(exchange.headers).encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self._admin_key.encode()):
                raise RefusedError("this endpoint needs the key of --admin-key", 401)
        elif self._separated:
            raise RefusedError("tenants are separated, and this endpoint shows all of them: set --admin-key", 403)
        # clients that the server lets in may read these
        elif (reply := await self._admission.refusal(exchange.headers)) is not None:
            raise RefusedError("the server refuses the API key", reply.status)

    async def _content(self, exchange: Exchange) -> None:
        """What the report shows."""
        accepted, with_tokens = exchange.headers.get("accept-encoding", ""), await self._is_protected()
        try:
            content, headers = await self._report.content(accepted=accepted, with_tokens=with_tokens)
        except PrefixStoreError as error:
            raise RefusedError(f"the store cannot be read: {error}", 503) from error
        exchange.answer(200, content, JSON, **headers)

    def _source(self) -> tuple[Engine, str]:
        store = self._session.store
        if store is None:
            raise UnavailableError(f"it is not open: {self._session.reason or 'the server is starting'}")
        return store.engine, store.store.location

    async def _is_protected(self) -> bool:
        """Whether a key is needed to get here. If not, the contents of prompts are not shown."""
        if self._admin_key is not None:
            return True
        try:
            return await self._admission.refusal({}) is not None
        except UpstreamError:
            return False

    async def _metrics(self, exchange: Exchange) -> None:
        # in a thread, as the location is asked: other requests go on while it does not answer
        text, content_type = await asyncio.to_thread(self._render)
        if self._session.is_ready:
            try:
                upstream = self._session.upstream
                reply = await upstream.ask("/metrics", upstream.credentials(exchange.headers))
                if reply.is_ok:
                    text = text.rstrip(b"\n") + b"\n" + reply.content
            except UpstreamError:
                pass  # they are worth something without the server's
        exchange.answer(200, text, content_type)

    async def _status(self) -> dict[str, Any]:
        session = self._session
        status: dict[str, Any] = {
            "ready": session.is_ready,
            "passed_through": session.reason,
            "why": session.why,
            "slots": [],
        }
        if session.manager is not None:
            pool = session.manager.pool
            status["slots"] = [
                {
                    "id": slot.id,
                    "n_ctx": slot.n_ctx,
                    "tokens": len(slot.tokens),
                    "unsaved_tokens": slot.n_unsaved if slot.is_dirty else 0,
                    "in_use": slot.is_busy,
                    "to_be_erased": not slot.is_clean,
                    "last_prompt": slot.told,
                }
                for slot in pool.slots
            ]
            status["waiting"] = pool.n_waiting
            status["copies"] = len(session.manager.copies)
            status["saves"] = session.manager.n_saves
            status["failures"] = dict(session.manager.failures)
            rates = asdict(session.rates)
            status["rates"] = {name: value for name, value in rates.items() if not name.startswith("_")}
        if session.store is not None:
            status["store"] = await asyncio.to_thread(_told, session.store)
        return status


def _told(store: SlotStore) -> dict[str, Any] | None:
    """What a store has done, and what its location holds; None if it has been closed meanwhile."""
    try:
        return asdict(store.store.stats()) | {
            "location": store.store.location,
            "kind": store.kind.value,
            "other_settings": store.differences(),
        }
    except ClosedError:
        return None


class LiveReport:
    """Generates the content, once for all who ask at the same time, and not too often.

    `source` names the engine of the store, and its location, or raises `PrefixStoreError`.
    """

    def __init__(self, source: Callable[[], tuple[Engine, str]]) -> None:
        self._source = source
        # the last one, with token ids and without; who asks while it is made waits for it
        self._made: dict[bool, asyncio.Future[tuple[bytes, float]]] = {}

    async def content(self, *, accepted: str, with_tokens: bool) -> tuple[bytes, dict[str, str]]:
        """The content of the page, and its headers; `with_tokens` if the client may have token ids of prompts.

        Raises
        ------
        PrefixStoreError
            If the store cannot be read.
        """
        making = self._made.get(with_tokens)
        if making is None or (making.done() and (making.exception() or time.monotonic() >= making.result()[1])):
            making = asyncio.ensure_future(asyncio.to_thread(self._read, with_tokens=with_tokens))
            # an error is for those who wait, if any still do
            making.add_done_callback(lambda made: made.cancelled() or made.exception())
            self._made[with_tokens] = making
        # it goes on if this client goes away
        packed, _ = await asyncio.shield(making)
        if "gzip" in accepted:
            return packed, HEADERS | {"content-encoding": "gzip"}
        return gzip.decompress(packed), HEADERS

    def _read(self, *, with_tokens: bool) -> tuple[bytes, float]:
        """A report, packed by gzip, and until when it is new."""
        began, (engine, location) = time.monotonic(), self._source()
        budget = engine.budget.max_bytes
        with engine.view() as view:
            content = content_of(view, location, with_tokens=with_tokens, max_bytes=budget, most_runs=MOST_RUNS)
        packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 5)
        ended = time.monotonic()
        return packed, ended + max(SECONDS, TIMES * (ended - began))
