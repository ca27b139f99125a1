"""`prefixstore serve -- llama-server …`, as clients see it: a real server, and its own cold answers to compare with."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixstore import PrefixStore
from prefixstore.cli import main
from prefixstore.counters import short
from prefixstore.maintenance.archive import Archive
from tests.support.llama_server import Running, binary
from tests.support.served import TEXT, Serve, Served, cached, launch, own_answers, prompt
from tests.support.timeouts import wait_for

KEY = "sk-tests-0123456789"


# -- the store --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prompt_is_warm_after_both_processes_were_restarted(serve: Serve, alone: Running, tmp_path: Path):
    right, trace = own_answers(alone, prompt(1)), tmp_path / "trace"
    served = serve(environment={"PREFIXSTORE_TRACE": str(trace)})
    assert served.text().startswith("prefixstore: listening on ")
    assert ": empty" in served.text()
    cold = served.complete(prompt(1))
    assert cold["content"] in right
    assert cached(cold) == 0
    assert served.metric("prefixstore_misses_total", reason="not_found") == 1
    served.post("/completion", content=b'{"prompt": "A most peculiar fault"')
    assert served.stop() == 0
    assert "prefixstore: stopping" in served.text()
    assert not any(said in served.text() for said in ("peculiar", prompt(1)[:30])), "no prompt reaches the log"
    served = serve(environment={"PREFIXSTORE_TRACE": str(trace)})
    assert re.search(r"is ready; store lmdb://\S+: \d+ pages, \d", served.text())
    warm = served.complete(prompt(1))
    assert warm["content"] in right
    assert cached(warm) == warm["timings"]["prompt_n"] + cached(warm) - 1 > 200
    served.complete(prompt(1))
    for source in ("store", "live"):
        assert served.counts(1, "prefixstore_requests_total", endpoint="/completion", source=source)
        assert served.counts(1, "prefixstore_lookups_total", source=source)
    assert served.counts(cached(warm), "prefixstore_request_restored_tokens_total", endpoint="/completion")

    def hits() -> list[int]:
        lines = [json.loads(line) for line in trace.read_text().splitlines() if line]
        return [line["hit_length"] for line in lines if "hit_length" in line]

    # the one that missed, the restored one, and the one whose slot still held it
    wait_for(lambda: len(hits()) == 3, "a request is not in the trace")
    assert hits() == [0, cached(warm), cached(warm)]


@pytest.mark.slow
def test_what_is_new_is_stored_when_the_slot_is_idle_and_survives_a_crash_of_both(serve: Serve, alone: Running):
    served = serve()
    served.complete(prompt(2))
    assert served.saved()["saves"] >= 1
    child = served.child()
    served.process.kill()
    served.process.wait()
    wait_for(lambda: not _is_running(child), "llama-server outlives us")
    served = serve()
    again = served.complete(prompt(2))
    assert again["content"] in own_answers(alone, prompt(2))
    assert cached(again) > 200


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.slow
def test_users_who_share_a_system_prompt_compute_it_once_and_their_own_text_once(serve: Serve):
    served = serve("-np", "4", "-c", "16384")
    users = ["Ann", "Bob", "Cem", "Dee"]
    system = {"role": "system", "content": TEXT[:3300]}
    chats = [
        [system, {"role": "user", "content": f"I am {user}. {TEXT[20_000 + 1000 * i :][:1000]}"}]
        for i, user in enumerate(users)
    ]
    computed: list[list[int]] = []
    for turn in range(3):
        computed.append([])
        for chat in chats:
            answer = served.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 8, "temperature": 0})
            assert answer.status_code == 200
            computed[-1].append(answer.json()["timings"]["prompt_n"])
            chat += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And {turn}, what of it?"}]
            # what is computed within a moment is saved in idle time only
            served.until(lambda status: all(one["unsaved_tokens"] < 32 for one in status["slots"]))
            served.until(lambda status: not status["copies"] and not status["store"]["queued_bytes"])
    first, *later = computed
    # the first one computes the system prompt, the others use it from its slot or from the store
    assert first[0] > 1300
    assert max(first[1:]) < 400
    # a few words each, whoever came between
    assert max(map(max, later)) < 32, computed
    assert sum(slot["tokens"] > 1300 for slot in served.status()["slots"]) == len(users)


@pytest.mark.slow
@pytest.mark.parametrize(("room", "n_full"), [("-c", 2), ("--kv-unified-per-slot", 4)])
def test_what_has_no_room_in_slots_that_share_one_memory_is_restored(room: str, n_full: int, serve: Serve):
    """As they do if ``-np`` is not given: the server empties idle slots, and does not say so."""
    served = serve("-np", "4", "-kvu", room, "1024", *([] if room == "-c" else ["-c", "4096"]))
    for n_found in (0, 400):
        for i in range(4):
            assert cached(served.complete(prompt(i))) >= n_found
            status = served.saved()
    assert not status["failures"]
    assert "purging slot" not in served.text()
    assert sum(slot["tokens"] > 0 for slot in status["slots"]) == n_full


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["trained", "gemma3"])
def test_what_was_warmed_for_a_server_is_restored_for_its_first_prompt(
    architecture, serve, models, docs_model, tmp_path
):
    model = docs_model if architecture == "trained" else models(architecture)
    system = {"role": "system", "content": TEXT[:3000]}
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [system]} if architecture == "trained" else {"prompt": TEXT[:3000]}))
    warming = ["warm", "--for-server", "--model", str(model), "--store", str(tmp_path / "store"), str(file)]
    assert main(warming) == 0
    served = serve("-np", "4", "-c", "16384", model=model)
    assert "none for these settings" not in served.text()
    assert served.status()["store"]["other_settings"] == []
    if architecture == "trained":
        messages = [system, {"role": "user", "content": "What is a slot?"}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        timings = served.post("/v1/chat/completions", json=body).json()["timings"]
    else:
        timings = served.complete(TEXT[:3000] + " What is a slot?")["timings"]
    assert timings["cache_n"] > 400
    assert timings["prompt_n"] < 64
    assert served.counts(1, "prefixstore_requests_total", source="store")


ENDPOINTS = {
    "/completion": lambda text: {"prompt": text, "n_predict": 8},
    "/completions": lambda text: {"prompt": text, "n_predict": 8},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 8},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 8},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "system": "Brief."},
    "/v1/responses": lambda text: {"input": text, "instructions": "Brief.", "max_output_tokens": 8},
}


def _text(answer: dict[str, Any]) -> str:
    if "content" in answer:
        content = answer["content"]
        return content if isinstance(content, str) else json.dumps(content)
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    return str([part["text"] for item in answer["output"] for part in item.get("content", [])])


@pytest.mark.slow
def test_each_endpoint_gains_the_store(serve: Serve, alone: Running):
    bodies = {path: make(prompt(i)) | {"temperature": 0} for i, (path, make) in enumerate(ENDPOINTS.items())}
    right = {}
    for path, body in bodies.items():
        alone.client.erase(0)
        alone.client.erase(1)
        # cold, and from the slot: these may differ by rounding
        answers = [httpx.post(alone.url + path, json=body, timeout=60, trust_env=False) for _ in range(2)]
        right[path] = {_text(answer.json()) for answer in answers}
    for _ in range(2):
        # a slot for each
        served = serve("-np", str(len(ENDPOINTS)), "-c", "8192")
        found = {}
        for path, body in bodies.items():
            answer = served.post(path, json=body)
            assert answer.status_code == 200, path
            assert _text(answer.json()) in right[path], path
            found[path] = _cached_tokens(answer.json())
        assert served.stop() == 0
    assert min(found.values()) > 200, found


def _cached_tokens(answer: dict[str, Any]) -> int:
    usage = answer.get("usage") or {"prompt_tokens_details": {"cached_tokens": answer["timings"]["cache_n"]}}
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])


@pytest.mark.slow
def test_the_official_client_streams_as_it_comes_and_its_leaving_frees_the_slot(serve: Serve, alone: Running):
    import openai  # it takes longer than all else that is imported here

    texts = []
    for _ in range(2):
        served = serve("-np", "1")
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": prompt(9)}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        client.close()
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
        usage = next(chunk.usage for chunk in chunks if chunk.usage)
        if len(texts) == 1:
            assert served.stop() == 0
    assert texts[0] == texts[1]
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    body = b'{"prompt": "Hello"}'
    host, port = served.url.removeprefix("http://").split(":")
    head = f"POST /completion HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with served.endless(prompt(10, 300)) as lines:
        events = list(islice((line for line in lines if line.startswith("data: {")), 20))
        # while the answer goes on
        assert (len(events), served.status()["slots"][0]["in_use"]) == (20, True)
        # another one waits for the slot, and leaves
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            served.until(lambda status: status["waiting"] == 1)
        served.until(lambda status: status["waiting"] == 0)
    served.until(lambda status: not status["slots"][0]["in_use"])
    assert served.complete(prompt(12))["content"] in own_answers(alone, prompt(12))


# -- what passes through ----------------------------------------------------------------------------------------------


def test_other_endpoints_pass_through(shared_proxy: Served, alone: Running):
    for path in ("/v1/models", "/health", "/nothing"):
        ours, theirs = shared_proxy.get(path), httpx.get(alone.url + path, timeout=60, trust_env=False)
        assert ours.status_code == theirs.status_code
    assert shared_proxy.get("/v1/models").json()["data"][0]["id"]
    tokens = shared_proxy.post("/tokenize", json={"content": "Hello"}).json()
    assert tokens == httpx.post(alone.url + "/tokenize", json={"content": "Hello"}, timeout=60, trust_env=False).json()
    assert len(shared_proxy.get("/slots").json()) == 2


@pytest.mark.slow
def test_errors_of_the_server_are_passed_on_and_harm_nothing(shared_proxy: Served, alone: Running):
    shared_proxy.complete(prompt(13))
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    # this model takes no images
    image = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, picture]}]})
    too_long = json.dumps({"prompt": TEXT[:30_000], "n_predict": 4})
    # what cannot be read does not get as far
    assert [shared_proxy.post("/completion", content=body).status_code for body in ("{", "[]")] == [400, 400]
    for body in ('{"prompt": 1}', '{"messages": 3}', too_long, image):
        for path in ("/completion", "/v1/chat/completions"):
            ours = shared_proxy.post(path, content=body, headers={"content-type": "application/json"})
            theirs = httpx.post(alone.url + path, content=body, timeout=60, trust_env=False)
            assert ours.status_code == theirs.status_code, body
    assert shared_proxy.metric("prefixstore_requests_passed_total", reason="no_tokens") > 0
    assert shared_proxy.complete(prompt(13))["content"] in own_answers(alone, prompt(13))


def test_what_the_store_cannot_serve_is_passed_on_and_counted(shared_proxy: Served):
    body = {"prompt": prompt(14), "n_predict": 4, "temperature": 0}
    for options, reason in (
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"n_cmpl": 2}, "several_answers"),
        ({"prompt": ["Hello", "Good day"]}, "several_prompts"),
        ({"cache_prompt": False}, "cache_prompt"),
    ):
        metric, labels = "prefixstore_requests_passed_total", {"endpoint": "/completion", "reason": reason}
        before = shared_proxy.metric(metric, **labels)
        assert shared_proxy.post("/completion", json=body | options).status_code == 200
        assert shared_proxy.counts(before + 1, metric, **labels)


def test_a_client_may_name_a_slot_and_writes_no_files_into_the_memory_of_the_machine(shared_proxy: Served):
    assert [shared_proxy.complete(prompt(17), id_slot=i)["id_slot"] for i in (1, 0)] == [1, 0]
    for action in ("save", "restore", "erase"):
        answer = shared_proxy.post("/slots/0", params={"action": action}, json={"filename": "planted"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")
    assert cached(shared_proxy.complete(prompt(17), id_slot=0)) > 200


@pytest.mark.slow
def test_a_large_body_and_a_full_queue_are_refused(serve: Serve):
    served = serve("-np", "1", options=("--max-body", "10KiB", "--max-waiting", "0"))
    for path in ("/completion", "/tokenize"):
        assert served.post(path, content=b"x" * 20_000).status_code == 413
        assert served.post(path, content=iter([b"x" * 9000] * 3)).status_code == 413
    with served.endless() as lines:
        next(lines)
        answer = served.post("/completion", json={"prompt": "Hello"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (503, "*")


@pytest.mark.slow
def test_a_location_that_others_lock_delays_no_answer(serve: Serve, alone: Running, tmp_path: Path):
    served = serve("-np", "1")
    right = {i: own_answers(alone, prompt(i)) for i in (2, 3)}
    served.complete(prompt(1))
    served.saved()
    with PrefixStore(tmp_path / "store", namespace="other") as store:
        # a store that can write nothing for half a minute gives pages up
        with store.engine._backend.update():
            for i in (2, 3):
                assert served.complete(prompt(i))["content"] in right[i]
                served.until(lambda status: not status["slots"][0]["unsaved_tokens"])
        served.saved()
    assert served.stop() == 0
    served = serve("-np", "1")
    for i in (2, 3):
        assert cached(served.complete(prompt(i))) > 200


# -- keys and tenants -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_api_keys_are_those_of_the_server(serve: Serve):
    served = serve("--api-key", KEY, headers={"Authorization": f"Bearer {KEY}"})
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/prefixstore/status", "/metrics", "/slots", "/props"):
            assert served.get(path, headers=headers).status_code == 401
        assert served.post("/completion", json={"prompt": "Hello"}, headers=headers).status_code == 401
    assert served.get("/prefixstore/health", headers={}).status_code == 200
    assert served.complete(prompt(18))["content"]
    assert served.stop() == 0
    served = serve("--api-key", KEY, headers={"x-api-key": KEY})
    assert cached(served.complete(prompt(18))) > 200
    assert KEY not in served.text()


@pytest.mark.slow
def test_api_keys_of_a_file_of_settings_are_needed(serve: Serve, tmp_path: Path):
    """llama-server reads it before its arguments."""
    file = tmp_path / "config" / "llama.cpp" / "config.ini"
    file.parent.mkdir(parents=True)
    file.write_text(f"; of all programs\n[*]\napi-key = {KEY}\n")
    served = serve(environment={"XDG_CONFIG_HOME": str(tmp_path / "config")})
    body = {"prompt": "Hello", "n_predict": 1}
    assert [served.post("/completion", json=body).status_code, served.get("/slots").status_code] == [401, 401]
    assert served.post("/completion", json=body, headers={"x-api-key": KEY}).status_code == 200
    file.write_text(f"; api-key = {KEY}\n")
    served = serve(environment={"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert served.post("/completion", json=body).status_code == 200


def _listens_at(child: int) -> Path:
    """The socket of a llama-server."""
    arguments = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
    return Path(arguments[arguments.index("--host") + 1])


def test_the_child_listens_to_us_only(shared_proxy: Served):
    child = shared_proxy.child()
    listens_at = _listens_at(child)
    assert listens_at.is_socket()
    assert listens_at.parent.stat().st_mode & 0o777 == 0o700
    inodes = {str(entry.readlink()) for entry in Path(f"/proc/{child}/fd").iterdir()}
    tcp = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    assert not inodes & {f"socket:[{fields[9]}]" for fields in tcp}


@pytest.mark.slow
def test_the_store_keeps_what_each_tenant_has_asked_for(serve: Serve, tmp_path: Path):
    served = serve("-np", "1", options=("--salt-from", "header:X-Tenant", "--admin-key", "admin"))
    served.headers = {"Authorization": "Bearer admin"}
    n_asked = 0
    for i, tenant in enumerate(("ann", "bob", "ann", "ann")):
        n_asked += served.complete(prompt(20), headers={"X-Tenant": tenant})["tokens_evaluated"]
        if i < 2:
            served.saved()
        # an answer is counted just after its end was sent
        served.until(lambda status, n=n_asked: status["store"]["prompt_tokens"] >= n)
    assert served.stop() == 0
    with Archive(str(tmp_path / "store"), read_only=True) as archive:
        history = archive.history()
        known = {one.settings["salt"]: short(one.key) for one in archive.holdings() if one.pages}
    ann, bob = (history.total(namespaces=[known[f"x-tenant:{name}"]]) for name in ("ann", "bob"))
    assert (ann.hits, ann.misses) == (1, 1)
    assert (bob.hits, bob.misses) == (0, 1)
    assert ann.tokens_restored > 200
    assert ann.prompt_tokens == 3 * bob.prompt_tokens > 600
    assert history.models


# -- the child --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_clean_stop_stores_the_slots_ends_the_child_and_leaves_nothing(number: int, serve: Serve):
    served = serve()
    child, private = served.child(), _listens_at(served.child()).parent
    served.complete(prompt(23))
    assert private.is_dir()
    assert served.stop(number) == 0
    assert not _is_running(child)
    assert not private.exists()
    served = serve()
    assert cached(served.complete(prompt(23))) > 200


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_many_signals_end_it_as_cleanly(number: int, serve: Serve):
    served = serve()
    child = served.child()
    at_once = "stopping immediately"
    with served.endless() as lines:
        next(lines)

        def said() -> bool:
            with suppress(ProcessLookupError):
                served.process.send_signal(number)
            return ": stopping" in served.text() and (at_once in served.text() or number != signal.SIGINT)

        # two that come before the process has a turn are one
        wait_for(said, "it does not stop")
        for _ in range(20):
            with suppress(ProcessLookupError):
                served.process.send_signal(number)
            time.sleep(0.01)
    assert served.ended() == 0
    assert "Traceback" not in served.text()
    assert not _is_running(child)
    assert (at_once in served.text()) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["--", "llama-servr", "-m", "m.gguf"], "llama-servr is not on the PATH"),
        (["--", "./llama-servr", "-m", "m.gguf"], "./llama-servr is not an executable file"),
        (["--", "-m", "m.gguf"], "the program comes first"),
        (["llama-server", "-m", "m.gguf"], "Options of llama-server follow --"),
        *((["--admin-key", key, "--", sys.executable], "--admin-key is empty") for key in ("", " ")),
        (["--host", "256.0.0.1", "--", sys.executable, "-c", "0"], "--host '256.0.0.1' is not an address"),
    ],
)
def test_a_command_that_cannot_be_started_is_told(
    command: list[str], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert main(["serve", str(tmp_path / "store"), "--port", "0", *command]) == 2
    assert says in capfd.readouterr().err


def test_the_hooks_say_that_the_proxy_needs_none(
    shared_proxy: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    options = ["--server", shared_proxy.url, "--slots-dir", str(tmp_path)]
    assert main(["slots", "save", "--all", *options, str(tmp_path / "store")]) == 2
    assert "saves and restores slots itself" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("added", "code"), [("", 0), (" -ctk q8_0", 1)])
def test_a_script_may_start_the_server_and_must_not_add_options(
    added: str, code: int, tmp_path: Path, docs_model: Path
):
    script = tmp_path / "starts-it"
    script.write_text(f'#!/bin/sh\nexec {binary()} "$@"{added}\n')
    script.chmod(0o755)
    command = [str(script), "-m", str(docs_model), "--no-warmup", "-t", "1", "-np", "1", "-c", "512"]
    served = launch(tmp_path, "scripted", [str(tmp_path / "store"), "--port", "0", "--", *command])
    try:
        if code == 0:
            served.wait_ready()
            assert served.stop() == 0
        assert served.ended() == code
        assert ("with other options than those after --" in served.text()) == (code == 1)
    finally:
        served.end()
