"""Whether the server accepts a client, found out before any work is done for it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from http import HTTPStatus

from prefixstore.server.upstream import Headers, Reply, Upstream

__all__ = ["Admission"]

MAX_REMEMBERED = 1024
REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class Admission:
    """Asks the server about each API key once, and remembers the accepted ones.

    A client without a key must not get a slot, or have a body read and understood.

    Parameters
    ----------
    upstream
        The server.
    has_keys
        Whether it requires a key of its clients.
    """

    def __init__(self, upstream: Upstream, *, has_keys: bool) -> None:
        self._upstream, self._has_keys = upstream, has_keys
        self._let_in: OrderedDict[bytes, None] = OrderedDict()

    async def refusal(self, headers: Headers) -> Reply | None:
        """The server's refusal of a client with these headers; None if it is accepted.

        Raises
        ------
        UpstreamError
            If the server does not answer.
        """
        if not self._has_keys:
            return None
        credentials = self._upstream.credentials(headers)
        digest = hashlib.sha256(repr(credentials).encode()).digest()
        if digest in self._let_in:
            self._let_in.move_to_end(digest)
            return None
        reply = await self._upstream.ask("/props", credentials)
        if reply.status in REFUSALS:
            return reply
        if reply.is_ok:
            self._let_in[digest] = None
            if len(self._let_in) > MAX_REMEMBERED:
                self._let_in.popitem(last=False)
        return None
