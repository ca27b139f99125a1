"""``usage.prompt_tokens_details.cached_tokens`` in the answers of a server whose own code does not know it."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixstore.server.completions import Request, current_request

__all__ = ["CachedTokens"]

ENDPOINTS = ("/v1/completions", "/v1/engines/copilot-codex/completions", "/v1/chat/completions")


class CachedTokens:
    """Middleware that tracks the completions of each request, and completes the ``usage`` of its response.

    Answers that are not JSON, and streams, pass through as they are: the server sends no ``usage`` in a stream.

    Parameters
    ----------
    app
        The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or not scope["path"].endswith(ENDPOINTS):
            await self._app(scope, receive, send)
            return
        request = Request(next(path for path in ENDPOINTS if scope["path"].endswith(path)))
        token = current_request.set(request)
        try:
            await self._app(scope, receive, _Answer(request, send))
        finally:
            current_request.reset(token)


class _Answer:
    """Sends an answer; one in JSON is held back until it is complete."""

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self._start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_json(message):
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)
        else:
            await self._send(message)

    async def _finish(self, start: Message) -> None:
        body = self._completed()
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _completed(self) -> bytes:
        origins = self._request.origins
        try:
            answer: Any = json.loads(self._body) if origins else None
        except ValueError:
            return bytes(self._body)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not isinstance(usage, dict):
            return bytes(self._body)
        cached = min(sum(origin.cached_tokens for origin in origins), usage.get("prompt_tokens", 0))
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _is_json(start: Message) -> bool:
    headers = {bytes(name).lower(): bytes(value) for name, value in start["headers"]}
    return headers.get(b"content-type", b"").startswith(b"application/json") and b"content-encoding" not in headers
