"""A reverse proxy in front of one llama-server, which adds the store to its completions."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from prefixstore.format.keys import Tokens
from prefixstore.metrics import RequestMetrics
from prefixstore.server.exchange import BodyBudget, Exchange
from prefixstore.server.own_endpoints import OwnEndpoints
from prefixstore.server.prefill import compute_ahead
from prefixstore.server.prompts import (
    CACHE_SALT,
    ENDPOINTS,
    MESSAGES,
    SLOTLESS,
    UNKNOWN_FIELD,
    Ask,
    aside,
    parse,
    pinned,
    tokens_of_request,
)
from prefixstore.server.rates import Report, RequestUsage
from prefixstore.server.refused import RefusedError
from prefixstore.server.server_session import ServerSession
from prefixstore.server.slot_manager import SlotManager
from prefixstore.server.slot_pool import Claim, Rows
from prefixstore.server.tenants import Admission, within
from prefixstore.server.upstream import Headers, UpstreamError, chunks_of, end_to_end

if TYPE_CHECKING:
    from prefixstore.server.serving import ServeSettings

log = logging.getLogger("prefixstore.server")

# a comment in a stream
PING = b":\n\n"
# What llama-server would read as a different path: clients leave out dot segments, and it reads %uXXXX.
AMBIGUOUS = re.compile(rb"(?:^|/)\.\.?(?:/|$)|%[uU]")
# At most this many unknown fields are logged.
MAX_TOLD_FIELDS = 100
FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
# What uses no slot, and does something for all, or tells of others.
CLOSED_TO_TENANTS = ("/v1/stream", "/props", "/cors-proxy", "/tools")
# These only ask. What is done for all others needs a key, if the server has any.
READS = ("GET", "HEAD", "OPTIONS")
RANGES: tuple[str, ...] = ("range", "if-range")
# What uses slots without reusing anything of them.
STATELESS = frozenset({"/embedding", "/embeddings", "/v1/embeddings"})
STATELESS |= {"/rerank", "/reranking", "/v1/rerank", "/v1/reranking"}


class Proxy:
    """Answers requests.

    `admission` decides whether the server lets a client in, `own` has the endpoints of the proxy itself, and `observer`
    counts requests.
    """

    def __init__(
        self,
        session: ServerSession,
        own: OwnEndpoints,
        admission: Admission,
        observer: RequestMetrics,
        settings: ServeSettings,
    ) -> None:
        self._upstream, self._session = session.upstream, session
        self._own, self._admission = own, admission
        self._observer, self._settings = observer, settings
        self._bodies = BodyBudget(16 * settings.max_body if settings.max_bodies is None else settings.max_bodies)
        self._told_fields: set[str] = set()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. If the client goes away, the task is cancelled, and the server is told to stop."""
        exchange = Exchange(request, self._settings.max_body, self._bodies)
        try:
            await self._route(exchange)
        except ConnectionError:
            # of the client: its task is just being cancelled
            exchange.cut()
        except RefusedError as error:
            if isinstance(error, UpstreamError):
                self._session.lost()
            exchange.refuse(error.status, str(error))
        except web.RequestPayloadError:
            exchange.refuse(400, "the request is not valid in HTTP")
        except Exception:
            log.exception("a request is not answered")
            exchange.refuse(500, "the proxy has failed; its log says why")
        finally:
            exchange.close()
        return await exchange.finish()

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.path
        if not exchange.target.startswith(b"/"):
            raise RefusedError("the target of the request must be a path")
        if AMBIGUOUS.search(exchange.target.split(b"?", 1)[0]):
            raise RefusedError("the target of the request has a segment . or .. or %u in it: write the resolved path")
        if path in self._own.paths:
            await self._own.answer(exchange)
        elif not self._session.is_ready:
            raise RefusedError("the server is starting", 503)
        # a body takes of what the bodies of all have together
        elif (exchange.method not in READS or exchange.has_body) and (
            refusal := await self._admission.refusal(exchange.headers)
        ):
            exchange.answer(refusal.status, refusal.content, refusal.content_type)
        elif exchange.method == "POST" and path in ENDPOINTS:
            await self._complete(exchange, await exchange.body())
        else:
            await self._pass(exchange)

    # -- everything but completions ------------------------------------------------------------------------------------

    async def _pass(self, exchange: Exchange) -> None:
        path = exchange.path
        if self._settings.separated and not self._may_pass(exchange):
            raise RefusedError(f"{path} is switched off: tenants are separated, and it shows other tenants", 403)
        if exchange.method == "POST" and path.startswith("/slots/"):
            # any client could write files into its directory in memory, which are never deleted
            raise RefusedError("slots are saved into the store only", 501)
        if exchange.method == "POST" and path == "/lora-adapters" and not self._session.is_never_stored:
            # One with --lora is not stored; of one whose arguments are not known it would not show.
            raise RefusedError("adapters cannot be changed while the store is used", 501)
        # as a whole: while a client sends it, no thread of the server waits for it, and no slot is in doubt
        content = await exchange.body() if exchange.has_body else None
        is_end_of_stream = exchange.method == "DELETE" and path.startswith("/v1/stream")
        if exchange.method in READS or path in SLOTLESS or is_end_of_stream:
            await self._forward(exchange, content)
            return
        self._observer.passed(path, "endpoint")
        if self._session.is_never_stored and not self._settings.separated:
            await self._forward(exchange, content)
            return
        async with self._manager.all_slots(None, leaves=Rows.UNKNOWN) as claims:
            status = await self._forward(exchange, content)
            if status >= HTTPStatus.BAD_REQUEST and status != HTTPStatus.INTERNAL_SERVER_ERROR:
                # it was refused
                for claim in claims:
                    claim.leaves = Rows.CLEAN

    def _may_pass(self, exchange: Exchange) -> bool:
        path = exchange.path
        if exchange.method in READS:
            return not path.startswith(("/slots", "/v1/stream", "/metrics", "/props/"))
        return path in STATELESS or (path in SLOTLESS and not path.startswith(CLOSED_TO_TENANTS))

    async def _forward(
        self,
        exchange: Exchange,
        content: bytes | None,
        report: Report | None = None,
    ) -> int:
        """Pass a request on, and its answer back; the status of the answer."""
        report = report or Report()
        # a part of an answer that is made has no use, and llama-server refuses a wrong one after it has made all
        without = () if exchange.method in READS else RANGES
        if self._settings.separated:
            # who names the conversation of another would end it
            without = (*without, "x-conversation-id")
        headers = end_to_end(exchange.headers, without)
        async with self._upstream.send(exchange.method, exchange.target, headers, content) as answer:
            report.status = answer.status
            before = after = b""
            if not exchange.has_begun:
                await exchange.begin(answer.status, end_to_end(answer.headers))
            elif answer.status != HTTPStatus.OK:
                # in a stream that has begun, an error is an event
                before, after = b"event: error\ndata: " if exchange.path in MESSAGES else b"data: ", PING[1:]
            if before:
                await exchange.write(before)
            async for chunk in chunks_of(answer):
                report.feed(chunk)
                await exchange.write(chunk)
            if after:
                await exchange.write(after)
        return answer.status

    # -- completions ---------------------------------------------------------------------------------------------------

    @property
    def _manager(self) -> SlotManager:
        manager = self._session.manager
        assert manager is not None, "the session is ready"
        return manager

    async def _complete(self, exchange: Exchange, body: bytes) -> None:
        tenants, path = self._settings.tenants, exchange.path
        owner = None if tenants is None else tenants.salt(exchange.headers)
        # without tenants, it is the server that would have to separate its slots
        allowed = self._settings.allowed_fields | (set() if owner is None else {CACHE_SALT})
        ask = await aside(len(body), lambda: parse(path, body, allowed))
        if owner is not None and ask.cache_salt is not None:
            owner = within(owner, ask.cache_salt)
        if not await self._session.look():
            raise RefusedError("the server is starting", 503)
        if tenants is None and self._session.is_never_stored:
            # the server itself knows best which slot has the prompt
            self._passed(exchange, self._session.reason or "")
            await self._forward(exchange, body)
        else:
            await self._in_slots(exchange, ask, body, owner)

    async def _in_slots(self, exchange: Exchange, ask: Ask, body: bytes, owner: str | None) -> None:
        manager, is_separated = self._manager, self._settings.separated
        can_choose = ask.can_pin or len(manager.pool.slots) == 1
        reason, tokens = ask.reason, None
        if reason is None or (reason == UNKNOWN_FIELD and can_choose):
            credentials = self._upstream.credentials(exchange.headers)
            tokens = await tokens_of_request(ask, self._upstream, credentials, self._session.marker)
            reason = "no_tokens" if tokens is None else reason
        passed = self._session.reason or reason
        if passed is not None:
            self._passed(exchange, passed)
        if ask.field is not None:
            self._tell_of_field(ask.field)
        if tokens is None and ask.id_slot is None and not is_separated and not ask.taints:
            # the server itself knows best which slot has such a prompt
            can_choose = len(manager.pool.slots) == 1
        if not can_choose and (is_separated or ask.taints):
            await self._in_all_slots(exchange, ask, body, owner, tokens, asks=passed is None)
        elif not can_choose and reason is not None:
            await manager.empty_tainted()
            await self._forward(exchange, pinned(body, n_cache_reuse=0) if ask.can_add else body)
        else:
            # what the store is not asked for goes on in its own slot, as with the server alone
            trusts = reason == UNKNOWN_FIELD or (reason is not None and ask.id_slot is not None)
            claim = await manager.acquire(tokens, owner, ask.id_slot, asks=passed is None, trusts=trusts)
            claim.leaves = _leaves(ask)
            if claim.must_compute and not ask.can_add and is_separated:
                manager.release(claim, None, began=False)
                raise RefusedError("no slot can be emptied", 503)
            await self._in_slot(exchange, ask, body, claim, manager)

    async def _in_all_slots(
        self, exchange: Exchange, ask: Ask, body: bytes, owner: str | None, tokens: Tokens | None, *, asks: bool
    ) -> None:
        """Pass on a completion for which the server chooses slots; it may find only what its own tenant has in any.

        While it runs, nobody else has a slot, which might hold a part of it.
        """
        manager = self._manager
        if ask.can_add:
            # it reuses nothing
            body = pinned(body, cache_prompt=False, n_cache_reuse=0)
        async with manager.all_slots(owner, tokens, asks=asks, leaves=_leaves(ask)) as claims:
            if not ask.can_add and any(claim.must_compute for claim in claims):
                raise RefusedError("no slot can be emptied", 503)
            if tokens is None:
                await self._forward(exchange, body)
            else:
                await self._in_slot(exchange, ask, body, claims.pop(0), manager)

    def _passed(self, exchange: Exchange, reason: str) -> None:
        """Note why a completion is passed on without the store."""
        self._observer.passed(exchange.path, reason)
        exchange.told = f"restored=0; reason={reason}"

    def _tell_of_field(self, name: str) -> None:
        """Say once of each field that is not known what that costs."""
        # what a client sends is printed only if it looks like a name
        if FIELD_NAME.fullmatch(name) and name not in self._told_fields and len(self._told_fields) < MAX_TOLD_FIELDS:
            self._told_fields.add(name)
            log.warning(
                "requests with the field %s bypass the store, since the field is not known to be harmless; "
                "if it affects only the choice of tokens and the format of responses, pass --allow-field %s",
                name,
                name,
            )

    async def _in_slot(self, exchange: Exchange, ask: Ask, body: bytes, claim: Claim, manager: SlotManager) -> None:
        report, usage = Report(), None
        try:
            if ask.can_add:
                # the store holds no rows that were moved
                fields: dict[str, int | bool] = {"n_cache_reuse": 0}
                if ask.can_pin:
                    # no guess of another slot may undo the restore
                    fields["id_slot"] = claim.slot.id
                if claim.must_compute:
                    fields["cache_prompt"] = False
                body = pinned(body, **fields)
            if not ask.can_pin:
                await manager.empty_tainted()
            if claim.asks:
                exchange.told = claim.told
            claim.slot.told = exchange.told
            if claim.asks and not claim.must_compute:
                await self._compute_ahead(exchange, ask, claim, manager)
            if await self._forward(exchange, body, report) == HTTPStatus.OK and claim.asks:
                # unless the answer says something else
                usage = RequestUsage(claim.n_reused, len(claim.tokens) - claim.n_reused)
        finally:
            said = report.usage() if report.status == HTTPStatus.OK else None
            began = ask.taints or report.status in (None, HTTPStatus.OK)
            manager.release(claim, said, began=began, has_failed=report.has_failed)
            if said is not None:
                self._session.computed(said)
                usage = said.after(claim.n_ahead)
            if usage is not None:
                self._count(exchange.path, claim, usage)

    async def _compute_ahead(self, exchange: Exchange, ask: Ask, claim: Claim, manager: SlotManager) -> None:
        async def ping(head: Headers) -> None:
            """Tell the client of a stream that it is alive, as the server alone would do."""
            if ask.streams:
                if not exchange.has_begun:
                    await exchange.begin(HTTPStatus.OK, end_to_end(head))
                await exchange.write(PING)

        headers = self._upstream.credentials(exchange.headers)
        if "origin" in exchange.headers:
            headers["origin"] = exchange.headers["origin"]
        await compute_ahead(self._session, manager, claim, headers, ping)

    def _count(self, path: str, claim: Claim, usage: RequestUsage) -> None:
        """Count a prompt that was computed, and the lookup if it was one."""
        source, reason = claim.outcome(usage)
        self._session.note(usage, claim, reason)
        if claim.asks:
            restored = min(claim.n_restored, usage.cached_tokens)
            self._observer.observe(
                path,
                source=source,
                reason=reason,
                prompt_tokens=usage.cached_tokens + usage.computed_tokens,
                live_tokens=usage.cached_tokens - restored,
                restored_tokens=restored,
                computed_tokens=usage.computed_tokens,
                lookup_seconds=claim.lookup_seconds,
                restore_seconds=claim.restored_seconds,
                saved_seconds=claim.saved_seconds if restored else 0.0,
            )


def _leaves(ask: Ask) -> Rows:
    """Whose rows a completion leaves in its slot."""
    return Rows.ALTERED if ask.taints else Rows.CLEAN
