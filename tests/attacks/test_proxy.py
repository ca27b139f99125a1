"""`prefixstore serve` under attack: processes killed, memory full, the store gone, crowds that leave."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support import PATIENCE, ROOT
from tests.support.llama_server import Running, binary
from tests.support.models import TORTURE
from tests.support.served import START_SECONDS, Serve, Served, cached, own_answers, prompt


def _ask(served: Served, text: str, **options: Any) -> httpx.Response | None:
    body = {"prompt": text, "n_predict": 12, "temperature": 0} | options
    with suppress(httpx.TransportError):
        return httpx.post(f"{served.url}/completion", json=body, timeout=5 * PATIENCE, trust_env=False)
    return None


def _until_answered(served: Served, text: str) -> dict[str, Any]:
    deadline = time.monotonic() + START_SECONDS
    while (answer := _ask(served, text)) is None or answer.status_code != 200:
        assert answer is None or (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (503, True)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return dict(answer.json())


def test_the_child_is_killed_while_it_answers(serve: Serve, alone: Running):
    served = serve()
    served.complete(prompt(1))
    served.saved()
    # with so many candidates for each token that it cannot end before it is read: more than is kept of it
    body = {"prompt": prompt(2), "n_predict": -1, "stream": True, "ignore_eos": True, "n_probs": 200}
    with served.http.stream("POST", served.url + "/completion", json=body) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        os.kill(served.child(), signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    again = _until_answered(served, prompt(1))
    assert again["content"] in own_answers(alone, prompt(1))
    assert cached(again) > 200
    assert "an answer is cut short" in served.text()
    assert "Traceback" not in served.text()


def test_a_model_that_was_replaced_before_the_child_is_started_again(serve: Serve, tmp_path: Path, docs_model: Path):
    model = Path(shutil.copy(docs_model, tmp_path / "model.gguf"))
    served = serve(model=model)
    served.complete(prompt(1))
    served.saved()
    # the same content: its pages are found again
    Path(shutil.copy(docs_model, tmp_path / "new.gguf")).replace(model)
    os.kill(served.child(), signal.SIGKILL)
    assert cached(_until_answered(served, prompt(1))) > 200
    served.complete(prompt(2))
    assert served.until(lambda status: status["saves"] >= 1)["failures"] == {}


def test_the_child_is_killed_around_its_saves(serve: Serve, alone: Running):
    served = serve()
    dice = random.Random(0)
    for i in range(4 * TORTURE):
        text = prompt(i % 12)
        answer = _until_answered(served, text)
        assert answer["content"] in own_answers(alone, text)
        time.sleep(dice.uniform(0.2, 0.3))  # saves begin a quarter of a second after the answer
        with suppress(ProcessLookupError, AssertionError):
            os.kill(served.child(), signal.SIGKILL)
    assert served.stop() == 0


def test_both_are_killed_at_any_time_and_the_store_stays_sound(serve: Serve, alone: Running, tmp_path: Path):
    dice = random.Random(1)
    for i in range(3 * TORTURE):
        served = serve()
        crowd = [threading.Thread(target=_ask, args=(served, prompt(j))) for j in range(i, i + 3)]
        for thread in crowd:
            thread.start()
        time.sleep(dice.uniform(0.1, 1.0))
        served.process.kill()
        served.process.wait()
        for thread in crowd:
            thread.join()
        check = [sys.executable, "-m", "prefixstore", "check", str(tmp_path / "store")]
        subprocess.run(check, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    served = serve()
    for j in range(4):
        assert served.complete(prompt(j))["content"] in own_answers(alone, prompt(j))


def test_the_directory_of_slots_is_full(serve: Serve, alone: Running, tmp_path: Path, docs_model: Path):
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("mounts are not allowed here")
    log = tmp_path / "full.log"
    # in a mount namespace of its own, so that nothing is left of it
    script = 'mount -t tmpfs -o size=300k tmpfs /dev/shm && exec "$@"'
    command = [sys.executable, "-m", "prefixstore", "serve", str(tmp_path / "store"), "--port", "0", "--"]
    command += [str(binary()), "-m", str(docs_model), "-c", "4096", "-np", "1", "-t", "1", "--no-warmup"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    served = Served(process, log)
    try:
        served.wait_ready()
        for i in (3, 4, 3, 4):
            assert served.complete(prompt(i))["content"] in own_answers(alone, prompt(i))
        status = served.until(lambda status: status["failures"].get("save", 0) > 0)
        assert status["ready"]
        assert served.stop() == 0
    finally:
        served.end()


def test_the_store_vanishes_while_it_is_used(serve: Serve, alone: Running, tmp_path: Path):
    served = serve("-np", "1")
    for i in range(4):
        served.complete(prompt(i))
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("something else")
    for i in range(4):
        assert served.complete(prompt(i))["content"] in own_answers(alone, prompt(i))
    served.stop()


def test_a_crowd_that_leaves_again_and_again_blocks_nothing(serve: Serve, alone: Running):
    served = serve()
    dice = random.Random(2)
    times = [dice.uniform(0.01, 1.0) for _ in range(30 * TORTURE)]

    def leave(i: int) -> None:
        body = {"prompt": prompt(i % 10), "n_predict": 200, "stream": bool(i % 2), "ignore_eos": True}
        with suppress(httpx.TransportError):
            httpx.post(f"{served.url}/completion", json=body, timeout=times[i], trust_env=False)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(leave, range(len(times))))
    status = served.until(lambda status: status["waiting"] == 0 and not any(s["in_use"] for s in status["slots"]))
    assert status["ready"]
    for i in range(4):
        assert served.complete(prompt(i))["content"] in own_answers(alone, prompt(i))


def test_requests_of_all_kinds_at_once(serve: Serve, alone: Running):
    served = serve("-np", "3")
    kinds: list[dict[str, Any]] = [{}, {"n_cmpl": 2}, {"lora": [{"id": 0, "scale": 1.0}]}, {"cache_prompt": False}]
    kinds += [{"id_slot": 1}, {"prompt": ["Hello", "Good day"]}, {"prompt": "x " * 6000}, {"n_predict": 0}]
    with ThreadPoolExecutor(12) as threads:
        work = [threads.submit(_ask, served, prompt(i % 7), **kinds[i % len(kinds)]) for i in range(32 * TORTURE)]
        answers = [one.result() for one in work]
    for i, answer in enumerate(answers):
        assert answer is not None
        assert answer.status_code == (400 if "x " * 9 in str(kinds[i % len(kinds)]) else 200), answer.text
    for i in range(7):
        assert served.complete(prompt(i))["content"] in own_answers(alone, prompt(i))


# -- clients that mean harm --------------------------------------------------------------------------------------------


def _connect(served: Served) -> socket.socket:
    address = urlsplit(served.url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port or 0), timeout=PATIENCE)


def _held(served: Served) -> list[int]:
    return [slot["tokens"] for slot in served.status()["slots"]]


def test_without_a_key_no_slot_is_touched_and_no_body_is_read(serve: Serve):
    served = serve("--api_key", "K", "-np", "1", headers={"authorization": "Bearer K"})
    for i in (1, 2):
        served.complete(prompt(i))
        served.saved()
    before = _held(served)
    for headers in ({}, {"authorization": "Bearer k"}, {"authorization": "Bearer \xe9"}, {"x-api-key": ""}):
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        answer = httpx.post(
            f"{served.url}/completion", json={"prompt": prompt(1)}, headers=raw, timeout=PATIENCE, trust_env=False
        )
        assert answer.status_code == 401
    with _connect(served) as client:
        # it announces a body that it never sends
        client.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n")
        assert b" 401 " in client.recv(4096)
    for length in (b"Content-Length: 9999", b"Transfer-Encoding: chunked"):
        with _connect(served) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n")
            assert b" 401 " in client.recv(4096)
    assert _held(served) == before
    assert served.metric("prefixstore_requests_total", source="store") == 0


def test_a_client_that_sends_slowly_leaves_the_slots_to_others(serve: Serve):
    served = serve()
    with _connect(served) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        served.get("/health")
        assert [cached(served.complete(prompt(1))) > 200 for _ in range(2)] == [False, True]
        assert not any(slot["to_be_erased"] for slot in served.status()["slots"])


@pytest.mark.parametrize(
    ("head", "statuses"),
    [
        (b"GET /x#/slots HTTP/1.1", (404,)),
        # heads that are too large for llama-server are no HTTP for aiohttp, which has one status for all of that
        (b"GET /%s HTTP/1.1" % (b"a" * 20_000), (400,)),
        # another server
        (b"GET http://192.0.2.1/ HTTP/1.1", (400,)),
        # the slots, for clients of HTTP and for llama-server
        (b"GET /a/../slots HTTP/1.1", (400,)),
        (b"GET /./slots?a HTTP/1.1", (400,)),
        (b"GET /slots/. HTTP/1.1", (400,)),
        (b"GET /%u0073lots HTTP/1.1", (400,)),
        (b"GET /props?a=/../%u HTTP/1.1", (200,)),
        (b"GET /health HTTP/1.1" + b"\r\nX: y" * 3000, (400,)),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 50_000, (400,)),
        # two lengths
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3", (400,)),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 300", (400,)),
    ],
)
def test_odd_requests_get_an_answer_and_leave_nothing_in_the_log(
    head: bytes, statuses: tuple[int, ...], shared_proxy: Served
):
    served = shared_proxy
    body = b'{"content":"a"}'
    with _connect(served) as client:
        client.sendall(head + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        if b"chunked" in head:
            client.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert int(client.recv(65536).split()[1]) in statuses
    assert "Traceback" not in served.text()


def test_a_tenant_finds_nothing_that_another_leaves_in_a_slot_while_it_goes_on(serve: Serve):
    served = serve("-np", "3", "-c", "6144", options=("--salt-from", "api-key"))
    assert "llama-server has no API keys, so a client may name any key" in served.text()
    ours, theirs = ({"authorization": f"Bearer {key}"} for key in "ab")
    for i in range(3):
        served.complete("hello", 1, headers=ours, id_slot=i)
    secret = prompt(1, 4000)
    # the first fills its context, and ends while the second goes on
    body = {"prompt": [secret, "x"], "n_predict": 1900, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(httpx.post, f"{served.url}/completion", json=body, headers=theirs, timeout=5 * PATIENCE)
        deadline = time.monotonic() + START_SECONDS
        while "truncated = 1" not in served.text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        slot = next(line for line in served.text().splitlines() if "truncated = 1" in line).split("id ")[1].split()[0]
        assert cached(served.complete(secret, 1, headers=ours, id_slot=int(slot))) == 0
        assert other.result().status_code == 200
