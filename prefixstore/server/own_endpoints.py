"""The proxy's own endpoints: health, status, and metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefixstore.errors import ClosedError
from prefixstore.server.exchange import Exchange
from prefixstore.server.refused import RefusedError
from prefixstore.server.server_session import ServerSession
from prefixstore.server.slot_store import SlotStore
from prefixstore.server.tenants import Admission, api_key_of
from prefixstore.server.upstream import UpstreamError

if TYPE_CHECKING:
    from prefixstore.server.serving import ServeSettings

HEALTH, STATUS, METRICS = "/prefixstore/health", "/prefixstore/status", "/metrics"
JSON = "application/json; charset=utf-8"


class OwnEndpoints:
    """The endpoints that the proxy answers itself.

    All need what the server asks of its clients, but ``/prefixstore/health``. With the administrator's key, that is
    needed instead. Without one they are off if tenants are separated, since they show data of all of them.
    """

    paths = frozenset({HEALTH, STATUS, METRICS})

    def __init__(
        self,
        session: ServerSession,
        admission: Admission,
        render: Callable[[], tuple[bytes, str]],
        settings: ServeSettings,
    ) -> None:
        self._session, self._admission, self._render = session, admission, render
        self._settings = settings

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request to one of `paths`."""
        if exchange.method not in ("GET", "HEAD"):
            exchange.refuse(405, "this endpoint is read-only", allow="GET, HEAD")
        elif exchange.path == HEALTH:
            is_ready = self._session.is_ready
            text = {"status": "ok" if is_ready else "starting"}
            exchange.answer(200 if is_ready else 503, json.dumps(text).encode(), JSON)
        else:
            await self._check_key(exchange)
            if exchange.path == STATUS:
                exchange.answer(200, json.dumps(await self._status()).encode(), JSON, cache_control="no-store")
            else:
                await self._metrics(exchange)

    async def _check_key(self, exchange: Exchange) -> None:
        """Raise `RefusedError` if the client may not read what is not public."""
        if (key := self._settings.admin_key) is not None:
            given = api_key_of(exchange.headers).encode(errors="surrogateescape")
            if not hmac.compare_digest(given, key.encode()):
                raise RefusedError("this endpoint needs the key of --admin-key", 401)
        elif self._settings.separated:
            raise RefusedError("tenants are separated, and this endpoint shows all of them: set --admin-key", 403)
        # clients that the server lets in may read these
        elif (reply := await self._admission.refusal(exchange.headers)) is not None:
            raise RefusedError("the server refuses the API key", reply.status)

    async def _metrics(self, exchange: Exchange) -> None:
        # in a thread, as the location is asked: other requests go on while it does not answer
        text, content_type = await asyncio.to_thread(self._render)
        if self._session.is_ready:
            try:
                # the client may have another key, that of the administrator
                reply = await self._session.upstream.ask("/metrics", self._session.credentials)
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
                    "tokens": len(slot.tokens) + slot.n_answer,
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
