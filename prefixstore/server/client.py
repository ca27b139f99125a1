"""A client of llama-server: its health and properties, its slots, and their files."""

from __future__ import annotations

import http.client
import json
import math
import operator
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from prefixstore.errors import (
    InvalidParameterError,
    ServerBusyError,
    ServerError,
    ServerRefusedError,
    ServerTooOldError,
    ServerUnreachableError,
)
from prefixstore.server.find_process import listening_process
from prefixstore.units import shown

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
MAX_MESSAGE = 300


@dataclass(frozen=True)
class Props:
    """The properties that a server reports.

    Attributes
    ----------
    build
        Number and commit of llama.cpp, ``"b1-0c1e570"``; empty if it is not known.
    model_path
        Path of the model on the server; empty if it is not known.
    n_slots
        How many sequences it computes side by side.
    n_ctx
        Tokens that fit into one slot.
    is_sleeping
        Whether it has unloaded the model until the next request.
    raw
        Everything, as it was answered.
    """

    build: str
    model_path: str
    n_slots: int
    n_ctx: int
    is_sleeping: bool = field(default=False, compare=False)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def commit(self) -> str:
        """The commit of llama.cpp that computes the states; empty if it is not known."""
        return self.build.rpartition("-")[2]


@dataclass(frozen=True)
class Slot:
    """One sequence of a server.

    Attributes
    ----------
    id
        Its number, from 0.
    is_processing
        Whether it computes a request.
    n_tokens
        Tokens that it holds; None if the server does not say: before the first request, and after a restore.
    n_ctx
        Tokens that fit into it.
    is_drafting
        Whether tokens are drafted for it: by another model, by layers of its own, or from its prompt.
    """

    id: int
    is_processing: bool
    n_tokens: int | None
    n_ctx: int
    is_drafting: bool = False


class SlotAction(NamedTuple):
    """How many tokens of a slot were saved, restored or erased, and the bytes of the file; 0 for an erasure."""

    n_tokens: int
    n_bytes: int = 0


