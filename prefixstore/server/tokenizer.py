"""The tokens of a prompt, as the server itself makes them."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from prefixstore.format.keys import Tokens
from prefixstore.server.prompts import Ask, aside
from prefixstore.server.upstream import Headers, Upstream

__all__ = ["Tokenizer"]

CACHED_PROMPTS = 32
TIMEOUT = 30.0
# of the text of a token's number, about
TOKEN_CHARACTERS = 6


class Tokenizer:
    """Asks ``/apply-template`` and ``/tokenize``, and remembers the latest answers.

    `marker` is what stands for an image in a prompt of this server; None if that is not known.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: dict[bytes, Tokens] = {}
        self.marker: str | None = None

    async def tokens(self, ask: Ask, headers: Headers, owner: str | None) -> Tokens | None:
        """The tokens that the server will use for this; None if it refuses, as it will then refuse the request itself.

        Those before the first image, and then a number that stands for the rest. `headers` are what the client has sent
        to be let in. What one tenant (`owner`) has asked before must not make the request of another faster.
        """
        if ask.media is not None and self.marker is None:
            return None
        kind = b"%s %d" % (b"chat" if ask.chat is not None else b"prompt", ask.media or 0)
        size = len(ask.chat or ask.prompt or b"")
        body = ask.chat if ask.chat is not None else await aside(size, lambda: _request(ask.prompt))
        salt = hashlib.sha256((owner or "").encode()).digest()
        key = hashlib.blake2b(kind + salt + body, digest_size=24).digest()
        if key in self._known:
            return self._known[key]
        if ask.chat is not None:
            answer = await self._post("/apply-template", body, headers)
            text = answer.get("prompt") if answer else None
            if not isinstance(text, str):
                return None
            body = await aside(len(text), lambda: _request(self._before_media(text, ask)))
        elif ask.media is not None:
            body = _request(self._before_media(ask.prompt, ask))
        answer = await self._post("/tokenize", body, headers)
        listed = answer.get("tokens") if answer else None
        if not isinstance(listed, list):
            return None
        tokens = await aside(len(listed) * TOKEN_CHARACTERS, lambda: _array(listed))
        if tokens is None:
            return None
        if ask.media is not None:
            tokens = np.append(tokens, np.int32(ask.media))
        if len(self._known) >= CACHED_PROMPTS:
            # the oldest
            del self._known[next(iter(self._known))]
        self._known[key] = tokens
        return tokens

    def _before_media(self, prompt: object, ask: Ask) -> object:
        if ask.media is None or not self.marker or not isinstance(prompt, str):
            return prompt
        return prompt.partition(self.marker)[0]

    def forget(self) -> None:
        """Forget all answers: another model may answer next."""
        self._known.clear()

    async def _post(self, path: str, body: bytes, headers: Headers) -> dict[str, object] | None:
        reply = await self._upstream.ask(path, headers, body, timeout=TIMEOUT)
        if not reply.is_ok:
            return None
        try:
            answer = await aside(len(reply.content), reply.json)
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None


def _array(listed: list[object]) -> Tokens | None:
    try:
        tokens = np.array(listed, np.int32)
    except (ValueError, TypeError, OverflowError):
        return None
    return tokens if tokens.ndim == 1 else None


def _request(prompt: object) -> bytes:
    # as the server tokenizes the prompts of completions
    request = {"content": prompt, "add_special": True, "parse_special": True}
    return json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
