"""Computes a prompt in steps, and has the slot copied after each: where its memory can be resumed only at such a place.

Recurrent memory has only its last state, and of a sliding window a slot file has only the last rows. So what another
prompt may share must be saved at the moment when just that is computed. llama-server stops there if it is asked for
that part of the prompt, and for no tokens of an answer (``n_predict: 0``); the client's own request goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.models.boundaries import prompt_boundaries
from prefixstore.server.prompts import TOKEN_CHARACTERS, aside
from prefixstore.server.rates import Rates, Report, RequestUsage
from prefixstore.server.server_session import ServerSession
from prefixstore.server.slot_manager import SlotManager
from prefixstore.server.slot_pool import Claim
from prefixstore.server.upstream import Headers, chunks_of

Ping = Callable[[Headers], Awaitable[None]]

# fewer tokens are computed again as fast as a slot is restored
MIN_MISSING: Final = 256
# as many tokens are not worth a stop
MIN_GAP: Final = 64
MOST_STOPS: Final = 6
# All stops of a prompt together may take this share of computing it, or as long as nobody notices.
MAX_SHARE: Final = 0.03
UNNOTICED_SECONDS: Final = 0.05


def most_stops(rates: Rates, n_missing: int, n_tokens: int) -> int:
    """At how many places a prompt of `n_tokens` may be stopped, of which `n_missing` are to be computed."""
    if n_missing < MIN_MISSING:
        return 0
    allowed = max(MAX_SHARE * rates.computing(n_missing), UNNOTICED_SECONDS)
    each = rates.stopping(n_tokens)
    return MOST_STOPS if each * MOST_STOPS <= allowed else int(allowed / each)


async def compute_ahead(
    session: ServerSession,
    manager: SlotManager,
    claim: Claim,
    headers: Headers,
    ping: Ping,
) -> None:
    """Compute a prompt in its slot up to its last boundary. If that fails, the client's request has the rest.

    The slot of the claim has what the store has, and the claim is told how many tokens were computed. `headers` are
    those of the request that the server needs. `ping` is called with the head of an answer each time the server says
    that it still computes.

    Raises
    ------
    UpstreamError
        If the server does not answer.
    """
    for end in await _boundaries(session, manager, claim):
        usage = await _compute(session, claim, end, headers, ping)
        if usage is None:
            return
        claim.n_ahead += usage.computed_tokens
        session.computed(usage)
        if not await manager.keep(claim, end):
            return


async def _boundaries(session: ServerSession, manager: SlotManager, claim: Claim) -> list[int]:
    store, slot, tokens = session.store, claim.slot, claim.tokens
    if store is None or store.can_cut or len(tokens) >= slot.n_ctx:
        return []
    start, parting = common_prefix(slot.tokens, tokens), list[int]()
    most = most_stops(manager.rates, len(tokens) - start, len(tokens))
    if most == 0 or not manager.pool.may_save(slot):
        return []
    if start == len(slot.tokens):
        # The end of the last answer may be in the slot, too. To stop before that would be to step back.
        start += slot.n_answer
    elif start >= MIN_GAP:
        # this prompt shows what others may share
        parting = [start]
        start -= 1
    kinds = await session.kinds()
    shared = await manager.shared(claim)
    return await aside(
        len(tokens) * TOKEN_CHARACTERS,
        lambda: prompt_boundaries(
            tokens,
            kinds,
            start=start,
            min_tokens=store.shortest,
            min_gap=MIN_GAP,
            most=most,
            shared=[shared] if shared else [],
            explicit=parting,
        ),
    )


async def _compute(session: ServerSession, claim: Claim, end: int, headers: Headers, ping: Ping) -> RequestUsage | None:
    """Have the server compute the first `end` tokens; None if it refuses."""
    body = await aside(end * TOKEN_CHARACTERS, lambda: _request(claim.tokens[:end], claim.slot.id))
    headers = {"content-type": "application/json", **headers}
    report = Report()
    async with session.upstream.send("POST", b"/completion", headers, body) as answer:
        async for chunk in chunks_of(answer):
            report.feed(chunk)
            if chunk.startswith(b":"):
                await ping(answer.headers)
    return report.usage() if answer.status == HTTPStatus.OK else None


def _request(tokens: Tokens, slot: int) -> bytes:
    # a stream has the head of its answer at once, and its pings
    fields = {"id_slot": slot, "n_predict": 0, "cache_prompt": True, "n_cache_reuse": 0, "stream": True}
    return json.dumps({"prompt": tokens.tolist(), **fields, "response_fields": ["timings"]}).encode()
