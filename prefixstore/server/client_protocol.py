"""HTTP/1.1 of clients, as httptools parses it, with the checks and limits that it lacks."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from prefixstore.server.exchange import CUT

__all__ = ["MAX_HEAD", "ClientProtocol"]

# Bytes of a head, or of what surrounds the parts of a body; one read more may come.
MAX_HEAD = 64 << 10


class ClientProtocol(HttpToolsProtocol):
    """A connection of a client.

    Unlike uvicorn's own, it reads a request that offers another protocol as if it did not: httptools takes the body for
    that protocol, and Java's client offers ``h2c`` with each request. The head of a request has a limit. And if the
    client goes away, all of its requests end, not only the last one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._n_silent = 0
        self._is_silent = True
        self._is_head = True
        # requests that are being answered while a later one has come
        self._earlier: list[RequestResponseCycle] = []

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells only the latest
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        self._earlier.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._is_silent = True
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
            return
        self._n_silent = self._n_silent + len(data) if self._is_silent else 0
        if self._n_silent > MAX_HEAD:
            self._refuse("The head of the request is too large.")

    def _refuse(self, message: str) -> None:
        self.logger.warning(message)
        self.send_400_response(message)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError from None
                data = self._head() + data[upgrade.args[0] :]
                # the other one reads nothing more
                self.parser = httptools.HttpRequestParser(self)
            else:
                return

    def _head(self) -> bytes:
        """The head of this request again, without the offer."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._is_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # what comes after the body is for one connection, and could say otherwise than the head
        if self._is_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._is_head = self._is_silent = False
            self._earlier = [cycle for cycle in (*self._earlier, self.cycle) if cycle and not cycle.response_complete]
            super().on_headers_complete()
            # the application is called after this
            scope = cast("dict[str, Any]", self.cycle.scope)
            scope[CUT] = partial(_cut, self.cycle)

    def on_body(self, body: bytes) -> None:
        self._is_silent = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._is_silent = False
            super().on_message_complete()


def _cut(cycle: RequestResponseCycle) -> None:
    """Close the connection of a request whose answer has no end; uvicorn would log where the application was."""
    cycle.disconnected = True
    cycle.transport.close()
