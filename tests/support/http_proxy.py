"""A port on this machine that leads to an HTTP server, for tests of what goes wrong with single requests."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.support import PATIENCE

# what happens to a request: it passes; it does not arrive; its reply is lost; half of its reply arrives; nothing does
PASS, DROP, LOSE, CUT, HANG = "pass", "drop", "lose", "cut", "hang"


class HTTPProxy:
    """A port that leads to a server.

    Parameters
    ----------
    endpoint
        Of the server.
    decide
        What happens to a request, by its method, its path and its number, from 1.
    drop_headers
        Beginnings of names of headers, in lower case, that do not arrive.
    """

    def __init__(  # noqa: C901 - the handler is a class in it
        self,
        endpoint: str,
        decide: Callable[[str, str, int], str] = lambda method, path, number: PASS,
        drop_headers: tuple[str, ...] = (),
    ) -> None:
        self.decide = decide
        self.requests: list[tuple[str, str]] = []
        self.released = threading.Event()
        address, lock, proxy = urlsplit(endpoint).netloc, threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with suppress(OSError, http.client.HTTPException):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    proxy.requests.append((self.command, self.path))
                    fate = proxy.decide(self.command, self.path, len(proxy.requests))
                if fate == HANG:
                    proxy.released.wait(PATIENCE)
                if fate in (DROP, HANG):
                    self.close_connection = True
                    return
                connection = http.client.HTTPConnection(address, timeout=PATIENCE)
                try:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        if not name.lower().startswith(drop_headers or ("\0",)):
                            connection.putheader(name, value)
                    connection.endheaders(body)
                    reply = connection.getresponse()
                    content = reply.read()
                finally:
                    connection.close()
                if fate == LOSE:
                    self.close_connection = True
                    return
                self.send_response_only(reply.status, reply.reason)
                for name, value in reply.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(content if fate != CUT else content[: len(content) // 2])
                self.close_connection |= fate == CUT

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815 - names of http.server

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