class LlamaServer:
    """A client of one llama-server. May be used from many threads.

    It needs no package but Python's own, and no event loop, as aiohttp does: `SlotStore` uses it in the threads of
    the proxy, and the commands without any.

    Parameters
    ----------
    url
        Where it listens: ``"http://127.0.0.1:8080"``.
    timeout
        Seconds that an answer may take.
    api_key
        Its key, if it wants one.
    socket
        The Unix socket that it listens on, if it does; `url` is a name then.

    Attributes
    ----------
    url
        As given, without a slash at the end.
    is_drafting
        Whether tokens are drafted for its slots, as `slots` has said last; True until it has.

    Examples
    --------
    >>> LlamaServer("http://127.0.0.1:8080").slot(0).n_tokens  # doctest: +SKIP
    256
    """

    def __init__(
        self,
        url: str,
        timeout: float = 10.0,
        api_key: str | None = None,
        *,
        socket: str | os.PathLike[str] | None = None,
    ) -> None:
        parts = _parts_of(url)
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameterError(f'url={shown(url)} must be a URL such as "http://127.0.0.1:8080"')
        if api_key and not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
            # the errors of the client would repeat it
            raise InvalidParameterError("api_key has characters, or space around it, that a header cannot have")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise InvalidParameterError(f"timeout={shown(timeout)} must be a number of seconds above 0")
        self.url = url.rstrip("/")
        self.is_drafting = True
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        # proxies of the environment are for other hosts, and would see the prompts: none is used
        self._parts, self._timeout = parts, timeout
        self._socket = None if socket is None else os.fspath(socket)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def __repr__(self) -> str:
        return f"LlamaServer({self.url!r})"

    # -- questions ----------------------------------------------------------------------------------------------------

    def props(self) -> Props:
        """Its properties.

        Raises
        ------
        ServerError
            `ServerUnreachableError`, `ServerBusyError` (loading), `ServerRefusedError` (the key), `ServerTooOldError`.
        """
        return props_of(self._ask("GET", "/props"))

    def slots(self) -> tuple[Slot, ...]:
        """All slots. Raises `ServerError`; `ServerRefusedError` if it was started with ``--no-slots``."""
        answer = self._ask("GET", "/slots")
        with _understood(f"{self.url}/slots"):
            slots = tuple(self._slot(one) for one in answer)
        self.is_drafting = any(slot.is_drafting for slot in slots)
        return slots

    def slot(self, i: int) -> Slot:
        """One slot. Raises as `slots`, and `InvalidParameterError` if there is none with this number."""
        found = {slot.id: slot for slot in self.slots()}
        if i not in found:
            there = ", ".join(map(str, sorted(found)))
            raise InvalidParameterError(f"slot={shown(i)}: {self.url} has the slots {there}")
        return found[i]

    @property
    def pid(self) -> int | None:
        """Its process, if that is on this machine and can be found."""
        return listening_process(self._port) if self._host in LOCAL_HOSTS else None

    # -- slots --------------------------------------------------------------------------------------------------------

    def save(self, slot: int, filename: str) -> SlotAction:
        """Have it write a slot into a file of its slot directory. All slots wait meanwhile.

        The file is written in place: read it only after this has returned. If the slot is processing, the server does
        it when that ends, or after this has given up.

        Raises
        ------
        ServerError
            `ServerRefusedError` also if it was started without ``--slot-save-path``.
        """
        return self._act(slot, "save", "n_saved", "n_written", filename)

    def restore(self, slot: int, filename: str) -> SlotAction:
        """Have it load a file of its slot directory into a slot. All slots wait meanwhile.

        If it refuses the file, the slot is empty afterwards. A file whose rows are cut short ends the server.

        Raises
        ------
        ServerError
            As `save`.
        """
        return self._act(slot, "restore", "n_restored", "n_read", filename)

    def erase(self, slot: int) -> SlotAction:
        """Empty a slot. Raises `ServerError`, as `save`."""
        return self._act(slot, "erase", "n_erased")

    def evaluate(self, slot: int, tokens: Sequence[int]) -> None:
        """Have a slot evaluate these tokens, in place of what it holds. Raises `ServerError`."""
        body = {"prompt": list(tokens), "n_predict": 0, "id_slot": slot, "cache_prompt": False, "temperature": 0}
        self._ask("POST", "/completion", body)

    def apply_template(self, messages: Any, tools: Any = None) -> str:
        """The prompt of a conversation, in the template of the model. Raises `ServerError`."""
        answer = self._ask("POST", "/apply-template", {"messages": messages} | ({"tools": tools} if tools else {}))
        with _understood(f"{self.url}/apply-template"):
            prompt = answer["prompt"]
            if not isinstance(prompt, str):
                raise TypeError(prompt)
            return prompt

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a prompt, as the server's completions have them. Raises `ServerError`."""
        answer = self._ask("POST", "/tokenize", {"content": text, "add_special": True, "parse_special": True})
        with _understood(f"{self.url}/tokenize"):
            return [operator.index(token) for token in answer["tokens"]]

    def tokens_of_content(self, content: str | Mapping[str, Any]) -> list[int]:
        """The tokens of a text, or of a request with ``"messages"`` and perhaps ``"tools"``. Raises `ServerError`."""
        if not isinstance(content, str):
            content = self.apply_template(content["messages"], content.get("tools"))
        return self.tokenize(content)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _act(
        self, slot: int, action: str, n_tokens: str, n_bytes: str | None = None, filename: str | None = None
    ) -> SlotAction:
        if isinstance(slot, bool) or not isinstance(slot, int) or slot < 0:
            raise InvalidParameterError(f"slot={shown(slot)} must be the number of a slot, from 0")
        body = {} if filename is None else {"filename": filename}
        try:
            answer = self._ask("POST", f"/slots/{slot}?action={action}", body)
        except ServerBusyError as error:
            raise ServerBusyError(f"slot {slot} was not {action}d: {error}") from error.__cause__
        with _understood(f"{self.url}/slots"):
            return SlotAction(int(answer[n_tokens]), int(answer[n_bytes]) if n_bytes else 0)

    def _slot(self, answer: Any) -> Slot:
        n_tokens = answer.get("n_prompt_tokens")
        return Slot(
            int(answer["id"]),
            bool(answer["is_processing"]),
            None if n_tokens is None else int(n_tokens),
            int(answer["n_ctx"]),
            bool(answer.get("speculative")),
        )

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request, as JSON. Raises `ServerError`."""
        url = self.url + path
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        # llama-server closes one that is not used
        connection = kind(self._host, self._port, timeout=self._timeout)
        is_connected = False
        try:
            if self._socket is None:
                connection.connect()
            else:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(self._timeout)
                connection.sock.connect(self._socket)
            is_connected = True
            data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
            headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
            connection.request(method, self._parts.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError as error:
            raise ServerBusyError(f"{url} has not answered in time") from error
        except (http.client.HTTPException, OSError, UnicodeError) as error:
            # a name of a host may be none that can be encoded
            what = f"the connection to {self.url} has broken" if is_connected else f"no server answers at {self.url}"
            raise ServerUnreachableError(f"{what}: {error}") from error
        finally:
            connection.close()
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise _refused(url, response.status, _parsed(content))
        answer = _parsed(content)
        if answer is None:
            raise ServerTooOldError(f"{url} has not answered with JSON: is it a llama-server?")
        return answer


@contextmanager
def _understood(url: str) -> Iterator[None]:
    """Raise `ServerTooOldError` if an answer has another form than the block expects."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):  # 1e999 is infinity
        raise ServerTooOldError(f"{url} has answered in a form that is not known: is it a llama-server?") from None


def _parts_of(url: object) -> SplitResult | None:
    """A URL, taken apart; None if it is none, or has a port or characters that none can have."""
    if not isinstance(url, str):
        return None
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - it is parsed when it is asked for
    except ValueError:
        return None
    return parts if url.isprintable() and " " not in url else None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _refused(url: str, code: int, answer: Any) -> ServerError:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = str(error.get("message", "")) if isinstance(error, dict) else ""
    said = f"{code} {message[:MAX_MESSAGE]}".rstrip()
    if code in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        return ServerBusyError(f"{url} is not ready: {said}")
    if code == HTTPStatus.NOT_FOUND:
        return ServerTooOldError(f"{url} does not exist there: {said}. Is it a llama-server, and new enough?")
    if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ServerRefusedError(f"{url} wants another API key: {said}")
    if code == HTTPStatus.NOT_IMPLEMENTED:
        return ServerRefusedError(
            f"{url} is switched off there: {said}. llama-server needs --slot-save-path DIR, and not --no-slots"
        )
    return ServerRefusedError(f"{url} was refused: {said}")


def props_of(answer: Any) -> Props:
    """The properties in the answer of ``/props``. Raises `ServerError`."""
    with _understood("/props"):
        if answer.get("role") == "router":
            raise ServerRefusedError("this llama-server is a router, without slots: start it with a model (-m FILE)")
        return Props(
            str(answer.get("build_info", "")),
            str(answer.get("model_path", "")),
            int(answer["total_slots"]),
            int(answer["default_generation_settings"]["n_ctx"]),
            bool(answer.get("is_sleeping", False)),
            answer,
        )
