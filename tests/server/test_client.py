"""The client of llama-server: records, and errors that say what to do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from prefixstore.errors import (
    InvalidParameterError,
    ServerBusyError,
    ServerError,
    ServerRefusedError,
    ServerTooOldError,
    ServerUnreachableError,
)
from prefixstore.server import LlamaServer
from tests.support.llama_server import Running
from tests.support.models import prompt


@contextmanager
def answering(code: int, body: object) -> Iterator[LlamaServer]:
    """A client of a server that answers everything with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815 - its name

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield LlamaServer(f"http://127.0.0.1:{server.server_port}/", timeout=60, api_key="secret")
        finally:
            server.shutdown()
            thread.join()


def test_what_a_server_and_its_slots_do(models: Callable[..., Path], llama_server: Callable[..., Running]):
    running = llama_server(models("llama", n_head=2), "-c", "2048")
    client = running.client
    props = client.props()
    assert (props.commit, props.n_slots, props.n_ctx) == ("0c1e570", 2, 1024)
    assert props.model_path == running.argv[2]
    empty = client.slot(0)
    assert (empty.is_processing, empty.n_tokens) == (False, None)
    running.complete(prompt(253), n=4, slot=1)
    assert client.slot(1).n_tokens == 256
    assert client.pid == running.process.pid
    saved = client.save(1, "mine")
    assert saved.n_tokens == 256
    assert saved.n_bytes == (running.slots_dir / "mine").stat().st_size
    assert client.erase(1).n_tokens == 256
    restored = client.restore(1, "mine")
    assert (restored.n_tokens, restored.n_bytes) == (256, saved.n_bytes)
    with pytest.raises(ServerRefusedError, match="400"):
        client.restore(0, "none")
    with pytest.raises(InvalidParameterError, match="has the slots 0, 1"):
        client.slot(2)
    messages = [{"role": "user", "content": "hello"}]
    assert "hello" in client.apply_template(messages)
    assert client.tokenize("hello world") == client.tokenize("hello world")


def test_a_server_without_slots_says_what_it_needs(models: Callable[..., Path], llama_server: Callable[..., Running]):
    running = llama_server(models("llama", n_head=2), "--no-slots", "--api-key", "right")
    with pytest.raises(ServerRefusedError, match="another API key"):
        running.client.props()
    client = LlamaServer(running.url, api_key="right")
    assert client.props().n_slots == 2
    with pytest.raises(ServerRefusedError, match="not --no-slots"):
        client.slots()


@pytest.mark.parametrize(
    ("code", "body", "error"),
    [
        (503, {"error": {"code": 503, "message": "Loading model"}}, ServerBusyError),
        (400, {"error": {"code": 400, "message": "no"}}, ServerRefusedError),
        (501, {"error": {"code": 501, "message": "start with --slots"}}, ServerRefusedError),
        (401, b"", ServerRefusedError),
        (404, b"not found", ServerTooOldError),
        (200, b"<html>", ServerTooOldError),
        (200, {"total_slots": 1}, ServerTooOldError),
        (200, b'[{"id": 0, "is_processing": false, "n_ctx": 1e999}]', ServerTooOldError),
        (200, [1], ServerTooOldError),
        (200, b"[" * 100_000, ServerTooOldError),
        # a number that is infinity
        (200, b'{"total_slots": 1e999, "n_saved": 1e999, "n_written": 1}', ServerTooOldError),
    ],
)
def test_each_fault_has_its_error(code: int, body: object, error: type[ServerError]):
    with answering(code, body) as client:
        for ask in (client.props, client.slots):
            with pytest.raises(error) as raised:
                ask()
            assert "secret" not in str(raised.value) + repr(client)
        with pytest.raises(error):
            client.save(0, "x")


def test_nobody_there_or_a_router():
    # a port without a server, and a name that cannot be encoded
    for url in ("http://127.0.0.1:9", f"http://{'a' * 70}.b"):
        with pytest.raises(ServerUnreachableError, match="no server answers"):
            LlamaServer(url, timeout=1).props()
    assert LlamaServer("http://127.0.0.1:9").pid is None
    with answering(200, {"role": "router"}) as client, pytest.raises(ServerRefusedError, match="router"):
        client.props()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:80",
        "ftp://here",
        None,
        "http://",
        "http://here:99999",
        "http://here:http",
        "http://[::1",
        "http://he\0re",
    ],
)
def test_a_url_that_is_none(url: str):
    with pytest.raises(InvalidParameterError, match="url="):
        LlamaServer(url)
    with pytest.raises(InvalidParameterError, match="timeout="):
        LlamaServer("http://here", timeout=0)


@pytest.mark.parametrize("key", ["from a file\n", " spaced", "schlüssel", "a\rb"])
def test_a_key_that_no_header_can_have_is_refused_and_not_repeated(key: str):
    with pytest.raises(InvalidParameterError) as raised:
        LlamaServer("http://here", api_key=key)
    assert key.strip() not in str(raised.value)
