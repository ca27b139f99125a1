"""Who a client is: whether the server lets it in, and which tenant its requests belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixstore.errors import InvalidParameterError
from prefixstore.server.refused import RefusedError

if TYPE_CHECKING:
    from prefixstore.server.upstream import Headers, Reply, Upstream

MAX_HEADER = 256
# what these say must not be in the store
CREDENTIALS = frozenset({"authorization", "x-api-key", "cookie", "proxy-authorization"})
MAX_REMEMBERED = 1024


@dataclass(frozen=True)
class TenantSource:
    """What identifies the tenant of a request: ``api-key``, or ``header:NAME``.

    Attributes
    ----------
    header
        The name of the header, in lower case; None: the API key.
    """

    header: str | None = None

    @classmethod
    def parse(cls, text: str) -> TenantSource:
        """Parse ``--salt-from``.

        Raises
        ------
        InvalidParameterError
            If it is neither.
        """
        if text == "api-key":
            return cls()
        kind, _, name = text.partition(":")
        if kind != "header" or not name.replace("-", "").replace("_", "").isalnum():
            raise InvalidParameterError(f"--salt-from={text!r} is not valid; pass api-key or header:NAME")
        if name.lower() in CREDENTIALS:
            raise InvalidParameterError(f"--salt-from={text!r} would store a secret; pass api-key")
        return cls(name.lower())

    def salt(self, headers: Mapping[str, str]) -> str:
        """The salt of the tenant. Of an API key only a hash is stored.

        Raises
        ------
        RefusedError
            If the request does not name one.
        """
        if self.header is None:
            key = api_key_of(headers)
            if not key:
                raise RefusedError("an API key is needed: it determines whose prompts may be reused", 401)
            return tenant_of_key(key.encode(errors="surrogateescape"))
        values = [value.strip(" \t") for name, value in headers.items() if name.lower() == self.header]
        # one that a client has added to that of the gateway must not count
        if len(values) != 1 or not values[0] or len(values[0]) > MAX_HEADER:
            raise RefusedError(
                f"the header {self.header} is needed, exactly once: it determines whose prompts may be reused", 401
            )
        name = values[0].encode(errors="surrogateescape")
        try:
            # as an operator writes it
            return f"{self.header}:{name.decode()}"
        except UnicodeDecodeError:
            return f"{self.header}/latin-1:{name.decode('latin-1')}"


def tenant_of_key(key: bytes) -> str:
    """The tenant whose API key this is."""
    return f"api-key:{_digest(key)}"


def within(salt: str, cache_salt: str) -> str:
    """Whose requests with this ``cache_salt`` are: a part of the tenant."""
    source, _, name = salt.partition(":")
    return f"{source}/cache-salt-{_digest(cache_salt.encode('utf-8', 'surrogatepass'))}:{name}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def api_key_of(headers: Mapping[str, str]) -> str:
    """The API key of a request, where llama-server looks for it; empty if there is none."""
    authorization = headers.get("authorization", "")
    return (authorization or headers.get("x-api-key", "")).removeprefix("Bearer ")


class Admission:
    """Asks the server about each API key once, and remembers the accepted ones.

    A client without a key must not get a slot, or have a body read and understood. `has_keys` is whether the server may
    require a key of its clients.
    """

    def __init__(self, upstream: Upstream, *, has_keys: bool) -> None:
        self._upstream, self._has_keys = upstream, has_keys
        self._let_in: set[bytes] = set()

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
            return None
        reply = await self._upstream.ask("/props", credentials)
        if not reply.is_ok:
            return reply
        if len(self._let_in) >= MAX_REMEMBERED:
            self._let_in.clear()
        self._let_in.add(digest)
        return None

    def forget(self) -> None:
        """Forget whom it has accepted: the server was started again, and may have read other keys."""
        self._let_in.clear()
